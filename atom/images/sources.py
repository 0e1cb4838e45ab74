"""Read images from data: URLs, listed servers and files.

    data = read_source("data:image/png;base64,iVBO…", SourceLimits())
    data = read_source("https://images.example.org/a.png", SourceLimits(domains=("images.example.org",)))
    data = read_file("photo.jpg", SourceLimits())            # only of who runs atom, never of a request

A listed server may be in a private network, but what it redirects to has to be listed and public.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

from atom.errors import RequestError

DATA = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(;[^,;]*)*),", re.IGNORECASE)
MAX_REDIRECTS = 3
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
CHUNK = 1 << 16  # bytes


class SourceLimits(NamedTuple):
    """The limits of what is read."""

    domains: tuple[str, ...] = ()  # servers by name; *.example.org has all inside example.org
    max_bytes: int = 32 << 20  # of a file
    seconds: float = 10.0  # until all of it is here


def read_source(url: str, limits: SourceLimits) -> bytes:
    """The bytes that a URL of a request has. RequestError if they are not to be had."""
    scheme = url[:10].partition(":")[0].lower()
    if scheme == "data":
        return read_data(url, limits)
    if scheme not in PORTS:
        raise RequestError(f"an image's URL begins with data:, http: or https:, not with {url[:20]!r}")
    return fetch(url, limits)


def read_data(url: str, limits: SourceLimits) -> bytes:
    """The bytes of a data: URL (RFC 2397)."""
    head = DATA.match(url)
    if head is None:
        raise RequestError("a data: URL without a comma has no data")
    if len(url) > limits.max_bytes * 2:
        raise too_large(limits)
    content = url[head.end() :]
    if "base64" not in head["parameters"].lower().split(";"):
        data = unquote_to_bytes(content)
    else:
        try:
            data = base64.b64decode(re.sub(r"\s", "", content), validate=True)
        except (binascii.Error, ValueError):
            raise RequestError("the base64 of an image's data: URL is not valid") from None
    if len(data) > limits.max_bytes:
        raise too_large(limits)
    return data


def read_file(path: str | Path, limits: SourceLimits) -> bytes:
    """The bytes of a file here. RequestError if it cannot be read."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(limits.max_bytes + 1)
    except OSError as error:
        raise RequestError(f"the image {path}: {error.strerror or error}") from None
    if len(data) > limits.max_bytes:
        raise too_large(limits)
    return data


def fetch(url: str, limits: SourceLimits) -> bytes:
    """Get a file by HTTP."""
    deadline = time.monotonic() + limits.seconds
    for redirects in range(MAX_REDIRECTS + 1):
        parts = check_listed(url, limits)
        assert parts.hostname is not None, "it is listed"
        try:
            found = get(parts, limits, deadline, must_be_public=redirects > 0)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(
                f"the image at {parts.hostname} was not to be had: {error or type(error).__name__}"
            ) from None
        if isinstance(found, bytes):
            return found
        url = urljoin(url, found)
    raise RequestError(f"the image at {parts.hostname}: more than {MAX_REDIRECTS} redirects")


def check_listed(url: str, limits: SourceLimits) -> SplitResult:
    """The parts of a URL whose server is on the list. RequestError for any other."""
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").lower(), parts.port
    except ValueError:
        raise RequestError("an image's URL is not valid") from None
    if not limits.domains:
        raise RequestError("images are not fetched here: send a data: URL, or set serve.image_domains")
    if parts.scheme not in PORTS or not any(matches(host, domain.lower()) for domain in limits.domains):
        raise RequestError(
            f"images of {host[:100] or 'no server'} are not fetched; serve.image_domains lists whose are"
        )
    return parts


def matches(host: str, domain: str) -> bool:
    """Whether a server is the one named, or, with *., one inside it."""
    return host == domain or (domain.startswith("*.") and host.endswith(domain[1:]))


def get(parts: SplitResult, limits: SourceLimits, deadline: float, *, must_be_public: bool) -> bytes | str:
    """The body of a URL, or where it redirects to."""
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]
    connection = http.client.HTTPConnection(host, port)
    sock = connection.sock = connect(host, port, parts.scheme, deadline, must_be_public=must_be_public)
    watch = threading.Timer(left_of(deadline), cut_off, [sock])  # a timeout of the socket begins anew at each byte
    watch.daemon = True
    watch.start()
    try:
        path = parts.path or "/"
        connection.request("GET", f"{path}?{parts.query}" if parts.query else path, headers={"User-Agent": "atom"})
        response = connection.getresponse()
        if response.status in REDIRECTS and (location := response.getheader("Location")):
            return location
        if response.status != 200:
            raise ValueError(f"status {response.status}")
        data = bytearray()
        while chunk := response.read1(CHUNK):
            data += chunk
            if len(data) > limits.max_bytes:
                raise too_large(limits)
        left_of(deadline)
        if response.length:
            raise ValueError("the answer ended early")
        return bytes(data)
    except (OSError, http.client.HTTPException):
        left_of(deadline)
        raise
    finally:
        watch.cancel()
        connection.close()


def cut_off(sock: socket.socket) -> None:
    """End what a connection waits for."""
    with contextlib.suppress(OSError):  # it has ended
        sock.shutdown(socket.SHUT_RDWR)


def connect(host: str, port: int, scheme: str, deadline: float, *, must_be_public: bool) -> socket.socket:
    """A connection to an address of the server, which was checked."""
    fault: OSError = OSError("the server has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        if must_be_public and not ipaddress.ip_address(address[0]).is_global:
            fault = OSError("it redirects to an address that is not public")
            continue
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(left_of(deadline))
            sock.connect(address)
            if scheme == "https":
                return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            return sock
        except OSError as error:
            sock.close()
            fault = error
    raise fault


def left_of(deadline: float) -> float:
    """Seconds until then. TimeoutError if there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("it took too long")
    return left


def too_large(limits: SourceLimits) -> RequestError:
    return RequestError(f"an image's file may have {limits.max_bytes} bytes at most")
