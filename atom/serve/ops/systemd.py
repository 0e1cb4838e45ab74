"""Take systemd's socket and report the server's state to it.

As sd_listen_fds(3) and sd_notify(3) do:

    listening = adopt(num_sockets=1, pid=4711)                # None if another process is meant
    notify(config.advanced.notify_socket, "READY=1")

A unit with `Type=notify` counts as started at READY=1; its dependents wait for it.
"""

from __future__ import annotations

import logging
import os
import socket

from atom.errors import ConfigError

LOG = logging.getLogger("atom.serve")
SECONDS = 1.0  # for systemd to take a datagram

FIRST = 3  # the descriptor of the first socket that is passed


def adopt(num_sockets: int, pid: int) -> socket.socket | None:
    """The listening socket that systemd has passed to this process; None without any.

    pid: of LISTEN_PID. ConfigError if there are several, or it is not a TCP socket.
    """
    if not num_sockets or pid != os.getpid():
        return None
    fix = "give the .socket unit one ListenStream= of an address and a port"
    if num_sockets > 1:
        raise ConfigError(f"systemd passes {num_sockets} sockets; {fix}")
    try:
        passed = socket.socket(fileno=FIRST)
        is_fit = passed.family in (socket.AF_INET, socket.AF_INET6) and passed.type == socket.SOCK_STREAM
        is_fit = is_fit and bool(passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError as error:
        raise ConfigError(f"the socket that systemd passes cannot be used ({error.strerror}); {fix}") from None
    if not is_fit:
        raise ConfigError(f"the socket that systemd passes does not listen for TCP; {fix}")
    passed.set_inheritable(False)
    return passed


def notify(address: str | None, state: str) -> None:
    """Send a state to the socket that systemd listens on; a warning if that fails.

    address: of NOTIFY_SOCKET, a path, or `@NAME` for an abstract one; None: nobody listens.
    """
    if address is None:
        return
    path = f"\0{address[1:]}" if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(SECONDS)
            sender.sendto(state.encode(), path)
    except OSError as error:
        LOG.warning("cannot send %s to systemd at %s: %s", state, address, error.strerror or error)
