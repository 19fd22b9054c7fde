"""Stacked bars as SVG: drawn here, coloured by the style sheet, with no script and no style."""

from __future__ import annotations

import math
from datetime import datetime

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from executions.services.dashboard import Series

WIDTH, HEIGHT = 720, 200
_LEFT, _BOTTOM, _TOP = 44, 20, 8
_COLOURS = 7


def stacked_bars(title: str, hours: list[datetime], series: list[Series]) -> SafeString:
    """One bar an hour, one colour a series; what a bar stands for shows when it is pointed at."""
    highest = max(
        (sum(values) for values in zip(*(s.values for s in series), strict=True)), default=0
    )
    top = _rounded_up(highest)
    step = (WIDTH - _LEFT) / len(hours)
    scale = (HEIGHT - _BOTTOM - _TOP) / top
    bars: list[tuple[int, str, str, str, str, str]] = []
    for index, hour in enumerate(hours):
        base = float(HEIGHT - _BOTTOM)
        for number, line in enumerate(series):
            if not (value := line.values[index]):
                continue
            height = value * scale
            base -= height
            bars.append(
                (
                    number % _COLOURS,
                    f"{_LEFT + index * step + step * 0.1:.1f}",
                    f"{base:.1f}",
                    f"{step * 0.8:.1f}",
                    f"{height:.1f}",
                    f"{line.name}: {value} ({hour:%d %b %H:00} UTC)",
                )
            )
    rects = format_html_join(
        "",
        '<rect class="series-{}" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>',
        bars,
    )
    return format_html(
        '<svg class="bars" viewBox="0 0 {} {}" role="img" aria-label="{}">{}{}{}</svg>{}',
        WIDTH,
        HEIGHT,
        title,
        _axis(top, scale),
        rects,
        _hours(hours, step),
        _legend(series),
    )


def _axis(top: int, scale: float) -> SafeString:
    lines = []
    for part in (0, 0.5, 1):
        y = f"{HEIGHT - _BOTTOM - top * part * scale:.1f}"
        lines.append((_LEFT, y, WIDTH, y, _LEFT - 6, y, f"{top * part:g}"))
    return format_html_join(
        "",
        '<line class="grid" x1="{}" y1="{}" x2="{}" y2="{}"/>'
        '<text class="tick" x="{}" y="{}" text-anchor="end" dominant-baseline="middle">{}</text>',
        lines,
    )


def _hours(hours: list[datetime], step: float) -> SafeString:
    long = len(hours) > 48
    every, shown = (24, "%d %b") if long else (3, "%H:00")
    labels = (
        (f"{_LEFT + (index + 0.5) * step:.1f}", HEIGHT - 4, hour.strftime(shown))
        for index, hour in enumerate(hours)
        if index % every == 0
    )
    return format_html_join(
        "", '<text class="tick" x="{}" y="{}" text-anchor="middle">{}</text>', labels
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
