"""What a server reports of drafted tokens."""

from __future__ import annotations

from typing import Any

import wire
from serving import Server, Start

ASK: dict[str, Any] = {"prompt": [1, 2, 3] * 5, "max_tokens": 40, "temperature": 0, "ignore_eos": True}


def test_answers_metrics_and_statistics_count_what_was_accepted(start_server: Start, server: Server):
    drafting = start_server("serve.method=ngram", "serve.num_speculative_tokens=4", "serve.prompt_lookup_min=1")
    plain = wire.ask(server.url, "POST", "/v1/completions", ASK).json
    answer = wire.ask(drafting.url, "POST", "/v1/completions", ASK).json
    assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "completion_tokens_details" not in plain["usage"]
    num_accepted = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    assert 0 < num_accepted < answer["usage"]["completion_tokens"] == 40

    def stats() -> Any:
        return wire.ask(drafting.url, "GET", "/debug/mtp_stats").json

    wire.wait_until(lambda: stats()["total_accepted_tokens"] == num_accepted)
    metrics = wire.metrics(drafting.url)
    assert metrics["atom:spec_decode_num_accepted_tokens_total"] == num_accepted
    assert metrics["atom:spec_decode_num_draft_tokens_total"] == stats()["total_draft_tokens"] >= num_accepted
    assert metrics["atom:spec_decode_num_drafts_total"] == sum(stats()["distribution"].values())
    by_position = [metrics[f'atom:spec_decode_num_accepted_tokens_per_pos_total{{position="{at}"}}'] for at in range(2)]
    assert num_accepted >= by_position[0] >= by_position[1] >= 0 and by_position[0] > 0
    nothing = wire.ask(server.url, "GET", "/debug/mtp_stats").json
    assert (nothing["total_draft_tokens"], nothing["distribution"]) == (0, {"0": 0})
