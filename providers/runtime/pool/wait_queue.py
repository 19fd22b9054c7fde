"""The bounded queue of callers who wait for a sandbox, fair to owners, and how much of a pool one
owner may hold.

An owner may hold four times what is free: alone 13 of 16, two of them 7 each, three of them 4. So
nobody has to know who else there is, or to take anything back (dynamic thresholds, as switches
share their buffers: Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998). Up to four
sandboxes are all anybody's: to hold one of so few back would cost more than it saves.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from providers.runtime.pool.sandbox import Sandbox


class QueueFull(Exception):
    """There is no room, and nobody in it holds so much that the newcomer may push in."""


@dataclass(eq=False)
class Waiter:
    """One caller in the line, and what it will get."""

    owner: str
    template: str
    future: asyncio.Future[Sandbox]


class WaitQueue:
    """Serves owners in turn, each owner's callers as they came.

    However many callers one owner sends, another owner's first is served second.
    """

    def __init__(self, more_for: Callable[[str], int] = lambda owner: sys.maxsize) -> None:
        """`more_for` says how many of an owner's callers may be served now."""
        self._more_for = more_for
        # The owner whose turn is next comes first.
        self._owners: dict[str, deque[Waiter]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._owners.values()))

    def __iter__(self) -> Iterator[Waiter]:
        """Everybody who may be served, in the order of service."""
        rows = [self._next_of(owner) for owner in self._owners]
        for row in itertools.zip_longest(*rows):
            yield from (place for place in row if place)

    def _next_of(self, owner: str) -> list[Waiter]:
        # Who gave up a moment ago has not left yet.
        waiting = (place for place in self._owners[owner] if not place.future.done())
        return list(itertools.islice(waiting, self._more_for(owner)))

    def everybody(self) -> list[Waiter]:
        """Whether they may be served or not."""
        return [place for places in self._owners.values() for place in places]

    def count(self, template: str) -> int:
        """How many wait for this template."""
        return sum(place.template == template for place in self)

    def join(self, owner: str, template: str, bound: int) -> tuple[Waiter, Waiter | None]:
        """A new place, and the place it displaced, if any. Raises QueueFull.

        Beyond `bound`, who has the most places loses the last one to somebody who has fewer.
        """
        displaced = None
        if len(self) >= bound:
            greediest = max(self._owners.values(), key=len, default=deque[Waiter]())
            if len(greediest) <= len(self._owners.get(owner, ())) + 1:
                raise QueueFull
            displaced = greediest[-1]
            self.leave(displaced)
        place = Waiter(owner, template, asyncio.get_running_loop().create_future())
        self._owners.setdefault(owner, deque()).append(place)
        return place, displaced

    def leave(self, place: Waiter) -> None:
        """Give up a place. Nothing happens when it is not in the line any more."""
        places = self._owners.get(place.owner)
        if places and place in places:
            places.remove(place)
            if not places:
                del self._owners[place.owner]

    def first(self, template: str, owner: str | None = None) -> Waiter | None:
        """Who is next for this template, of this owner or of all."""
        for place in self:
            if place.template == template and owner in (None, place.owner):
                return place
        return None

    def serve(self, place: Waiter) -> None:
        """Take a place out of the line; its owner's next turn comes after everybody else's."""
        self.leave(place)
        rest = self._owners.pop(place.owner, None)
        if rest:
            self._owners[place.owner] = rest


TIMES_FREE = 4


class Shares:
    """Counts what each owner holds of the sandboxes of one pool."""

    def __init__(self) -> None:
        self._held: Counter[str] = Counter()

    @property
    def held(self) -> int:
        return self._held.total()

    def give(self, owner: str) -> None:
        self._held[owner] += 1

    def take_back(self, owner: str) -> None:
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]

    def more_for(self, owner: str, capacity: int) -> int:
        """How many more of a pool of this capacity the owner may be given now."""
        free = capacity - self._held.total()
        return max(0, math.ceil((TIMES_FREE * free - self._held[owner]) / (TIMES_FREE + 1)))
