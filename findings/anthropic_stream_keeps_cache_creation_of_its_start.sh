#!/usr/bin/env bash
# The stream helper of anthropic 2.14.0 takes cache_creation_input_tokens from the usage of message_delta, but not their
# breakdown by ttl, cache_creation, which MessageDeltaUsage has no field for: the final message has that of message_start.
# So a server that knows what was cached only after it has sent message_start cannot correct the breakdown.
# Seen: 32 tokens in all, and 0 and 0 by ttl, though message_delta says 32 of 5m.
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


def usage(written):
    by_ttl = {"ephemeral_5m_input_tokens": written, "ephemeral_1h_input_tokens": 0}
    return {
        "input_tokens": 40 - written, "cache_creation_input_tokens": written, "cache_creation": by_ttl, "output_tokens": 1
    }


MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage(0)}
EVENTS = [
    {"type": "message_start", "message": MESSAGE | {"stop_reason": None, "stop_sequence": None}},
    {"type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None}, "usage": usage(32)},
    {"type": "message_stop"},
]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        data = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in EVENTS).encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


server = HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.server_port}", api_key="none", max_retries=0)
asked = [{"role": "user", "content": "Hello"}]
with client.messages.stream(model="m", max_tokens=9, messages=asked) as stream:
    found = stream.get_final_message().usage
print(found)
by_ttl = found.cache_creation
seen = (found.cache_creation_input_tokens, by_ttl.ephemeral_5m_input_tokens, by_ttl.ephemeral_1h_input_tokens)
raise SystemExit(seen != (32, 0, 0))
P
