"""The bytes of images: data: URLs, listed servers, files."""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from atom.errors import RequestError
from atom.images.sources import SourceLimits, read_file, read_source

HERE = SourceLimits(domains=("localhost",), max_bytes=1000, seconds=30)


class Files(BaseHTTPRequestHandler):
    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):  # of a client that left
            super().handle()

    def do_GET(self) -> None:
        path, _, rest = self.path.partition("?")
        bodies = {"/a.png": b"abc" + rest.encode(), "/large": b"x" * 1001, "/short": b"ab"}
        if path == "/to":
            self.send_response(302)
            self.send_header("Location", rest)
            self.end_headers()
        elif path == "/slow":
            self.send_response(200)
            self.flush_headers()
            with contextlib.suppress(OSError):  # until the client leaves
                while True:
                    self.wfile.write(b"x")
                    time.sleep(0.05)
        elif path in bodies:
            self.send_response(200)
            self.send_header("Content-Length", str(len(bodies[path]) + (path == "/short")))
            self.end_headers()
            self.wfile.write(bodies[path])
        else:
            self.send_error(404)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server = ThreadingHTTPServer(("localhost", 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def test_data_urls_need_no_list() -> None:
    content = bytes(range(256))
    encoded = base64.b64encode(content).decode()
    for url in (f"data:image/png;base64,{encoded}", f"DATA:;base64,{encoded}", f"data:image/png;x=y;BASE64,{encoded}"):
        assert read_source(url, SourceLimits()) == content
    assert read_source("data:text/plain,a%20b", SourceLimits()) == b"a b"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("data:image/png;base64", "a data: URL without a comma has no data"),
        ("data:image/png;base64,%%%", "the base64 of an image's data: URL is not valid"),
        ("data:;base64," + "A" * 1600, "may have 1000 bytes at most"),
        ("data:;base64," + "A" * 4000, "may have 1000 bytes at most"),
        ("file:///etc/passwd", "begins with data:, http: or https:, not with 'file:///etc/passwd'"),
        ("/etc/passwd", "begins with"),
        ("", "begins with"),
        ("http://[::1", "an image's URL is not valid"),
        ("https://example.org/a.png", "images of example.org are not fetched; serve.image_domains lists whose are"),
        ("http://localhost.example.org/", "are not fetched"),
        ("http://user@example.org@localhost.evil/", "are not fetched"),
    ],
)
def test_what_is_refused_is_said_in_a_line(url: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as error:
        read_source(url, HERE)
    assert len(str(error.value)) < 150 and "\n" not in str(error.value)


def test_without_a_list_nothing_is_fetched(port: int) -> None:
    with pytest.raises(
        RequestError, match=r"images are not fetched here: send a data: URL, or set serve\.image_domains"
    ):
        read_source(f"http://localhost:{port}/a.png", SourceLimits())


def test_a_listed_server_is_asked(port: int) -> None:
    assert read_source(f"http://localhost:{port}/a.png", HERE) == b"abc"
    assert read_source(f"HTTP://LocalHost:{port}/a.png?q=1", HERE) == b"abcq=1"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none", "the image at localhost was not to be had: status 404"),
        ("large", "may have 1000 bytes at most"),
        ("short", "was not to be had"),
        ("to?http://example.org/a.png", "images of example.org are not fetched"),
        ("to?/a.png", "it redirects to an address that is not public"),
        ("to?file:///etc/passwd", "are not fetched"),
    ],
)
def test_faults_of_a_listed_server_are_a_line(port: int, path: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_source(f"http://localhost:{port}/{path}", HERE)


def test_a_server_that_sends_little_by_little_is_left(port: int) -> None:
    with pytest.raises(RequestError, match="was not to be had: it took too long"):
        read_source(f"http://localhost:{port}/slow", HERE._replace(seconds=0.2))


def test_names_inside_a_domain() -> None:
    from atom.images.sources import matches

    assert matches("a.example.org", "*.example.org") and matches("example.org", "example.org")
    assert not matches("example.org", "*.example.org") and not matches("badexample.org", "*.example.org")


def test_files_are_read_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"x" * 1000)
    assert read_file(path, HERE) == b"x" * 1000
    path.write_bytes(b"x" * 1001)
    with pytest.raises(RequestError, match="may have 1000 bytes at most"):
        read_file(path, HERE)
    with pytest.raises(RequestError, match="No such file"):
        read_file(tmp_path / "none.png", HERE)
