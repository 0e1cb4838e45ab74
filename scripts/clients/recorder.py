"""A proxy that keeps requests, and the status of their answers.

with record(server.url) as recorder:
    run_client(recorder.url)
    [exchange for exchange in recorder.exchanges if exchange.status != 200]
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

SECONDS = 300.0  # that an answer may take
OWN = ("connection", "transfer-encoding", "content-length", "date", "server")  # headers that each hop writes itself


class Exchange(NamedTuple):
    method: str
    path: str
    request: str
    status: int
    answer: str


@dataclass
class Recorder:
    url: str
    exchanges: list[Exchange] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write a line of JSON for each exchange."""
        path.write_text("".join(json.dumps(each._asdict()) + "\n" for each in self.exchanges))


@contextmanager
def record(url: str) -> Iterator[Recorder]:
    """Stand before the server at url until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=SECONDS)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in OWN}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            said = self.relay(answer)
            connection.close()
            texts = body.decode(errors="replace"), said.decode(errors="replace")
            recorder.exchanges.append(Exchange(self.command, self.path, texts[0], answer.status, texts[1]))

        def relay(self, answer: http.client.HTTPResponse) -> bytes:
            """Send the answer piece by piece, as it comes; all of it."""
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in OWN:
                    self.send_header(name, value)
            has_body = self.command != "HEAD" and answer.status not in (204, 304)
            if has_body:
                self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            said = b""
            while piece := answer.read1() if has_body else b"":
                said += piece
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            if has_body:
                self.wfile.write(b"0\r\n\r\n")
            return said

        do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = do_OPTIONS = pass_on

        def log_message(self, format: str, *args: object) -> None:
            """The server has a log of its own."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    recorder = Recorder(f"http://127.0.0.1:{proxy.server_port}")
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield recorder
    finally:
        proxy.shutdown()
        proxy.server_close()
