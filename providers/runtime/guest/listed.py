"""Lists and dicts as JSON, as E2B's code interpreter gives them beside their repr()."""

import math

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Any

# Of more there is the repr() alone.
MOST_VALUES = 20_000
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
