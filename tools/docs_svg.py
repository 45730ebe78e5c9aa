"""Charts and diagrams as SVG text: the same bytes wherever they are drawn, so that tests compare them."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

INK, GREY, GRID = "#1f2328", "#656d76", "#d8dee4"
BLUE, ORANGE, GREEN, VIOLET = "#0b62c4", "#c75300", "#1a7f37", "#8250df"
FEW = 8  # label every x value if there are at most so many
WHITE = "#ffffff"
# Color on a white ground -> color where the reader's system prefers a dark one.
DARK = {
    WHITE: "#0d1117", INK: "#e6edf3", GREY: "#9198a1", GRID: "#3d444d",
    BLUE: "#4493f8", ORANGE: "#f0883e", GREEN: "#3fb950", VIOLET: "#a371f7",
    "#cfe3fb": "#12406e", "#d6f0dd": "#14532d", "#fbe2cf": "#6b3410", "#e9dcfb": "#4a2a82", "#f6f8fa": "#1c2128",
    "#eaf3fe": "#10294a", "#eaf7ee": "#11331d", "#fdf1e7": "#402611",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of a chart; `points` maps x to y."""

    label: str
    points: Mapping[float, float]
    color: str
    dash: str = ""
    marker: bool = True


@dataclass(frozen=True)
class Panel:
    """Axes and their lines. Both axes are logarithmic, or both linear."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log: bool = True


def text(
    x: float, y: float, content: str, size: float = 12, anchor: str = "start", color: str = INK, **more: str
) -> str:
    """Return a line of text; `more` are attributes, with _ for -."""
    extra = "".join(f' {n.replace("_", "-")}="{v}"' for n, v in more.items())
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" fill="{color}"'
    return f"<text {place}{extra}>{html.escape(content, quote=False)}</text>"


def rect(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 0) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def path(
    points: Iterable[tuple[float, float]], color: str, width: float = 1, dash: str = "", arrow: bool = False
) -> str:
    """Return straight lines from point to point, with an arrowhead at the end if asked."""
    line = "L".join(f"{x:.1f},{y:.1f}" for x, y in points)
    style = f' stroke-dasharray="{dash}"' if dash else ""
    style += ' marker-end="url(#arrow)"' if arrow else ""
    return f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="{width:g}"{style}/>'


def figure(width: float, height: float, parts: Iterable[str], title: str) -> str:
    """Return the file, on a white ground, or on a dark one where the reader's system prefers that."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="Helvetica, Arial, sans-serif" role="img">'
    )
    arrow = (
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0,0L8,4L0,8z" fill="{GREY}"/></marker></defs>'
    )
    lines = [f"<title>{html.escape(title, quote=False)}</title>", arrow, rect(0, 0, width, height, WHITE), *parts]
    return "\n".join([head, _dark_style("\n".join(lines)), *lines, "</svg>"]) + "\n"


def _dark_style(body: str) -> str:
    """Return rules for a dark ground, of the colors in `body`: they override the attributes `fill` and `stroke`."""
    rules = [
        f'[{attribute}="{light}"]{{{attribute}:{dark}}}'
        for light, dark in DARK.items()
        for attribute in ("fill", "stroke")
        if f'{attribute}="{light}"' in body
    ]
    return "<style>@media (prefers-color-scheme: dark) {" + " ".join(rules) + "}</style>"


def chart(panels: Sequence[Panel], title: str) -> str:
    """Return panels in a row, with one legend above them."""
    width, high, left, gap = 834.0, 260.0, 62.0, 88.0
    wide = (width - left - 24 - (len(panels) - 1) * gap) / len(panels)
    legend, below = _legend([line for p in panels for line in p.lines], left, width)
    parts, top = [legend], below + 44
    for i, panel in enumerate(panels):
        parts.append(_panel(panel, left + i * (wide + gap), top, wide, high))
    return figure(width, top + high + 48, parts, title)


def _legend(lines: Sequence[Line], left: float, right: float) -> tuple[str, float]:
    """Return the labels, in as many rows as they need, and the height of the last row."""
    parts, x, y = [], left, 18.0
    for line in {line.label: line for line in lines}.values():
        wide = 32 + 6.6 * len(line.label)
        if x > left and x + wide > right:
            x, y = left, y + 20
        parts.append(path([(x, y), (x + 26, y)], line.color, 2.2, line.dash))
        if line.marker:
            parts.append(f'<circle cx="{x + 13:.1f}" cy="{y:g}" r="3.4" fill="{line.color}"/>')
        parts.append(text(x + 32, y + 4, line.label))
        x += wide + 24
    return "\n".join(parts), y


def _panel(panel: Panel, x0: float, y0: float, wide: float, high: float) -> str:
    xs = [x for line in panel.lines for x in line.points]
    ys = [y for line in panel.lines for y in line.points.values()]
    x_ticks = _x_ticks(xs) if panel.log or len(set(xs)) <= FEW else _nice(xs)
    y_ticks = _decades(ys) if panel.log else _nice(ys)
    scale: Callable[[float], float] = math.log if panel.log else float
    to_x = _axis(scale, min([*xs, x_ticks[0]]), max([*xs, x_ticks[-1]]), x0 + 8, x0 + wide - 8)
    to_y = _axis(scale, y_ticks[0], y_ticks[-1], y0 + high, y0)
    parts = [text(x0 + wide / 2, y0 - 12, panel.title, 13, "middle", font_weight="bold")]
    for y in y_ticks:
        parts.append(path([(x0, to_y(y)), (x0 + wide, to_y(y))], GRID))
        parts.append(text(x0 - 6, to_y(y) + 4, f"{y:,.12g}", 11, "end", GREY))
    for x in x_ticks:
        parts.append(path([(to_x(x), y0 + high), (to_x(x), y0 + high + 4)], GREY))
        parts.append(text(to_x(x), y0 + high + 17, _length(x), 11, "middle", GREY))
    parts.append(path([(x0, y0), (x0, y0 + high), (x0 + wide, y0 + high)], GREY))
    parts.append(text(x0 + wide / 2, y0 + high + 36, panel.x_label, 12, "middle"))
    middle = f"rotate(-90 {x0 - 50:.1f} {y0 + high / 2:.1f})"
    parts.append(text(x0 - 50, y0 + high / 2, panel.y_label, 12, "middle", transform=middle))
    for line in panel.lines:
        places = [(to_x(x), to_y(y)) for x, y in sorted(line.points.items())]
        parts.append(path(places, line.color, 2.2 if line.marker else 1.4, line.dash))
        if line.marker:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{line.color}"/>' for x, y in places]
    return "\n".join(parts)


def _axis(scale: Callable[[float], float], lo: float, hi: float, a: float, b: float) -> Callable[[float], float]:
    return lambda value: a + (b - a) * (scale(value) - scale(lo)) / (scale(hi) - scale(lo) or 1)  # 1: of one point


def _x_ticks(xs: Sequence[float]) -> list[float]:
    return sorted(set(xs))


def _decades(ys: Sequence[float]) -> list[float]:
    lo, hi = math.floor(math.log10(min(ys))), math.ceil(math.log10(max(ys)))
    return [float(f"1e{n}") for n in range(lo, hi + 1)]


def _nice(values: Sequence[float]) -> list[float]:
    """Return about five round numbers around the values, and 0 among them unless it is far away."""
    hi = max(values)
    lo = 0.0 if 0 <= min(values) < hi / 2 else min(values)
    step = next(s * 10.0**n for n in range(-9, 12) for s in (1, 2, 5) if (hi - lo) / (s * 10.0**n) <= 6)
    first, last = math.floor(lo / step), math.ceil(hi / step)
    return [i * step for i in range(first, last + 1)]


def _length(x: float) -> str:
    return f"{x / 1024:g}k" if x >= 1024 and x % 1024 == 0 else f"{x:,.12g}"
