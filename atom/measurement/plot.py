"""Plot throughput against interactivity, as PNG and as self-contained HTML.

    series = [Series("input 1024, output 1024", "before tp8", (Point(95.0, 410.0, "c4"), Point(70.0, 620.0, "c8")))]
    draw_png(series, Path("compare.png"))
    write_html(series, rows, "after against before", ["The hardware differs."], Path("compare.html"))

Interactivity is tokens per second for one user; throughput is that of all users. `draw_measured` plots other numbers,
with their standard errors. matplotlib draws, of the extra bench.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from atom.measurement import page

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# colors that stand for a page's CSS variables, which replace them in the SVG; and matplotlib's settings for each
PLACEHOLDERS = {name: f"#00ff{at:02x}" for at, name in enumerate(("text", "line", "ground", "c0", "c1", "c2", "c3"))}
OF_THE_PAGE = {
    "text": "text.color axes.edgecolor axes.labelcolor xtick.color ytick.color grid.color",
    "line": "legend.edgecolor",
    "ground": "legend.facecolor",
}


class Point(NamedTuple):
    interactivity: float  # tokens a second of one user
    throughput: float  # output tokens a second
    name: str


class Series(NamedTuple):
    panel: str  # the plot that it is drawn in
    label: str
    points: tuple[Point, ...]


class Measured(NamedTuple):
    x: float
    y: float
    error: float | None  # standard, of y; None: it is not known
    name: str


class Plot(NamedTuple):
    across: str  # what x is, with its unit
    up: str
    points: tuple[Measured, ...]


def draw_png(series: Sequence[Series], path: Path, *, unit: str) -> None:
    """unit: of the throughput."""
    draw(series, unit).savefig(path, dpi=120)


def write_html(
    series: Sequence[Series],
    rows: Sequence[Sequence[str]],
    title: str,
    notes: Sequence[str],
    path: Path,
    *,
    unit: str,
) -> None:
    """
    series: empty: no plot
    rows: the table, its header first
    notes: sentences above it
    """
    svg = f'<div class="plot">{draw_svg(series, unit)}</div>' if series else ""
    path.write_text(page.write_page(title, [page.notes(notes), svg, page.table(rows)]), encoding="utf-8")


def draw_svg(series: Sequence[Series], unit: str) -> str:
    """Draw an <svg> element to embed in a page, in the page's colors."""
    return to_svg(lambda: draw(series, unit))


def draw_measured(plots: Sequence[Plot]) -> str:
    """Draw plots side by side as an <svg> element, their points with names and standard errors."""
    return to_svg(lambda: draw_points(plots))


def to_svg(make: Callable[[], Figure]) -> str:
    """The <svg> element of a figure that `make` draws, in the page's colors."""
    import_matplotlib()
    import matplotlib
    from matplotlib.rcsetup import cycler

    file = io.StringIO()
    nothing: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    names = {param: PLACEHOLDERS[name] for name, params in OF_THE_PAGE.items() for param in params.split()}
    colors = cycler(color=[color for name, color in PLACEHOLDERS.items() if name.startswith("c")])
    lines = cycler(linestyle=["-", "--", ":", "-."]) * colors
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "atom", "axes.prop_cycle": lines, "legend.framealpha": 1}
    with matplotlib.rc_context(style | names):
        make().savefig(file, format="svg", metadata=nothing, transparent=True)
    text = file.getvalue()
    for name, color in PLACEHOLDERS.items():
        text = text.replace(color, f"var(--{name})")
    return text[text.index("<svg") :]


def import_matplotlib() -> None:
    """ModuleNotFoundError that says what to install if it is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise ModuleNotFoundError("drawing needs the package matplotlib: pip install 'atom-run[bench]'") from None


def draw(series: Sequence[Series], unit: str) -> Figure:
    """A plot for each panel, side by side. ModuleNotFoundError without matplotlib."""
    import_matplotlib()
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(each.panel for each in series)) or [""]
    figure = Figure(figsize=(6.5 * len(panels), 5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for each in (line for line in series if line.panel == panel):
            across, up = ([point[at] for point in each.points] for at in (0, 1))
            axes.plot(across, up, marker="o", label=each.label)
            for point in each.points:
                at = (point.interactivity, point.throughput)
                axes.annotate(point.name, at, xytext=(4, 4), textcoords="offset points", fontsize=8)
        axes.set(title=panel, xlabel="interactivity: tokens/s a user", ylabel=f"throughput: {unit}")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        if any(line.panel == panel for line in series):
            axes.legend()
    return figure


def draw_points(plots: Sequence[Plot]) -> Figure:
    """A figure of plots, side by side. x begins at 0."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(plots), 5), layout="constrained")
    for axes, plot in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        across, up, errors, names = zip(*plot.points, strict=True)
        axes.errorbar(across, up, yerr=[error or 0.0 for error in errors], fmt="o", capsize=3)
        for x, y, name in zip(across, up, names, strict=True):
            axes.annotate(name, (x, y), xytext=(6, 5), textcoords="offset points", fontsize=8)
        axes.set(xlabel=plot.across, ylabel=plot.up)
        axes.set_xlim(left=0, right=1.25 * max(across))  # room for the names
        axes.margins(y=0.12)
        axes.grid(alpha=0.3)
    return figure
