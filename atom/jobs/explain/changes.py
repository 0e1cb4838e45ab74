"""Show what passes change in the text, side by side.

Lines of equal layers are shown once.

changes(before, after)      # [Change("gate = linear(…)", "gate_up = linear(…)", times=61), …]
draw_passes(stages)         # a row of passes to step through, by mouse or arrow keys, without a script
"""

from __future__ import annotations

import difflib
import html
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

TOKEN = re.compile(r"[\w.]+|\s+|.")
STYLE = """
.passes { display: flex; flex-wrap: wrap; gap: .3rem; border: 0; padding: 0; margin: 0; min-width: 0 }
.passes legend { padding: 0; margin-bottom: .5rem; color: var(--quiet) }
.passes input { position: absolute; opacity: 0 }
.passes label { padding: .25rem .6rem; border: 1px solid var(--quiet); border-radius: 1rem; cursor: pointer;
  font-size: 13px }
.passes label b { font-weight: 600; margin-left: .35rem }
.passes input:disabled + label { border-color: var(--line); color: var(--quiet); cursor: default }
.passes input:checked + label { background: var(--text); color: var(--ground); border-color: var(--text) }
.passes input:focus-visible + label { outline: 3px solid var(--c2); outline-offset: 2px }
.passes .panel { display: none; order: 1; width: 100%; min-width: 0; margin-top: .6rem }
.passes input:checked + label + .panel { display: block }
.sides { font: 12px/1.45 ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace; border: 1px solid var(--line);
  border-radius: 6px; overflow: hidden }
.sides > div { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); border-top: 1px solid var(--line) }
.sides > div:first-child { border-top: 0 }
.sides > div > * { padding: .25rem .6rem; white-space: pre-wrap; overflow-wrap: break-word; text-decoration: none;
  min-width: 0 }
.sides del { border-right: 1px solid var(--line) } .sides .times { grid-column: 1 / -1; color: var(--quiet) }
.sides del:not(:empty) { background: var(--gone) } .sides ins:not(:empty) { background: var(--come) }
.sides mark { color: inherit; border-radius: 2px } .sides del mark { background: var(--gone2) }
.sides ins mark { background: var(--come2) }
:root { --gone: #fdecea; --gone2: #f6b8b1; --come: #e6f4f1; --come2: #a5d8cf }
@media (prefers-color-scheme: dark) { :root { --gone: #2c1917; --gone2: #6d2a24; --come: #10231f; --come2: #1c574d } }
@media (max-width: 45rem) { .sides > div { grid-template-columns: minmax(0, 1fr) } .sides del { border-right: 0 }
  .sides :empty { display: none } }
@media print { .passes .panel { display: block } }
"""


class Stage(NamedTuple):
    """One pass: its report, and the text after it."""

    name: str
    num_changes: int
    seconds: float
    text: str

    def describe(self) -> str:
        changes = "1 change" if self.num_changes == 1 else f"{self.num_changes} changes"
        return f"{self.name}: {changes}, {self.seconds * 1e3:.1f} ms"


class Change(NamedTuple):
    old: str | None
    new: str | None
    times: int = 1  # places that differ only in numbers


def changes(before: str, after: str) -> list[Change]:
    """The lines that changed, each kind of change once; layers differ in their numbers only."""
    old, new = code_lines(before), code_lines(after)
    found: dict[tuple[str | None, str | None], Change] = {}
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new).get_opcodes():
        for pair in align(old[a:b], new[c:d]) if tag != "equal" else ():
            key = kind_of(pair[0]), kind_of(pair[1])
            first = found.get(key, Change(*pair, 0))
            found[key] = first._replace(times=first.times + 1)
    return list(found.values())


def align(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    """Pair lines: those that assign the same names, and what is between them in order."""
    before, after = ([line.partition(" = ")[0] for line in lines] for lines in (old, new))
    for tag, a, b, c, d in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "delete":
            yield from ((line, None) for line in old[a:b])
        elif tag == "insert":
            yield from ((None, line) for line in new[c:d])
        else:
            yield from zip_longest(old[a:b], new[c:d])


def code_lines(text: str) -> list[str]:
    """The lines without the comments that have types and reasons."""
    return ["    ".join(line.split("    ")[:-1]) if "    #" in line else line for line in text.splitlines()]


def kind_of(line: str | None) -> str | None:
    """A line without its numbers: what lines of equal layers share."""
    return None if line is None else re.sub(r"_\d+\b|\d+", "", line)


def folded_lines(text: str) -> Iterator[str]:
    """The lines of a text, each kind of line once."""
    seen, num_folded = set[str | None](), 0
    for line in text.splitlines():
        if (kind := kind_of(line)) in seen and line.strip():
            num_folded += 1
            continue
        if num_folded:
            yield f"    … {num_folded:,} lines like those above"
        seen.add(kind)
        num_folded = 0
        yield line
    if num_folded:
        yield f"    … {num_folded:,} lines like those above"


def draw_passes(stages: Sequence[Stage]) -> str:
    """Steps from the text before all passes to that after them; arrow keys skip those that changed nothing."""
    parts = ["<legend>The text before, what each pass changed, and the text after</legend>"]
    parts.append(draw_step("first", stages[0].name, "", draw_text(stages[0].text), is_checked=True))
    for before, after in pairwise(stages):
        found = changes(before.text, after.text)
        body = f'<p class="quiet">{html.escape(after.describe())}</p>{draw_changes(found)}' if found else ""
        parts.append(draw_step(after.name, after.name, f"{after.num_changes:,}" if found else "", body))
    parts.append(draw_step("last", "the text after", "", draw_text(stages[-1].text)))
    return '<fieldset class="passes">\n{}\n</fieldset>'.format("\n".join(parts))


def draw_step(key: str, name: str, count: str, body: str, *, is_checked: bool = False) -> str:
    """A pass to choose, disabled if it has nothing to show, and what is shown then."""
    state = " checked" if is_checked else "" if body else " disabled"
    number = f"<b>{count}</b>" if count else ""
    return (
        f'<input type="radio" name="pass" id="pass-{key}"{state}><label for="pass-{key}">{html.escape(name)}{number}'
        f'</label><div class="panel">{body}</div>'
    )


def draw_text(text: str) -> str:
    """A text, lines of equal layers once."""
    lines = "\n".join(folded_lines(text))
    return f'<p class="quiet">job.stage=NAME prints a text as a whole</p><pre tabindex="0">{html.escape(lines)}</pre>'


def draw_changes(found: Sequence[Change]) -> str:
    """Old lines and new ones, what differs within them marked."""
    rows = []
    for old, new, times in found:
        left, right = mark(old or "", new or "") if old and new else (html.escape(old or ""), html.escape(new or ""))
        note = f'<span class="times">and {times - 1:,} like this</span>' if times > 1 else ""
        rows.append(f"<div><del>{left}</del><ins>{right}</ins>{note}</div>")
    return f'<div class="sides">{"".join(rows)}</div>'


def mark(old: str, new: str) -> tuple[str, str]:
    """Both lines as HTML, with what differs marked; without marks if little is the same."""
    words = TOKEN.findall(old.strip()), TOKEN.findall(new.strip())
    matcher = difflib.SequenceMatcher(None, *words, autojunk=False)
    if matcher.ratio() < 0.4:
        return html.escape(old.strip()), html.escape(new.strip())
    sides = ["", ""]
    for tag, a, b, c, d in matcher.get_opcodes():
        for at, part in enumerate(("".join(words[0][a:b]), "".join(words[1][c:d]))):
            shown = html.escape(part)
            sides[at] += shown if tag == "equal" or not part else f"<mark>{shown}</mark>"
    return sides[0], sides[1]
