"""A gate is the way of one sandbox to the network: its rules, its budget, and its records."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from providers.credentials import Credential
from providers.network import Attempt, Network, Target, Verdict, with_credentials
from providers.runtime.network.masking import Mask

if TYPE_CHECKING:
    from providers.runtime.network.authority import Authority

# Of all sandboxes of one tenant together.
MOST_OF_OWNER = 256
# Beyond its budget a gate answers so many more connections at once, to say so.
MOST_REFUSALS = 16
_MOST_TEXT = 500
# Versions of credentials whose values are masked, those that hold no more among them.
_MOST_KNOWN = 500
_MOST_MASKS = 16

Clock = Callable[[], float]


@dataclass(eq=False)
class Hold:
    """A connection of a program. `end` breaks it off."""

    end: Callable[[], None]
    target: Target | None = None
    # What of the budget it was too many for.
    exceeded: str = ""
    # The program has all of its answer, and nothing is on record of it yet.
    is_answered: bool = False

    def note_answer(self) -> None:
        self.is_answered = True


class Gate:
    """Judges what a sandbox asks for. Lives in one event loop."""

    def __init__(
        self,
        network: Network,
        record: Callable[[Attempt], None],
        owner: str = "",
        owners: Counter[str] | None = None,
        clock: Clock = time.monotonic,
        authority: Authority | None = None,
    ) -> None:
        """`owners` counts the connections of each tenant. Without an `authority` no TLS is opened,
        and what needs that is refused."""
        self.network = network
        self._authority = authority
        self._known: dict[tuple[object, ...], Credential] = {}
        self._sent = Network(())
        # Of answers that have begun, and some more: a program may make up hosts without number.
        self._masks: WeakValueDictionary[str, Mask] = WeakValueDictionary()
        self._kept: deque[Mask] = deque(maxlen=_MOST_MASKS)
        self._learn(network.credentials)
        self._record = record
        self.owner = owner
        self._owners = Counter() if owners is None else owners
        self._clock = clock
        self._holds: set[Hold] = set()
        self._recent: deque[float] = deque()
        self._refusals: deque[float] = deque()
        self._bytes = 0
        self._is_closed = False

    @property
    def is_crowded(self) -> bool:
        """Whether a connection is closed without an answer."""
        return len(self._holds) >= self.network.budget.connections + MOST_REFUSALS

    @property
    def is_closed(self) -> bool:
        """Whether no connection is served any more."""
        return self._is_closed

    def add(self, end: Callable[[], None]) -> Hold:
        """Count a connection, until `remove`."""
        hold = Hold(end)
        most = self.network.budget.connections
        if sum(not each.exceeded for each in self._holds) >= most:
            hold.exceeded = f"This sandbox may have {most} connections at once."
        elif self._owners[self.owner] >= MOST_OF_OWNER:
            hold.exceeded = f"A tenant may have {MOST_OF_OWNER} connections at once."
        self._holds.add(hold)
        self._owners[self.owner] += 1
        return hold

    def remove(self, hold: Hold) -> None:
        self._holds.discard(hold)
        self._owners[self.owner] -= 1

    def over_budget(self, hold: Hold) -> str:
        """Count a request of a connection; return what of the budget it exceeds, "" for nothing."""
        budget, now = self.network.budget, self._clock()
        if hold.exceeded:
            return hold.exceeded
        if self._bytes >= budget.bytes:
            return f"This sandbox has used the {budget.bytes} bytes that it may transfer."
        while self._recent and self._recent[0] <= now - 60:
            self._recent.popleft()
        if len(self._recent) >= budget.connections_per_minute:
            return f"This sandbox may begin {budget.connections_per_minute} connections a minute."
        self._recent.append(now)
        return ""

    @property
    def is_spent(self) -> bool:
        """Whether more bytes have passed than the budget has."""
        return self._bytes > self.network.budget.bytes

    def count(self, size: int) -> bool:
        """Count bytes that pass. Whether the budget has them."""
        self._bytes += size
        return not self.is_spent

    def judge(self, target: Target) -> Verdict:
        return self.network.judge(target)

    def opens_tls(self, host: str, port: int) -> bool:
        """Whether requests over TLS to it are read."""
        return self.network.opens_tls(host, port)

    def context_for(self, host: str) -> ssl.SSLContext | None:
        """Return what a server needs to be this host for the sandbox, None without an authority."""
        return self._authority.context_for(host) if self._authority else None

    def mask_for(self, host: str) -> Mask | None:
        """Return what masks the values that this host may have been sent, None for no values."""
        if (mask := self._masks.get(host)) is None and (values := self._values_of(host)):
            mask = self._masks[host] = Mask(values)
            self._kept.append(mask)
        return mask

    def _values_of(self, host: str) -> list[str]:
        return [each.value.reveal() for each in self._sent.credentials_of(host)]

    def _learn(self, credentials: Iterable[Credential]) -> None:
        """Mask the values of these, too."""
        for each in credentials:
            # Those that hold are the last to be forgotten.
            key = each.id, each.version, each.rules
            self._known.pop(key, None)
            self._known[key] = each
        for oldest in list(self._known)[:-_MOST_KNOWN]:
            del self._known[oldest]
        self._sent = Network((), credentials=tuple(self._known.values()))

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        """Put in other versions from now on, by id; None takes one away."""
        self.change(with_credentials(self.network, changes))

    def change(self, network: Network, authority: Authority | None = None) -> None:
        """Hold these rules from now on. Connections that they do not allow end."""
        hosts = {hold.target.host for hold in self._holds if hold.target is not None}
        unmasked = {host for host in hosts if self.mask_for(host) is None}
        self.network = network
        self._authority = self._authority or authority
        self._learn(network.credentials)
        for host, mask in list(self._masks.items()):
            # Answers that have begun are masked by it.
            mask.change(self._values_of(host))
        revealing = {host for host in unmasked if self.mask_for(host) is not None}
        for hold in list(self._holds):
            target = hold.target
            if target and (target.host in revealing or not network.judge(target).is_allowed):
                hold.end()

    def close(self) -> None:
        """End every connection, and those that are accepted but not served yet."""
        self._is_closed = True
        for hold in list(self._holds):
            hold.end()

    async def settle(self) -> None:
        """Wait until what was answered is on record."""
        while any(hold.is_answered for hold in self._holds):
            await asyncio.sleep(0)

    async def ended(self) -> None:
        """Wait until no connection is left."""
        while self._holds:
            await asyncio.sleep(0.005)

    def record(self, attempt: Attempt) -> None:
        """Record it, unless refusals come faster than connections may."""
        if attempt.why in ("budget", "malformed"):
            now = self._clock()
            while self._refusals and self._refusals[0] <= now - 60:
                self._refusals.popleft()
            if len(self._refusals) >= self.network.budget.connections_per_minute:
                return
            self._refusals.append(now)
        self._record(attempt)


def shown(text: str) -> str:
    """A text of a program, fit for a record."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:_MOST_TEXT])
