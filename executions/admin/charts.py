"""Stacked bars as SVG: drawn here, coloured by the style sheet, with no script and no style."""

from __future__ import annotations

import math
from datetime import datetime, timedelta

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from executions.services.dashboard import Series

WIDTH, HEIGHT = 720, 210
_LEFT, _BOTTOM, _TOP = 60, 38, 14
_COLOURS = 7


def stacked_bars(title: str, starts: list[datetime], series: list[Series]) -> SafeString:
    """One bar for each start, one colour a series; what it stands for shows when pointed at."""
    highest = max(
        (sum(values) for values in zip(*(s.values for s in series), strict=True)), default=0
    )
    top = _rounded_up(highest)
    step = (WIDTH - _LEFT) / len(starts)
    scale = (HEIGHT - _BOTTOM - _TOP) / top
    drawn: list[tuple[int, str, str, str, str, str]] = []
    for index, start in enumerate(starts):
        base = float(HEIGHT - _BOTTOM)
        for number, line in enumerate(series):
            if not (value := line.values[index]):
                continue
            height = value * scale
            base -= height
            drawn.append(
                (
                    number % _COLOURS,
                    f"{_LEFT + index * step + step * 0.1:.1f}",
                    f"{base:.1f}",
                    f"{step * 0.8:.1f}",
                    f"{height:.1f}",
                    f"{line.name}: {value} (from {start:%d %b %H:00} UTC)",
                )
            )
    rects = format_html_join(
        "",
        '<rect class="series-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
        drawn,
    )
    return format_html(
        '<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>{}',
        WIDTH,
        HEIGHT,
        title,
        _axis(top, scale),
        rects,
        _labels(starts, step),
        _legend(series),
    )


def _axis(top: int, scale: float) -> SafeString:
    lines = []
    for part in (0, 0.5, 1):
        y = f"{HEIGHT - _BOTTOM - top * part * scale:.1f}"
        lines.append((_LEFT, y, WIDTH, y, _LEFT - 6, y, _short(top * part)))
    return format_html_join(
        "",
        '<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>'
        '<text class="tick" x="{}" y="{}" text-anchor="end" dominant-baseline="middle">{}</text>',
        lines,
    )


def _short(number: float) -> str:
    """Few enough characters for the space beside the chart."""
    for least, unit, sign in ((10**9, 10**9, "G"), (10**6, 10**6, "M"), (10**4, 10**3, "k")):
        if number >= least:
            return f"{number / unit:g}{sign}"
    return f"{number:g}"


def _labels(starts: list[datetime], step: float) -> SafeString:
    days = starts[-1] - starts[0] > timedelta(days=2)
    every, shown = (4, "%d %b") if days else (3, "%H:00")
    # Every other one is left out on a phone, where the letters are larger beside the bars.
    labels = (
        (
            " tick-spared" if index // every % 2 else "",
            f"{_LEFT + (index + 0.5) * step:.1f}",
            HEIGHT - 8,
            start.strftime(shown),
        )
        for index, start in enumerate(starts)
        if index % every == 0
    )
    return format_html_join(
        "", '<text class="tick{}" x="{}" y="{}" text-anchor="middle">{}</text>', labels
    )


def _legend(series: list[Series]) -> SafeString:
    items = (
        (number % _COLOURS, line.name, f"{sum(line.values):,}")
        for number, line in enumerate(series)
    )
    listed = format_html_join("", '<li><span class="key key-{}"></span>{} <b>{}</b></li>', items)
    return format_html('<ul class="legend">{}</ul>', listed)


def _rounded_up(value: int) -> int:
    """The next 1, 2 or 5 times a power of ten, so that the axis has round numbers; at least 2."""
    if value <= 2:
        return 2
    power = 10 ** math.floor(math.log10(value))
    return int(next(step * power for step in (1, 2, 5, 10) if step * power >= value))
