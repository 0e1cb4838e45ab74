"""Tell systemd the server's state, as sd_notify(3) does.

    notify(config.serve.http.notify_socket, "READY=1")

A unit with `Type=notify` counts as started at READY=1; its dependents wait for it.
"""

from __future__ import annotations

import logging
import socket

LOG = logging.getLogger("atom.serve")
SECONDS = 1.0  # for systemd to take a datagram


def notify(address: str | None, state: str) -> None:
    """Send a state to the socket that systemd listens on; a warning where that fails.

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
