"""Start the other ranks of an engine, compare their models, and connect them."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import torch

from atom.assemble.compiling import digest_of
from atom.assemble.kv_blocks import state_kinds
from atom.compiler import Compiled, compile_graph, mesh_of
from atom.config import Config
from atom.config.parallel import devices_of
from atom.config.resolve_quant import BUDGET
from atom.errors import CheckpointError, ConfigError, EngineDeadError
from atom.graph import Graph, Mesh, Recipe, W
from atom.kernels import Communicator, Rendezvous, connect_rank
from atom.runtime.ranks.links import LOOPBACK, RANK, RANK_ON_GPU, Channel, RankProcess, Ranks
from atom.runtime.ranks.ray import place_with_ray
from atom.runtime.ranks.remote import Placement, RemoteRank, await_ranks, without_secrets
from atom.runtime.types import StateKind
from atom.weights.evaluate import Loaded
from atom.weights.lora import LoraWeights, Sizes

SAMPLED = 1024  # elements of a weight, by which hosts compare theirs


class RankOpening(msgspec.Struct):
    """The first message to a rank: what it starts with."""

    config: Config  # its level is that of the text
    rank: int
    num_threads: int | None  # None: as many as torch takes by itself
    text: str  # digest of the lowered text of its stage
    host: str  # the rank's address for the others


class RankModel(msgspec.Struct):
    """Properties of a rank's model, which all ranks exchange."""

    weights: bytes  # a digest of samples
    kinds: list[StateKind]  # of its layers
    modules: dict[str, Sizes]  # of its layers that may have adapters


def place_ranks(config: Config, started: ExitStack) -> Placement | None:
    """Wait for ranks that others start, or have Ray start them; None if this process does. The stack ends them."""
    parallel, num_ranks = config.parallel, mesh_of(config).num_ranks
    if parallel.launcher == "local":
        return None
    if parallel.launcher == "ray":
        placement = place_with_ray(parallel, num_ranks, on_gpus=config.device != "cpu")
    else:
        placement = await_ranks(parallel, num_ranks)
    started.callback(placement.close)
    return placement


def start_processes(config: Config, replica: int, started: ExitStack) -> list[RankProcess]:
    """Start the processes of the other ranks, unless others do. The stack ends them."""
    if config.parallel.launcher != "local":
        return []
    processes = []
    for rank in range(1, mesh_of(config).num_ranks):
        on_gpu = (RANK_ON_GPU, devices_of(config.parallel, replica)[rank])
        processes.append(RankProcess(RANK) if config.device == "cpu" else RankProcess(*on_gpu))
        started.callback(processes[-1].close)
    return processes


def check_placed(placed: Placement | Sequence[RankProcess]) -> None:
    """Raise EngineDeadError if a rank that waits for the driver to compile has ended."""
    if isinstance(placed, Placement):
        return placed.check()
    for rank, process in enumerate(placed, 1):
        if process.has_ended:
            raise EngineDeadError(f"rank {rank} has ended")


def start_ranks(
    config: Config, compiled: Compiled, placed: Placement | Sequence[RankProcess], started: ExitStack
) -> Ranks | None:
    """Have the other ranks of an engine load their weights; None for one rank. The stack ends them.

    placed: those that others start, or their processes
    """
    mesh = mesh_of(config)
    if mesh.num_ranks == 1:
        return None
    lowered = replace(config, level=compiled.level)
    others = (compile_graph(lowered, stage=stage) for stage in range(1, mesh.pipeline))
    texts, before = [*map(digest_of, (compiled.graph, *others))], torch.get_num_threads()
    num_threads: int | None = max(before // mesh.num_ranks, 1)  # they share the cores
    channels: Sequence[Channel]
    if isinstance(placed, Placement):
        num_threads, channels = placed.num_threads, (joined := placed.join())
        places = [(config_of(each, rank, config), each.host) for rank, each in enumerate(joined, 1)]
    else:
        channels = placed
        places = [(config, LOOPBACK)] * len(channels)
    openings = [
        RankOpening(replace(own, level=compiled.level), rank, num_threads, texts[mesh.stage(rank)], host)
        for rank, (own, host) in enumerate(places, 1)
    ]
    ranks = Ranks(channels, list(map(msgspec.msgpack.encode, openings)))
    started.callback(ranks.close)
    ranks.limit_silence(config.advanced.heartbeat_seconds)
    if num_threads is not None:
        ranks.at_close.append(functools.partial(torch.set_num_threads, before))
        torch.set_num_threads(num_threads)
    return ranks


def config_of(channel: RemoteRank, rank: int, config: Config) -> Config:
    """The configuration of a rank that others have started: the driver's, with the folders of its own host.

    ConfigError if its command line differs, which is sent to the rank too.
    """
    config = without_secrets(config)
    if not channel.hello:
        return config
    own = msgspec.msgpack.decode(channel.hello, type=Config)
    ours = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config)  # as it comes back from there
    ours = replace(ours, cache=own.cache, checkpoint=own.checkpoint)
    if own.quant.fmt == BUDGET:  # which the driver has measured for all ranks
        own = replace(own, quant=ours.quant)
    of_host = {name: getattr(own.parallel, name) for name in ("address", "key_file", "host", "visible_devices")}
    advanced = replace(ours.advanced, torchrun=own.advanced.torchrun)
    ours = replace(ours, parallel=replace(ours.parallel, **of_host), advanced=advanced)
    for each in fields(Config):
        if getattr(own, each.name) != getattr(ours, each.name):
            reason = f"its command line differs in {each.name}; give all ranks the same one"
            channel.refuse(reason)
            raise ConfigError(f"rank {rank}: {reason}")
    return ours


def describe_rank(
    graph: Graph, tensors: Mapping[Recipe, Loaded], adapters: LoraWeights | None, block_size: int
) -> bytes:
    """Describe this rank's model, once its weights are loaded, for `compare_ranks`."""
    modules = {} if adapters is None else adapters.modules
    return msgspec.msgpack.encode(RankModel(sample_weights(tensors), state_kinds(graph, block_size), modules))


def compare_ranks(described: Sequence[bytes], mesh: Mesh) -> list[RankModel]:
    """Check that the ranks of a stage have the same weights; the model of each stage."""
    models = msgspec.msgpack.Decoder(RankModel)
    ranks = [models.decode(each) for each in described]
    firsts = range(0, mesh.num_ranks, mesh.ranks_per_stage)
    for first in firsts:
        check_same_weights([rank.weights for rank in ranks[first : first + mesh.ranks_per_stage]], first)
    return [ranks[first] for first in firsts]


def sample_weights(tensors: Mapping[Recipe, Loaded]) -> bytes:
    """A digest of the beginnings of the weights that all ranks have whole: norms, routers, often the embedding."""
    sampled = hashlib.sha256()
    whole = {each.name: tensor for each, tensor in tensors.items() if isinstance(each, W) and torch.is_tensor(tensor)}
    for name in sorted(whole):
        sampled.update(whole[name].flatten()[:SAMPLED].cpu().view(torch.uint8).numpy().tobytes())
    return sampled.digest()


def check_same_weights(samples: Sequence[bytes], first: int = 0) -> None:
    """Raise CheckpointError if a rank, on a host of its own, has other weights than the first of its stage."""
    others = ", ".join(str(rank) for rank, sample in enumerate(samples, first) if sample != samples[0])
    if others:
        raise CheckpointError(f"rank {others} has other weights than rank {first}: each host needs the same files")


def connect(ranks: Ranks, config: Config, placement: Placement | None, folder: str) -> Communicator:
    """Connect all ranks, once their weights are loaded, and have them open their runners.

    folder: a private one, for memory that ranks on one host share
    """
    mesh, is_one_host = mesh_of(config), placement is None or placement.is_one_host
    ranks.send([folder.encode() if is_one_host else b""] * (mesh.num_ranks - 1))
    host = LOOPBACK if placement is None else placement.host
    shared = Path(folder) if is_one_host else None
    rendezvous = Rendezvous(0, mesh, host, ranks.exchange, shared, config.parallel.collectives)
    communicator = connect_rank(config.device, rendezvous)
    communicator.watch(ranks.check)
    ranks.watch(lambda _: communicator.abort())
    ranks.at_close.append(communicator.abort)
    return communicator
