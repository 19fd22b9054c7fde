"""Data frames of pandas as data, without importing pandas for programs that do not use it."""

import sys

from . import charts, listed

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

# Of more there is what pandas shows of it alone.
MOST_VALUES = 20_000


def columns(value: object) -> "dict[str, list[object]] | None":
    """The columns of a data frame of pandas. None for what is none, or has too many values."""
    pandas: "Any" = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, getattr(pandas, "DataFrame", ())):
        return None
    frame: "Any" = value
    if frame.size > MOST_VALUES:
        return None
    found: "dict[str, list[object]]" = {}
    several = listed.Plain(MOST_VALUES - frame.size)
    for place, name in enumerate(_distinct(frame.columns)):
        values = frame.iloc[:, place].tolist()
        found[name] = [_cell(pandas, each, several) for each in values]
    return found


def _distinct(names: "Any") -> "list[str]":
    """The columns' names as text. Of two with one name the second is `name.1`, as in read_csv."""
    texts = [charts.text(name) for name in names]
    taken = set(texts)
    found: "dict[str, None]" = {}
    for text in texts:
        name, number = text, 0
        while name in found or (number and name in taken):
            number += 1
            name = f"{text}.{number}"
        found[name] = None
    return list(found)


def _cell(pandas: "Any", value: "Any", several: listed.Plain) -> object:
    """A cell as JSON has it; what has no JSON as text, so that one such cell loses no other."""
    if value is None or value is pandas.NaT or value is getattr(pandas, "NA", None):
        return None
    if isinstance(value, (bool, int, str)):
        return value
    try:
        if isinstance(value, (list, tuple, dict)):
            return several.of(value)
        if getattr(value, "ndim", 0) and value.size <= MOST_VALUES:
            return several.of(value.tolist())
    except Exception:
        return charts.text(value)
    return charts.plain(value)
