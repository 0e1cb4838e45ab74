"""Count the drafts that are accepted when agents' answers are replayed.

No model runs. The answers are this repository's commits, as an agent would have made them: it reads a file, edits it
hunk by hunk with old and new text, or writes it, runs the tests and commits. Each answer is a turn of a session, after
all turns before it; sessions follow one another in the order of the commits. Their tokens are those of the embedded
model's tokenizer. A step computes one token and accepts the drafts that equal the next ones.

    scripts/replay-drafts --save        # the table of docs/speculation.md
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from atom import SamplingParams
from atom.checkpoint import SILENT
from atom.config.checkpoint import open_for
from atom.config.limits import SuffixLimits
from atom.config.load import load
from atom.runtime.draft.speculation import Drafter, NgramDrafter
from atom.runtime.draft.suffix import SuffixDrafter
from atom.runtime.types import Sequence

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "speculation.md"
BEGIN, END = "<!-- scripts/replay-drafts -->\n", "<!-- end of scripts/replay-drafts -->\n"
SYSTEM = """You are a coding agent with these tools: read(path) returns a file; write(path, content) writes a file;
edit(path, old_string, new_string) replaces a text that occurs once; run(command) runs a command."""
GENERATED = ("docs/configuration.md", "docs/results/", "tests/golden/")  # by scripts, not by an agent
CONTEXT = 2  # lines before and after a change that an edit repeats
MAX_TOKENS = 16_000  # of a session
SMALL, WHOLE = 10, 1000  # max lines of a text that an edit replaces, or that it writes
NGRAMS = [(min_n, max_n) for max_n in (4, 8, 16) for min_n in (1, 2)]
FACTORS = (1, 2, 4)

Turn = tuple[list[int], list[int]]  # tokens of the prompt after the turn before it, and of the answer
Encode = Callable[[str], list[int]]


class Counts(NamedTuple):
    steps: int
    drafted: int
    accepted: int


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout.decode(errors="replace")


def call(tool: str, **arguments: str) -> str:
    """A tool call as Qwen3-Coder writes it."""
    lines = [f"<parameter={name}>\n{value}\n</parameter>" for name, value in arguments.items()]
    return "\n".join(["<tool_call>", f"<function={tool}>", *lines, "</function>", "</tool_call>"])


def find_edits(before: str, after: str, max_lines: int) -> Iterator[tuple[str, str]]:
    """The old and the new text of each hunk that is no longer than max_lines."""
    old, new = before.splitlines(), after.splitlines()
    for hunk in difflib.SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(CONTEXT):
        texts = old[hunk[0][1] : hunk[-1][2]], new[hunk[0][3] : hunk[-1][4]]
        if max(map(len, texts)) <= max_lines:
            yield "\n".join(texts[0]), "\n".join(texts[1])


def list_files(commit: str) -> Iterator[tuple[str, str | None, str]]:
    """The files that a commit changes or adds: path, the text before it, None of a new one, and after it."""
    for line in git("diff-tree", "--no-commit-id", "-r", "--no-renames", commit).splitlines():
        fields, path = line.split("\t")
        status = fields.split()[4]
        if status in "AM" and path.endswith((".py", ".md", ".yaml")) and not path.startswith(GENERATED):
            before = git("show", f"{commit}~1:{path}") if status == "M" else None
            yield path, before, git("show", f"{commit}:{path}")


def act(commit: str, max_lines: int) -> Iterator[tuple[str, str]]:
    """The answers of a session, each with what the agent is told before it."""
    message = git("log", "-1", "--format=%B", commit).strip()
    told = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{message.splitlines()[0]}<|im_end|>\n"
    respond = "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n".format
    tests = list[str]()
    for path, before, after in list_files(commit):
        if before is None and after.count("\n") <= max_lines:
            yield told, call("write", path=path, content=after.rstrip())
            told = respond(f"{path} is written.")
        elif before is not None and (edits := list(find_edits(before, after, max_lines))):
            yield told, call("read", path=path)
            told = respond(before.rstrip())
            for old, new in edits:
                yield told, call("edit", path=path, old_string=old, new_string=new)
                told = respond(f"{path} is edited.")
        if path.startswith("tests/"):
            tests.append(path)
    if tests:
        yield told, call("run", command=f"python -m pytest -q {' '.join(tests)}")
        told = respond("All tests passed.")
    yield told, call("run", command=f"git commit -am '{message}'")


def record(commits: list[str], max_lines: int, encode: Encode) -> list[list[Turn]]:
    """The sessions of commits, each up to MAX_TOKENS."""
    sessions = []
    for commit in commits:
        session, num_tokens = list[Turn](), 0
        for told, answer in act(commit, max_lines):
            turn = encode(f"{told}<|im_start|>assistant\n"), encode(f"{answer}<|im_end|>")
            num_tokens += sum(map(len, turn))
            if num_tokens > MAX_TOKENS:
                break
            session.append(turn)
        sessions.append(session)
    return sessions


def replay(sessions: list[list[Turn]], drafter: Drafter, max_drafts: int, *, keeps_index: bool = False) -> Counts:
    """Answer all turns, with drafts of a drafter that is new.

    keeps_index: prompts are indexed before their answers, as n-grams need no index on a GPU, not in their first steps
    """
    steps = drafted = accepted = 0
    numbers = itertools.count()
    for session in sessions:
        history, name = list[int](), str(next(numbers))
        for told, answer in session:
            history += told
            sequence = Sequence(name, list(history), SamplingParams(), output=answer[:1])
            while (at := len(sequence.output)) < len(answer):
                drafts = drafter.draft(sequence, max_drafts)
                pairs = zip(drafts, answer[at:], strict=False)
                num_right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
                sequence.output += answer[at : at + num_right + 1]
                steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + num_right
            if not keeps_index:
                drafter.forget(sequence)
            history += answer
        if keeps_index:
            drafter.forget(sequence)
    return Counts(steps, drafted, accepted)


def time_drafts(sessions: list[list[Turn]], drafter: Drafter, num_sequences: int = 64, context: int = 10_000) -> float:
    """Median microseconds a sequence to index a token and draft, of 100 steps."""
    tokens = [token for session in sessions for turn in session for part in turn for token in part]
    starts = [number * (len(tokens) - context - 100) // num_sequences for number in range(num_sequences)]
    every = [Sequence(str(at), tokens[at : at + context], SamplingParams()) for at in starts]
    seconds = list[float]()
    for step in range(104):
        for at, sequence in zip(starts, every, strict=True):
            sequence.output.append(tokens[at + context + step])
        began = time.perf_counter()
        for sequence in every:
            drafter.draft(sequence, 7)
        seconds.append(time.perf_counter() - began)
    return sorted(seconds[4:])[50] / num_sequences * 1e6  # the first steps index the prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commits", type=int, default=150, help="the latest ones before the revision")
    parser.add_argument("--revision", default="HEAD")
    parser.add_argument("--drafted", type=int, nargs="+", default=[7], help="max tokens of a draft")
    parser.add_argument("--save", action="store_true", help="write the table to docs/speculation.md")
    options = parser.parse_args()
    tokenizer = open_for(load(["device=cpu"]), SILENT).tokenizer()
    assert tokenizer is not None, "the embedded model has one"
    commits = git("log", "--no-merges", "--format=%H", f"-{options.commits}", options.revision).split()[::-1]
    lines = list[str]()
    for title, max_lines in (("small edits", SMALL), ("all edits", WHOLE)):
        sessions = record(commits, max_lines, lambda text: list(tokenizer.encode(text)))
        answers = [len(answer) for session in sessions for _, answer in session]
        heading = f"{title}: {len(answers):,} answers of {sum(answers) / len(answers):.0f} tokens on average"
        lines += [heading, "", "| drafts | at most | accepted a step | drafted a step |", "|---|---|---|---|"]
        for max_drafts in options.drafted:
            for row in compare(sessions, max_drafts):
                print(json.dumps({"answers": title, "max_drafts": max_drafts, **row}), flush=True)
                lines.append("| {name} | {0} | {accepted:.2f} | {drafted:.2f} |".format(max_drafts, **row))
        lines.append("")
    drafters = {"suffix": SuffixDrafter(7, SuffixLimits()), "ngram": NgramDrafter(7, 2, 4)}
    print(json.dumps({f"{name}_us": round(time_drafts(sessions, each), 1) for name, each in drafters.items()}))
    if options.save:
        found = re.escape(BEGIN) + ".*" + re.escape(END)
        table = BEGIN + "\n" + "\n".join(lines) + "\n" + END
        PAGE.write_text(re.sub(found, lambda _: table, PAGE.read_text(), flags=re.DOTALL))
    return 0


def compare(sessions: list[list[Turn]], max_drafts: int) -> Iterator[dict[str, str | float]]:
    """Rows of n-grams by default and at their best, and of suffixes by their factors."""

    def row(name: str, counts: Counts) -> dict[str, str | float]:
        return {"name": name, "accepted": counts.accepted / counts.steps, "drafted": counts.drafted / counts.steps}

    run = partial(replay, sessions, max_drafts=max_drafts)
    found = {sizes: run(NgramDrafter(max_drafts, *sizes), keeps_index=True) for sizes in NGRAMS}
    yield row("`ngram`", found[2, 4])
    best = min(found, key=lambda sizes: found[sizes].steps)
    title = "`ngram`, `prompt_lookup_min={}`, `prompt_lookup_max={}`: the best of {} settings"
    yield row(title.format(*best, len(NGRAMS)), found[best])
    for factor in FACTORS:
        limits = SuffixLimits(max_spec_factor=factor)
        yield row(f"`suffix`, `max_spec_factor={factor}`", run(SuffixDrafter(max_drafts, limits)))


if __name__ == "__main__":
    sys.exit(main())
