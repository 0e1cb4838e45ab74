"""The versions of clients that are tried.

`scripts/test-clients --newest` tries the newest ones instead. Once these pass, they are written here and in
docs/clients.md; one that does not pass keeps its pin until it does, with the reason next to it.
"""

from __future__ import annotations

PYTHON = {
    "openai": "3.57.0",
    "anthropic": "2.14.0",
    "openai-agents": "0.24.0",
    "pydantic-ai-slim": "2.68.0",
    "langchain-openai": "1.7.4",
    "instructor": "1.17.0",
    "litellm": "1.110.2",
    "cohere": "7.3.1",
    "dify-plugin": "0.7.4",
    "guidellm": "0.8.1",
    "vllm": "0.33.0",
}
NPM = {
    "@openai/codex": "0.171.0",
    "@anthropic-ai/claude-code": "2.1.332",
    "@qwen-code/qwen-code": "0.24.4",
    "opencode-ai": "1.18.33",
    "ai": "7.0.173",
    "zod": "4.6.7",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/openai-compatible": "3.0.92",
    "@ai-sdk/anthropic": "4.0.105",
    "@ai-sdk/open-responses": "2.0.36",
}
