"""Try coding agents: each edits, tests and fixes a file.

The workspace has a test, which notes its outcomes. The script looks at a picture, writes a file with a bug, runs the
test, fixes the file, runs the test again, and ends; it reasons before each call. What counts: the file, the outcomes,
and that each request was answered with 200. The settings are those of docs/clients.md.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scripts.clients.recorder import record
from scripts.clients.servers import serve_script
from scripts.clients.verdict import SHOWN, Verdict, find_refused, run_client

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
MCP_SERVER = Path(__file__).with_name("mcp_server.py")
TASK = "Write add.py, so that check.py passes."
TRIED = "look, edit, test, fix, test"
WRONG, RIGHT = "return a - b", "return a + b"
CHECK = """\
from pathlib import Path

from add import add

outcome = "passed" if add(2, 3) == 5 else "failed"
with Path("outcomes").open("a") as file:
    print(outcome, file=file)
print(outcome)
"""
PICTURE = "iVBORw0KGgoAAAANSUhEUgAAAAgAAAAIAQAAAADsdIMmAAAAC0lEQVR42mNgQAUAABAAAaoZ+IIAAAAASUVORK5CYII="  # a PNG, 8 x 8
RUN = "python3 -B check.py"  # no bytecode: both versions of add.py have one size, and maybe one second
DONE = "The test passes."
SUMMARY = {  # what Codex is to end with, in a response format that leaves it free to call tools
    "type": "object",
    "properties": {"summary": {"type": "string"}},
    "required": ["summary"],
    "additionalProperties": False,
}
# what an agent sends elsewhere is refused at once
OFFLINE = {"NO_PROXY": "127.0.0.1", "HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}


class Call(NamedTuple):
    name: str
    arguments: dict[str, object]


class Agent(NamedTuple):
    package: str  # of npm
    program: str  # that it installs
    arguments: tuple[str, ...]  # before the task
    configure: Callable[[Path, str], dict[str, str]]  # (home, server's url) -> environment; may write files
    calls: Callable[[Path], list[Call]]  # (workspace) -> the turns of the loop


def read_settings(heading: str, url: str) -> str:
    """The settings of a section of docs/clients.md, for the server at url."""
    found = re.search(rf"^## {heading}$.*?^```\w+$\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/clients.md has no settings of {heading}"
    return found[1].replace("http://localhost:8000", url)


def read_environment(heading: str, url: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(.*)$", read_settings(heading, url), re.MULTILINE))


def configure_codex(home: Path, url: str) -> dict[str, str]:
    quiet = "check_for_update_on_startup = false\n{}\n[analytics]\nenabled = false\n"
    command = {"command": sys.executable, "args": [str(MCP_SERVER)], "cwd": str(home.parent / "workspace")}
    checker = "\n".join(["[mcp_servers.checker]", *(f"{name} = {json.dumps(each)}" for name, each in command.items())])
    (home / "config.toml").write_text(quiet.format(f"{read_settings('Codex', url)}\n{checker}\n"))
    (home / "summary.json").write_text(json.dumps(SUMMARY))
    return {"CODEX_HOME": str(home), "ATOM_API_KEY": "none"}


def configure_claude(home: Path, url: str) -> dict[str, str]:
    root = {"IS_SANDBOX": "1"}  # or root may not skip permissions
    return read_environment("Claude Code", url) | {"CLAUDE_CONFIG_DIR": str(home)} | root


def configure_qwen(home: Path, url: str) -> dict[str, str]:
    quiet = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (home / ".qwen").mkdir()
    (home / ".qwen" / "settings.json").write_text(json.dumps(quiet))
    return read_environment("qwen-code", url)


def configure_opencode(home: Path, url: str) -> dict[str, str]:
    (home / "opencode.json").write_text(read_settings("opencode", url))
    names = ("AUTOUPDATE", "LSP_DOWNLOAD", "MODELS_FETCH", "SHARE")
    return {"OPENCODE_CONFIG": str(home / "opencode.json")} | {f"OPENCODE_DISABLE_{name}": "1" for name in names}


def codex_calls(workspace: Path) -> list[Call]:
    """It has a shell, in which `apply_patch` is its own, and runs the last test by an MCP server."""
    patches = (
        f"*** Add File: add.py\n+def add(a, b):\n+    {WRONG}\n",
        f"*** Update File: add.py\n@@\n-    {WRONG}\n+    {RIGHT}\n",
    )
    edits = [f"apply_patch <<'EOF'\n*** Begin Patch\n{patch}*** End Patch\nEOF" for patch in patches]
    look = Call("view_image", {"path": str(workspace / "picture.png")})
    commands = [Call("exec_command", {"cmd": command}) for command in (edits[0], RUN, edits[1])]
    return [look, *commands, Call("mcp__checker__run", {})]


def claude_calls(workspace: Path) -> list[Call]:
    """It also looks up a tool whose description it has not sent."""
    calls = editor_calls(workspace, "Read Write Bash Edit", "file_path old_string new_string")
    return [Call("ToolSearch", {"query": "select:NotebookEdit"}), *calls]


def editor_calls(workspace: Path, tools: str, fields: str) -> list[Call]:
    """The calls of an agent with tools that read, write, run and edit.

    tools: the names of these. fields: what they call a path, and the old and the new text of an edit
    """
    read, write, shell, edit = tools.split()
    path, old, new = fields.split()
    file = {path: str(workspace / "add.py")}
    run = Call(shell, {"command": RUN, "description": "Run the test"})
    return [
        Call(read, {path: str(workspace / "picture.png")}),
        Call(write, {**file, "content": f"def add(a, b):\n    {WRONG}\n"}),
        run,
        Call(edit, {**file, old: WRONG, new: RIGHT}),
        run,
    ]


AGENTS = {
    "codex": Agent(
        "@openai/codex",
        "codex",
        (
            "exec",
            "--strict-config",
            "--skip-git-repo-check",
            "--dangerously-bypass-approvals-and-sandbox",
            "--output-schema=../home/summary.json",
        ),
        configure_codex,
        codex_calls,
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code",
        "claude",
        (
            "--dangerously-skip-permissions",
            "--thinking-display=summarized",  # or --print drops thoughts, and the model does not read them again
            "--print",
        ),
        configure_claude,
        claude_calls,
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code",
        "qwen",
        ("--yolo", "--prompt"),
        configure_qwen,
        partial(
            editor_calls,
            tools="read_file write_file run_shell_command edit",
            fields="file_path old_string new_string",
        ),
    ),
    "opencode": Agent(
        "opencode-ai",
        "opencode",
        ("run",),
        configure_opencode,
        partial(editor_calls, tools="read write bash edit", fields="filePath oldString newString"),
    ),
}


def try_agent(name: str, version: str, programs: Path, records: Path) -> Verdict:
    """Run an agent in a folder of its own. programs: npm's folder of them. records: gets its requests and answers."""
    agent = AGENTS[name]
    with tempfile.TemporaryDirectory() as folder:
        workspace, home = Path(folder, "workspace"), Path(folder, "home")
        workspace.mkdir()
        home.mkdir()
        (workspace / "check.py").write_text(CHECK)
        (workspace / "picture.png").write_bytes(base64.b64decode(PICTURE))
        turns = [format_call(call) for call in agent.calls(workspace)]
        with (
            serve_script([*turns, json.dumps({"summary": DONE})], Path(folder)) as server,
            record(server.url) as recorder,
        ):
            environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **OFFLINE}
            environment |= agent.configure(home, recorder.url)
            ended = run_client([str(programs / agent.program), *agent.arguments, TASK], workspace, environment)
        recorder.save(records / f"{name}.jsonl")
        fault = find_refused(recorder) or ended.fault or find_fault(workspace, ended.out)
        return Verdict(name, version, TRIED, fault)


def format_call(call: Call) -> str:
    """A turn of a model that reasons, in the format of conf/tool_calls/tagged_json.yaml."""
    arguments = json.dumps({"name": call.name, "arguments": call.arguments})
    return f"<think>\nI call {call.name}.\n</think>\n\n<tool_call>\n{arguments}\n</tool_call>"


def find_fault(workspace: Path, out: str) -> str:
    """What is wrong with the workspace or with what the agent printed, if anything is."""
    outcomes, add = workspace / "outcomes", workspace / "add.py"
    said = outcomes.read_text().split() if outcomes.exists() else []
    if said != ["failed", "passed"]:
        return f"the test's outcomes are {said}"
    if RIGHT not in add.read_text():
        return f"add.py is {add.read_text()!r}"
    return "" if DONE in out else f"it did not print the last answer, but {out[-SHOWN:]!r}"
