"""Which kept sandboxes there are: under which name, whose, and until when."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from providers.errors import InvalidConfiguration, KeptFull, KeptSandboxLost, before_the_code
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.wait_queue import Shares

# The longest that a sandbox may be kept without a word, and what is taken where nobody says.
LONGEST_LEASE_SECONDS = 24 * 3600.0
LEASE_SECONDS = 600.0
# When there may be room again cannot be known: sessions last as long as somebody wants them.
RETRY_AFTER_SECONDS = 10.0


@dataclass(eq=False)
class Session:
    """A kept sandbox in its owner's hands. `lent_by` is the pool it counts in."""

    ref: str
    owner: str
    kept: Kept
    lent_by: object
    expires_at: float
    opened_at: float = field(default_factory=time.monotonic)

    def renew(self, seconds: float) -> None:
        """Keep it for so long from now on. Raises InvalidConfiguration."""
        self.expires_at = time.monotonic() + lease(seconds)

    @property
    def idle_seconds(self) -> float:
        return 0.0 if self.kept.busy else time.monotonic() - self.kept.used_at


def lease(seconds: object) -> float:
    """How long a sandbox is to be kept without a word. Raises InvalidConfiguration."""
    if type(seconds) not in (int, float) or not 0 < seconds <= LONGEST_LEASE_SECONDS:  # type: ignore[operator]
        raise InvalidConfiguration(
            f"seconds: Must be more than 0 and at most {LONGEST_LEASE_SECONDS:g}.", field="seconds"
        )
    return float(seconds)  # type: ignore[arg-type]


class Sessions:
    """Refs are of this object: those of another service, or of this one before its restart, are
    told as lost. `end` is called for what is over."""

    def __init__(self, end: Callable[[Session], None]) -> None:
        self._boot = secrets.token_hex(4)
        self._end = end
        self._sessions: dict[str, Session] = {}
        self._shares: dict[object, Shares] = {}

    def reserve(self, lent_by: object, owner: str, most: int) -> None:
        """Count one more for this owner, of `most` in this pool. Raises KeptFull.

        Of what is free an owner may have four fifths, as of a pool's sandboxes. Whoever is refused
        is told which of his own was idle the longest.
        """
        if not self._shares.setdefault(lent_by, Shares()).more_for(owner, most):
            raise KeptFull(self._refusal(lent_by, owner, most), retry_after=RETRY_AFTER_SECONDS)
        self.count(lent_by, owner)

    def count(self, lent_by: object, owner: str) -> None:
        """Count one that is there already, however many there may be."""
        self._shares.setdefault(lent_by, Shares()).give(owner)

    def cancel(self, lent_by: object, owner: str) -> None:
        """What was reserved has come to nothing, or to its end."""
        self._shares[lent_by].take_back(owner)
        if not self._shares[lent_by].held:
            del self._shares[lent_by]

    def add(
        self,
        kept: Kept,
        lent_by: object,
        owner: str,
        seconds: float,
        *,
        ref: str = "",
        age: float = 0.0,
    ) -> Session:
        """Name a sandbox for which there is a reservation. It leaves when it ends.

        One that a former process has kept has its `ref` and its `age` in seconds.
        """
        now = time.monotonic()
        ref = ref or f"{self._boot}-{secrets.token_urlsafe(16)}"
        session = Session(ref, owner, kept, lent_by, now + seconds, now - age)
        self._sessions[ref] = session
        kept.sandbox.closed.add_done_callback(lambda _: self.remove(session))
        if not kept.alive:
            self.remove(session)
        return session

    def get(self, ref: str) -> Session:
        """Raises KeptSandboxLost for what is not, or no longer, there."""
        session = self._sessions.get(ref)
        if session is None or not session.kept.alive:
            anew = "" if ref.startswith(f"{self._boot}-") else ": the service was restarted"
            with before_the_code():
                raise KeptSandboxLost(f"The sandbox does not exist any more{anew}.")
        return session

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def remove(self, session: Session) -> bool:
        """End it. False when it was not there."""
        if self._sessions.pop(session.ref, None) is None:
            return False
        self.cancel(session.lent_by, session.owner)
        self._end(session)
        return True

    def move(self, session: Session, lent_by: object) -> None:
        """Count it in another pool."""
        self.cancel(session.lent_by, session.owner)
        self.count(lent_by, session.owner)
        session.lent_by = lent_by

    def leave(self, session: Session) -> None:
        """Forget one that outlives this process."""
        if self._sessions.pop(session.ref, None) is not None:
            self.cancel(session.lent_by, session.owner)

    def reap(self) -> int:
        """End those that nobody has renewed. A busy one is left until it is not."""
        now = time.monotonic()
        late = [each for each in self.all() if each.expires_at < now and not each.kept.busy]
        return sum(self.remove(each) for each in late)

    def _refusal(self, lent_by: object, owner: str, most: int) -> str:
        if most < 1:
            return "There is no room for persistent sandboxes. Raise max_sandboxes to 2 or more."
        own = [
            each
            for each in self.all()
            if each.owner == owner and each.lent_by is lent_by and not each.kept.busy
        ]
        message = (
            f"There is no room for another persistent sandbox: at most {most} can exist, and one "
            "tenant can have four fifths of those that others do not use."
        )
        if own:
            idle = max(own, key=lambda each: each.idle_seconds)
            seconds = math.floor(idle.idle_seconds)
            message += f" The tenant's longest idle one is {idle.ref}, for {seconds} s."
        return message
