"""What a GPU's memory is for: weights, what a step takes, CUDA graphs; the rest is the KV pool's.

left_for_kv(graph, config)                          # bytes, before anything is loaded; CapacityError where nothing is
measure_left(runner, [512], config.serve)           # bytes, with the weights there
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from atom import weights
from atom.config import Config, ServeConfig
from atom.errors import CapacityError
from atom.graph import Graph
from atom.runtime.device_runner import DeviceRunner

SPARE = 64 << 20  # bytes that the allocator may lose between its blocks
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512)  # of decodes


def capture_sizes(serve: ServeConfig) -> list[int]:
    """The numbers of decodes that are captured, smallest first."""
    if serve.cudagraph_capture_sizes is not None:
        return sorted(set(serve.cudagraph_capture_sizes))
    limit = min(serve.max_num_seqs, serve.max_num_batched_tokens)
    larger = range(SIZES[-1] + 128, limit, 128)
    return [*(size for size in (*SIZES, *larger) if size < limit), limit]


def left_for_kv(graph: Graph, config: Config) -> int:
    """Bytes that the share of the GPU's memory which is to be taken leaves beside the weights, before they are loaded.

    CapacityError where they do not fit.
    """
    free, total = torch.cuda.mem_get_info()
    share = config.serve.gpu_memory_utilization
    usable, needed = int(total * share) - (total - free), weights.num_bytes(graph)
    if needed > usable:
        raise CapacityError(
            f"the weights take {needed / 2**30:.1f} GiB, the GPU has {max(usable, 0) / 2**30:.1f} GiB for them "
            f"({free / 2**30:.1f} of its {total / 2**30:.1f} GiB are free, of all of which "
            f"serve.gpu_memory_utilization={share:g} is to be used): raise that, free memory, or take a larger GPU"
        )
    return usable - needed


def measure_left(runner: DeviceRunner, largest: Sequence[int], serve: ServeConfig) -> int:
    """Bytes for the KV pool: what is left of the share behind the largest step and the largest graphs."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    num_tokens = serve.max_num_batched_tokens
    runner.graphs.rehearse(num_tokens, min(num_tokens, serve.max_num_seqs))
    step = torch.cuda.max_memory_allocated() - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    runner.graphs.capture(largest, is_lazy=True)
    torch.cuda.empty_cache()
    graphs = free - torch.cuda.mem_get_info()[0]
    return int(total * serve.gpu_memory_utilization) - (total - free) - step - graphs - SPARE
