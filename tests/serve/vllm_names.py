"""The request fields and routes of vLLM and ROCm/ATOM: names, as their sources have them.

Fields are those of vLLM 0.33's models in entrypoints/**/protocol.py, by the route that takes them. Routes are those that
its entrypoints add. ROCm/ATOM's are those of its protocol.py and api_server.py of November 2026.
"""

FIELDS = {
    "/v1/chat/completions": """
        add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
        chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
        ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
        logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
        mm_payload mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs
        reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
        return_weight_versions routed_experts_prompt_start seed session_id skip_special_tokens
        spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options
        structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p
        truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
    """,
    "/v1/completions": """
        add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
        ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
        logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds
        prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
        return_token_ids return_token_offsets return_tokens_as_token_ids return_weight_versions
        routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
        stop_token_ids stream stream_interval stream_options structured_outputs suffix temperature
        thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
        watermarking
    """,
    "/v1/responses": """
        background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
        ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
        logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload
        mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages
        previous_response_id priority prompt prompt_cache_key prompt_cache_options prompt_cache_retention
        reasoning repetition_penalty request_id return_mm_kwargs safety_identifier seed service_tier session_id
        skip_special_tokens spaces_between_special_tokens stop stop_token_ids store stream structured_outputs
        temperature text tool_choice tools top_k top_logprobs top_p truncation user vllm_xargs watermarking
    """,
    "/v1/messages": """
        cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
        mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking
        tool_choice tools top_k top_p vllm_xargs watermarking
    """,
    "/v1/messages/count_tokens": """
        chat_template_kwargs messages model output_config system thinking tool_choice tools
    """,
    "/v1/embeddings": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs messages
        mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/classify": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message input media_io_kwargs messages mm_processor_kwargs model padding priority request_id
        truncate_prompt_tokens truncation_side use_activation user
    """,
    "/pooling": """
        add_generation_prompt add_special_tokens cache_salt chat_template chat_template_kwargs
        continue_final_message dimensions embed_dtype encoding_format endianness input media_io_kwargs messages
        mm_processor_kwargs model padding priority request_id task truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/score": """
        cache_salt chat_template_kwargs data_1 data_2 documents instruction items max_tokens_per_doc
        max_tokens_per_query mm_processor_kwargs model padding priority queries request_id text_1 text_2
        truncate_prompt_tokens truncation_side use_activation user
    """,
    "/rerank": """
        cache_salt chat_template_kwargs documents instruction max_tokens_per_doc max_tokens_per_query
        mm_processor_kwargs model padding priority query request_id top_n truncate_prompt_tokens truncation_side
        use_activation user
    """,
    "/tokenize": """
        add_generation_prompt add_special_tokens chat_template chat_template_kwargs continue_final_message
        media_io_kwargs messages mm_processor_kwargs model prompt return_token_strs tools
    """,
    "/detokenize": """
        model tokens
    """,
    "/v1/load_lora_adapter": """
        is_3d_lora_weight load_inplace lora_name lora_path
    """,
    "/v1/unload_lora_adapter": """
        lora_int_id lora_name
    """,
}
STRUCTURED_OUTPUTS = """
    choice disable_additional_properties disable_any_whitespace grammar json json_object regex structural_tag
    whitespace_pattern
"""  # of vllm/sampling_params.py
MODELS = {  # vLLM's names of the models of a route's body
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/messages": "AnthropicMessagesRequest",
    "/v1/messages/count_tokens": "AnthropicCountTokensRequest",
    "/v1/embeddings": "EmbeddingCompletionRequest EmbeddingChatRequest",
    "/classify": "ClassificationCompletionRequest ClassificationChatRequest",
    "/pooling": "PoolingCompletionRequest PoolingChatRequest",
    "/score": "ScoreDataRequest ScoreQueriesDocumentsRequest ScoreQueriesItemsRequest ScoreTextRequest",
    "/rerank": "RerankRequest",
    "/tokenize": "TokenizeCompletionRequest TokenizeChatRequest",
    "/detokenize": "DetokenizeRequest",
    "/v1/load_lora_adapter": "LoadLoRAAdapterRequest",
    "/v1/unload_lora_adapter": "UnloadLoRAAdapterRequest",
}
ROUTES = """
/abort_requests /classify /cohere/v2/chat /cohere/v2/chat/render /collective_rpc /detokenize /docs
/fault_tolerance/apply /fault_tolerance/status /finish_weight_update /generative_scoring /get_world_size
/health /inference/v1/abort_requests /inference/v1/generate /init_weight_transfer_engine /invocations
/is_paused /is_scaling_elastic_ep /is_sleeping /kv_event_sources /load /pause /ping /pooling /ready /readyz
/release_kv_cache_memory /rerank /reset_encoder_cache /reset_mm_cache /reset_prefix_cache /resume
/scale_elastic_ep /score /server_info /shutdown_weight_transfer_engine /sleep /start_draft_weight_update
/start_profile /start_weight_update /stop_profile /tokenize /tokenizer_info /update_weight_version
/update_weights /v1/audio/transcriptions /v1/audio/translations /v1/chat/completions
/v1/chat/completions/batch /v1/chat/completions/derender /v1/chat/completions/render /v1/completions
/v1/completions/derender /v1/completions/render /v1/decisions /v1/embeddings /v1/load_lora_adapter
/v1/messages /v1/messages/count_tokens /v1/messages/render /v1/models /v1/realtime /v1/rerank /v1/responses
/v1/responses/render /v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/score /v1/systemone
/v1/unload_lora_adapter /v2/embed /v2/rerank /version /wake_up /weight_checker /weight_info
"""  # of vLLM 0.33
ROCM_ROUTES = """
/debug/cache_stats /debug/mtp_stats /health /kv_transfer_info /metrics /server_info /start_profile /stop_profile
/v1/chat/completions /v1/completions /v1/messages /v1/models /v1/responses
"""
ROCM_FIELDS = {
    "/v1/chat/completions": """
        chat_template_kwargs data_parallel_rank frequency_penalty ignore_eos kv_transfer_params max_tokens messages
        model n presence_penalty prompt seed stop stream temperature tool_choice tools top_k top_p
    """,
    "/v1/completions": """
        data_parallel_rank ignore_eos kv_transfer_params max_tokens model n prompt stop stream temperature top_k top_p
    """,
    "/v1/responses": """
        chat_template_kwargs ignore_eos input instructions max_output_tokens max_tokens model seed stop store stream
        temperature tool_choice tools top_k top_p
    """,
}
