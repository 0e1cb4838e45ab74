"""TCP connections between processes that share a key: mutual authentication, signed frames.

    with listen("tcp://10.0.0.1:7000") as listening:
        rank, connection = accept(listening.accept()[0], key)
        connection.send(b"…")

    connection = connect("tcp://10.0.0.1:7000", key, rank=3)         # on another host
    connection.receive()                                             # b"…"

The handshake, numbers little-endian:

    rank      MAGIC, its number in 4 bytes, a nonce
    driver    a nonce
    rank      HMAC-SHA256(key, "rank proves" + all of the above)
    driver    HMAC-SHA256(key, "driver proves" + all of the above)

Then frames: the length in 4 bytes, HMAC-SHA256(session key, number of the frame in 8 bytes + body), the body. Each
direction has its own session key, an HMAC of the handshake. So nobody without the key can forge, replay, reflect, drop
or reorder a frame unnoticed. Nothing is encrypted. Before the proof, only fixed lengths are read.

On a Unix socket ("unix:NAME", abstract) the kernel reports the user of the other process, and the key is empty.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time

from atom.config.parallel import UNIX, all_interfaces, is_unspecified, split_address
from atom.errors import ConfigError

MAGIC = b"atom-run ranks 1\n"
NONCE_BYTES = PROOF_BYTES = 32
RANK = struct.Struct("<I")
HEAD = struct.Struct(f"<I{PROOF_BYTES}s")
NUMBER = struct.Struct("<Q")
MAX_BODY = 1 << 28  # bytes: a step's masks of a grammar for 512 sequences of 152k tokens are 78 MB
HANDSHAKE_SECONDS = 5.0
MIN_LOSS_SECONDS = 10.0  # of TCP without an acknowledgment
BACKLOG = 1024  # connections waiting to be accepted
USER = struct.Struct("3i")  # pid, uid, gid of SO_PEERCRED


class WrongKeyError(OSError):
    """The other side does not have our key."""


class Connection:
    """A connection whose other side has proved that it has the key. Several threads may send; one receives."""

    def __init__(self, connected: socket.socket, send_key: bytes, receive_key: bytes) -> None:
        self._socket, self._send_key, self._receive_key = connected, send_key, receive_key
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def host(self) -> str:
        """The address of the other side."""
        other = self._socket.getpeername()
        return str(other[0]) if isinstance(other, tuple) else "127.0.0.1"

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed it, and all that it sent has been received."""
        try:
            return self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except OSError as error:
            return not isinstance(error, BlockingIOError)

    def send(self, body: bytes) -> None:
        assert len(body) <= MAX_BODY, f"a frame of {len(body)} bytes is more than {MAX_BODY}"
        with self._sending:
            proof = prove(self._send_key, NUMBER.pack(self._num_sent), body)
            self._num_sent += 1
            self._socket.sendall(HEAD.pack(len(body), proof) + body)

    def receive(self) -> bytes | None:
        """The next frame's body; None at the end. OSError if it is cut off, too large or not authentic."""
        head = read(self._socket, HEAD.size)
        if not head:
            return None
        if len(head) < HEAD.size:
            raise OSError("a frame was cut off")
        size, proof = HEAD.unpack(head)
        if size > MAX_BODY:
            raise OSError(f"a frame of {size} bytes is more than {MAX_BODY}")
        body = read(self._socket, size)
        if len(body) < size:
            raise OSError("a frame was cut off")
        if not hmac.compare_digest(proof, prove(self._receive_key, NUMBER.pack(self._num_received), body)):
            raise OSError("a frame is not authentic")
        self._num_received += 1
        return body

    def limit_silence(self, seconds: float | None) -> None:
        """Have `receive` raise TimeoutError after this long without data; None: never."""
        self._socket.settimeout(seconds)

    def limit_loss(self, seconds: float) -> None:
        """Have the kernel end the connection once the other host has acknowledged nothing for this long.

        Its kernel acknowledges for a stopped process too, until that process's receive buffer is full.

        seconds: raised to MIN_LOSS_SECONDS, since a network that loses packets needs time to send them again
        """
        if self._socket.family == socket.AF_UNIX:
            return
        seconds = max(seconds, MIN_LOSS_SECONDS)
        probes = round(seconds / 4)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        options = {"TCP_KEEPIDLE": probes, "TCP_KEEPINTVL": probes, "TCP_KEEPCNT": 3}
        for name, value in (options | {"TCP_USER_TIMEOUT": round(seconds * 1000)}).items():
            if hasattr(socket, name):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def end(self) -> None:
        """End it for both sides, and for threads of this process that wait for it."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.end()
        self._socket.close()


def listen(address: str) -> socket.socket:
    """Listen at the driver's address. ConfigError if that fails."""
    try:
        family, place = find_place(address)
        listening = socket.socket(family, socket.SOCK_STREAM)
        if family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(place)
    except OSError as error:
        fix = "parallel.address must be an address of this host, and a port that is free"
        if address.startswith(UNIX):
            fix = "another run has this name; set another MASTER_PORT"
        raise ConfigError(f"cannot listen at {address} ({error.strerror or error}); {fix}") from None
    listening.listen(BACKLOG)
    return listening


def accept(connected: socket.socket, key: bytes) -> tuple[int, Connection]:
    """Authenticate a rank that has connected: its number, its connection. OSError, with the reason, for a stranger."""
    end = time.monotonic() + HANDSHAKE_SECONDS
    check_user(connected)
    greeting = read(connected, len(MAGIC) + RANK.size + NONCE_BYTES, end)
    if not greeting:
        raise OSError("it said nothing")
    if not greeting.startswith(MAGIC) or len(greeting) < len(MAGIC) + RANK.size + NONCE_BYTES:
        raise OSError("it is no rank")
    nonce = secrets.token_bytes(NONCE_BYTES)
    connected.sendall(nonce)
    proof = read(connected, PROOF_BYTES, end)
    if not hmac.compare_digest(proof, prove(key, b"rank proves", greeting, nonce)):
        raise WrongKeyError("it has another key")
    connected.sendall(prove(key, b"driver proves", greeting, nonce))
    send_key, receive_key = (prove(key, who, greeting, nonce) for who in (b"driver sends", b"rank sends"))
    connected.settimeout(None)
    (rank,) = RANK.unpack_from(greeting, len(MAGIC))
    return rank, Connection(connected, send_key, receive_key)


def connect(address: str, key: bytes, rank: int, host: str | None = None) -> Connection:
    """Connect to the driver. OSError if it does not listen, WrongKeyError if it has another key.

    host: this host's address to connect from; None: any
    """
    family, place = find_place(address)
    connected = socket.socket(family, socket.SOCK_STREAM)
    try:
        connected.settimeout(HANDSHAKE_SECONDS)
        if host is not None:
            bind(connected, host)
        connected.connect(place)
        check_user(connected)
        greeting = MAGIC + RANK.pack(rank) + secrets.token_bytes(NONCE_BYTES)
        connected.sendall(greeting)
        nonce = read(connected, NONCE_BYTES)
        if len(nonce) < NONCE_BYTES:
            raise OSError(f"what listens at {address} is no driver, or has no time")
        connected.sendall(prove(key, b"rank proves", greeting, nonce))
        if not hmac.compare_digest(read(connected, PROOF_BYTES), prove(key, b"driver proves", greeting, nonce)):
            raise WrongKeyError(f"the driver at {address} has another key")
        send_key, receive_key = (prove(key, who, greeting, nonce) for who in (b"rank sends", b"driver sends"))
        return Connection(connected, send_key, receive_key)
    except BaseException:
        connected.close()
        raise


def bind(connecting: socket.socket, host: str) -> None:
    """Have a socket connect from this address. ConfigError if it is not one of this host."""
    try:
        connecting.bind((host, 0))
    except OSError as error:
        raise ConfigError(f"parallel.host={host} must be an address of this host ({error.strerror or error})") from None


def prove(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of parts of which all but the last have fixed lengths."""
    return hmac.digest(key, b"".join(parts), "sha256")


def read(connected: socket.socket, size: int, end: float | None = None) -> bytes:
    """This many bytes; fewer if the other side has ended. end: monotonic time from which on it raises TimeoutError"""
    data = bytearray()
    while len(data) < size:
        if end is not None:
            connected.settimeout(max(end - time.monotonic(), 1e-3))
        try:
            part = connected.recv(min(size - len(data), 1 << 20))
        except ConnectionError:
            part = b""
        if not part:
            break
        data += part
    return bytes(data)


def check_user(connected: socket.socket) -> None:
    """OSError if a Unix socket leads to another user's process."""
    if connected.family == socket.AF_UNIX:
        _, user, _ = USER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, USER.size))
        if user != os.getuid():
            raise OSError(f"it is of user {user}")


def find_place(address: str) -> tuple[socket.AddressFamily, tuple[str, int] | str]:
    """The family and address for sockets. ConfigError if the name means all interfaces."""
    if address.startswith(UNIX):
        return socket.AF_UNIX, "\0" + address.removeprefix(UNIX)
    family, _, _, _, place = socket.getaddrinfo(*split_address(address), type=socket.SOCK_STREAM)[0]
    if is_unspecified(str(place[0])):
        raise all_interfaces(address)
    return family, place[:2]  # type: ignore[return-value]
