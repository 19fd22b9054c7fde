"""Session sandboxes of the service: made, also by settings of their own, named, and ended when
nobody renews them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    KeptFull,
    KeptSandboxLost,
    SandboxError,
    before_the_code,
)
from providers.network import Network
from providers.runtime.guest.protocol import VERSION
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.requests import check_limits
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.settings import LAUNCHERS, PLATFORMS
from providers.runtime.pool.shelf import Shares
from providers.runtime.pool.state_store import (
    GRACE_SECONDS,
    LONGEST_LEASE_SECONDS,
    SandboxRecord,
    StateStore,
    boot,
    now,
)
from providers.runtime.service.adoption import (
    AT_ONCE,
    adopt_all,
    find_one,
    guest_seconds,
    lasting,
    new_marker,
)
from providers.runtime.service.settings import ServiceSettings
from providers.values import SandboxLimits

if TYPE_CHECKING:
    from providers.runtime.service.pool_manager import Instance, PoolManager, Revision

logger = logging.getLogger(__name__)

# How often it is looked for kept sandboxes that nobody has renewed.
REAP_SECONDS = 1.0
# How long a caller waits for a sandbox that is still being found, and is then to wait himself.
COMING_SECONDS = 10.0
LOOK_SECONDS = 0.05
RETRY_AFTER_SECONDS = 2.0


class SandboxRegistry:
    """The kept sandboxes of a PoolManager. Each counts in its pool until it has ended."""

    def __init__(self, manager: PoolManager, memory: StateStore | None) -> None:
        self.sessions = Sessions(self._end, self._look_for)
        self._manager = manager
        self._memory = memory
        self._outliving = DurableSandboxes(memory)
        self._instances: dict[Kept, Instance] = {}
        self._has_left = False
        self._minimum_isolation = ""
        self._searches: set[asyncio.Task[None]] = set()
        self._search_slots = asyncio.Semaphore(AT_ONCE)

    async def keep(
        self,
        template: str,
        owner: str,
        seconds: float,
        environment: Mapping[str, str],
        limits: SandboxLimits | None,
        spec: PoolSpec | None = None,
        network: Network | None = None,
        digest: str = "",
    ) -> Session:
        """A sandbox that stays with this owner for so long, and for longer if it is renewed.

        It is of the pool of `spec`, or of the one in force, reaches `network` alone, and has the
        files of the template of this digest. Raises SandboxError; nothing has run then.
        """
        manager = self._manager
        revision = await (manager.current() if spec is None else manager.pool_of(spec))
        instance, reserved = None, False
        try:
            self.sessions.reserve(revision, owner, revision.settings.most_kept)
            reserved = True
            instance = await self._take(revision, template, owner, digest)
            check_limits(limits, instance.sandbox.template.limits)
            commands = revision.commands(instance.sandbox.template)
            marker = new_marker() if self._outliving.may(instance.sandbox) else ""
            told = lasting(marker, seconds) if marker else None
            if network is not None:
                instance.sandbox.network.prepare(network)
                environment = instance.sandbox.network.extend(environment)
            kept = await Kept.open(instance.sandbox, environment, commands, told)
            if network is not None:
                await kept.open_network(manager.network, network, owner)
        except BaseException:
            if reserved:
                self.sessions.cancel(revision, owner)
            if instance is not None:
                manager.end(instance)
            manager.close_if_unused(revision)
            raise
        instance.kept = kept
        self._instances[kept] = instance
        # Its end is this session's from now on.
        manager.leave_end(instance)
        session = self.sessions.add(kept, revision, owner, seconds)
        if marker:
            try:
                await self._outliving.begin(session, marker)
            except BaseException:
                # Nobody hears of it.
                self.sessions.remove(session)
                raise
        return session

    async def session(self, ref: str) -> Session:
        """The sandbox of this name. Raises KeptSandboxLost for what is not, or no longer, there.

        What a former process has left is waited for a moment, while it is looked for. Raises
        ConnectionFailed for what may be there again later.
        """
        deadline = time.monotonic() + COMING_SECONDS
        while True:
            try:
                return self.sessions.get(ref)
            except KeptSandboxLost:
                if not self._outliving.may_come(ref):
                    raise
            if time.monotonic() > deadline or self._has_left:
                raise ConnectionFailed(
                    "The pool service is restarting, and this sandbox is not available yet. Try "
                    "again.",
                    retry_after=RETRY_AFTER_SECONDS,
                )
            await asyncio.sleep(LOOK_SECONDS)

    async def find_again(self, minimum_isolation: str) -> None:
        """Take over what a former process of this pool has left."""
        self._minimum_isolation = minimum_isolation
        if self._memory is not None:
            await adopt_all(self._manager, self._memory, minimum_isolation, self._go_on)

    def leave(self) -> None:
        """Let go of what outlives this process."""
        self._has_left = True
        for session in self._outliving.leave():
            self.sessions.leave(session)
            self._manager.let_go(self._instances.pop(session.kept))
            session.kept.leave()

    def move_what_was_found(self, former: Revision, revision: Revision) -> None:
        """Have what was found before the settings were known count where the next ones do."""
        if revision.launcher is not former.launcher:
            return
        for session in self._outliving.found():
            instance = self._instances[session.kept]
            if instance.revision is former:
                former.pool.let_go(instance.sandbox)
                former.instances -= 1
                revision.pool.take_over(instance.sandbox, session.owner)
                revision.instances += 1
                instance.revision = revision
                self.sessions.move(session, revision)

    def _look_for(self, session: Session) -> bool:
        """Look for one whose connection has ended. Return whether it may be there still."""
        sandbox = session.kept.sandbox
        if self._has_left or sandbox.destroyed or not sandbox.guest.is_cut:
            return False
        remembered = self._outliving.let_go(session)
        if remembered is None or self._memory is None:
            return False
        self.sessions.leave(session)
        self._manager.lose(self._instances.pop(session.kept))
        session.kept.leave()
        search = asyncio.ensure_future(
            find_one(
                *(self._manager, self._memory, remembered, self._minimum_isolation),
                *(self._go_on, self._search_slots),
            )
        )
        self._searches.add(search)
        search.add_done_callback(self._searches.discard)
        return True

    def _go_on(self, revision: Revision, kept: Kept, remembered: SandboxRecord) -> None:
        """One that was found. Its lease goes on."""
        instance = self._manager.take_over(revision, kept, remembered.owner)
        self._manager.leave_end(instance)
        self._instances[kept] = instance
        self.sessions.count(revision, remembered.owner)
        session = self.sessions.add(
            kept,
            revision,
            remembered.owner,
            remembered.left,
            ref=remembered.ref,
            age=now() - remembered.opened_at,
        )
        self._outliving.go_on(session, remembered)
        if not kept.alive:
            # It has ended before anybody could hear of that.
            self._outliving.ended(session)

    async def reap(self) -> None:
        """End those that nobody has renewed, until this is cancelled."""
        while True:
            try:
                if count := self.sessions.reap():
                    logger.info("ended %d persistent sandboxes: their leases were over", count)
                self._outliving.look()
            except Exception:
                # Nobody else would end them, or tell guests of their leases.
                logger.exception("maintenance of persistent sandboxes failed")
            await asyncio.sleep(REAP_SECONDS)

    async def _take(self, revision: Revision, template: str, owner: str, digest: str) -> Instance:
        """One in which nothing has run: what the owner's former runs have left is ended."""
        while True:
            instance = await self._manager.create_in(
                revision, template, owner, digest=digest, alone=True
            )
            instance.used = True
            if not instance.sandbox.has_run:
                return instance
            instance.sandbox.reusable = False
            self._manager.end(instance)

    def _end(self, session: Session) -> None:
        self._outliving.ended(session)
        self._manager.end(self._instances.pop(session.kept))


@dataclass(frozen=True)
class PoolSpec:
    """The pool of a local provider: its settings, and which of its launchers."""

    settings: ServiceSettings
    launcher: str
    gvisor_platform: str

    @property
    def key(self) -> Hashable:
        """Those with the same key can share a pool."""
        return self.launcher, self.gvisor_platform, repr(self.settings.sandbox_key)

    @classmethod
    def from_json(cls, given: object) -> PoolSpec:
        """Raises InvalidConfiguration naming the field at fault."""
        if not isinstance(given, Mapping):
            raise InvalidConfiguration("pool: Must be an object.", field="pool")
        config: Any = given.get("settings")
        launcher, platform = given.get("launcher"), given.get("gvisor_platform")
        if not isinstance(config, Mapping):
            raise InvalidConfiguration("settings: Must be an object.", field="settings")
        if launcher not in ("auto", *LAUNCHERS):
            raise InvalidConfiguration(
                f"launcher: Must be one of: auto, {', '.join(LAUNCHERS)}.", field="launcher"
            )
        if platform not in PLATFORMS:
            raise InvalidConfiguration(
                f"gvisor_platform: Must be one of: {', '.join(PLATFORMS)}.", field="gvisor_platform"
            )
        return cls(ServiceSettings.from_config(config), launcher, platform)


# The lease that is taken where nobody says.
LEASE_SECONDS = 600.0
# When there may be room again cannot be known: sessions last as long as somebody wants them.
FULL_SECONDS = 10.0


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
    told as lost. `end` is called for what is over, unless `look_for` says that it may be there."""

    def __init__(self, end: Callable[[Session], None], look_for: Callable[[Session], bool]) -> None:
        self._boot = secrets.token_hex(4)
        self._end = end
        self._look_for = look_for
        self._sessions: dict[str, Session] = {}
        self._shares: dict[object, Shares] = {}

    def reserve(self, lent_by: object, owner: str, most: int) -> None:
        """Count one more for this owner, of `most` in this pool. Raises KeptFull.

        Of what is free an owner may have four fifths, as of a pool's sandboxes. Whoever is refused
        is told which of his own was idle the longest.
        """
        if not self._shares.setdefault(lent_by, Shares()).more_for(owner, most):
            raise KeptFull(self._refusal(lent_by, owner, most), retry_after=FULL_SECONDS)
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
        kept.sandbox.closed.add_done_callback(lambda _: self._close(session))
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

    def _close(self, session: Session) -> None:
        if session.ref in self._sessions and not self._look_for(session):
            self.remove(session)

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


if TYPE_CHECKING:
    from providers.runtime.service.pool_manager import PoolManager, Revision


# A lease that differs by more than that from what is remembered is remembered anew.
SLACK_SECONDS = 0.5


@dataclass
class _Entry:
    """`remembered` is None where that did not work: the sandbox ends with this process."""

    remembered: SandboxRecord | None
    lives_until: float
    was_found: bool = False


class DurableSandboxes:
    """Those of this process. All of it happens in one event loop."""

    def __init__(self, memory: StateStore | None) -> None:
        self._memory = memory
        self._entries: dict[Session, _Entry] = {}
        self._left: set[str] = set()

    def may(self, sandbox: Sandbox) -> bool:
        """Whether a sandbox can outlive this process, and another one would find it."""
        ours = self._memory is not None and self._memory.is_ours
        return ours and sandbox.guest.container != ""

    async def begin(self, session: Session, marker: str) -> None:
        """Remember one whose guest has been told its marker."""
        guest, template = session.kept.sandbox.guest, session.kept.sandbox.template
        if self._memory is None or not guest.container:
            return
        left = session.expires_at - time.monotonic()
        remembered = SandboxRecord(
            container=guest.container,
            ref=session.ref,
            owner=session.owner,
            template=template.name,
            language=template.language,
            runtime=session.kept.sandbox.runtime,
            limits=asdict(template.limits),
            interpreter=template.interpreter,
            marker=marker,
            found=guest.found,
            version=VERSION,
            boot=boot(),
            opened_at=now(),
            expires_at=now() + left,
            seconds=left,
        )
        entry = self._entries[session] = _Entry(None, time.monotonic() + guest_seconds(left))
        try:
            self._memory.save(remembered)
            await guest.stay()
        except (OSError, SandboxError) as error:
            logger.warning("a persistent sandbox will end with this process: %s", error)
            self._memory.forget(guest.container)
        else:
            if session in self._entries:
                entry.remembered = remembered
            else:
                # It has ended meanwhile.
                self._memory.forget(guest.container)

    def go_on(self, session: Session, remembered: SandboxRecord) -> None:
        """One that this process has found."""
        lives_until = time.monotonic() + guest_seconds(remembered.left)
        self._entries[session] = _Entry(remembered, lives_until, was_found=True)

    def found(self) -> list[Session]:
        """Those that a former process has left."""
        return [session for session, entry in self._entries.items() if entry.was_found]

    def look(self) -> None:
        """Have guests and memory know of the leases as they are now."""
        for session, entry in self._entries.items():
            try:
                self._look_at(session, entry)
            except Exception:
                # Whatever is wrong with one, the others are told.
                logger.exception("the lease of a persistent sandbox could not be sent")

    def _look_at(self, session: Session, entry: _Entry) -> None:
        left = session.expires_at - time.monotonic()
        renewed = entry.remembered and abs(entry.remembered.left - left) > SLACK_SECONDS
        if renewed and (left > 0 or not session.kept.busy):
            self._save(entry, left)
        lives_for = entry.lives_until - time.monotonic()
        # One that is busy is left beyond its lease.
        if abs(lives_for - guest_seconds(left)) > SLACK_SECONDS and (
            left > 0 or lives_for < GRACE_SECONDS / 2
        ):
            session.kept.lives_for(guest_seconds(left))
            entry.lives_until = time.monotonic() + guest_seconds(left)

    def _save(self, entry: _Entry, left: float) -> None:
        if self._memory is None or entry.remembered is None:
            return
        entry.remembered = replace(
            entry.remembered, expires_at=now() + left, seconds=max(0.0, left)
        )
        try:
            self._memory.save(entry.remembered)
        except OSError as error:
            logger.warning("a lease could not be stored: %s", error)

    def ended(self, session: Session) -> None:
        """It is over, whoever ended it."""
        entry = self._entries.pop(session, None)
        if self._memory is not None and entry is not None and entry.remembered is not None:
            self._memory.forget(entry.remembered.container)

    def let_go(self, session: Session) -> SandboxRecord | None:
        """Forget one whose record stays. Return the record, None where it has none."""
        entry = self._entries.pop(session, None)
        return entry.remembered if entry else None

    def leave(self) -> list[Session]:
        """Those that are to be let go of, because they outlive this process."""
        self.look()
        found = [
            session
            for session, entry in self._entries.items()
            if entry.remembered is not None and session.kept.alive
        ]
        self._left |= {session.ref for session in found}
        for session in found:
            del self._entries[session]
        return found

    def may_come(self, ref: str) -> bool:
        """Whether a sandbox that is not here may be had again, from us or from the next process."""
        return ref in self._left or (self._memory is not None and self._memory.knows(ref))
