"""Train a tiny model by GRPO: PyTorch trains, a server samples.

python -m atom.examples.grpo --steps 12 --seed 0

The reward of an answer is its share of even tokens. A step samples groups of answers with their log probabilities,
takes a gradient step (Shao et al. 2024, DeepSeekMath, section 4.1), and gives the server the new weights through
shared memory while it is paused. What is printed last: how far the server's log probabilities are from the trainer's.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from atom.trainer import SharedWeights

VOCABULARY, PROMPT, ANSWER = 64, 6, 16  # sizes in tokens
PROMPTS, GROUP = 8, 8  # of a step; answers to each prompt
CLIP, RATE = 0.2, 1e-2


class Rollout(NamedTuple):
    tokens: Tensor  # i64[answers, PROMPT + ANSWER]
    logprobs: Tensor  # [answers, ANSWER], by the server
    versions: set[str]  # of the weights that sampled them


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rewards; the exit code."""
    parser = argparse.ArgumentParser("python -m atom.examples.grpo")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="updates of the weights (default: 12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, prompts and answers (default: 0)")
    train(parser.parse_args(argv))
    return 0


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        ),
        dtype=torch.float32,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with serve(folder) as url:
            for step in range(args.steps + 1):
                prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT))
                rollout = sample(url, prompts, seed=args.seed + step * GROUP)
                rewards = (rollout.tokens[:, PROMPT:] % 2 == 0).float().mean(1)
                logprobs = score(model, rollout.tokens)
                apart = (logprobs - rollout.logprobs).abs().max()
                (version,) = rollout.versions
                print(f"step {step:2}: reward {rewards.mean():.2f} by {version}, {apart:.0e} apart", flush=True)
                if step < args.steps:
                    optimizer.zero_grad()
                    find_loss(logprobs, rollout.logprobs, rewards).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    send(url, model, version=f"step-{step + 1}")


def sample(url: str, prompts: Tensor, seed: int) -> Rollout:
    """A group of answers to each prompt."""
    sampling = {"n": GROUP, "max_tokens": ANSWER, "temperature": 1.0, "seed": seed}
    wanted = {"logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
    choices = post(f"{url}/v1/completions", {"prompt": prompts.tolist(), **sampling, **wanted})["choices"]
    tokens = torch.tensor([[*each["prompt_token_ids"], *each["token_ids"]] for each in choices])
    logprobs = torch.tensor([each["logprobs"]["token_logprobs"] for each in choices])
    return Rollout(tokens, logprobs, {span["version"] for each in choices for span in each["weight_versions"]})


def score(model: Any, tokens: Tensor) -> Tensor:
    """The log probabilities [answers, ANSWER] of answers by the trainer's weights."""
    logprobs: Tensor = model(tokens).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, tokens[:, PROMPT:, None])[..., 0]


def find_loss(logprobs: Tensor, old: Tensor, rewards: Tensor) -> Tensor:
    """The clipped objective, negative, of advantages relative to the group's."""
    groups = rewards.view(PROMPTS, GROUP)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    ratio = (logprobs - old).exp()
    return -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def send(url: str, model: Any, version: str) -> None:
    """Give the server the trainer's weights; what KV it has of older ones is forgotten."""
    post(f"{url}/pause?mode=wait", {})
    with SharedWeights(model.state_dict()) as shared:
        post(f"{url}/update_weights", {"update_info": shared.update_info | {"version": version}})
    post(f"{url}/resume", {})


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)


@contextmanager
def serve(folder: str) -> Iterator[str]:
    """A server of a checkpoint; its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (f"checkpoint={folder}", "dtype=fp32", "device=cpu", "level=1", "serve.max_model_len=64")
    address = ("serve.http.host=127.0.0.1", f"serve.http.port={port}", "serve.http.log_level=warning")
    server = subprocess.Popen([sys.executable, "-m", "atom", *options, *address], stdout=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main())
