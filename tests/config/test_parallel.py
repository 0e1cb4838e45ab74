"""Where ranks run: what torchrun says, the driver's address, the key."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from atom.config.load import load
from atom.config.parallel import own_device, read_key, split_address
from atom.errors import ConfigError, UnsupportedError

SAID = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """What torchrun passes to the last of three ranks, each on a host of its own."""
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_torchrun_says_the_rank_and_where_the_driver_is(said: pytest.MonkeyPatch, key: Path):
    fields = ["parallel=tp3", "parallel.launcher=torchrun", f"parallel.key_file={key}"]
    config = load(fields)
    assert (config.rank, config.parallel.address) == (2, "tcp://10.0.0.1:29501")
    said.setenv("MASTER_ADDR", "fd00::1")
    assert load(fields).parallel.address == "tcp://[fd00::1]:29501"
    explicit = load([*fields, "parallel.address=tcp://node0:7000", "advanced.torchrun.rank=0"])
    assert (explicit.rank, explicit.parallel.address) == (0, "tcp://node0:7000")


def own_device_of(fields: list[str]) -> str:
    config = load(fields)
    return own_device(config.parallel, config.advanced.torchrun)


def test_a_rank_of_torchrun_has_the_gpu_of_its_number_on_its_host(said: pytest.MonkeyPatch, key: Path):
    said.setenv("LOCAL_RANK", "1")
    said.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fields = ["parallel=tp3", "parallel.launcher=torchrun", f"parallel.key_file={key}", "device=cuda"]
    assert own_device_of(fields) == "1"
    assert own_device_of([*fields, "parallel.visible_devices='4,6'"]) == "6"
    with pytest.raises(ConfigError, match="LOCAL_RANK=1: CUDA_VISIBLE_DEVICES=4 has no GPU for it"):
        own_device_of([*fields, "parallel.visible_devices='4'"])


def test_ranks_of_one_host_need_no_key(said: pytest.MonkeyPatch):
    said.setenv("LOCAL_WORLD_SIZE", "3")
    said.setenv("TORCHELASTIC_RUN_ID", "a1")
    parallel = load(["parallel=tp3", "parallel.launcher=torchrun"]).parallel
    assert parallel.address is not None and parallel.address.startswith("unix:atom-run-")
    assert parallel.address.endswith("-a1-29500")
    said.delenv("TORCHELASTIC_RUN_ID")
    said.delenv("MASTER_PORT")
    with pytest.raises(ConfigError, match="the environment has no MASTER_PORT, by which ranks of one host find each"):
        load(["parallel=tp3", "parallel.launcher=torchrun"])


def test_torchrun_s_environment_means_nothing_to_other_launchers_and_jobs(said: pytest.MonkeyPatch):
    assert load(["parallel=tp3"]).rank == 0
    assert load(["parallel=tp3", "parallel.launcher=torchrun", "job=explain"]).rank == 0


def test_processes_of_torchrun_do_not_each_open_an_engine_with_ranks(said: pytest.MonkeyPatch):
    said.setenv("TORCHELASTIC_RUN_ID", "none")
    reason = "torchrun started 3 processes, and each would open an engine of its own; set parallel.launcher=torchrun"
    for fields in (["parallel=tp3"], ["parallel=tp3", "job=serve"], ["parallel=tp3", "parallel.launcher=ray"]):
        with pytest.raises(ConfigError, match=reason):
            load(fields)
    assert load([]).parallel.num_ranks == 1, "a script may have an engine in each process"
    assert load(["parallel=tp3", "job=explain"]).parallel.num_ranks == 3
    said.setenv("WORLD_SIZE", "1")
    assert load(["parallel=tp3"]).parallel.num_ranks == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (["parallel=tp3"], r"must show a key: set parallel\.key_file; \(umask 077; openssl rand -hex 32 > key\)"),
        (["parallel=tp3", "advanced.torchrun.rank=null"], "the environment has no RANK and WORLD_SIZE; start it as torchrun"),
        (["parallel=tp9"], "torchrun starts 3 processes, and the engine has 9 ranks; set parallel=tp3"),
        (["parallel=tp3", "advanced.torchrun.world_size=1"], r"starts 1 .* has 3 ranks; .*\(WORLD_SIZE\) to start 3$"),
        (["parallel=tp3", "advanced.torchrun.world_size=0"], r"starts 0 .* has 3 ranks; .*\(WORLD_SIZE\) to start 3$"),
        (["parallel=tp3", "advanced.torchrun.local_world_size=x"], "LOCAL_WORLD_SIZE=x must be a whole number"),
        (["parallel=tp3", "advanced.torchrun.master_port=65535"], "MASTER_PORT=65535: .* set 65534 at most"),
        ([], "starts several ranks, and this engine has one; set parallel=tp2 or more"),
        (["parallel=tp3", "advanced.torchrun.rank=3"], "RANK=3 must be below WORLD_SIZE=3"),
        (["parallel=tp3", "advanced.torchrun.rank=-1"], "RANK=-1 must be a whole number"),
        (["parallel=tp3", "advanced.torchrun.master_port=null"], r"no MASTER_ADDR and MASTER_PORT; set parallel\.address"),
        (["parallel=tp3", "parallel.address=tcp://0.0.0.0:7000"], r"0\.0\.0\.0:7000 means all interfaces; name the one"),
        (["parallel=tp3", "advanced.torchrun.master_addr='0'"], r"address=tcp://0:29501 means all interfaces"),
        (["parallel=tp3", "parallel.address=tcp://10.0.0.1:0"], "would take a free port, which no rank knows; name one"),
        (["parallel=tp3", "parallel.address=10.0.0.1:7000"], r"must be tcp://HOST:PORT, as in tcp://10\.0\.0\.1:7000"),
        (["parallel=tp3", "parallel.key_file=/nowhere/key"], "/nowhere/key: No such file or directory; .*openssl"),
    ],
)  # fmt: skip
def test_what_torchrun_s_ranks_lack_is_said(fields: list[str], reason: str, said: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=reason):
        load(["parallel.launcher=torchrun", *fields])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            ["parallel.address=tcp://10.0.0.1:7000"],
            r"parallel\.address is not for parallel\.launcher=local; leave it out",
        ),
        (["parallel.host=10.0.0.1"], r"parallel\.host is not for parallel\.launcher=local"),
        (["parallel.launcher=ray", "parallel.key_file=key"], r"parallel\.key_file is not for parallel\.launcher=ray"),
        (["parallel.launcher=slurm"], "choices: local, torchrun, ray"),
    ],
)
def test_fields_of_another_launcher_are_refused(fields: list[str], reason: str):
    with pytest.raises(ConfigError, match=reason):
        load(["parallel=tp3", *fields])


GROUPS = {"parallel.data": 8, "parallel.experts": 8, "parallel.launcher": "torchrun", "parallel.key_file": "key"}
MIXTURE = Path(__file__).parents[1] / "configs" / "qwen3_30b_a3b.json"  # of 128 experts, of which a token chooses 8


@pytest.mark.parametrize(
    ("hosts", "fields", "chosen"),
    [
        (8, {}, "dispatch"),
        (1, {}, "gather"),
        (4, {}, "gather"),  # all rows are 7 a token between hosts; one to each of 6 ranks with experts is 2 * 6 * 0.67
        (8, {"parallel.data": 2, "parallel.tensor": 4}, "dispatch"),  # of 8 parts of the experts, it meets one
        (4, {"parallel.data": 4, "parallel.tensor": 2}, "dispatch"),  # and 3, on as many hosts
        (2, {"parallel.pipeline": 2, "parallel.data": 4, "parallel.experts": 4}, "gather"),  # a host has a stage
        (8, {"parallel.experts": 2}, "gather"),  # nearly all tokens choose one of a half
        (8, {"parallel.dispatch": "gather"}, "gather"),
        (1, {"parallel.dispatch": "dispatch"}, "dispatch"),
        (1, {"parallel.launcher": "ray", "parallel.key_file": "null"}, "dispatch"),
        (1, {"parallel.launcher": "local", "parallel.key_file": "null"}, "gather"),
        (8, {"job": "explain"}, "dispatch"),
    ],
)
def test_groups_send_tokens_to_their_experts_where_that_is_less_between_hosts(
    hosts: int, fields: dict[str, object], chosen: str, said: pytest.MonkeyPatch, key: Path, tmp_path: Path
):
    shutil.copy(MIXTURE, tmp_path / "config.json")
    for name, value in {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_WORLD_SIZE": 8 // hosts}.items():
        said.setenv(name, str(value))
    fields = {**GROUPS, "parallel.key_file": key, **fields, "checkpoint": tmp_path, "load_dummy": True}
    assert load([f"{name}={value}" for name, value in fields.items()]).parallel.dispatch == chosen


def test_tokens_are_sent_only_to_experts_of_several_ranks(checkpoints: Any):
    with pytest.raises(
        ConfigError, match=r"parallel\.dispatch=dispatch is for groups whose ranks have experts of their own"
    ):
        load([f"checkpoint={checkpoints('qwen3_moe')}", "parallel.data=2", "parallel.dispatch=dispatch"])


@pytest.mark.parametrize("launcher", ["torchrun", "ray"])
def test_replicas_are_of_one_host(launcher: str):
    instead = "on one host leave parallel.launcher out, on several start a server for each replica, behind a proxy"
    with pytest.raises(UnsupportedError, match=f"parallel.replicas=2 with parallel.launcher={launcher}: .*; {instead}"):
        load(["parallel=tp3", "parallel.replicas=2", f"parallel.launcher={launcher}"])


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o610])
def test_a_key_that_others_can_read_or_write_is_refused(mode: int, key: Path):
    key.chmod(mode)
    with pytest.raises(ConfigError, match=f"others may read or write it; chmod 600 {key}"):
        read_key(str(key))


def test_a_key_has_16_bytes_or_more_without_the_end_of_its_line(key: Path):
    assert read_key(str(key)) == b"0123456789abcdef"
    key.write_text("0123456789abcde\n")
    with pytest.raises(ConfigError, match="has 15 bytes, 16 are the least"):
        read_key(str(key))


@pytest.mark.parametrize(
    "address",
    ["", "tcp://", "tcp://:7000", "tcp://a", "tcp://a:", "tcp://a:70000", "tcp://a:x", "udp://a:1", "tcp://a:1/",
     "tcp://a:1/b", "tcp://u@a:1", "tcp://a:1?b", "tcp://a:1#b", "tcp://[::1:7", "a:1", "unix:a"],
)  # fmt: skip
def test_an_address_of_another_form_is_refused(address: str):
    with pytest.raises(ConfigError, match="must be tcp://HOST:PORT"):
        split_address(address)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "0", "0.0", "0x0", "00.0.0.0", "[::]", "[0::0]", "[::0.0.0.0]", "[::ffff:0.0.0.0]", "[::ffff:0:0]"],
)
def test_all_interfaces_are_refused_however_they_are_written(host: str):
    with pytest.raises(ConfigError, match="means all interfaces; name the one that other hosts reach"):
        split_address(f"tcp://{host}:7000")


def test_an_address_is_a_host_and_a_port():
    assert split_address("tcp://10.0.0.1:7000") == ("10.0.0.1", 7000)
    assert split_address("tcp://[::1]:0") == ("::1", 0)
