"""Data frames of pandas as data, without importing pandas for programs that do not use it."""

import sys

from . import charts

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
    return {
        str(name): [_cell(pandas, each) for each in frame.iloc[:, place].tolist()]
        for place, name in enumerate(frame.columns)
    }


def _cell(pandas: "Any", value: "Any") -> object:
    if value is None or value is pandas.NaT or value is getattr(pandas, "NA", None):
        return None
    if isinstance(value, (bool, int, str)):
        return value
    return charts.plain(value)
