"""`atom.benchmarks.benchmark_serving` sends conversations to a real server, whose prefix cache has what was said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import Server, Start

from atom.benchmarks.benchmark_serving import main

SIZES = ["--num-prompts", "3", "--multi-turn-turns", "3", "--multi-turn-shared-len", "64", "--multi-turn-new-len", "48",
         "--multi-turn-output-len", "8", "--multi-turn-think-time", "0.01"]  # fmt: skip


@pytest.mark.parametrize("backend", ["vllm", pytest.param("openai-chat", marks=pytest.mark.slow)])
def test_later_turns_of_conversations_are_cached(
    backend: str, server: Server, talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    argv = ["--base-url", server.url, "--tokenizer", str(talker), "--backend", backend, "--dataset-name", "multi-turn"]
    more = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", str(tmp_path)]
    assert main([*argv, *SIZES, *more]) == 0
    result = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert (result["completed"], result["failed"], result["total_output_tokens"]) == (9, 0, 72)
    lengths = [result["input_lens"][at::3] for at in range(3)]
    if backend == "vllm":
        assert lengths == [[112] * 3, [168] * 3, [224] * 3], "112 and, for each turn, 8 answered and 48 new"
        # of 168 and 224 all that was said, but the last token of each answer and what fills no block of 16
        assert result["later_turns_cached_share"] >= (112 + 160) / (168 + 224)
        assert result["first_turn_cached_share"] <= 2 / 3 * 64 / 112, "not those of the conversation that came first"
        assert "another length" not in capsys.readouterr().err
    assert result["later_turns_cached_share"] > 0.5


@pytest.mark.slow
def test_conversations_that_the_pool_does_not_hold_are_loaded_from_host_memory(start_server: Start, tmp_path: Path):
    """Each of 8 conversations ends with 192 tokens, of which a pool of 32 blocks holds two."""
    shares = []
    for swap_space in ("0", "1GiB"):
        server = start_server(
            "serve.block_size=16",
            "serve.num_kvcache_blocks=32",
            "serve.max_model_len=192",
            f"serve.swap_space={swap_space}",
        )
        sizes = ["--num-prompts", "8", "--multi-turn-turns", "4", "--multi-turn-shared-len", "0", "--multi-turn-new-len",
                 "40", "--multi-turn-output-len", "8", "--multi-turn-think-time", "0.3"]  # fmt: skip
        more = ["--ignore-eos", "--disable-tqdm", "--save-result", "--result-dir", str(tmp_path / swap_space)]
        assert main(["--base-url", server.url, "--dataset-name", "multi-turn", *sizes, *more]) == 0
        shares.append(json.loads(next((tmp_path / swap_space).glob("*.json")).read_text())["later_turns_cached_share"])
    recomputed, loaded = shares
    # of turns of 88, 136 and 184 tokens what was said: 32, 80 and 128 in whole blocks
    assert loaded >= 0.95 * (32 + 80 + 128) / (88 + 136 + 184) > recomputed
