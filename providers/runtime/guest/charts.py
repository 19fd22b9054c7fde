"""What a figure of matplotlib shows, as data: points, bars, wedges and boxes by kind of chart.

The shapes are those that clients of E2B's code interpreter know. Nothing here is imported before a
program has a figure, so matplotlib is there.
"""

import math
import re

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

    Series = list[tuple[list[Any], list[Any], bool]]

# Of more there is the picture alone.
MOST_POINTS = 20_000
# Of a value that is no number and no text of its own.
MOST_CHARACTERS = 1000
_UNIT = re.compile(r"\s\(([^()]*)\)|\[([^\[\]]*)\]")
_NUMBERED = re.compile(r"_(?:child|container)(\d+)")
# What box plots mark the mean with, which is no value.
_MEAN = "^"
_DATES = ("DateConverter", "DatetimeConverter")


def chart(figure: "Any") -> "dict[str, object] | None":
    """The figure's chart, or all of them. None where nothing was drawn, or too much.

    Raises whatever matplotlib does, of which a program may have changed anything.
    """
    drawn = [axes for axes in figure.get_axes() if axes.get_label() != "<colorbar>"]
    drawn = [axes for axes in drawn if axes.has_data()]
    if not drawn or sum(map(_size, drawn)) > MOST_POINTS:
        return None
    if len(drawn) == 1:
        return _of_axes(drawn[0])
    title = getattr(figure, "_suptitle", None)
    said = title.get_text() if title is not None else ""
    return {
        "type": "superchart",
        "title": said or None,
        "elements": [_of_axes(axes) for axes in drawn],
    }


def _size(axes: "Any") -> int:
    lines = sum(len(line.get_xdata(orig=False)) for line in axes.lines)
    return lines + sum(len(each.get_offsets()) for each in axes.collections) + len(axes.patches)


def _of_axes(axes: "Any") -> "dict[str, object]":
    from matplotlib.collections import PathCollection
    from matplotlib.container import BarContainer
    from matplotlib.patches import Wedge

    patches = list(axes.patches)
    points = [each for each in axes.collections if isinstance(each, PathCollection)]
    bars = [each for each in axes.containers if isinstance(each, BarContainer)]
    if patches and all(isinstance(each, Wedge) for each in patches):
        return {
            "type": "pie",
            "title": _title(axes),
            "elements": [_wedge(each) for each in patches],
        }
    if bars:
        return _bars(axes, bars)
    if boxes := _boxes(axes):
        return _box_chart(axes, boxes)
    # Grid lines of a scatter are no data; a curve through its points is.
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    if points and not lines:
        return {
            "type": "scatter",
            **_planar(axes),
            "elements": [
                {"label": str(each.get_label()), "points": _offsets(axes, each)} for each in points
            ],
        }
    if lines and not points:
        return {
            "type": "line",
            **_planar(axes),
            "elements": [
                {"label": _label(line, "Line"), "points": _points(line)} for line in lines
            ],
        }
    return {"type": "unknown", "title": _title(axes), "elements": []}


def _title(axes: "Any") -> "str | None":
    return axes.get_title() or None


def _label(artist: "Any", kind: str) -> str:
    label = str(artist.get_label())
    found = _NUMBERED.fullmatch(label)
    return f"{kind} {found[1]}" if found else label


def _labels(axes: "Any", *, is_turned: bool = False) -> "dict[str, object]":
    x, y = axes.get_xlabel(), axes.get_ylabel()
    if is_turned:
        x, y = y, x
    return {
        "title": _title(axes),
        "x_label": x or None,
        "y_label": y or None,
        "x_unit": _unit(x),
        "y_unit": _unit(y),
    }


def _unit(label: str) -> "str | None":
    found = _UNIT.search(label)
    return (found[1] or found[2]) if found else None


def _planar(axes: "Any") -> "dict[str, object]":
    told = _labels(axes)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        labels = [each.get_text() for each in axis.get_ticklabels()]
        ticks = [_value(axis, tick) for tick in axis.get_ticklocs()]
        told[f"{name}_ticks"] = ticks
        told[f"{name}_tick_labels"] = labels
        told[f"{name}_scale"] = _scale(axis, ticks, labels)
    return told


def _scale(axis: "Any", ticks: "list[Any]", labels: "list[str]") -> str:
    if _has_dates(axis):
        return "datetime"
    scale = str(axis.get_scale())
    if scale != "linear":
        return scale
    if type(_converter(axis)).__name__ == "StrCategoryConverter":
        return "categorical"
    # Named one by one: 0, 1, 2 with labels that are no numbers.
    is_named = bool(ticks) and all(
        tick == place and label not in ("", str(place))
        for place, (tick, label) in enumerate(zip(ticks, labels))
    )
    return "categorical" if is_named else "linear"


def _converter(axis: "Any") -> object:
    # Newer versions warn of the attribute.
    asked = getattr(axis, "get_converter", None)
    return asked() if asked is not None else axis.converter


def _has_dates(axis: "Any") -> bool:
    return type(_converter(axis)).__name__.endswith(_DATES)


def _value(axis: "Any", number: "Any") -> object:
    """A place on an axis, as a program would write it."""
    if _has_dates(axis):
        from matplotlib.dates import num2date

        return num2date(number).isoformat()
    return plain(number)


def plain(value: "Any") -> object:
    """A number, a date or a text of any library, as JSON has it. Never raises an Exception."""
    try:
        return _plain(value)
    except Exception:
        return text(value)


def text(value: "Any") -> str:
    """What a value says of itself, cut where that is long."""
    try:
        said = str(value)
    except Exception:
        said = f"<{type(value).__name__}>"
    return said if len(said) <= MOST_CHARACTERS else f"{said[: MOST_CHARACTERS - 1]}…"


def _plain(value: "Any") -> object:
    if hasattr(value, "astype") and str(getattr(value, "dtype", "")).startswith("datetime64"):
        return str(value.astype("datetime64[s]"))
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, (str, int)):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return text(value)
    return number if math.isfinite(number) else None


def _points(line: "Any") -> "list[tuple[object, object]]":
    xs, ys = line.get_xdata(orig=True), line.get_ydata(orig=True)
    if len(xs) != len(ys):
        xs, ys = line.get_xdata(orig=False), line.get_ydata(orig=False)
    return [(plain(x), plain(y)) for x, y in zip(xs, ys)]


def _offsets(axes: "Any", collection: "Any") -> "list[tuple[object, object]]":
    return [
        (_value(axes.xaxis, x), _value(axes.yaxis, y)) for x, y in collection.get_offsets().tolist()
    ]


def _wedge(wedge: "Any") -> "dict[str, object]":
    angle = abs(float(wedge.theta2) - float(wedge.theta1))
    return {
        "label": str(wedge.get_label()),
        "angle": round(angle, 6),
        "radius": plain(wedge.r),
    }


def _bars(axes: "Any", containers: "list[Any]") -> "dict[str, object]":
    is_turned = all(each.orientation == "horizontal" for each in containers)
    axis = axes.yaxis if is_turned else axes.xaxis
    names = _Names(axis)
    elements = []
    for container in containers:
        group = _label(container, "Group")
        for bar in container.patches:
            begin, length = (
                (bar.get_y(), bar.get_height()) if is_turned else (bar.get_x(), bar.get_width())
            )
            value = bar.get_width() if is_turned else bar.get_height()
            label = names.at(begin + length / 2)
            elements.append({"label": label, "value": plain(value), "group": group})
    return {"type": "bar", **_labels(axes, is_turned=is_turned), "elements": elements}


class _Names:
    """What stands at the places of an axis."""

    def __init__(self, axis: "Any") -> None:
        self._axis = axis
        ticks = [float(each) for each in axis.get_ticklocs()]
        labels = [each.get_text() for each in axis.get_ticklabels()]
        self._known = [(tick, label) for tick, label in zip(ticks, labels) if label]
        gaps = [right - left for left, right in zip(ticks, ticks[1:])]
        # Bars of a group stand beside the name that they have in common.
        self._is_named = _scale(axis, ticks, labels) == "categorical"
        self._reach = min(gaps, default=2.0) / 2 if self._is_named else 1e-9

    def at(self, place: float) -> str:
        near = min(self._known, key=lambda each: abs(each[0] - place), default=None)
        if near is not None and abs(near[0] - place) <= self._reach:
            return str(near[1])
        found = _value(self._axis, place)
        return f"{found:g}" if isinstance(found, float) else str(found)


def _boxes(axes: "Any") -> "list[tuple[float, float, float, float]]":
    """Left, right, bottom and top of the boxes of a box plot, whichever way they were drawn."""
    from matplotlib.patches import PathPatch

    outlines = [
        each.get_path().vertices.tolist() for each in axes.patches if isinstance(each, PathPatch)
    ]
    if not outlines:
        outlines = [
            [list(point) for point in zip(xs, ys)] for xs, ys, _ in _series(axes) if _is_box(xs, ys)
        ]
    found = []
    for outline in outlines:
        # A notch may reach beyond its box, two of whose corners are these.
        xs, ys = zip(*((outline[0], outline[5]) if len(outline) >= 11 else outline))
        found.append((min(xs), max(xs), min(ys), max(ys)))
    # A box has whiskers, caps and a median.
    return found if len(axes.lines) >= 3 * len(found) else []


def _is_box(xs: "list[Any]", ys: "list[Any]") -> bool:
    is_closed = len(xs) in (5, 11) and (xs[0], ys[0]) == (xs[-1], ys[-1])
    return is_closed and (len(xs) == 11 or len(set(xs)) <= 2 >= len(set(ys)))


def _series(axes: "Any") -> "Series":
    """Each line's places, and whether it is drawn as marks alone."""
    return [
        (
            [float(x) for x in line.get_xdata(orig=False)],
            [float(y) for y in line.get_ydata(orig=False)],
            line.get_linestyle() == "None",
        )
        for line in axes.lines
        if line.get_marker() != _MEAN
    ]


def _box_chart(
    axes: "Any", boxes: "list[tuple[float, float, float, float]]"
) -> "dict[str, object]":
    series = _series(axes)
    is_upright = any(_is_whisker(box, xs, ys) for xs, ys, _ in series for box in boxes)
    if not is_upright:
        series = [(ys, xs, marks) for xs, ys, marks in series]
        boxes = [(bottom, top, left, right) for left, right, bottom, top in boxes]
    names = _Names(axes.xaxis if is_upright else axes.yaxis)
    return {
        "type": "box_and_whisker",
        **_labels(axes, is_turned=not is_upright),
        "elements": [_box(box, series, names) for box in boxes],
    }


def _is_whisker(
    box: "tuple[float, float, float, float]", xs: "list[float]", ys: "list[float]"
) -> bool:
    """Whether this goes up or down from one end of the box, in its middle."""
    left, right, low, high = box
    if len(xs) != 2 or xs[0] != xs[1] or not _near(xs[0], (left + right) / 2):
        return False
    return len({*ys} & {low, high}) == 1


def _box(
    box: "tuple[float, float, float, float]", series: "Series", names: _Names
) -> "dict[str, object]":
    left, right, low, high = box
    least, most = low, high
    # A cap of a whisker without any length lies on an end of the box, as the median may.
    best, median = (False, -1.0), (low + high) / 2
    marked: "list[float]" = []
    for xs, ys, marks in series:
        if not xs or min(xs) < left - 1e-9 or max(xs) > right + 1e-9:
            continue
        if marks:
            marked += ys
        elif len(xs) == 2 and xs[0] == xs[1]:
            if _near(max(ys), low):
                least = min(ys)
            elif _near(min(ys), high):
                most = max(ys)
        elif len(xs) == 2 and ys[0] == ys[1] and low <= ys[0] <= high:
            best, median = max((best, median), ((low < ys[0] < high, abs(xs[1] - xs[0])), ys[0]))
    return {
        "label": names.at((left + right) / 2),
        "min": least,
        "first_quartile": low,
        "median": median,
        "third_quartile": high,
        "max": most,
        "outliers": [each for each in marked if each < least or each > most],
    }


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-9 * max(1.0, abs(one), abs(other))
