"""What to send in place of vLLM fields and routes that are not served.

vLLM 0.33 is the newest version whose lists were read; ROCm/ATOM's routes are here too. A field of a field has a dotted
name; a route counts for the paths below it, too.
"""

NO_BEAMS = "there is no beam search; n draws several answers"
IMAGES = "images are parts of messages, and read as the server's docs/images.md says; leave it out"
LLGUIDANCE = "llguidance is the one library for grammars; leave it out"
NO_TRANSFER = "no KV leaves its engine; leave it out"
CHATS = "conversations are taken by /v1/chat/completions, /v1/responses, /v1/messages and /tokenize; send a text here"
INSTEAD = {
    "add_generation_prompt": CHATS,
    "cache_salt": "send it to /v1/completions, /v1/chat/completions or /v1/responses",
    "chat_template": "a template is code, and comes from the server's command line: serve.http.chat_template",
    "chat_template_kwargs": "send it to /v1/chat/completions or /v1/responses, or set serve.http.chat_template_kwargs",
    "continue_final_message": CHATS,
    "data_parallel_rank": "a request goes to the engine that has most of its prompt cached; leave it out",
    "detokenize": "texts are always there; return_token_ids adds the token ids",
    "documents": "put their text into messages",
    "early_stopping": NO_BEAMS,
    "ec_transfer_params": IMAGES,
    "echo": "only of /v1/completions; a chat goes on with continue_final_message",
    "embed_dtype": "numbers are float32, also with encoding_format=base64; leave it out",
    "enable_response_messages": "POST /tokenize with messages shows what the model reads; leave it out",
    "endianness": "encoding_format=base64 is little-endian; leave it out",
    "guided_decoding_backend": LLGUIDANCE,
    "guided_whitespace_pattern": LLGUIDANCE,
    "include_reasoning": "reasoning is always in reasoning_content; leave it out",
    "is_3d_lora_weight": "experts' adapters are read as PEFT writes them, with the server's serve.lora_experts=true",
    "kv_transfer_params": NO_TRANSFER,
    "length_penalty": NO_BEAMS,
    "load_inplace": "unload the adapter first, by POST /v1/unload_lora_adapter; leave it out",
    "logits_processors": "take logit_bias, allowed_token_ids, bad_words or structured_outputs",
    "logprob_token_ids": "logprobs and top_logprobs report the most likely tokens; allowed_token_ids limits an answer",
    "max_tokens": "of chats, completions and messages; a response has max_output_tokens",
    "media_io_kwargs": IMAGES,
    "messages": CHATS,
    "mm_payload": IMAGES,
    "mm_processor_kwargs": IMAGES,
    "padding": "inputs are never padded; leave it out",
    "previous_input_messages": "send the whole conversation as input",
    "prompt_embeds": "a prompt is a text or token ids; send prompt",
    "return_mm_kwargs": IMAGES,
    "return_prompt_text": "POST /tokenize with messages gives the prompt's token ids, and POST /detokenize their text",
    "return_token_offsets": "POST /tokenize with return_token_strs gives the text of each token; leave it out",
    "routed_experts_prompt_start": "the experts of a token are not reported; leave it out",
    "session_id": "prompts that begin alike share their KV, in any session; leave it out",
    "spaces_between_special_tokens": "special tokens are written without spaces; leave it out",
    "stream_interval": "a stream has an event for each step; leave it out",
    "structured_outputs.disable_additional_properties": "write additionalProperties: false in the schema",
    "structured_outputs.disable_any_whitespace": LLGUIDANCE,
    "structured_outputs.structural_tag": "send grammar, or tools with tool_choice=required, which forces a call",
    "structured_outputs.whitespace_pattern": LLGUIDANCE,
    "truncation_side": "truncate_prompt_tokens keeps a prompt's last tokens, an embedding's first; leave it out",
    "use_activation": "scores are similarities, or probabilities of labels; leave it out",
    "use_beam_search": NO_BEAMS,
    "vllm_xargs": "there is no extension that reads it; leave it out",
    "watermarking": "answers bear no watermark; leave it out",
}

LABELS = "structured_outputs.choice limits an answer of POST /v1/chat/completions to labels"
NO_SOUND = "models read text and images here, and write text"
ENCODED = "serve.image_memory keeps encoded images, and the longest unused make room"
RANKS = "the number of ranks and engines is set at the start: see GET /server_info"
RESTARTS = "an engine that dies is started again; GET /health and /metrics show the engines"
HANG_UP = "close the connection, which ends its request"
ROUTES = {
    "/cohere": "write POST /v1/chat/completions",
    "/collective_rpc": "no function of a rank is called from outside; GET /server_info and /metrics show its state",
    "/debug/cache_stats": "GET /metrics counts the tokens that were found in the prefix cache",
    "/fault_tolerance": RESTARTS,
    "/generative_scoring": LABELS,
    "/inference/v1/abort_requests": HANG_UP,
    "/inference/v1/generate": "write POST /v1/completions with token ids as its prompt, and return_token_ids",
    "/invocations": "write the route itself, as POST /v1/chat/completions",
    "/is_scaling_elastic_ep": RANKS,
    "/kv_event_sources": "no KV leaves its engine; GET /metrics counts the tokens that were found in the prefix cache",
    "/kv_transfer_info": "no KV leaves its engine",
    "/readyz": "write GET /ready",
    "/release_kv_cache_memory": "write POST /sleep?level=1, with serve.enable_sleep_mode=true",
    "/reset_encoder_cache": ENCODED,
    "/reset_mm_cache": ENCODED,
    "/scale_elastic_ep": RANKS,
    "/shutdown_weight_transfer_engine": "the next POST /init_weight_transfer_engine ends a group of ranks",
    "/start_draft_weight_update": "POST /update_weights is about the model; drafts keep their weights",
    "/tokenizer_info": "serve.http.enable_tokenizer_info_endpoint=true adds it",
    "/v1/audio": NO_SOUND,
    "/v1/chat/completions/batch": "send each conversation to POST /v1/chat/completions: they run together",
    "/v1/chat/completions/derender": "write POST /detokenize",
    "/v1/chat/completions/render": "write POST /tokenize with messages",
    "/v1/completions/derender": "write POST /detokenize",
    "/v1/completions/render": "write POST /tokenize with prompt",
    "/v1/decisions": LABELS,
    "/v1/load_lora_adapter": "serve.allow_runtime_lora_updating=true adds it",
    "/v1/messages/render": "POST /v1/messages/count_tokens counts its tokens; POST /tokenize shows those of a chat",
    "/v1/realtime": NO_SOUND,
    "/v1/responses": "serve.http.response_store_bytes=4GiB stores answers; or send the whole conversation as input",
    "/v1/responses/render": "POST /v1/responses/input_tokens counts its tokens; POST /tokenize shows those of a chat",
    "/v1/systemone": LABELS,
    "/v1/unload_lora_adapter": "serve.allow_runtime_lora_updating=true adds it",
    "/v2/embed": "write POST /v1/embeddings",
    "/weight_checker": "POST /update_weights refuses what does not fit; GET /weight_info names the weights",
}


def instead_of_route(path: str) -> str | None:
    """The replacement of a route, or of one above it; None for a route that is not known."""
    while path and path not in ROUTES:
        path = path.rpartition("/")[0]
    return ROUTES.get(path)
