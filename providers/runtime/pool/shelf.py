"""A shelf: the idle sandboxes of one template (and owner of a kernel) and how their making goes;
all shelves of a pool, what they have too little of, and what too much.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import math
import statistics
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from providers.errors import CreationFailed, InvalidConfiguration, RateLimited, SandboxError
from providers.runtime.pool.launcher import Launcher, Starter
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import PoolSettings
from providers.runtime.pool.template import Template

# A template nobody asked for in this time is no longer kept warm (the first one always is).
WARM_SECONDS = 300.0

# For so long after a caller had to wait, more are kept warm.
BURST_SECONDS = 30.0

LONGEST_BACKOFF_SECONDS = 5.0

# In an owner's kernel another one costs little: one is for the next call, more for who has to wait.
OWNERS_WARM, OWNERS_BURST = 1, 2

# What is made in an owner's kernel and what runs in it are one to the machine, which cannot weigh
# them: the run goes first for so long.
OWNERS_REST_SECONDS = 0.03

# A warm sandbox that ends before it is this old counts as a start that failed.
INFANT_SECONDS = 1.0

# From so many failures in a row on, callers are told at once instead of waiting.
FAILURES_THAT_COUNT = 3


class Shelf:
    """`idle` sandboxes have run nothing; `kept` ones are clean, and their former owner's alone.

    One with an `owner` has sandboxes made in a kernel of that owner's, by a `starter` of its own.
    """

    def __init__(
        self,
        name: str,
        template: Template,
        starter: Starter,
        *,
        always_warm: bool = False,
        owner: str = "",
        most_idle: int | None = None,
    ) -> None:
        """`most_idle` is how many are kept ready at most, whatever the settings."""
        self.name = name
        self.template = template
        self.starter = starter
        self.owner = owner
        self.idle: deque[Sandbox] = deque()
        self.kept: deque[Sandbox] = deque()
        self.starting = 0
        self.started = 0
        self.failed = 0
        self.restarts = 0
        self.not_before = 0.0
        self.failures = 0
        # Whether its owner's code has been in the kernel that its sandboxes are made in.
        self.has_code = False
        self._doubted = 0
        self._always_warm = always_warm
        self._most_idle = most_idle
        self._last_asked = self._last_waited = float("-inf")
        self.creation_seconds: deque[float] = deque(maxlen=100)
        self._error: SandboxError | None = None

    def asked(self) -> None:
        """Somebody wants a sandbox of this template."""
        self._last_asked = time.monotonic()

    def handed_out(self) -> None:
        """One is of use to somebody, so they do not all end at once."""
        self._doubted = 0

    def waited(self) -> None:
        """There was none ready."""
        self._last_waited = time.monotonic()

    def target(self, settings: PoolSettings) -> int:
        """How many should be idle now."""
        now = time.monotonic()
        pressed = now - self._last_waited < BURST_SECONDS
        if self.owner:
            return (OWNERS_BURST if pressed else OWNERS_WARM) if self.is_asked_for else 0
        if not self._always_warm and not self.is_asked_for:
            return settings.minimum if self._most_idle is None else 0
        if settings.isolation == "tenant-kernel":
            # Those of no tenant and of sessions are made here, and one shows that it can be done.
            return max(1, settings.minimum)
        wanted = max(settings.size, settings.minimum) + (settings.burst if pressed else 0)
        return wanted if self._most_idle is None else min(wanted, self._most_idle)

    @property
    def is_asked_for(self) -> bool:
        """Whether somebody wanted one lately."""
        return time.monotonic() - self._last_asked < WARM_SECONDS

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing here, nor about to be."""
        return not (self.idle or self.kept or self.starting)

    def take(self, owner: str) -> Sandbox | None:
        """A living sandbox for this owner: the one it used last, else one that nobody has used."""
        # The one used last is warmest, and those not needed grow old. The dead are left for who
        # watches their end.
        for sandbox in (*reversed(self.kept), *self.idle):
            if sandbox.owner in ("", owner) and sandbox.silent:
                self.remove(sandbox)
                return sandbox
        return None

    def remove(self, sandbox: Sandbox) -> bool:
        """Take out this one. False when it is not here."""
        for place in (self.idle, self.kept):
            if sandbox in place:
                place.remove(sandbox)
                return True
        return False

    def start_succeeded(self, seconds: float) -> None:
        self.started += 1
        # Not forgotten before one has been of use: they may all end as soon as they are there.
        self._doubted = max(self._doubted, self.failures)
        self.failures = 0
        self._error = None
        self.creation_seconds.append(seconds)

    def start_failed(self, error: SandboxError) -> float:
        """Seconds until the next attempt, longer each time."""
        self.failed += 1
        self.failures += 1
        self._error = error
        delay = self._backoff()
        self.not_before = time.monotonic() + delay
        return delay

    def _backoff(self) -> float:
        return min(LONGEST_BACKOFF_SECONDS, 0.1 * 2.0 ** min(self.failures, 10))

    def ended_unused(self, sandbox: Sandbox) -> float:
        """Seconds until it should be replaced. Several that end at a time count once."""
        self.restarts += 1
        now = time.monotonic()
        if now - sandbox.started_at < INFANT_SECONDS and now >= self.not_before:
            self.failures = max(self.failures, self._doubted) + 1
            self.not_before = now + self._backoff()
            if self.failures >= FAILURES_THAT_COUNT:
                self._error = CreationFailed("Sandboxes end right after their start.")
        return max(0.0, self.not_before - now)

    def failure(self) -> SandboxError | None:
        """Why sandboxes cannot be started, for one caller; None while they can, or may again."""
        if self._error is None:
            return None
        error = copy.copy(self._error)
        if self.has_code:
            # The code may have brought it about: nothing that others' provider is judged by.
            error = RateLimited(
                f"No sandbox could be started in the tenant's kernel: {error.message}"
            )
        error.retry_after = max(1.0, self.not_before - time.monotonic())
        return error

    @property
    def is_failing(self) -> bool:
        """So many starts failed that it would be no use to wait for the next one."""
        return self.failures >= FAILURES_THAT_COUNT and time.monotonic() < self.not_before

    def stats(self, settings: PoolSettings) -> dict[str, Any]:
        return {
            "target": self.target(settings),
            "idle": len(self.idle),
            "kept": len(self.kept),
            "creating": self.starting,
            "started": self.started,
            "failed": self.failed,
            "restarts": self.restarts,
            "failing": self._error.message if self._error else "",
            "creation_ms": _milliseconds(self.creation_seconds),
        }


def describe(shelves: Collection[Shelf], settings: PoolSettings) -> dict[str, Any]:
    """The figures of all shelves together, and of each."""
    summed = ("idle", "kept", "creating", "started", "failed", "restarts")
    each: dict[str, dict[str, Any]] = {}
    for shelf in shelves:
        stats = shelf.stats(settings)
        template, _, _ = shelf.name.partition(":")
        known = each.setdefault(template, stats)
        if known is not stats:
            # Of all owners together: who they are is not for everybody.
            known |= {name: known[name] + stats[name] for name in ("target", *summed)}
            known["failing"] = known["failing"] or stats["failing"]
    return {
        **{name: sum(stats[name] for stats in each.values()) for name in summed},
        "failing": [name for name, stats in each.items() if stats["failing"]],
        "creation_ms": _milliseconds([s for shelf in shelves for s in shelf.creation_seconds]),
        "templates": each,
    }


def _milliseconds(seconds: Collection[float]) -> float | None:
    """The median, None when there is nothing to take it of."""
    return round(statistics.median(seconds) * 1000, 1) if seconds else None


class Shelves(dict[str, Shelf]):
    """By the name under which callers wait for what is on them."""

    def __init__(self, launcher: Launcher, templates: Mapping[str, Template]) -> None:
        super().__init__(
            (name, Shelf(name, template, launcher, always_warm=index == 0))
            for index, (name, template) in enumerate(templates.items())
        )
        self._templates = dict(templates)
        self._launchers = dict.fromkeys(templates, launcher)
        # Templates that are there from the start, whose shelves stay.
        self._lasting = frozenset(templates)

    def add(self, template: Template, launcher: Launcher) -> None:
        """Have one more template, whose sandboxes this launcher starts, while it is in use."""
        self._templates[template.name], self._launchers[template.name] = template, launcher
        if template.name not in self:
            self[template.name] = Shelf(template.name, template, launcher, most_idle=OWNERS_WARM)

    def find(self, template: str, owner: str = "") -> Shelf:
        """That of a template, or of a template in the kernel of this owner. Raises SandboxError."""
        if template not in self._templates:
            raise InvalidConfiguration(f"There is no template {template!r}.", field="language")
        if not owner:
            return self[template]
        # No template's name has a colon.
        name = f"{template}:{owner}"
        if name not in self:
            starter = self._launchers[template].for_owner(owner)
            shelf = Shelf(name, self._templates[template], starter, owner=owner)
            shelf.has_code = any(each.has_code for each in self._of(owner))
            self[name] = shelf
        return self[name]

    def handed_out(self, shelf: Shelf) -> None:
        """One of its sandboxes is in its owner's hands."""
        shelf.handed_out()
        if shelf.owner and not shelf.has_code:
            for each in self._of(shelf.owner):
                each.has_code = True

    def _of(self, owner: str) -> list[Shelf]:
        return [shelf for shelf in self.values() if shelf.owner == owner]

    def forget(self, used: Collection[str]) -> None:
        """Keep nothing of owners and added templates that were not asked for long, unless it is
        `used`."""
        for name, shelf in list(self.items()):
            if (
                (shelf.owner or name not in self._lasting)
                and shelf.is_empty
                and not shelf.is_asked_for
                and name not in used
            ):
                del self[name]
        known = {shelf.template.name for shelf in self.values()}
        for name in [each for each in self._templates if each not in known]:
            del self._templates[name], self._launchers[name]


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
