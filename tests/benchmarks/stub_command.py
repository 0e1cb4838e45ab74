"""A server's command line for tests: answers /health and streams completions of as many tokens as asked for.

python stub_command.py --model m --host 127.0.0.1 --server-port 8123 -tp 2 [--mode MODE]
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any


class Handler(http.server.BaseHTTPRequestHandler):
    mode = ""
    num_posts = 0

    def do_GET(self) -> None:
        is_ready = self.path == "/health" and self.mode != "never-ready"
        self.send_response(200 if is_ready else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        Handler.num_posts += 1
        if self.mode == "dies" and Handler.num_posts > 4:
            os._exit(7)
        if self.mode == "fails" and Handler.num_posts > 1:
            return self.send_error(500)
        if self.mode == "fails once" and Handler.num_posts == 3:
            return self.send_error(500)
        if self.mode == "hangs":
            time.sleep(60)
        ids = {"token_ids": [7]} if body.get("return_token_ids") else {}
        token: dict[str, Any] = {"choices": [{"text": " a", "finish_reason": None, **ids}]}
        counts = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events = [json.dumps(token)] * body["max_tokens"] + [json.dumps({"choices": [], "usage": counts}), "[DONE]"]
        data = "".join(f"data: {each}\n\n" for each in events).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--server-port", type=int, required=True)
    parser.add_argument("-tp", type=int, required=True)
    parser.add_argument("--mode", default="")
    args = parser.parse_args()
    print(f"serving {args.model} at tp {args.tp}, mode {args.mode}", flush=True)
    if args.mode == "dies at once":
        sys.exit("no memory left")
    if args.mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if args.mode == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(f"child {child.pid}", flush=True)
    Handler.mode = args.mode
    http.server.ThreadingHTTPServer((args.host, args.server_port), Handler).serve_forever()


if __name__ == "__main__":
    main()
