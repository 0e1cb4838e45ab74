"""An MCP server with one tool, which runs the test of its folder.

python -m scripts.clients.mcp_server      # an agent starts it; see https://modelcontextprotocol.io
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TOOL = {"name": "run", "description": "Runs check.py.", "inputSchema": {"type": "object", "properties": {}}}


def answer(method: str, params: dict[str, Any]) -> dict[str, Any]:
    match method:
        case "initialize":
            about = {"serverInfo": {"name": "checker", "version": "1"}, "capabilities": {"tools": {}}}
            return {"protocolVersion": params["protocolVersion"], **about}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            ran = subprocess.run([sys.executable, "-B", "check.py"], capture_output=True, text=True, check=False)
            return {"content": [{"type": "text", "text": ran.stdout + ran.stderr}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        message = json.loads(line)
        if "id" in message:
            result = answer(message["method"], message.get("params") or {})
            print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}), flush=True)
