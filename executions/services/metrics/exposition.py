"""Prometheus' text format (0.0.4).

A label's value may be anything: what would end it, or the line, is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPED = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_MOST_CHARACTERS = 200


@dataclass
class Family:
    """One metric: its name, its kind, what it tells, and its samples.

    A sample's suffix is what a histogram's parts are told apart by.
    """

    name: str
    kind: str
    help: str
    samples: list[tuple[str, Mapping[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, suffix: str = "", **labels: str) -> None:
        """Nothing is added for None: what is not known is not zero."""
        if value is not None:
            self.samples.append((suffix, labels, float(value)))

    def add_histogram(
        self, buckets: Iterable[tuple[float, int]], total: float, **labels: str
    ) -> None:
        """`buckets` are (upper bound, how many in this one alone), every bound once, in order."""
        seen = 0
        for bound, number in buckets:
            seen += number
            self.add(seen, "_bucket", **labels, le=_number(bound))
        self.add(total, "_sum", **labels)
        self.add(seen, "_count", **labels)


def write(families: Iterable[Family]) -> str:
    """The whole answer. A family without samples is left out."""
    return "".join(f"{line}\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for suffix, labels, value in family.samples:
        pairs = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        yield (
            f"{family.name}{suffix}{{{pairs}}} {_number(value)}"
            if pairs
            else (f"{family.name}{suffix} {_number(value)}")
        )


def _escaped(text: str) -> str:
    # Lone surrogates have no UTF-8, and other line ends than \n end no line of the format.
    text = text[:_MOST_CHARACTERS].encode("utf-8", "replace").decode()
    return text.translate(_ESCAPED)


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    if math.isnan(value):
        return "NaN"
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(value)
