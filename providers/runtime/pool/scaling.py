"""What a pool has too little of (for who waits and for full shelves) and too much of (old, surplus,
or in the way).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping

from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import PoolSettings
from providers.runtime.pool.shelf import Shelf
from providers.runtime.pool.wait_queue import Waiter, WaitQueue


def without_start(line: WaitQueue, shelves: Mapping[str, Shelf]) -> list[Waiter]:
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
    line: WaitQueue, shelves: Mapping[str, Shelf], settings: PoolSettings
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


# Of one template, so that it is not without warm sandboxes because all are of the same age.
MOST_EXPIRED_AT_ONCE = 2


def take_least_used(shelves: Collection[Shelf]) -> Sandbox | None:
    """Take out the one used longest ago, of those kept for an owner while there are any."""
    kept = [(sandbox, shelf) for shelf in shelves for sandbox in shelf.kept]
    idle = [(sandbox, shelf) for shelf in shelves for sandbox in shelf.idle]
    if not (kept or idle):
        return None
    sandbox, shelf = min(kept or idle, key=lambda each: each[0].used_at)
    shelf.remove(sandbox)
    return sandbox


def take_beyond(shelves: Collection[Shelf], settings: PoolSettings) -> Iterator[Sandbox]:
    """Take out what the settings do not ask for."""
    for shelf in shelves:
        while len(shelf.idle) > shelf.target(settings):
            yield shelf.idle.popleft()
        if settings.isolation != "tenant":
            while shelf.kept:
                yield shelf.kept.popleft()


def take_older(shelves: Collection[Shelf], oldest: float) -> Iterator[Sandbox]:
    """Take out a few that were started before `oldest`, by time.monotonic()."""
    for shelf in shelves:
        old = [*shelf.kept, *shelf.idle]
        for sandbox in [each for each in old if each.started_at < oldest][:MOST_EXPIRED_AT_ONCE]:
            shelf.remove(sandbox)
            yield sandbox
