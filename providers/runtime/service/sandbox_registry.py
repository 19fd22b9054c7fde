"""Session sandboxes of the service: made, also by settings of their own, named, and ended when
nobody renews them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from providers.errors import ConnectionFailed, InvalidConfiguration, KeptSandboxLost
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.requests import check_limits
from providers.runtime.pool.sessions import Session, Sessions
from providers.runtime.pool.state_store import SandboxRecord, StateStore, now
from providers.runtime.service.durable import DurableSandboxes, adopt_all, lasting, new_marker
from providers.runtime.service.settings import ServiceSettings, settings_digest
from providers.values import SandboxLimits

if TYPE_CHECKING:
    from providers.runtime.service.pool_manager import PoolManager
    from providers.runtime.service.revisions import Instance, Revision

logger = logging.getLogger(__name__)

# How often it is looked for kept sandboxes that nobody has renewed.
REAP_SECONDS = 1.0
# How long a caller waits for a sandbox that is still being found, and is then to wait himself.
COMING_SECONDS = 10.0
LOOK_SECONDS = 0.05
RETRY_AFTER_SECONDS = 2.0


class SandboxRegistry:
    """The kept sandboxes of a PoolManager. Each counts in its pool until it has ended."""

    def __init__(self, keeper: PoolManager, memory: StateStore | None) -> None:
        self.sessions = Sessions(self._end)
        self._keeper = keeper
        self._memory = memory
        self._outliving = DurableSandboxes(memory)
        self._instances: dict[Kept, Instance] = {}
        self._has_left = False

    async def keep(
        self,
        template: str,
        owner: str,
        seconds: float,
        environment: Mapping[str, str],
        limits: SandboxLimits | None,
        apart: Apart | None = None,
    ) -> Session:
        """A sandbox that stays with this owner for so long, and for longer if it is renewed.

        `apart` has it made by other settings than those in force. Raises SandboxError; nothing has
        run then.
        """
        keeper = self._keeper
        line = await (keeper.current() if apart is None else keeper.line_apart(apart))
        instance, reserved = None, False
        try:
            self.sessions.reserve(line, owner, line.settings.most_kept)
            reserved = True
            instance = await self._take(line, template, owner)
            check_limits(limits, instance.sandbox.template.limits)
            commands = line.commands(instance.sandbox.template)
            marker = new_marker() if self._outliving.may(instance.sandbox) else ""
            told = lasting(marker, seconds) if marker else None
            kept = await Kept.open(instance.sandbox, environment, commands, told)
        except BaseException:
            if reserved:
                self.sessions.cancel(line, owner)
            if instance is not None:
                keeper.end(instance)
            keeper.close_if_unused(line)
            raise
        instance.kept = kept
        self._instances[kept] = instance
        session = self.sessions.add(kept, line, owner, seconds)
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
        if self._memory is not None:
            await adopt_all(self._keeper, self._memory, minimum_isolation, self._go_on)

    def leave(self) -> None:
        """Let go of what outlives this process."""
        self._has_left = True
        for session in self._outliving.leave():
            self.sessions.leave(session)
            self._keeper.let_go(self._instances.pop(session.kept))
            session.kept.leave()

    def move_what_was_found(self, former: Revision, line: Revision) -> None:
        """Have what was found before the settings were known count where the next ones do."""
        if line.launcher is not former.launcher:
            return
        for session in self._outliving.found():
            instance = self._instances[session.kept]
            if instance.line is former:
                former.pool.let_go(instance.sandbox)
                former.instances -= 1
                line.pool.take_over(instance.sandbox, session.owner)
                line.instances += 1
                instance.line = line
                self.sessions.move(session, line)

    def _go_on(self, line: Revision, kept: Kept, remembered: SandboxRecord) -> None:
        """One that was found. Its lease goes on."""
        self._instances[kept] = self._keeper.take_over(line, kept, remembered.owner)
        self.sessions.count(line, remembered.owner)
        session = self.sessions.add(
            kept,
            line,
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

    async def _take(self, line: Revision, template: str, owner: str) -> Instance:
        """One in which nothing has run: what the owner's former runs have left is ended."""
        while True:
            instance = await self._keeper.create_in(line, template, owner, alone=True)
            instance.used = True
            if not instance.sandbox.has_run:
                return instance
            instance.sandbox.reusable = False
            self._keeper.end(instance)

    def _end(self, session: Session) -> None:
        self._outliving.ended(session)
        self._keeper.end(self._instances.pop(session.kept))


LAUNCHERS = ("bubblewrap", "gvisor")
PLATFORMS = ("systrap", "ptrace", "kvm")


@dataclass(frozen=True)
class Apart:
    """The local provider's sandboxes: its settings, and which of its launchers."""

    settings: ServiceSettings
    launcher: str
    gvisor_platform: str
    key: Hashable

    @classmethod
    def from_json(cls, given: object) -> Apart:
        """Raises InvalidConfiguration naming the field at fault."""
        if not isinstance(given, Mapping):
            raise InvalidConfiguration("apart: Must be an object.", field="apart")
        config: Any = given.get("settings")
        launcher, platform = given.get("launcher"), given.get("gvisor_platform")
        if not isinstance(config, Mapping):
            raise InvalidConfiguration("settings: Must be an object.", field="settings")
        if launcher not in LAUNCHERS:
            raise InvalidConfiguration(
                f"launcher: Must be one of: {', '.join(LAUNCHERS)}.", field="launcher"
            )
        if platform not in PLATFORMS:
            raise InvalidConfiguration(
                f"gvisor_platform: Must be one of: {', '.join(PLATFORMS)}.", field="gvisor_platform"
            )
        settings = ServiceSettings.from_config(config)
        if settings.isolation in ("auto", "tenant-kernel"):
            # No session is ever in a tenant's kernel.
            settings = replace(settings, isolation="execution")
        return cls(settings, launcher, platform, (launcher, platform, settings_digest(config)))
