"""What a pool lacks: sandboxes for who waits, and for the shelves to be as full as they should."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from providers.runtime.pool.settings import PoolSettings
from providers.runtime.pool.shelf import Shelf
from providers.runtime.pool.waiting import Line, Place


def without_start(line: Line, shelves: Mapping[str, Shelf]) -> list[Place]:
    """Who waits and has no start under way on their behalf, in their order."""
    coming = Counter({name: shelf.starting for name, shelf in shelves.items()})
    coming.subtract(place.template for place in line)
    found = []
    for place in reversed(list(line)):
        if coming[place.template] < 0:
            coming[place.template] += 1
            found.append(place)
    return found[::-1]


def missing(
    line: Line, shelves: Mapping[str, Shelf], settings: PoolSettings
) -> list[tuple[Shelf, bool]]:
    """A shelf for every sandbox that is not there, and whether a caller waits for it.

    Callers come first, in their order.
    """
    found = [(shelves[place.template], True) for place in without_start(line, shelves)]
    for shelf in shelves.values():
        spare = max(0, shelf.starting - line.count(shelf.name))
        lacking = shelf.target(settings) - len(shelf.idle) - spare
        found += [(shelf, False)] * lacking
    return found
