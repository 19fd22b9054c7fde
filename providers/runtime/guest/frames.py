"""Data frames of pandas as data, without importing pandas for programs that do not use it.

Lists and dicts as JSON, as E2B's code interpreter gives them beside their repr().
"""

import math
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
    found: "dict[str, list[object]]" = {}
    several = Plain(MOST_VALUES - frame.size)
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


def _cell(pandas: "Any", value: "Any", several: "Plain") -> object:
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


# Of more there is the repr() alone.
# Other whole numbers have no JSON at E2B.
_LEAST, _MOST = -(2**63), 2**64


def as_json(value: "list[Any] | dict[Any, Any]") -> "Any":
    """The same as JSON has it.

    Raises TypeError for one with what has no JSON, and ValueError for too many values.
    """
    return Plain().of(value)


class Plain:
    """Makes JSON of values, of so many together."""

    def __init__(self, left: int = MOST_VALUES) -> None:
        self._left = left

    def _take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError("too many values")

    def of(self, value: "Any") -> object:
        """Raises as `as_json` does."""
        self._take(1)
        if value is None or isinstance(value, (bool, str)):
            return value
        if isinstance(value, int):
            if not _LEAST <= value < _MOST:
                raise TypeError("a whole number of more than 64 bits")
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else None
        if isinstance(value, (list, tuple)):
            return [self.of(each) for each in value]
        if isinstance(value, dict):
            return {_key(name): self.of(each) for name, each in value.items()}
        kind = type(value)
        if fields := getattr(kind, "__dataclass_fields__", None):
            return {name: self.of(getattr(value, name)) for name in fields if name[0] != "_"}
        if kind.__module__ == "numpy" and hasattr(value, "tolist"):
            # Before there is a list of it.
            self._take(value.size)
            return self.of(value.tolist())
        return _text(value)


def _key(name: "Any") -> str:
    if isinstance(name, str):
        return name
    if name is None or isinstance(name, bool):
        return {None: "null", True: "true", False: "false"}[name]
    return str(name) if isinstance(name, (int, float)) else _text(name)


def _text(value: "Any") -> str:
    module = type(value).__module__
    if module == "datetime" and hasattr(value, "isoformat"):
        return str(value.isoformat())
    if module == "uuid":
        return str(value)
    raise TypeError(f"a {type(value).__name__} cannot be JSON")
