"""Requests like those of coding agents in the middle of their work, in small: Codex's, Claude Code's and a chat's.

Every text that a model has to see begins with "seen" and is there once.
"""

from __future__ import annotations

import re
from typing import Any

COMMAND = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": {"type": "string"}}, "workdir": {"type": "string"}},
    "required": ["command"],
}


def item(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


def shell(id: str, arguments: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "shell", "arguments": arguments}


def output(id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": text}


CODEX: dict[str, Any] = {
    "instructions": "seenInstructions: you are a coding agent.",
    "input": [
        item("developer", "seenPermissions: writing is allowed in the workspace."),
        item("developer", "seenRules: run the tests."),
        item("user", "<environment_context>seenFolder /repo</environment_context>"),
        item("user", "seenTask: mend the test."),
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look first."}]},
        shell("call_a1B2c3", '{"command": ["ls"], "workdir": "/repo"}'),
        output("call_a1B2c3", "seenListing test_add.py"),
        item("assistant", "I read both."),  # a text next to calls, which some templates leave out
        shell("call_d4E5f6", '{"command": ["cat", "add.py"]}'),
        shell("call_g7H8i9", '{"command": ["cat", "test_ad'),
        output("call_d4E5f6", "seenSource def add(a, b): return a - b"),
        output("call_g7H8i9", "seenError the call was cut off"),
        item("developer", "seenReminder: the sandbox has changed."),
        item("user", "seenLast: go on."),
    ],
    "tools": [{"type": "function", "name": "shell", "description": "Runs a command.", "parameters": COMMAND}],
    "parallel_tool_calls": True,
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "high", "summary": "auto"},
    "prompt_cache_key": "6f1d",
}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def use(id: str, *command: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "Bash", "input": {"command": list(command)}}


def result(id: str, words: str, **more: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": words, **more}


CLAUDE_CODE: dict[str, Any] = {
    "model": "talker",
    "max_tokens": 64,
    "stream": True,
    "system": [text("seenIdentity: you are a coding agent."), text("seenTone: be brief.")],
    "messages": [
        {
            "role": "user",
            "content": [text("<system-reminder>seenContext: today is Monday.</system-reminder>"), text("seenTask")],
        },
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, text("seenPlan")]},
        {"role": "user", "content": "seenMore"},
        {"role": "assistant", "content": [use("toolu_01AbC", "ls"), use("toolu_02DeF", "cat", "add.py")]},
        {
            "role": "user",
            "content": [
                result("toolu_01AbC", "seenListing"),
                result("toolu_02DeF", "seenMissing", is_error=True),
                text("<system-reminder>seenTodo: the list is empty.</system-reminder>"),
            ],
        },
        {"role": "assistant", "content": [use("toolu_03GhI", "cat", "sub.py")]},
        {"role": "user", "content": [result("toolu_03GhI", "seenSource")]},
        {"role": "system", "content": "seenReminder: the file has changed."},
        {"role": "user", "content": [text("seenLast")]},
    ],
    "tools": [{"name": "Bash", "description": "Runs a command.", "input_schema": COMMAND}],
    "output_config": {"effort": "high"},
}


def call(id: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": "shell", "arguments": arguments}}


CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [text("seenIdentity: you are a coding agent."), text("seenTone: be brief.")]},
        {"role": "developer", "content": "seenRules: run the tests."},
        {"role": "user", "content": [text("seenContext: today is Monday."), text("seenTask")]},
        {"role": "user", "content": "seenMore"},
        {"role": "assistant", "content": [], "reasoning_content": "Hm."},
        {"role": "system", "content": "seenReminder: be kind."},
        {"role": "user", "content": "seenAgain"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                call("chatcmpl-tool-1f", '{"command": ["ls"]}'),
                call("functions.shell:1", '{"command": ["ca'),
            ],
        },
        {"role": "tool", "tool_call_id": "functions.shell:1", "content": "seenError the call was cut off"},
        {"role": "tool", "tool_call_id": "chatcmpl-tool-1f", "content": [text("seenListing")]},
        {"role": "user", "content": "seenLast"},
        {"role": "assistant", "content": "seenAnswer"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "seenEnd"},
    ],
    "tools": [{"type": "function", "function": {"name": "shell", "description": "Runs.", "parameters": COMMAND}}],
    "reasoning_effort": "high",
}


def seen(body: Any) -> set[str]:
    """The words that a model has to see."""
    return set(re.findall(r"\bseen[A-Z][a-z]*", str(body)))
