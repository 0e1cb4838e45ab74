from __future__ import annotations

import io
import os
import signal
import socket
import time
from pathlib import Path

import PIL.Image
import pixtral
import pytest
import serving
import wire
from serving import Server, Start

SLOW = {"step_seconds": 0.02}
BODY = {"prompt": [0, 9], "max_tokens": 50}  # a second of SLOW
ENDLESS = {"prompt": [0, 9], "max_tokens": 8000}


def health(server: Server) -> tuple[int, str]:
    answer = wire.ask(server.url, "GET", "/health")
    return answer.status, answer.json["state"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_lets_what_runs_end_and_takes_no_more(start_server: Start, number: int, code: int):
    server = start_server(stub=SLOW)
    with wire.connect(server.url) as kept, kept.makefile("rb") as file:
        kept.sendall(wire.request("GET", "/health"))
        assert wire.read_answer(file).status == 200
        stream = wire.Stream(server.url, BODY)
        waiting = wire.Stream(server.url, BODY | {"stream": False, "n": 2})
        stream.read_events(1)
        server.process.send_signal(number)
        wire.wait_until(lambda: health(server) == (503, "draining"))
        late = wire.request("POST", "/v1/completions", BODY)
        kept.sendall(late)
        for answer in (wire.read_answer(file), wire.exchange(server.url, late)):
            assert answer.status == 503 and answer.headers["retry-after"] == "5"
            assert answer.json["error"]["message"] == "the server is draining"
            assert answer.headers["connection"] == "close"
        assert file.read() == b"", "a retry reaches the next server"
    events = stream.read_events()
    assert len(events) == 50 and events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "length"
    answer = wire.read_answer(waiting.file)
    assert [choice["text"] for choice in answer.json["choices"]] == ["word " * 50] * 2
    assert server.process.wait(wire.SECONDS) == code


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_what_still_runs_when_the_time_is_over_ends_with_an_error(start_server: Start, number: int, code: int):
    server = start_server("serve.http.drain_seconds=0.5", stub=SLOW)
    stream = wire.Stream(server.url, ENDLESS)
    waiting = wire.Stream(server.url, ENDLESS | {"stream": False})
    stream.read_events(1)
    start = time.monotonic()
    server.process.send_signal(number)
    *_, last = stream.read_events()
    assert last["error"]["message"] == "the server ends before this request has been answered"
    assert wire.read_answer(waiting.file).status == 503
    assert server.process.wait(wire.SECONDS) == code
    assert time.monotonic() - start > 0.5


def test_a_second_signal_ends_at_once(start_server: Start):
    server = start_server("serve.http.drain_seconds=10000", stub={"step_seconds": 1.0})
    stream = wire.Stream(server.url, ENDLESS)
    stream.read_events(1)
    server.process.send_signal(signal.SIGTERM)
    wire.wait_until(lambda: health(server) == (503, "draining"))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(wire.SECONDS) == 0


def test_a_request_whose_image_is_still_read_is_answered(tmp_path: Path):
    pixtral.save("Llava", tmp_path / "model")
    template = tmp_path / "template.jinja"
    template.write_text("What? [IMG]")
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 8)).save(file, "PNG")
    with (
        socket.create_server(("127.0.0.1", 0)) as source,
        serving.started(
            tmp_path / "model", tmp_path, "serve.image_domains=[127.0.0.1]", f"serve.http.chat_template={template}",
            stub={},
        ) as server,
    ):  # fmt: skip
        url = f"http://127.0.0.1:{source.getsockname()[1]}/a.png"
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": False}
        waiting = wire.Stream(server.url, body, path="/v1/chat/completions")
        reading, _ = source.accept()
        with reading:
            assert reading.recv(1 << 16).startswith(b"GET /a.png ")
            server.process.send_signal(signal.SIGTERM)
            wire.wait_until(lambda: health(server) == (503, "draining"))
            reading.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + file.getvalue())
        assert wire.read_answer(waiting.file).status == 200
        assert server.process.wait(wire.SECONDS) == 0


def test_a_signal_ends_a_server_that_loads(talker: Path, tmp_path: Path):
    server = serving.launch(talker, tmp_path, stub={"load_seconds": 10_000})
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    wire.wait_until(lambda: children.read_text())
    time.sleep(0.5)  # the child is in its own code
    server.process.terminate()
    assert server.process.wait(wire.SECONDS) == 0


def test_a_drain_ends_when_the_engine_dies_in_it(start_server: Start):
    server = start_server(stub=SLOW)
    stream = wire.Stream(server.url, ENDLESS)
    stream.read_events(1)
    server.process.terminate()
    wire.wait_until(lambda: health(server) == (503, "draining"))
    engine = int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text())
    os.kill(engine, signal.SIGKILL)
    *_, last = stream.read_events()
    assert last["error"]["code"] == "unavailable"
    server.process.terminate()  # it reports the death for some seconds more
    assert server.process.wait(wire.SECONDS) == 1
