#!/usr/bin/env bash
# The tool_runner of anthropic 2.14.0 asks the server to keep the conversation, with thread in its first request, though
# nobody has asked for that. A 400 whose error.details.error_code is thread_unsupported_request makes it send all messages
# in each request instead, without an error for its caller.
# Seen: with such a 400 the requests have thread and 1 message, then no thread and 1, then no thread and 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check anthropic==2.14.0
"$folder/venv/bin/python" - <<'P'
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import anthropic

seen = []


def answer(content, reason):
    usage = {"input_tokens": 1, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": content}
    return 200, message | {"stop_reason": reason, "stop_sequence": None, "usage": usage}


def respond(body):
    seen.append((body.get("thread"), len(body["messages"])))
    if body.get("thread"):
        details = {"error_code": "thread_unsupported_request"}
        error = {"type": "invalid_request_error", "message": "no threads", "details": details}
        return 400, {"type": "error", "error": error}
    if len(body["messages"]) == 1:
        return answer([{"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": 2}}], "tool_use")
    return answer([{"type": "text", "text": "3"}], "end_turn")


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        status, body = respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@anthropic.beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)
asked = [{"role": "user", "content": "1 + 2?"}]
ended = client.beta.messages.tool_runner(model="m", max_tokens=9, messages=asked, tools=[add]).until_done()
print(*seen, ended.content[-1].text, sep="\n")
asks = [thread is not None for thread, _ in seen]
raise SystemExit((asks, [number for _, number in seen]) != ([True, False, False], [1, 1, 3]))
P
