"""Pages of long lists, newest first, whatever they are filtered by, in bounded time.

One indexed condition is answered by its index. Several are answered by looking through the rows of
the one that has the fewest, and never through more than MOST of them or for longer than SECONDS,
or than a third of it once the page is full: what was not looked at is told, and where to go on.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from django.db.models import Model, Q, QuerySet

MOST = 10_000
SECONDS = 0.06
_FIRST_CHUNK, _LARGEST_CHUNK = 200, 1_000

Rows = QuerySet[Any]


@dataclass(frozen=True)
class Condition:
    """What a list is filtered by.

    `index` is "ordered" where one index has such rows in the order of their keys, "found" where
    one has them in another order, and "" where none has them. Matching rows lie in
    `low <= key < high`.
    """

    q: Q
    index: Literal["", "ordered", "found"] = ""
    low: Any = None
    high: Any = None

    @property
    def is_range(self) -> bool:
        return self.low is not None or self.high is not None


@dataclass(frozen=True)
class Place:
    """Where a page begins and which way it goes. Without a key, at the very end of the list."""

    key: Any = None
    is_inclusive: bool = False
    descending: bool = True

    def ahead(self, rows: Rows) -> Rows:
        """The rows from here on, in order."""
        ordered = rows.order_by("-pk" if self.descending else "pk")
        if self.key is None:
            return ordered
        side = "lt" if self.descending else "gt"
        return ordered.filter(**{f"pk__{side}{'e' if self.is_inclusive else ''}": self.key})


@dataclass(frozen=True)
class Page:
    """At most the asked number of rows in the order of the place, and whether more may follow.

    `count` is of all rows that match where `is_exact`, at most MOST + 1; else there are at least
    so many. `looked_at` is how many rows were looked through, and `last` the last of them where
    the bound has cut: the list goes on behind it.
    """

    rows: list[Any]
    has_more: bool
    count: int
    is_exact: bool
    looked_at: int = 0
    last: Any = None


def find(
    base: Rows, listed: Rows, conditions: Sequence[Condition], place: Place, size: int
) -> Page:
    """A page of `listed`, which is `base` filtered by all of the conditions."""
    selective = [condition for condition in conditions if not condition.is_range]
    bounded = _within(listed, conditions)
    if not selective or (len(selective) == 1 and selective[0].index == "ordered"):
        rows = list(place.ahead(bounded)[: size + 1])
        count = bounded.order_by().values("pk")[: MOST + 1].count()
        return Page(rows[:size], len(rows) > size, count, is_exact=True)
    deadline = time.monotonic() + SECONDS
    keys = _fewest(base, selective)
    if keys is None:
        return _walk(base, bounded, conditions, place, size, deadline)
    return _look_through(keys, bounded, place, size, deadline)


def _within(rows: Rows, conditions: Iterable[Condition]) -> Rows:
    for condition in conditions:
        if condition.low is not None:
            rows = rows.filter(pk__gte=condition.low)
        if condition.high is not None:
            rows = rows.filter(pk__lt=condition.high)
    return rows


def _fewest(base: Rows, conditions: Iterable[Condition]) -> list[Any] | None:
    """The keys of the rows of the indexed condition that has the fewest; None if all have many."""
    best, fewest = None, MOST + 1
    for condition in conditions:
        if condition.index:
            found = base.filter(condition.q).order_by().values("pk")
            if (count := found[: MOST + 1].count()) < fewest:
                best, fewest = condition, count
    if best is None:
        return None
    # One more than were counted just now may have come since; what is left out then is newer.
    found = base.filter(best.q).order_by().values_list("pk", flat=True)
    return sorted(found[: MOST + 1])


def _look_through(keys: list[Any], listed: Rows, place: Place, size: int, deadline: float) -> Page:
    """The page out of these keys, from its place on first, and then how many there are in all."""
    if place.key is None:
        split = len(keys) if place.descending else 0
    elif place.descending == place.is_inclusive:
        split = bisect_right(keys, place.key)
    else:
        split = bisect_left(keys, place.key)
    ahead, behind = keys[:split][::-1], keys[split:]
    if not place.descending:
        ahead, behind = keys[split:], keys[:split]
    matching, looked_at, last = _sift(_chunks(ahead), listed, deadline)
    counted, more, cut = _sift(_chunks(behind), listed, deadline)
    return _page(
        matching,
        listed,
        size,
        count=len(matching) + len(counted),
        is_exact=last is None and cut is None,
        looked_at=looked_at + more,
        last=last,
    )


def _walk(
    base: Rows,
    listed: Rows,
    conditions: Sequence[Condition],
    place: Place,
    size: int,
    deadline: float,
) -> Page:
    """The page out of the next MOST rows of an index that has them in order."""
    ordered = [condition.q for condition in conditions if condition.index == "ordered"]
    rows = _sparsest(
        [place.ahead(_within(base.filter(q), conditions)) for q in ordered or [Q()]],
        place.descending,
    )
    pieces = _pieces(rows, place.descending)
    matching, looked_at, last = _sift(pieces, listed, deadline, enough=size)
    return _page(
        matching,
        listed,
        size,
        count=len(matching),
        is_exact=last is None and place.key is None,
        looked_at=looked_at,
        last=last,
    )


def _sparsest(each: list[Rows], descending: bool) -> Rows:
    """Of several indexes the one whose next rows reach furthest: it has the fewest to look through.

    All of them have every row that matches.
    """
    if len(each) == 1:
        return each[0]
    reached: list[tuple[Any, Rows]] = []
    for rows in each:
        ends = rows.values_list("pk", flat=True)[_FIRST_CHUNK - 1 : _FIRST_CHUNK]
        if (key := next(iter(ends), None)) is None:
            return rows
        reached.append((key, rows))
    furthest = min if descending else max
    return furthest(reached, key=lambda found: found[0])[1]


def _page(matching: list[Any], listed: Rows, size: int, *, count: int, **told: Any) -> Page:
    found = listed.model._default_manager.none() if not matching else listed
    by_key = {row.pk: row for row in found.filter(pk__in=matching[:size])}
    rows = [by_key[key] for key in matching[:size] if key in by_key]
    last = told.pop("last")
    # What is behind a whole page is reached by its own last row.
    return Page(
        rows, len(matching) > size, count, last=None if len(matching) > size else last, **told
    )


def _sift(
    chunks: Iterator[tuple[list[Any], bool]], listed: Rows, deadline: float, enough: int = MOST
) -> tuple[list[Any], int, Any]:
    """The keys that match, how many were looked at, and the last one where time has cut.

    With more than `enough`, which fill a page, it is cut sooner.
    """
    matching: list[Any] = []
    looked_at = 0
    for chunk, is_last in chunks:
        if chunk:
            found = set(listed.filter(pk__in=chunk).order_by().values_list("pk", flat=True))
            matching += [key for key in chunk if key in found]
            looked_at += len(chunk)
        if is_last:
            return matching, looked_at, None
        until = deadline - SECONDS * 2 / 3 if len(matching) > enough else deadline
        if looked_at >= MOST or time.monotonic() > until:
            return matching, looked_at, chunk[-1]
    return matching, looked_at, None


def _chunks(keys: list[Any]) -> Iterator[tuple[list[Any], bool]]:
    start, size = 0, _FIRST_CHUNK
    while start < len(keys):
        chunk = keys[start : start + size]
        start += size
        yield chunk, start >= len(keys)
        size = min(2 * size, _LARGEST_CHUNK)


def _pieces(rows: QuerySet[Model], descending: bool) -> Iterator[tuple[list[Any], bool]]:
    size = _FIRST_CHUNK
    side = "pk__lt" if descending else "pk__gt"
    while True:
        chunk = list(rows.values_list("pk", flat=True)[:size])
        yield chunk, len(chunk) < size
        if len(chunk) < size:
            return
        rows = rows.filter(**{side: chunk[-1]})
        size = min(2 * size, _LARGEST_CHUNK)
