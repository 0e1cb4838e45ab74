"""The handshake and frames between hosts, against bytes that are written here by hand."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atom.errors import ConfigError
from atom.runtime.ranks import secure_connection
from atom.runtime.ranks.secure_connection import MAX_BODY, Connection, WrongKeyError, accept, connect, listen

KEY = b"0123456789abcdef"


def sign(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


class Peer(NamedTuple):
    """A rank whose bytes are written by hand, connected to a real driver."""

    socket: socket.socket
    send_key: bytes
    receive_key: bytes
    driver: Connection
    sent: list[bytes]  # of the handshake

    def frame(self, number: int, body: bytes) -> bytes:
        return len(body).to_bytes(4, "little") + sign(self.send_key, number.to_bytes(8, "little") + body) + body


def greet(rank: int = 3, key: bytes = KEY) -> Peer:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(accept, theirs, KEY)
        greeting = b"atom-run ranks 1\n" + rank.to_bytes(4, "little") + secrets.token_bytes(32)
        ours.sendall(greeting)
        nonce = ours.recv(32, socket.MSG_WAITALL)
        proof = sign(key, b"rank proves" + greeting + nonce)
        ours.sendall(proof)
        try:
            number, driver = accepted.result(60)
        except BaseException:
            ours.close()
            theirs.close()
            raise
    assert number == rank
    assert ours.recv(32, socket.MSG_WAITALL) == sign(key, b"driver proves" + greeting + nonce)
    keys = [sign(key, who + greeting + nonce) for who in (b"rank sends", b"driver sends")]
    return Peer(ours, keys[0], keys[1], driver, [greeting, proof])


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = greet()
    yield made
    made.driver.close()
    made.socket.close()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(20.0, [5, 5, 3, 20_000]), (0.5, [2, 2, 3, 10_000]), (9.9, [2, 2, 3, 10_000]), (0.0, [2, 2, 3, 10_000])],
)
def test_the_system_ends_a_connection_whose_other_host_acknowledges_nothing_for_so_long(
    seconds: float, expected: list[int]
):
    """Or for 10 s, if that is longer."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connected:
        Connection(connected, KEY, KEY).limit_loss(seconds)
        options = [socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT]
        assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert [connected.getsockopt(socket.IPPROTO_TCP, each) for each in options] == expected


def test_both_sides_prove_the_key_and_sign_numbered_frames(peer: Peer):
    peer.driver.send(b"one")
    peer.driver.send(b"")
    for number, body in enumerate([b"one", b""]):
        head = peer.socket.recv(36, socket.MSG_WAITALL)
        assert int.from_bytes(head[:4], "little") == len(body)
        assert peer.socket.recv(len(body)) == body if body else True
        assert head[4:] == sign(peer.receive_key, number.to_bytes(8, "little") + body)
    peer.socket.sendall(peer.frame(0, b"two") + peer.frame(1, b"three"))
    assert [peer.driver.receive(), peer.driver.receive()] == [b"two", b"three"]
    peer.socket.close()
    assert peer.driver.receive() is None


@pytest.mark.parametrize("key", [b"", KEY[:-1], KEY + b"\n"])
def test_another_key_is_refused(key: bytes):
    with pytest.raises(WrongKeyError, match="it has another key"):
        greet(key=key)


def refused(data: bytes) -> str:
    """Why a driver drops whoever says this and then waits."""
    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs), ThreadPoolExecutor(1) as pool:
        accepted: Future[Any] = pool.submit(accept, theirs, KEY)
        ours.sendall(data)
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError) as error:
            accepted.result(60)
    return str(error.value)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it said nothing"),
        (b"GET / HTTP/1.1\r\nHost: 10.0.0.1:7000\r\n\r\n" + b"x" * 100, "it is no rank"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200, "it is no rank"),  # TLS
        (b"\xff\xff\xff\xff" + b"\0" * 100, "it is no rank"),  # a frame of 4 GiB
        (b"atom-run ranks 1\n\3\0\0", "it is no rank"),
        (b"atom-run ranks 1\n" + bytes(36), "it has another key"),
        (b"atom-run ranks 1\n" + bytes(36 + 31), "it has another key"),
    ],
)
def test_a_stranger_is_refused(data: bytes, reason: str):
    assert refused(data) == reason


@settings(max_examples=60)
@given(st.one_of(st.binary(max_size=200), st.binary(max_size=200).map(b"atom-run ranks 1\n".__add__)))
def test_no_bytes_get_in_without_the_key(data: bytes):
    assert refused(data)


def test_a_handshake_that_is_replayed_is_refused(peer: Peer):
    assert refused(b"".join(peer.sent)) == "it has another key"


def test_a_handshake_that_dawdles_ends_in_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(secure_connection, "HANDSHAKE_SECONDS", 0.5)
    ours, theirs = socket.socketpair()
    left = threading.Event()

    def dawdle() -> None:
        while not left.wait(0.1):
            ours.send(b"a")

    with closing(ours), closing(theirs):
        dawdling = threading.Thread(target=dawdle)
        dawdling.start()
        since = time.monotonic()
        with pytest.raises(TimeoutError):
            accept(theirs, KEY)
        assert time.monotonic() - since > 0.4
        left.set()
        dawdling.join()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda peer: peer.frame(0, b"body")[:-1], "cut off"),
        (lambda peer: peer.frame(0, b"body")[:20], "cut off"),
        (lambda peer: b"\xff\xff\xff\xff" + bytes(32), f"4294967295 bytes is more than {MAX_BODY}"),
        (lambda peer: peer.frame(0, b"body")[:-1] + b"Y", "not authentic"),
        (lambda peer: bytes(36), "not authentic"),
        (lambda peer: peer.frame(1, b"body"), "not authentic"),  # one was dropped
        (lambda peer: peer._replace(send_key=peer.receive_key).frame(0, b"body"), "not authentic"),  # sent back
    ],
)
def test_a_frame_that_is_no_frame_ends_the_connection(change: Any, reason: str, peer: Peer):
    peer.socket.sendall(change(peer))
    peer.socket.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=reason):
        peer.driver.receive()


def test_a_frame_that_is_replayed_ends_the_connection(peer: Peer):
    peer.socket.sendall(peer.frame(0, b"once") * 2)
    assert peer.driver.receive() == b"once"
    with pytest.raises(OSError, match="not authentic"):
        peer.driver.receive()


@settings(max_examples=30)
@given(st.binary(min_size=1, max_size=300))
def test_no_bytes_are_a_frame_without_the_session_key(data: bytes):
    peer = greet()
    with closing(peer.socket), closing(peer.driver):
        peer.socket.sendall(data)
        peer.socket.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=r"cut off|more than|not authentic"):
            peer.driver.receive()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://[::1]:0", "unix:atom-run-test"])
def test_a_rank_connects_to_an_address(address: str):
    with listen(address) as listening, ThreadPoolExecutor(1) as pool:
        place = listening.getsockname()
        if address.startswith("tcp"):
            address = f"{address.removesuffix('0')}{place[1]}"
        found = pool.submit(lambda: accept(listening.accept()[0], KEY))
        ours = connect(address, KEY, 5)
        rank, theirs = found.result(60)
        with closing(ours), closing(theirs):
            body = b"x" * (1 << 20)
            sending = pool.submit(ours.send, body)
            assert rank == 5 and theirs.receive() == body and sending.result(60) is None
            assert not theirs.has_ended
            ours.close()
            assert theirs.receive() is None and theirs.has_ended


def test_a_driver_with_another_key_is_refused_by_the_rank():
    with listen("tcp://127.0.0.1:0") as listening, ThreadPoolExecutor(1) as pool:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"

        def pretend() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(53, socket.MSG_WAITALL)
                connected.sendall(bytes(32))
                connected.recv(32, socket.MSG_WAITALL)
                connected.sendall(bytes(32))

        pretending = pool.submit(pretend)
        with pytest.raises(WrongKeyError, match=f"the driver at {address} has another key"):
            connect(address, KEY, 1)
        pretending.result(60)


def test_another_user_s_process_of_this_host_is_refused(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = socket.socketpair()
    user = secure_connection.os.getuid()
    monkeypatch.setattr(secure_connection.os, "getuid", lambda: user + 1)
    with closing(ours), closing(theirs), pytest.raises(OSError, match=f"it is of user {user}"):
        accept(theirs, b"")


@pytest.mark.parametrize("place", [("0.0.0.0", 0), ("::", 0, 0, 0), ("::ffff:0.0.0.0", 0, 0, 0)])
def test_a_name_that_means_all_interfaces_is_refused(place: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    family = socket.AF_INET if len(place) == 2 else socket.AF_INET6
    found = [(family, socket.SOCK_STREAM, 6, "", place)]
    monkeypatch.setattr(secure_connection.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(ConfigError, match=r"parallel\.address=tcp://everywhere:0 means all interfaces"):
        listen("tcp://everywhere:0")


def test_a_name_of_this_host_that_another_run_has_is_refused():
    reason = "cannot listen at unix:atom-run-test-name .*in use.*; another run has this name; set another MASTER_PORT"
    with listen("unix:atom-run-test-name"), pytest.raises(ConfigError, match=reason):
        listen("unix:atom-run-test-name")


def test_an_address_that_is_none_of_this_host_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen at tcp://192\.0\.2\.77:7000 .*an address of this host"):
        listen("tcp://192.0.2.77:7000")
    with pytest.raises(ConfigError, match=r"parallel.host=192\.0\.2\.77 must be an address of this host"):
        connect("tcp://127.0.0.1:7000", KEY, 1, "192.0.2.77")
