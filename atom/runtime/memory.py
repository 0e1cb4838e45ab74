"""Plan a GPU's memory: weights, the largest step, CUDA graphs, KV pool.

left_for_kv(graph, config.serve)                    # bytes, before anything is loaded; CapacityError if nothing is
with no_memory_at_start(config.serve):              # CapacityError if memory does not suffice
    measure_left(runner, [512], config.serve)       # bytes, with the weights there
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from atom import weights
from atom.config import ServeConfig
from atom.errors import CapacityError, naming_a_lack_of_memory
from atom.graph import Graph, Host
from atom.graph.recipe_contents import held_bytes
from atom.graph.recipes import leaves
from atom.graph.tables import find_tables
from atom.kernels.logprobs import top_logprobs
from atom.runtime.step.input import BatchShape, Encode
from atom.runtime.step.model import Model, logits_type
from atom.runtime.step.program import rows_of, score
from atom.runtime.step.request_state import counts_bytes
from atom.runtime.step.runner import HEAD_ROWS, Runner
from atom.sampling_params import SAMPLING_KINDS

NUM_TOP = 20  # log probabilities of a token, as many as OpenAI's API gives
SPARE = 128 << 20  # bytes for the allocator's fragmentation and for graphs that are captured later
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # of decodes


def capture_sizes(serve: ServeConfig) -> list[int]:
    """The numbers of decodes to capture, smallest first."""
    if serve.cudagraph_capture_sizes is not None:
        return sorted(set(serve.cudagraph_capture_sizes))
    limit = min(serve.max_num_seqs, serve.max_num_batched_tokens)
    larger = range(SIZES[-1] + 128, limit, 128)
    return [*(size for size in (*SIZES, *larger) if size < limit), limit]


def left_for_kv(graph: Graph, serve: ServeConfig) -> int:
    """Bytes of the GPU's share that weights and penalty counts leave, computed before they are loaded.

    CapacityError if they do not fit.
    """
    free, total = torch.cuda.mem_get_info()
    share, max_num_seqs = serve.gpu_memory_utilization, serve.max_num_seqs
    needed, counts = weights.num_bytes(graph), counts_bytes(max_num_seqs, int(logits_type(graph).shape[-1]))
    usable = int(total * share) - (total - free)
    if needed + counts > usable:
        raise CapacityError(
            f"the weights take {needed / 2**30:.1f} GiB and the counts of penalties {counts / 2**30:.1f} GiB "
            f"(serve.max_num_seqs={max_num_seqs}), the GPU has {max(usable, 0) / 2**30:.1f} GiB for them "
            f"({free / 2**30:.1f} of its {total / 2**30:.1f} GiB are free, of all of which "
            f"serve.gpu_memory_utilization={share:g} is to be used): raise that, lower serve.max_num_seqs, free "
            f"memory, or take a larger GPU{advise_offload(graph, needed + counts - usable)}"
        )
    return usable - needed - counts


def advise_offload(graph: Graph, lacking: int) -> str:
    """Advice to keep tables in host memory, if that frees as many bytes of the GPU; else nothing."""
    tables = [table for table in find_tables(graph) if not isinstance(table, Host)]
    if torch.version.hip is not None or sum(map(held_bytes, tables)) < lacking:
        return ""
    names = dict.fromkeys(
        leaf.name.removesuffix(".weight").split(".")[-1] for table in tables for leaf in leaves(table)
    )
    return f"; serve.cpu_offload_params=[{','.join(names)}] keeps tables in host memory, of which a token reads a row"


def left_of_share(serve: ServeConfig) -> int:
    """Bytes of the GPU's share that are free now."""
    free, total = torch.cuda.mem_get_info()
    return int(total * serve.gpu_memory_utilization) - (total - free)


@contextmanager
def no_memory_at_start(serve: ServeConfig) -> Iterator[None]:
    """Raise a CapacityError that says what to lower if a start runs out of memory after the weights."""
    with naming_a_lack_of_memory(
        "the weights leave too little memory of the GPU for a start: lower serve.max_num_seqs "
        f"({serve.max_num_seqs}) or serve.max_num_batched_tokens ({serve.max_num_batched_tokens})"
    ):
        yield


def measure_left(runner: Runner, largest: Sequence[int], serve: ServeConfig, encode: Encode | None = None) -> int:
    """Bytes for the KV pool: serve.gpu_memory_utilization less the largest step and the largest CUDA graphs.

    encode: the largest one, which comes before a step's body; None: no images are encoded
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_tokens = serve.max_num_batched_tokens
    if encode is not None:
        with naming_a_lack_of_memory(
            "encoding images takes more memory than the weights leave of the GPU: lower serve.max_patches "
            f"({serve.max_patches}) or serve.image_memory, or serve text only with serve.images=false"
        ):
            runner.encode(encode)
    with naming_a_lack_of_memory(
        f"a step of {num_tokens} tokens takes more memory than the weights leave of the GPU: "
        f"lower serve.max_num_batched_tokens (to {max(num_tokens // 2, 1)}) or serve.max_num_seqs"
    ):
        take_largest_step(runner.model, num_tokens, min(num_tokens, serve.max_num_seqs))
    step = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    runner.graphs.capture(largest, is_lazy=True)
    torch.cuda.empty_cache()
    graphs = free - torch.cuda.mem_get_info()[0]
    return int(total * serve.gpu_memory_utilization) - (total - free) - step - graphs - SPARE


@torch.inference_mode()
def take_largest_step(model: Model, num_tokens: int, num_rows: int) -> None:
    """Run the step that takes the most memory, on padding.

    It reports log probabilities of all tokens drawn and of the max number of prompt tokens that are scored at a time,
    with penalties and logit processors.
    """
    shape = BatchShape(num_tokens, num_rows, num_rows)
    packed = model.send(shape.pad(model.padding))
    computed, rows = model.mix(shape, packed), shape.split(packed)
    logits = score(model.head, computed.unscored) if computed.logits is None else computed.logits
    scored = score(model.head, rows_of(computed.hidden, slice(HEAD_ROWS)))
    top_logprobs(scored, torch.arange(len(scored), device=model.device), NUM_TOP)
    reports = top_logprobs(logits, torch.arange(num_rows, device=model.device), NUM_TOP)
    shaped = logits.to(torch.float32, copy=True)
    model.sample(rows.sampled, shaped, SAMPLING_KINDS[-1], penalties=True)
    if model.has_draft_programs:
        model.follow(computed, rows.sampled, rows)
    del reports  # they are held while tokens are drawn
