"""Name what to write in place of vLLM's request fields that are refused."""

NO_BEAMS = "there is no beam search; n draws several answers"
TEXT_ALONE = "models read text alone here; leave it out"
LLGUIDANCE = "llguidance is the one library for grammars; leave it out"
INSTEAD = {
    "chat_template": "a template is code, and comes from the server's command line: serve.http.chat_template",
    "detokenize": "texts are always there; return_token_ids adds the token ids",
    "documents": "put their text into messages",
    "early_stopping": NO_BEAMS,
    "echo": "of /v1/completions alone; a chat goes on with continue_final_message",
    "guided_decoding_backend": LLGUIDANCE,
    "guided_whitespace_pattern": LLGUIDANCE,
    "include_reasoning": "reasoning is always in reasoning_content; leave it out",
    "length_penalty": NO_BEAMS,
    "logits_processors": "take logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "media_io_kwargs": TEXT_ALONE,
    "mm_processor_kwargs": TEXT_ALONE,
    "return_tokens_as_token_ids": "return_token_ids adds the token ids",
    "spaces_between_special_tokens": "special tokens are written without spaces; leave it out",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "use_beam_search": NO_BEAMS,
}
