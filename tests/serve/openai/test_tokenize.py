"""`/tokenizer_info`; what /tokenize and /detokenize take is in test_api_fields."""

from __future__ import annotations

import serving
import wire
from serving import Server, Start


def test_tokenizer_info_is_a_tokenizer_config_where_it_is_asked_for(start_server: Start, server: Server):
    asked = start_server("serve.http.enable_tokenizer_info_endpoint=true", "serve.max_model_len=512", stub={})
    answer = wire.ask(asked.url, "GET", "/tokenizer_info")
    assert (answer.status, answer.json) == (
        200,
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "chat_template": serving.TEMPLATE,
            "model_max_length": 512,
        },
    )
    assert wire.ask(server.url, "GET", "/tokenizer_info").status == 404, "a template may be nobody else's business"
