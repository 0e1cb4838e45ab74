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
from typing import Any

import torch
import transformers
from torch import Tensor

from atom.trainer import SharedWeights

PROMPT, ANSWER, PROMPTS, GROUP = 6, 16, 8, 8  # tokens of each, prompts of a step, answers to each prompt
CLIP, RATE = 0.2, 1e-2
TINY = transformers.Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
WANTED = {"n": GROUP, "max_tokens": ANSWER, "temperature": 1.0, "logprobs": 0, "return_token_ids": True}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the rewards; the exit code."""
    parser = argparse.ArgumentParser("python -m atom.examples.grpo")
    parser.add_argument("--steps", type=int, default=12, metavar="N", help="updates of the weights (default: 12)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, prompts and answers (default: 0)")
    train(parser.parse_args(argv))
    return 0


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    model = transformers.AutoModelForCausalLM.from_config(TINY, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with serve(folder) as url:
            for step in range(args.steps + 1):
                tokens, sampled, version = sample(url, seed=args.seed + step * GROUP)
                rewards = (tokens[:, PROMPT:] % 2 == 0).float().mean(1)
                logprobs = score(model, tokens)
                apart = (logprobs - sampled).abs().max()
                print(f"step {step:2}: reward {rewards.mean():.2f} by {version}, {apart:.0e} apart", flush=True)
                if step < args.steps:
                    optimizer.zero_grad()
                    find_loss(logprobs, sampled, rewards).backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    send(url, model, version=f"step-{step + 1}")


def sample(url: str, seed: int) -> tuple[Tensor, Tensor, str]:
    """Prompts and answers i64[answers, PROMPT + ANSWER], the answers' log probabilities, and by which weights."""
    prompts = torch.randint(TINY.vocab_size, (PROMPTS, PROMPT)).tolist()
    body = {"prompt": prompts, "seed": seed, "return_weight_versions": True, **WANTED}
    choices = post(f"{url}/v1/completions", body)["choices"]
    tokens = torch.tensor([[*each["prompt_token_ids"], *each["token_ids"]] for each in choices])
    logprobs = torch.tensor([each["logprobs"]["token_logprobs"] for each in choices])
    (version,) = {span["version"] for each in choices for span in each["weight_versions"]}
    return tokens, logprobs, version


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
    """A server of a checkpoint; its address. RuntimeError if it ends before it serves."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = (f"checkpoint={folder}", "dtype=fp32", "device=cpu", "level=1", "serve.max_model_len=64")
    address = ("serve.http.host=127.0.0.1", f"serve.http.port={port}", "serve.http.log_level=warning")
    process = subprocess.Popen([sys.executable, "-m", "atom", *options, *address], stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        while not is_healthy(url):
            if (code := process.poll()) is not None:
                raise RuntimeError(f"the server has ended with exit code {code}; its error is above")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
