"""Write self-contained HTML pages: tables, folds, bars, curves, timelines.

    write_page("after against before", [notes(["The hardware differs."]), table(rows)])     # the page's text
    fold("all layers", table(rows))
    bars([Bar("weights", 16e9, "16 GB")], limit=80e9)
    curves({"p": [0.1, 0.2, 0.4]}, "ms")
    frontier([Dot(95.0, 410.0, "tp8"), Dot(70.0, 620.0, "tp4")], ("tokens/s of a user", "tokens/s of a GPU"))

Every function takes plain text and gives HTML, in which that text is escaped. A page asks nobody for anything, and
follows the reader's light or dark mode.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{title}</title>
<style>
:root {{ --ground: #fff; --text: #1b2022; --quiet: #566064; --line: #dcdfe0; --tint: #f3f5f5; --bad: #b3261e;
  --c0: #0b7468; --c1: #a35200; --c2: #3b5bb5; --c3: #9a3d87; --c4: #8a959a;
  --c5: #6b7a00; --c6: #00799e; --c7: #7a5c45; --c8: #c2185b; --c9: #b9c2c6 }}
@media (prefers-color-scheme: dark) {{ :root {{ --ground: #121617; --text: #e5e9ea; --quiet: #a7b2b6; --line: #30383b;
  --tint: #1a1f21; --bad: #ff8a80; --c0: #4cc3b3; --c1: #f0a050; --c2: #8fabff; --c3: #e08fd0; --c4: #6d797e;
  --c5: #b9c34a; --c6: #4fc3e8; --c7: #c2a083; --c8: #ff80ab; --c9: #4a565b }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 75rem; padding: 0 1rem;
  background: var(--ground); color: var(--text) }}
h1 {{ font-size: 1.5rem; overflow-wrap: break-word }} h2 {{ font-size: 1.15rem; margin: 2rem 0 .5rem }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: top }}
th:first-child, td:first-child {{ text-align: left }}
.table:not(.left) td {{ white-space: nowrap }} .left :is(th, td) {{ text-align: left }}
.table, pre, .plot {{ overflow-x: auto; font-size: 13px }}
pre {{ margin: .3rem 0 1rem; padding: .6rem .8rem; background: var(--tint); border: 1px solid var(--line);
  border-radius: 6px }}
pre, code, summary code {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace }}
summary {{ cursor: pointer; padding: .15rem 0 }}
svg {{ max-width: 100%; min-width: 38rem; height: auto; font: 12px system-ui, sans-serif }}
svg text {{ fill: var(--text) }} svg text.quiet {{ fill: var(--quiet) }} svg .grid {{ stroke: var(--line) }}
svg text.inside {{ fill: var(--ground) }}
.quiet {{ color: var(--quiet); margin: .2rem 0 }}
{style}</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""
NUM_COLORS = 5  # of curves
WIDTH, LABEL, NOTE = 1100, 308, 240  # of bars and timelines; of texts before bars; of those after them, at least
CHARACTER = 7.5  # the width of a character of these texts, about
NARROWEST = 0.1  # of a box that is drawn


class Bar(NamedTuple):
    label: str
    value: float
    text: str  # what the value is, with its unit
    color: int = 0
    mark_at: float | None = None  # a mark: a limit
    mark: str = ""  # what the limit is, with its unit


class Box(NamedTuple):
    """An interval of a timeline."""

    name: str
    start: float
    stop: float
    lane: int
    color: int


class Dot(NamedTuple):
    """A point of a plot."""

    x: float
    y: float
    name: str


def write_page(title: str, parts: Iterable[str], style: str = "") -> str:
    """A page of some parts. style: CSS of these parts"""
    return PAGE.format(title=html.escape(title), body="\n".join(parts), style=style)


def heading(text: str) -> str:
    return f"<h2>{html.escape(text)}</h2>"


def notes(lines: Iterable[str]) -> str:
    """Sentences, each a paragraph."""
    return "\n".join(f"<p><strong>{html.escape(line)}</strong></p>" for line in lines)


def paragraph(text: str) -> str:
    return f'<p class="quiet">{html.escape(text)}</p>'


def table(rows: Sequence[Sequence[str]], *, has_text: bool = False) -> str:
    """A table, its header first. has_text: all columns are flush left."""
    head, *body = [[html.escape(cell) for cell in row] for row in rows]
    lines = [f"<tr><th>{'</th><th>'.join(head)}</th></tr>"]
    lines += [f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" for cells in body]
    shape = "table left" if has_text else "table"
    return '<div class="{}"><table>\n{}\n</table></div>'.format(shape, "\n".join(lines))


def fold(summary: str, body: str) -> str:
    """A part that is folded; its body is HTML."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{body}\n</details>"


def code(text: str) -> str:
    return f'<pre tabindex="0">{html.escape(text)}</pre>'


def bars(shown: Sequence[Bar], *, limit: float | None = None) -> str:
    """Bars from one zero, a line where the limit of all is, and marks of their own limits."""
    largest = max([limit or 0.0, *(max(each.value, each.mark_at or 0.0) for each in shown)]) or 1.0
    longest = max((16 + CHARACTER * len(join_texts(each)) for each in shown), default=0.0)
    scale, lines = (WIDTH - LABEL - min(max(NOTE, longest), (WIDTH - LABEL) / 2)) / largest, []
    for at, each in enumerate(shown):
        y, width = 24 * at + 4, max(each.value * scale, 0.5)
        label = shorten(each.label, int((LABEL - 8) / CHARACTER))
        lines.append(f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{label}</text>')
        lines.append(f'<rect x="{LABEL}" y="{y}" width="{width:.1f}" height="18" rx="2" fill="var(--c{each.color})"/>')
        if each.mark_at is not None:
            x = LABEL + each.mark_at * scale
            lines.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 2}" y2="{y + 20}" stroke="var(--text)" stroke-width="2"/>'
            )
        lines += write_texts(each, scale, y + 13, limit)
    height = 24 * len(shown) + 4
    if limit is not None:
        x = LABEL + limit * scale
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}" stroke="var(--bad)" stroke-width="2"/>')
    return svg(WIDTH, height, lines)


def join_texts(bar: Bar) -> str:
    return ", ".join(filter(None, (bar.text, bar.mark)))


def write_texts(bar: Bar, scale: float, y: float, limit: float | None) -> list[str]:
    """Write the texts of a bar's value and of its mark, each at its own end.

    If the mark is beyond the bar, the value's text stands between them, or in the bar. If neither has room, both
    stand past the mark.
    """

    def text(content: str, x: float, style: str = 'class="quiet"') -> str:
        return f'<text {style} x="{x:.1f}" y="{y}">{html.escape(content)}</text>'

    end, own = LABEL + bar.value * scale, CHARACTER * len(bar.text)
    mark = end if bar.mark_at is None else LABEL + bar.mark_at * scale
    if mark > end:
        after = [text(bar.mark, mark + 8)] if bar.mark else []
        if end + 8 + own < mark:
            return [text(bar.text, end + 8), *after]
        if own + 16 < end - LABEL:
            return [text(bar.text, end - 8, 'class="inside" text-anchor="end"'), *after]
    right, both = max(end, mark) + 8, join_texts(bar)
    if limit is not None and right - 8 <= (line := LABEL + limit * scale) < right + CHARACTER * len(both):
        right = line + 8  # the line would strike the text out
    return [text(both, right)]


def timeline(boxes: Sequence[Box], seconds: float) -> str:
    """A timeline, nested calls in lanes below; a tooltip on a box shows its name and time.

    Those that would be too narrow to be seen are left out.
    """
    scale, lanes = WIDTH / seconds, 1 + max((box.lane for box in boxes), default=0)
    lines = []
    for box in boxes:
        x, width = box.start * scale, (box.stop - box.start) * scale
        if width < NARROWEST:
            continue
        title = f"{html.escape(box.name)}: {(box.stop - box.start) * 1e6:,.1f} µs"
        shape = f'x="{x:.2f}" y="{22 * box.lane}" width="{width:.2f}" height="20" fill="var(--c{box.color})"'
        lines.append(f"<rect {shape}><title>{title}</title></rect>")
    height = 22 * lanes
    for tick in ticks(seconds * 1e3):
        x, anchor = tick / 1e3 * scale, "end" if tick / 1e3 > 0.95 * seconds else "middle" if tick else "start"
        lines.append(f'<text class="quiet" x="{x:.1f}" y="{height + 14}" text-anchor="{anchor}">{tick:g} ms</text>')
    return svg(WIDTH, height + 20, lines)


def curves(values: Mapping[str, Sequence[float]], unit: str) -> str:
    """Cumulative distributions, a curve for each name: the share of values up to the one on the axis."""
    width, height, left = 620, 240, 46
    lines, top = [], max((max(each) for each in values.values() if each), default=0.0) or 1.0
    for share in (0.0, 0.5, 0.9, 1.0):
        y = height - 30 - share * (height - 45)
        lines.append(f'<line class="grid" x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text class="quiet" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    scale = (width - left - 20) / top
    for tick in ticks(top):
        at = f'x="{left + tick * scale:.1f}" y="{height - 12}" text-anchor="middle"'
        lines.append(f'<text class="quiet" {at}>{tick:g}{f" {unit}" if not tick else ""}</text>')
    for which, (name, each) in enumerate(values.items()):
        ordered = sorted(each)
        points = [(0.0, ordered[0])] if ordered else []
        points += [((at + 1) / len(ordered), value) for at, value in enumerate(ordered)]
        path = " ".join(f"{left + x * scale:.1f},{height - 30 - share * (height - 45):.1f}" for share, x in points)
        color = f"var(--c{which % NUM_COLORS})"
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(values) > 1:
            at = f'x="{width - 14}" y="{height - 40 - 16 * which}" text-anchor="end" style="fill: {color}"'
            lines.append(f"<text {at}>{html.escape(name)}</text>")
    return svg(width, height, lines)


def log_curve(places: Sequence[str], values: Sequence[float], limits: Sequence[float], axis: str) -> str:
    """A point for each place on a logarithmic scale, those above their limits in another color, and the limits dashed.

    places: their labels
    axis: what the places are
    """
    width, height, left, right, top, base = 900, 300, 56, 36, 14, 254
    finite = [each for each in (*values, *limits) if 0 < each < math.inf] or [1.0]
    low, high = math.floor(math.log10(min(finite))), math.ceil(math.log10(max(finite)))
    low, high = low - any(each <= 0 for each in values), high + (math.inf in values)  # places of their own for 0 and ∞
    high = max(high, low + 1)
    across, down = (width - left - right) / max(len(places) - 1, 1), (base - top) / (high - low)

    def x_of(at: int) -> float:
        return left + at * across

    def y_of(value: float) -> float:
        power = low if value <= 0 else high if value == math.inf else math.log10(value)
        return base - (power - low) * down

    def text(content: str, x: float, y: float, anchor: str) -> str:
        return f'<text class="quiet" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(content)}</text>'

    def path(points: Sequence[float], style: str) -> str:
        joined = " ".join(f"{x_of(at):.1f},{y_of(value):.1f}" for at, value in enumerate(points))
        return f'<polyline points="{joined}" fill="none" {style}/>'

    names = {low: "0"} if min(values, default=1.0) <= 0 else {}
    names |= {high: "∞"} if math.inf in values else {}
    lines = []
    for power in sorted({*range(low, high + 1, -(-(high - low) // 8)), *names}):
        y = base - (power - low) * down
        lines.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(text(names.get(power, f"1e{power}"), left - 8, y + 4, "end"))
    step = -(-len(places) // 16)
    lines += [text(places[at], x_of(at), base + 18, "middle") for at in range(0, len(places), step)]
    lines.append(text(axis, (left + width - right) / 2, height - 6, "middle"))
    lines.append(path(limits, 'stroke="var(--c1)" stroke-width="2" stroke-dasharray="6 4"'))
    lines.append(path(values, 'stroke="var(--c0)" stroke-width="2"'))
    for at, (place, value, limit) in enumerate(zip(places, values, limits, strict=True)):
        color, size = ("var(--c0)", 3) if value <= limit else ("var(--bad)", 5)
        title = f"<title>{html.escape(place)}: {value:.2g}, allowed {limit:.2g}</title>"
        lines.append(f'<circle cx="{x_of(at):.1f}" cy="{y_of(value):.1f}" r="{size}" fill="{color}">{title}</circle>')
    return svg(width, height, lines)


def frontier(points: Sequence[Dot], axes: tuple[str, str], *, least: float | None = None) -> str:
    """Points of which those that no other one beats in both directions are joined; a line where x has to be at least.

    A tooltip has each point's name, which stands next to those of the line that have room.

    axes: what x and y are, with their units
    """
    width, height, left, right, top, base = 900, 420, 70, 180, 32, 366  # at the right there is room for a name
    most_x, most_y = max((at.x for at in points), default=1.0), max((at.y for at in points), default=1.0)
    across, down = (width - left - right) / most_x / 1.05, (base - top) / most_y / 1.05

    def text(content: str, x: float, y: float, anchor: str, style: str = 'class="quiet"') -> str:
        return f'<text {style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(content)}</text>'

    lines = []
    for tick in ticks(most_y):
        y = base - tick * down
        lines.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(text(f"{tick:,g}", left - 8, y + 4, "end"))
    lines += [text(f"{tick:,g}", left + tick * across, base + 18, "middle") for tick in ticks(most_x)]
    lines.append(text(axes[0], (left + width - right) / 2, height - 8, "middle"))
    lines.append(text(axes[1], left + 6, top - 18, "start"))
    if least is not None and least <= most_x * 1.05:
        x = left + least * across
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{base}" stroke="var(--bad)" stroke-width="2"/>')
    best = unbeaten(points)
    places = [(left + each.x * across, base - each.y * down) for each in best]
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    lines.append(f'<polyline points="{joined}" fill="none" stroke="var(--c0)" stroke-width="2"/>')
    for each in points:
        color, size = ("var(--c0)", 5) if each in best else ("var(--c4)", 3)
        title = f"<title>{html.escape(each.name)}: {each.x:,.4g}, {each.y:,.4g}</title>"
        place = f'cx="{left + each.x * across:.1f}" cy="{base - each.y * down:.1f}"'
        lines.append(f'<circle {place} r="{size}" fill="{color}">{title}</circle>')
    end, level = -math.inf, math.inf  # of the last name
    for each, (x, y) in zip(best, places, strict=True):
        name_end = x + 9 + CHARACTER * len(each.name)
        if (x + 9 > end or y > level + 15) and name_end < width:
            lines.append(text(each.name, x + 9, y - 6, "start", ""))
            end, level = name_end, y
    return svg(width, height, lines)


def unbeaten(points: Sequence[Dot]) -> list[Dot]:
    """The points than which no other one is as large in both directions, by x."""
    best = list[Dot]()
    for each in sorted(points, key=lambda dot: (-dot.x, -dot.y)):
        if not best or each.y > best[-1].y:
            best.append(each)
    return best[::-1]


def ticks(top: float) -> list[float]:
    """Round numbers from 0 to some end, about five."""
    power = 10 ** math.floor(math.log10(top / 4))
    step = next(each * power for each in (1, 2, 5, 10) if top / (each * power) <= 6)
    return [round(step * at, 12) for at in range(int(top / step + 1e-9) + 1)]


def svg(width: float, height: float, lines: Sequence[str]) -> str:
    shape = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"'
    return f'<div class="plot"><svg {shape}>\n{chr(10).join(lines)}\n</svg></div>'


def legend(names: Iterable[str]) -> str:
    """The names of the colors, in order."""
    shown = (f'<span style="color: var(--c{at})">■</span> {html.escape(name)}' for at, name in enumerate(names))
    return f"<p>{' &nbsp; '.join(shown)}</p>"


def shorten(text: str, max_chars: int) -> str:
    return html.escape(text if len(text) <= max_chars else f"{text[: max_chars - 1]}…")
