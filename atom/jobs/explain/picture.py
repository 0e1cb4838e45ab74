"""Draw a model: layers in order, modules with bytes and shares of a step.

page.write_page(title, [draw_model(graph)], STYLE)
"""

from __future__ import annotations

import html
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from string import ascii_uppercase
from typing import NamedTuple

from atom.graph import Graph, State
from atom.jobs.explain.layer_sizes import KV, STATE, Entry, LayerKind, divide_sizes, group_layers
from atom.jobs.explain.layouts import CONTEXT, PROMPT
from atom.jobs.explain.text import format_bytes
from atom.measurement import page
from atom.state_rules import WindowRule

COLORS = (0, 1, 2, 3, 5, 6, 7, 8)  # of the largest parts; the others are gray
GRAY = 4
SMALLEST = 0.0005  # share that is shown
OTHERS = "others"
NUM_TINTS = 4  # of the letters of kinds
BARS = (
    "weights, by bytes",
    f"decode of one sequence of {CONTEXT:,} tokens, by bytes moved",
    f"prompt of {PROMPT:,} tokens, by operations",
)
MAX_RANGES = 6  # of a kind's layers that are written out
STYLE = """
.strip { display: flex; flex-wrap: wrap; gap: 2px; margin: .5rem 0 1rem }
.strip b { width: 1.15rem; font: 600 11px/1.15rem system-ui, sans-serif; text-align: center; border-radius: 3px;
  border: 1px solid var(--quiet) }
.k1 { background: var(--text); color: var(--ground) } .k2 { background: var(--quiet); color: var(--ground) }
.k3 { background: var(--line) }
.bar { display: flex; height: 1.4rem; margin: .1rem 0 .7rem; border-radius: 4px; overflow: hidden; gap: 1px }
.bar i, .key i, .meter i { background: var(--c, var(--c4)) }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; padding: 0; margin: 0 0 1.2rem; list-style: none }
.key i { display: inline-block; width: .8rem; height: .8rem; border-radius: 2px; margin-right: .35rem }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 23rem), 1fr)); gap: 1rem;
  align-items: start }
.card { border: 1px solid var(--line); border-radius: 8px; padding: .7rem .8rem; min-width: 0 }
.card h3 { margin: 0 0 .2rem; font-size: 1rem } .card p { margin: 0 0 .5rem }
.card h3 b { display: inline-block; min-width: 1.4rem; margin-right: .4rem; text-align: center; border-radius: 3px;
  border: 1px solid var(--quiet) }
.card table { width: 100%; font-size: 13px; table-layout: fixed }
.card :is(th, td) { padding: .12rem .3rem; border: 0 } .card td { white-space: nowrap }
.card col:not(:first-child) { width: 4.1em }
.card col:nth-child(2) { width: 5.9em } .card :is(th, td):first-child { white-space: normal; overflow-wrap: break-word }
.card thead th { font-weight: 400; color: var(--quiet); vertical-align: bottom }
.card tbody tr { background: var(--tint) }
.card tbody :is(th, td):first-child { border-left: 5px solid var(--c, var(--c4)) }
.card tbody tr:first-child > * { border-top: .45rem solid var(--ground) }
.card tbody td:first-child { padding-left: .8rem } .card tbody th { font-weight: 600 }
.card small { display: block; color: var(--quiet); font-size: 11.5px; font-weight: 400 }
.card .meter { padding: 0 0 .2rem } .meter i { display: block; height: 4px; min-width: 1px }
""" + "".join(f".c{at} {{ --c: var(--c{at}) }} " for at in (*COLORS, GRAY))  # fmt: skip


class Sum(NamedTuple):
    """Entries in all."""

    num_bytes: float
    decode_bytes: float
    prompt_flops: float

    def per(self, times: int) -> int:
        """The bytes of one of several layers."""
        return round(self.num_bytes / times)

    def shares(self, whole: Sum) -> list[float]:
        """The shares of weights, a decode and a prompt."""
        return [own / (each or 1.0) for own, each in zip(self, whole, strict=True)]


def draw_model(graph: Graph) -> str:
    """Draw a rank's graph after the passes: its layers in order, where bytes and operations are, and every part."""
    entries = divide_sizes(graph)
    kinds, whole, colors = group_layers(graph, entries), add(entries), choose_colors(entries)
    draw = partial(draw_card, whole=whole, colors=colors, differ=len({entry.fmt for entry in entries} - {""}) > 1)
    drawn = [page.paragraph(describe_model(kinds, whole))]
    for (section, stack), each in groupby(enumerate(kinds), key=lambda kind: (kind[1].section, kind[1].stack)):
        drawn.append(draw_layers(section, stack, dict(each)))
    drawn += [draw_shares(entries, whole, colors), draw_key(colors)]
    cards = []
    for at, kind in enumerate(kinds):
        title = f"<b>{letter(at)}</b>{html.escape(title_of(kind))}"
        cards.append(draw(title, describe_layers(kind), kind.entries, len(kind.layers)))
    ends: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        if not entry.place.stack:
            ends[entry.place.section].append(entry)
    for section, own in ends.items():
        title = f"{section}, in no layer" if section else "before and after the layers"
        cards.append(draw(html.escape(title), "", own, 1))
    return "\n".join([*drawn, f'<div class="cards">{"".join(cards)}</div>'])


def add(entries: Iterable[Entry]) -> Sum:
    columns = zip(*(entry[2:5] for entry in entries), strict=True)
    return Sum(*map(sum, columns))


def letter(at: int) -> str:
    """The name of a kind of layers: A to Z, then A2."""
    more, which = divmod(at, len(ascii_uppercase))
    return f"{ascii_uppercase[which]}{more + 1 if more else ''}"


def choose_colors(entries: Sequence[Entry]) -> dict[str, int]:
    """Colors of the parts with the largest shares of a step or of the weights; what has none is gray."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[color_key(entry)].append(entry)
    whole = add(entries)
    sizes = {name: max(add(each).shares(whole)) for name, each in groups.items()}
    largest = sorted(sizes, key=lambda name: -sizes[name])[: len(COLORS)]
    return {name: color for name, color in zip(largest, COLORS, strict=False) if sizes[name] >= SMALLEST}


def color_key(entry: Entry) -> str:
    """The part, or what a layer keeps of a sequence; parts of images and drafts together."""
    row = next((row for row in (KV, STATE) if entry.place.row.startswith(row)), None)
    return entry.place.section or row or entry.place.part


def describe_model(kinds: Sequence[LayerKind], whole: Sum) -> str:
    """Layers, bytes and what a sequence takes, in a sentence each."""
    layers = sum(len(kind.layers) for kind in kinds if not kind.section)
    num = sum(not kind.section for kind in kinds)
    kept = [(len(kind.layers), kept_bytes(kind.states)) for kind in kinds]
    tokens, slots = sum(num * each for num, (each, _) in kept), sum(num * each for num, (_, each) in kept)
    texts = [
        f"{layers} layers of {num} {'kind' if num == 1 else 'kinds'}",
        f"{format_bytes(round(whole.num_bytes))} of weights",
        f"{format_bytes(round(whole.decode_bytes))} moved by a decode of one sequence of {CONTEXT:,} tokens",
        f"{round(tokens):,} bytes of KV a token" if tokens else "",
        f"{format_bytes(slots)} of recurrent state a sequence" if slots else "",
    ]
    return ", ".join(filter(None, texts))


def kept_bytes(states: Iterable[State]) -> tuple[float, int]:
    """The bytes that a layer keeps of each token, and of a sequence whatever its length."""
    sizes = [(state.rule, state.type.num_bytes) for state in states]
    tokens = sum(size / rule.entry_tokens for rule, size in sizes if not rule.in_slot)
    return tokens, sum(size for rule, size in sizes if rule.in_slot)


def title_of(kind: LayerKind) -> str:
    """What layers of a kind do, by their states and experts."""
    rows = dict.fromkeys(entry.place.row for entry in kind.entries)
    kept = list(dict.fromkeys(filter(None, map(describe_state, kind.states))))
    kept += [row for row in rows if row.endswith(" of an earlier layer")]
    experts = [f"{kind.experts[0]} of {kind.experts[1]} experts"] if kind.experts else []
    return ", ".join([*kept, *experts]) or kind.stack


def describe_state(state: State) -> str:
    """What a state is, without its size."""
    rule = state.rule
    if rule.in_slot:
        return STATE
    if isinstance(rule, WindowRule):
        return f"window of {rule.window:,} tokens"
    return "full attention" if rule.entry_tokens == 1 else f"an entry for each {rule.entry_tokens:,} tokens"


def describe_layers(kind: LayerKind) -> str:
    """Which layers they are, and what one of them keeps of a sequence."""
    one = len(kind.layers) == 1
    texts = [f"{'layer' if one else f'{len(kind.layers)} layers:'} {ranges(kind.layers)}"]
    texts += [kind.section] if kind.section else []
    tokens, slots = kept_bytes(kind.states)
    each = "" if one else " in each"
    texts += [f"{tokens:,.6g} bytes of KV a token{each}"] if tokens else []
    texts += [f"{format_bytes(slots)} of state a sequence{each}"] if slots else []
    return "; ".join(texts)


def ranges(numbers: Sequence[int]) -> str:
    """Numbers as ranges: 0–2, 4, 6."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1] = runs[-1][0], number
        else:
            runs.append((number, number))
    shown = [f"{first}–{last}" if last > first else str(first) for first, last in runs]
    return ", ".join(shown if len(shown) <= MAX_RANGES else [*shown[: MAX_RANGES - 1], "…", shown[-1]])


def draw_layers(section: str, stack: str, kinds: Mapping[int, LayerKind]) -> str:
    """The layers of a stack in order, each with the letter of its kind."""
    letters = dict(sorted((number, at) for at, kind in kinds.items() for number in kind.layers))
    cells = (f'<b class="k{at % NUM_TINTS}" title="layer {number}">{letter(at)}</b>' for number, at in letters.items())
    label = "; ".join(f"{letter(at)}: {ranges(kind.layers)}" for at, kind in kinds.items())
    name = f"{stack}, {section}" if section else stack
    return (
        f'<p class="quiet">{html.escape(name)}</p>'
        f'<div class="strip" role="img" aria-label="{html.escape(f"layers of {name}: {label}")}">{"".join(cells)}</div>'
    )


def draw_shares(entries: Sequence[Entry], whole: Sum, colors: Mapping[str, int]) -> str:
    """A bar of each of weights, a decode and a prompt, divided by color."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        groups[color_key(entry) if color_key(entry) in colors else OTHERS].append(entry)
    order = [*colors, *([OTHERS] if OTHERS in groups else [])]
    sums = {name: add(groups[name]) for name in order}
    drawn = []
    for at, title in enumerate(BARS):
        shares = {name: each.shares(whole)[at] for name, each in sums.items() if each[at]}
        texts = {name: html.escape(f"{name} {share:.1%}") for name, share in shares.items()}
        parts = [
            f'<i class="c{colors.get(name, GRAY)}" style="flex:{share:.4f}" title="{texts[name]}"></i>'
            for name, share in shares.items()
        ]
        bar = f'<div class="bar" role="img" aria-label="{", ".join(texts.values())}">{"".join(parts)}</div>'
        drawn += [page.paragraph(title), bar] if parts else []
    return "\n".join(drawn)


def draw_key(colors: Mapping[str, int]) -> str:
    """The names of the colors."""
    shown = (f'<li class="c{color}"><i></i>{html.escape(name)}</li>' for name, color in colors.items())
    return f'<ul class="key">{"".join(shown)}<li class="c{GRAY}"><i></i>{OTHERS}</li></ul>'


def draw_card(
    title: str,
    about: str,
    entries: Sequence[Entry],
    times: int,
    whole: Sum,
    colors: Mapping[str, int],
    *,
    differ: bool,
) -> str:
    """The parts of layers that are alike, with the bytes of one layer and the shares of a step that all of them have.

    title: HTML
    times: the number of these layers
    """
    parts: dict[str, dict[str, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for entry in entries:
        parts[entry.place.part][entry.place.row].append(entry)
    head = ("module, and the call that reads it", "bytes of each" if times > 1 else "bytes", "decode", "prompt")
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    cells = f"<colgroup>{'<col>' * len(head)}</colgroup><thead><tr>{columns}</tr></thead>"
    bodies = "".join(draw_part(part, rows, times, whole, colors, differ=differ) for part, rows in parts.items())
    text = page.paragraph(about) if about else ""
    return f'<section class="card"><h3>{title}</h3>{text}<table>{cells}{bodies}</table></section>'


def describe_formats(entries: Sequence[Entry]) -> str:
    """The formats of a module's weights, with their layers if those differ."""
    layers: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        if entry.fmt and entry.num_bytes:
            layers[entry.fmt].append(entry.place.layer)
    if len(layers) < 2:
        return "".join(layers)
    every = {fmt: sorted({*numbers}) for fmt, numbers in sorted(layers.items())}
    return "; ".join(f"{fmt} in layer{'s' * (len(each) > 1)} {ranges(each)}" for fmt, each in every.items())


def draw_part(
    part: str,
    rows: Mapping[str, Sequence[Entry]],
    times: int,
    whole: Sum,
    colors: Mapping[str, int],
    *,
    differ: bool,
) -> str:
    """A part with a bar of its share of a decode, and its rows; one without a name is the part itself.

    differ: the formats of weights, which then are named
    """

    def describe(own: Sequence[Entry]) -> tuple[str, str]:
        return main_call(own), describe_formats(own) if differ else ""

    every = [entry for own in rows.values() for entry in own]
    weights = [entry for entry in every if entry.num_bytes]
    has_rows = list(rows) != [""]
    lines = [draw_row("th", part, () if has_rows else describe(every), add(every).per(times), add(every).shares(whole))]
    if (share := add(every).shares(whole)[1]) >= SMALLEST:
        bar = f'<i style="width:{share:.1%}"></i>'
        lines.append(f'<tr aria-hidden="true"><td colspan="4" class="meter">{bar}</td></tr>')
    for row, own in rows.items() if has_rows else ():
        kept = next((name for name in (KV, STATE) if row.startswith(name)), None)
        css = f' class="c{colors.get(kept, GRAY)}"' if kept else ""
        each = add(own)
        lines.append(draw_row("td", row or "itself", describe(own), each.per(times), each.shares(whole), css))
    color = colors.get(color_key(next(iter(weights or every))), GRAY)
    return f'<tbody class="c{color}">{"".join(lines)}</tbody>'


def draw_row(tag: str, name: str, notes: Sequence[str], num_bytes: int, shares: Sequence[float], css: str = "") -> str:
    """A row of a card's table. notes: below the name, those that are empty left out"""
    scope = ' scope="rowgroup"' if tag == "th" else ""
    small = "".join(f"<small>{html.escape(note)}</small>" for note in notes if note)
    size = format_bytes(num_bytes) if num_bytes else ""
    numbers = "".join(f"<td>{share:.1%}</td>" if share >= SMALLEST else "<td></td>" for share in shares[1:])
    shown = re.sub(r"([._])", r"\1<wbr>", html.escape(name))
    return f"<tr{css}><{tag}{scope}>{shown}{small}</{tag}><td>{size}</td>{numbers}</tr>"


def main_call(entries: Sequence[Entry]) -> str:
    """The call that most of the work is in, or else most of the entries."""
    work: dict[str, float] = defaultdict(float)
    for entry in entries:
        work[entry.call] += entry.decode_bytes + entry.prompt_flops
    calls = Counter(entry.call for entry in entries)
    return max(calls, key=lambda call: (work[call], calls[call]))
