"""Resolve where ranks run: torchrun, the driver's address, the key.

parallel = derive_parallel(config, model)
parallel.launcher, parallel.address              # torchrun, tcp://10.0.0.1:29501
split_address(parallel.address)                  # ("10.0.0.1", 29501)
read_key(parallel.key_file)                      # the secret of all hosts
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import stat
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from atom.config.schema import Config, MLPConfig, ModelConfig, ParallelConfig, TorchrunConfig
from atom.errors import ConfigError, UnsupportedError, one_line

ENGINE_JOBS = ("serve", "batch", "generate", "chat", "bench", "profile")  # the others start no rank
MIN_KEY_BYTES = 16
WORTH_COUNTING = 0.75  # of all rows between hosts, below which it is worth while to count those that are needed
MAX_MASTER_PORT = 65534  # the driver listens at the next one
UNIX = "unix:"  # and a name: an abstract socket, whose owner the kernel reports
MAKE_KEY = "(umask 077; openssl rand -hex 32 > key) makes one, which each host needs a copy of"


def derive_parallel(config: Config, model: ModelConfig) -> ParallelConfig:
    """Resolve the fields of ranks on several hosts, and check them. model: the one that they divide"""
    parallel = _derive_hosts(config)
    placed = replace(parallel, launcher=config.parallel.launcher)  # also of a job that starts no rank
    return replace(parallel, dispatch=choose_dispatch(placed, config.advanced.torchrun, model))


def choose_dispatch(parallel: ParallelConfig, torchrun: TorchrunConfig, model: ModelConfig) -> str:
    """Choose what data groups send each other: on several hosts, the rows that are needed if these are much fewer."""
    mixture = find_mixture(model)
    if parallel.dispatch != "auto":
        return parallel.dispatch
    if mixture is None or parallel.data == 1 or _is_one_host(parallel, torchrun):
        return "gather"
    local_world_size = torchrun.local_world_size if parallel.launcher == "torchrun" else None
    num_local = _whole("LOCAL_WORLD_SIZE", local_world_size or "1")
    on_a_host = min(max(num_local // parallel.tensor, 1), parallel.data)
    if parallel.experts == 1 or on_a_host == parallel.data:  # of several hosts each has stages of its own
        return "gather"
    dispatched = on_a_host * (parallel.data - on_a_host) * sent_share(mixture, parallel.experts)
    gathered = parallel.data - 1  # each row is passed on from host to host
    return "dispatch" if dispatched < WORTH_COUNTING * gathered else "gather"


def find_mixture(model: ModelConfig) -> MLPConfig | None:
    return next((mlp for mlp in model.mlps if mlp.kind == "moe"), None)


def sent_share(mixture: MLPConfig, parts: int) -> float:
    """The share of tokens that choose an expert of one of this many parts, if all experts are chosen equally often."""
    assert mixture.experts and mixture.top_k, "config.load checks that it has them"
    others, top_k = mixture.experts - -(-mixture.experts // parts), min(mixture.top_k, mixture.experts)
    return 1 - math.comb(others, top_k) / math.comb(mixture.experts, top_k)


def _is_one_host(parallel: ParallelConfig, torchrun: TorchrunConfig) -> bool:
    """Whether all ranks are on this host. Ray may place them on others."""
    if parallel.launcher != "torchrun":
        return parallel.launcher == "local"
    if parallel.address is not None:
        return parallel.address.startswith(UNIX)
    return torchrun.world_size is not None and torchrun.local_world_size == torchrun.world_size


def _derive_hosts(config: Config) -> ParallelConfig:
    parallel, torchrun = config.parallel, config.advanced.torchrun
    at = f"parallel.launcher={parallel.launcher}"
    if config.job.kind not in ENGINE_JOBS:
        return replace(parallel, launcher="local")
    for name in _unused(parallel.launcher):
        if getattr(parallel, name) is not None:
            raise ConfigError(f"parallel.{name} is not for {at}; leave it out")
    if parallel.launcher != "torchrun":
        _check_unasked(parallel, torchrun)
    if parallel.launcher == "local":
        return parallel
    if parallel.replicas > 1:
        raise UnsupportedError(
            f"parallel.replicas={parallel.replicas} with {at}: its processes end together, and a replica that dies is "
            "started again; on one host leave parallel.launcher out, on several start a server for each replica, "
            "behind a proxy (docs/parallel.md, Replicas on several machines)"
        )
    if parallel.num_ranks == 1:
        raise ConfigError(f"{at} starts several ranks, and this engine has one; set parallel=tp2 or more")
    if parallel.launcher == "torchrun":
        parallel = with_torchrun(parallel, torchrun)
    if parallel.address is not None and not parallel.address.startswith(UNIX):
        _, port = split_address(parallel.address)
        if parallel.launcher == "torchrun":
            if port == 0:
                unknown = "the driver would take a free port, which no rank knows; name one, as in tcp://10.0.0.1:7000"
                raise ConfigError(f"parallel.address={parallel.address}: {unknown}")
            if parallel.key_file is None:
                raise ConfigError(f"ranks at {parallel.address} must show a key: set parallel.key_file; {MAKE_KEY}")
            read_key(parallel.key_file)
    return parallel


def _check_unasked(parallel: ParallelConfig, torchrun: TorchrunConfig) -> None:
    """Check that torchrun has not started this process as a rank, if it would open an engine with ranks itself."""
    if torchrun.run_id is None or parallel.num_ranks == 1:  # a cluster may set RANK and WORLD_SIZE for itself
        return
    if (world_size := _whole("WORLD_SIZE", torchrun.world_size or "1")) > 1:
        each = "and each would open an engine of its own; set parallel.launcher=torchrun"
        raise ConfigError(f"torchrun started {world_size} processes, {each}")


def devices_of(parallel: ParallelConfig, replica: int = 0) -> list[str]:
    """The GPU of each rank of an engine, as CUDA_VISIBLE_DEVICES has it."""
    return _visible(parallel, replica * parallel.num_ranks, parallel.num_ranks)


def own_device(parallel: ParallelConfig, torchrun: TorchrunConfig) -> str:
    """The GPU of the rank that torchrun has started this process as, as CUDA_VISIBLE_DEVICES has it."""
    number = _whole("LOCAL_RANK", torchrun.local_rank or "0")
    devices = _visible(parallel, number, 1)
    if not devices:
        raise ConfigError(f"LOCAL_RANK={number}: CUDA_VISIBLE_DEVICES={parallel.visible_devices} has no GPU for it")
    return devices[0]


def _visible(parallel: ParallelConfig, first: int, count: int) -> list[str]:
    """So many GPUs from a number on, of those that there are for this process."""
    if parallel.visible_devices is None:
        return [str(number) for number in range(first, first + count)]
    return [device.strip() for device in parallel.visible_devices.split(",")[first : first + count]]


def _unused(launcher: str) -> tuple[str, ...]:
    """The fields that a launcher has no use for."""
    return {"local": ("address", "key_file", "host"), "torchrun": (), "ray": ("key_file", "host")}[launcher]


def with_torchrun(parallel: ParallelConfig, torchrun: TorchrunConfig) -> ParallelConfig:
    """Check the environment that torchrun sets, and fill in the driver's address."""
    if torchrun.rank is None or torchrun.world_size is None:
        start = "start it as torchrun --no-python … atom-run …, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
        raise ConfigError(f"parallel.launcher=torchrun: the environment has no RANK and WORLD_SIZE; {start}")
    rank, world_size = _whole("RANK", torchrun.rank), _whole("WORLD_SIZE", torchrun.world_size)
    num_local = None if torchrun.local_world_size is None else _whole("LOCAL_WORLD_SIZE", torchrun.local_world_size)
    if world_size != (num_ranks := parallel.num_ranks):
        fix = f"set torchrun's --nnodes and --nproc-per-node (WORLD_SIZE) to start {num_ranks}"
        if world_size > 1:
            fix = f"set parallel=tp{world_size}, or torchrun's --nnodes and --nproc-per-node"
        raise ConfigError(f"torchrun starts {world_size} processes, and the engine has {num_ranks} ranks; {fix}")
    if rank >= world_size:
        raise ConfigError(f"RANK={rank} must be below WORLD_SIZE={world_size}")
    if parallel.address is not None:
        return parallel
    if num_local == world_size:
        if torchrun.run_id is None and torchrun.master_port is None:
            raise ConfigError(
                "the environment has no MASTER_PORT, by which ranks of one host find each other; set it, to "
                "another number for each run"
            )
        return replace(parallel, address=f"{UNIX}atom-run-{os.getuid()}-{torchrun.run_id}-{torchrun.master_port}")
    if torchrun.master_addr is None or torchrun.master_port is None:
        raise ConfigError(
            "the environment has no MASTER_ADDR and MASTER_PORT; set parallel.address, as in tcp://10.0.0.1:7000"
        )
    port = _whole("MASTER_PORT", torchrun.master_port)
    if port > MAX_MASTER_PORT:
        fix = f"set {MAX_MASTER_PORT} at most, or parallel.address, as in tcp://10.0.0.1:7000"
        raise ConfigError(f"MASTER_PORT={port}: the driver listens at the port after it; {fix}")
    return replace(parallel, address=f"tcp://{bracketed(torchrun.master_addr)}:{port + 1}")


def _whole(name: str, value: str) -> int:
    if not (value.isascii() and value.isdigit()):
        raise ConfigError(f"{name}={value} must be a whole number")
    return int(value)


def split_address(address: str) -> tuple[str, int]:
    """The host and port of tcp://HOST:PORT. ConfigError for another form, and for all interfaces at once."""
    form = f"parallel.address={address} must be tcp://HOST:PORT, as in tcp://10.0.0.1:7000"
    try:
        parts = urlsplit(address)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{form}: {one_line(error)}") from None
    if not host or port is None or address != f"tcp://{parts.netloc}" or "@" in address:
        raise ConfigError(form)
    if is_unspecified(host):
        raise all_interfaces(address)
    return host, port


def all_interfaces(address: str) -> ConfigError:
    """The refusal of an address that means, or whose name means, all interfaces."""
    fix = "name the one that other hosts reach, in parallel.address or MASTER_ADDR"
    return ConfigError(f"parallel.address={address} means all interfaces; {fix}")


def bracketed(host: str) -> str:
    """A host as it is written in an address."""
    return f"[{host}]" if ":" in host else host


def is_unspecified(host: str) -> bool:
    """Whether a host is an address that means all interfaces, however it is written: 0, 0x0, ::ffff:0.0.0.0."""
    try:
        address = ip_address(host)
    except ValueError:  # a name, or a form that only the C library reads
        with contextlib.suppress(OSError, ValueError):
            return socket.inet_aton(host) == bytes(4)
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def read_key(path: str) -> bytes:
    """The secret in a key file. ConfigError if others may read it, or it is short."""
    file, at = Path(path).expanduser(), f"parallel.key_file={path}"
    try:
        status = file.stat()
        key = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{at}: {error.strerror or error}; {MAKE_KEY}") from None
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"{at}: others may read or write it; chmod 600 {path}, as its owner")
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(f"{at} has {len(key)} bytes, {MIN_KEY_BYTES} are the least; {MAKE_KEY}")
    return key
