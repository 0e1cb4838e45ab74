"""Print on stderr how an engine was opened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from atom.checkpoint.modules import reads_more
from atom.config import Config
from atom.config.limits import EngineLimits
from atom.config.vision import has_pillow
from atom.graph import Graph
from atom.graph.recipe_contents import host_bytes
from atom.process.messages import say
from atom.runtime.images.request_images import RequestImages
from atom.runtime.kv.host_blocks import HostBlocks
from atom.runtime.types import StateKind
from atom.sampling_params import unused_values


def report_engine(
    kinds: Sequence[StateKind],
    num_blocks: Mapping[str, int],
    limits: EngineLimits,
    host: HostBlocks | None,
    config: Config,
    images: RequestImages | None = None,
) -> None:
    """Print what an engine has room for, and what of its checkpoint is not plain from the configuration."""
    say(_describe_pool(kinds, num_blocks, limits, config.serve.block_size))
    if host is not None:
        say(_describe_host(host, config.serve.block_size))
    if images is not None:
        kept, largest = images.pool.num_rows, config.serve.max_patches
        say(f"images: the tower is loaded, encodes {largest} patches a step and keeps {kept} encoded tokens")
    if reads_more(config.hf) and images is None:
        more = "images" if config.hf.keys() & {"vision_config", "vit_config"} else "sound"
        lacks = config.model.vision is not None and not has_pillow()
        why = ": images need Pillow, pip install 'atom-run[images]'" if lacks else ""
        if more == "images" and not lacks:
            why = "; serve.images=true has it read them, or says why not"
        say(f"{config.checkpoint} also reads {more}; here only its text model runs{why}")
    for text in (_describe_unread_rope(config), _describe_unread_prefix(config), _describe_sampling(config)):
        if text:
            say(text)


def report_host_tables(graph: Graph) -> None:
    """Print the bytes of tables that stay in host memory, if any do."""
    if size := sum(map(host_bytes, graph.recipes())):
        say(f"tables in pinned host memory: {size / 2**30:.3g} GiB")


def report_unused(generation: Mapping[str, Any], config: Config) -> None:
    """Print the values of generation_config.json that are not applied here, unless all of it is left out."""
    unused = {} if config.sampling.defaults == "none" else unused_values(generation)
    text = ", ".join(f"{name} {value}" if isinstance(value, int | float) else name for name, value in unused.items())
    if text:
        say(f"not used of the checkpoint's generation_config.json, though it changes answers in transformers: {text}")


def _describe_pool(
    kinds: Sequence[StateKind], num_blocks: Mapping[str, int], limits: EngineLimits, block_size: int
) -> str:
    length, step = limits.max_model_len, limits.max_num_batched_tokens
    paged = [kind for kind in kinds if not kind.rule.in_slot]
    parts = []
    if paged:
        num_tokens = max((num_blocks[kind.name] - 1) * kind.stride for kind in paged) * block_size
        num_requests = min((num_blocks[kind.name] - 1) // kind.blocks(length, min(step, length)) for kind in paged)
        parts.append(f"KV: {num_tokens} tokens, {num_requests} request{'s' * (num_requests != 1)} at max_model_len")
    for kind in kinds:
        if kind.rule.in_slot:
            size, copies = kind.bytes_per_slot(limits) / 2**20, num_blocks[kind.name] - 1
            each = f"{limits.num_states} states in " if limits.num_drafts else ""
            parts.append(f"recurrent state: {limits.max_num_seqs} sequences of {each}{size:.3g} MiB, {copies} copies")
    return "; ".join(parts)


def _describe_host(host: HostBlocks, block_size: int) -> str:
    assert host.costs is not None, "they were measured"
    num_tokens, costs = (max(host.num_blocks.values()) - 1) * block_size, host.costs
    times = (
        f"{costs.load_token_seconds * 1e6:.3g} us a token to load, {costs.compute_token_seconds * 1e6:.3g} to compute"
    )
    return f"KV on the host: {num_tokens} tokens, {times}"


def _describe_unread_rope(config: Config) -> str:
    """Say that whole heads are rotated though config.json gives a part; empty if the model reads it or has no rope."""
    rope, part = config.model.attention.rope, (config.hf.get("rope_parameters") or {}).get("partial_rotary_factor")
    if rope.kind == "none" or rope.partial != 1 or part in (None, 1):
        return ""
    unread = f"rope_parameters.partial_rotary_factor={part} of config.json is not applied by model={config.model.name}"
    return f"{unread}, as in most families of transformers; model.attention.rope.partial={part} applies it"


def _describe_unread_prefix(config: Config) -> str:
    """Say that attention is causal though config.json is of a prefix LM; empty for others."""
    if config.hf.get("prefix_lm") is not True:
        return ""
    causal = "prefix_lm=true of config.json is not applied: the tokens of a prompt do not attend to later ones"
    return f"{causal}, as in transformers without token_type_ids; in vLLM they do"


def _describe_sampling(config: Config) -> str:
    """Describe the checkpoint's sampling defaults that are in effect; empty without any."""
    in_effect = {name: value for name, value in config.generation.items() if getattr(config.sampling, name) == value}
    text = ", ".join(f"{name} {value:g}" for name, value in in_effect.items())
    return f"sampling as the checkpoint says: {text}; sampling.defaults=none leaves it out" if text else ""
