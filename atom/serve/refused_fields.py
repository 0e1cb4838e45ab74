"""What to send in place of refused OpenAI and Anthropic fields."""

from typing import LiteralString

REFUSED: dict[str, LiteralString] = {  # of requests that may have tools
    "audio": "answers are only text here; leave it out",
    "compaction": "no conversation is summarized here; ask for a summary in a message",
    "container": "no code is run here; leave it out",
    "function_call": "this is not supported here; send tool_choice, with tools",
    "functions": 'this is not supported here; send tools, as in [{"type": "function", "function": {"name": "f"}}]',
    "max_tool_calls": "no built-in tool is run here; leave it out",
    "mcp_servers": "no MCP server is called from here; send its tools as tools, which the client runs",
    "output_format": "this is not supported here; send output_config.format, or response_format in a chat",
    "web_search_options": "nothing is searched here; send a tool that searches, which the client runs",
}
