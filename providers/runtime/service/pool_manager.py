"""The pools of the service, one for each kind of settings, and what is lent of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from providers.errors import ProviderUnavailable, SandboxError, before_the_code
from providers.languages import OURS, normalize_language, offered_names
from providers.network import Network
from providers.remote.reclaim import has_ended_here
from providers.runtime.network.client import NetworkProxy
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.pool import Pool
from providers.runtime.pool.requests import check_job, command_of, make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.runtime.service.launchers import ChosenLevel, LauncherChoice, choose_level
from providers.runtime.service.registry import PoolSpec, SandboxRegistry
from providers.runtime.service.settings import ServiceSettings
from providers.runtime.service.templates import WITH_TEMPLATES, TemplateLaunchers, bases_of
from providers.templates.store import TemplateStore
from providers.values import Emit, ExecutionResult, Job


@dataclass(eq=False)
class Revision:
    """One pool and what it was made for. It is open while it has holders or sandboxes are lent."""

    settings: ServiceSettings
    choice: LauncherChoice
    kind: str
    launcher: Launcher
    pool: Pool
    templates: Mapping[str, Template]
    chosen: ChosenLevel
    template_launchers: TemplateLaunchers
    instances: int = 0
    # How clients name it.
    name: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    # Who needs it open, and is told when it becomes full and when it is no longer.
    holders: list[Callable[[bool], None]] = field(default_factory=list)
    was_full: bool = False

    def tell_full(self) -> None:
        """Tell the holders whether a caller would have to wait now, where that has changed."""
        is_full = self.pool.is_full
        if is_full != self.was_full:
            self.was_full = is_full
            for tell in self.holders:
                tell(is_full)

    def commands(self, template: Template) -> dict[str, tuple[str, ...]]:
        """The interpreters of all languages in sandboxes of a template."""
        name = template.name
        launcher = self.template_launchers.launcher_of(name) or self.launcher
        return {
            language: command_of(name, language, launcher, template.limits)
            for language in OURS
            if launcher.interpreter(language, name)
        }


async def open_revision(
    choice: LauncherChoice, settings: ServiceSettings, former: Revision | None = None
) -> Revision:
    """A pool for these settings, over the former's launcher if that fits them too."""
    if former is not None and settings.launcher_key == former.settings.launcher_key:
        chosen = await choose_level(former.launcher, settings.isolation)
        return _over(choice, former.kind, former.launcher, chosen, settings)
    kind, launcher, chosen = await choice.open(settings)
    try:
        return _over(choice, kind, launcher, chosen, settings)
    except BaseException:
        # Nobody else has it yet.
        launcher.close()
        await launcher.disconnect()
        raise


def _over(
    choice: LauncherChoice,
    kind: str,
    launcher: Launcher,
    chosen: ChosenLevel,
    settings: ServiceSettings,
) -> Revision:
    wanted = {language: language for language in launcher.languages()}
    wanted |= {name: language for name, (language, _) in settings.templates.items()}
    templates = {
        name: make_template(
            name,
            language,
            launcher,
            settings.limits,
            settings.preload,
            advise=settings.enable_ast_analysis,
        )
        for name, language in wanted.items()
    }
    pool = Pool(launcher, templates, settings.pool_settings(chosen.level))
    pool.open()
    template_launchers = TemplateLaunchers(choice, kind, launcher, settings)
    return Revision(settings, choice, kind, launcher, pool, templates, chosen, template_launchers)


def why_not_opened(error: Exception) -> SandboxError:
    """What is told of a revision that cannot be opened. What nobody has foreseen may name files and
    commands of this machine, which are for its log alone."""
    if isinstance(error, SandboxError):
        return error
    reason = (error.strerror if isinstance(error, OSError) else "") or type(error).__name__
    return ProviderUnavailable(
        f"The pool cannot be opened: {reason}. The log of the pool service has the details. The "
        "service tries again until it works."
    )


@dataclass(eq=False)
class Instance:
    """A sandbox in a caller's hands. It runs one job, then it is gone."""

    instance_id: str
    template: str
    sandbox: Sandbox
    revision: Revision
    client: str = ""
    used: bool = False
    kept: Kept | None = None
    forget: Callable[[asyncio.Future[None]], None] | None = None

    @property
    def runtime(self) -> str:
        return self.sandbox.runtime

    @property
    def sharing(self) -> str:
        return self.sandbox.sharing


logger = logging.getLogger(__name__)

LONGEST_RETRY_SECONDS = 5.0
# A caller who has not used what he was lent in this time does not keep a service from ending.
UNUSED_SECONDS = 10.0

# How often it is looked whether the processes live that instances were lent to.
CLIENTS_SECONDS = 5.0

# The ids of so many instances that have run are remembered: a request that somebody on the way has
# sent twice must not be told that nothing ran.
SPENT_REMEMBERED = 10_000


class PoolManager:
    """Lives in one event loop. What cannot be started yet is tried again until it can."""

    def __init__(
        self,
        choice: LauncherChoice,
        settings: ServiceSettings,
        network_allowed: Sequence[str] = (),
        network_ca_file: str = "",
    ) -> None:
        """`network_allowed` are the addresses that sandboxes may reach although they are not
        public, as NETWORK_ALLOWED_ADDRESSES has them, `network_ca_file` is NETWORK_CA_FILE."""
        self._choice = choice
        self.data_dir = choice.data_dir
        # Pods of a cluster have the memory of their nodes.
        self.shares_memory = choice.kind != "kubernetes"
        self.store = TemplateStore(choice.data_dir)
        self.network = NetworkProxy(network_allowed, network_ca_file)
        self._settings = settings
        # The one of the settings in force, which holds itself.
        self._current: Revision | None = None
        self._open: dict[Hashable, Revision] = {}
        self._failure: SandboxError | None = None
        self._instances: dict[str, Instance] = {}
        self.registry = SandboxRegistry(self, choice.memory)
        self._creating = 0
        self._spent: dict[str, None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._endings: set[asyncio.Task[None]] = set()
        self._closing_revisions: list[Revision] = []
        self._changing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._draining = False
        self._closing = False

    @property
    def settings(self) -> ServiceSettings:
        return self._settings

    def open(self, *, has_settings: bool = True) -> None:
        """Start warming up, and keep trying while the isolation tool cannot be used.

        Without `has_settings` none are in force: only the pools of a PoolSpec can be had.
        """
        if has_settings:
            self._spawn(self._open_until_it_works())
        else:
            self._failure = ProviderUnavailable("This service is for the provider local alone.")
        self._spawn(self._end_what_the_dead_left())
        self._spawn(self.registry.reap())
        self._spawn(self.registry.find_again(self._choice.minimum_isolation))

    async def apply(self, settings: ServiceSettings) -> None:
        """Have the pool fit these settings; what runs is left alone.

        Raises SandboxError when they cannot be had here. Then nothing has changed.
        """
        self._refuse_when_draining()
        async with self._changing:
            await self._hold_current(settings)
            self._settings = settings
            self._failure = None

    async def create(
        self,
        template: str,
        owner: str = "",
        network: Network | None = None,
        digest: str = "",
    ) -> Instance:
        """A warm sandbox for this owner alone. Raises SandboxError; nothing has run then."""
        revision = await self.current()
        return await self.create_in(revision, template, owner, network, digest=digest)

    async def create_apart(
        self,
        settings: ServiceSettings,
        template: str,
        owner: str = "",
        network: Network | None = None,
    ) -> Instance:
        """A sandbox such as these settings ask for, started for this caller. They do not come
        into force. Raises SandboxError."""
        self._refuse_when_draining()
        async with self._changing:
            # By a key that no other has: whether one can be started is what is asked.
            revision = await self._open_one(object(), self._choice, settings.for_one())
        return await self.create_in(revision, template, owner, network)

    async def create_in(
        self,
        revision: Revision,
        template: str,
        owner: str,
        network: Network | None = None,
        *,
        digest: str = "",
        alone: bool = False,
    ) -> Instance:
        """One of this pool's sandboxes, handed out, which reaches this network alone; `alone`
        shares nothing with other runs. It has the files of the template of this digest."""
        name = normalize_language(template)
        revision.instances += 1
        self._creating += 1
        try:
            if digest:
                name = await revision.template_launchers.add(revision.pool, name, digest)
            sandbox = await revision.pool.acquire(name, owner, alone=alone)
            if network is not None:
                await self._open_network(revision, sandbox, network, owner)
        except BaseException:
            revision.instances -= 1
            self.close_if_unused(revision)
            raise
        finally:
            self._creating -= 1
        revision.tell_full()
        return self._hold(Instance(secrets.token_urlsafe(12), name, sandbox, revision))

    async def _open_network(
        self, revision: Revision, sandbox: Sandbox, network: Network, owner: str
    ) -> None:
        """Raises SandboxError; the sandbox is given back then."""
        try:
            await sandbox.network.open(self.network, network, owner)
        except BaseException:
            await revision.pool.release(sandbox)
            raise

    def take_over(self, revision: Revision, kept: Kept, owner: str) -> Instance:
        """A sandbox that a former process has kept for this owner."""
        sandbox = kept.sandbox
        revision.instances += 1
        revision.pool.take_over(sandbox, owner)
        revision.tell_full()
        name = sandbox.template.name
        token = secrets.token_urlsafe(12)
        return self._hold(Instance(token, name, sandbox, revision, used=True, kept=kept))

    def _hold(self, instance: Instance) -> Instance:
        self._instances[instance.instance_id] = instance
        # Whatever ends the sandbox, such as the pool when nobody used it for too long.
        instance.forget = lambda _: self.end(instance)
        instance.sandbox.closed.add_done_callback(instance.forget)
        return instance

    def leave_end(self, instance: Instance) -> None:
        """Have another part of the service see to the end of one."""
        if instance.forget:
            instance.sandbox.closed.remove_done_callback(instance.forget)
            instance.forget = None

    def let_go(self, instance: Instance) -> None:
        """Forget one whose sandbox outlives this process."""
        self._instances.pop(instance.instance_id, None)
        self.leave_end(instance)
        instance.revision.pool.let_go(instance.sandbox)

    def lose(self, instance: Instance) -> None:
        """Forget one whose sandbox may be found again."""
        self.let_go(instance)
        instance.revision.instances -= 1
        instance.revision.tell_full()
        self.close_if_unused(instance.revision)

    async def hold(
        self, spec: PoolSpec, tell_full: Callable[[bool], None], *, is_trial: bool = False
    ) -> Revision:
        """The pool of the spec, open until it is left and nothing of it is lent.

        `tell_full` is told whenever it becomes full or is no longer. A trial leaves the sizes of an
        open pool as they are, and opens one with a single idle sandbox. Raises SandboxError.
        """
        trial = replace(spec, settings=replace(spec.settings, pool_size=1))
        revision = await self.pool_of(trial if is_trial else spec)
        is_first = not revision.holders
        revision.holders.append(tell_full)
        if revision.was_full:
            tell_full(True)
        if not is_trial and (is_first or revision.settings != spec.settings):
            try:
                if is_first:
                    _log_opened(revision)
                await _resize(revision, spec.settings)
            except BaseException:
                self.leave(revision, tell_full)
                raise
        return revision

    def leave(self, revision: Revision, tell_full: Callable[[bool], None]) -> None:
        """Hold it no longer. What is lent of it may be used, and nothing is kept warm."""
        revision.holders.remove(tell_full)
        self.close_if_unused(revision)
        if not revision.holders and revision.instances and not self._closing:
            sizes = revision.settings.pool_settings(revision.chosen.level)
            self._spawn(revision.pool.resize(replace(sizes, size=0, minimum=0, burst=0)))

    def pool_named(self, name: str) -> Revision:
        """The open pool of this name. Raises ProviderUnavailable."""
        self._refuse_when_draining()
        for revision in self._open.values():
            if revision.name == name:
                return revision
        raise ProviderUnavailable("The pool service has no such pool.")

    async def pool_of(self, spec: PoolSpec) -> Revision:
        """The pool of the spec. It ends with its last sandbox, unless somebody holds it."""
        self._refuse_when_draining()
        async with self._changing:
            revision = self._open.get(spec.key)
            if revision is None:
                choice = self._choice.for_local(spec.launcher, spec.gvisor_platform)
                revision = await self._open_one(spec.key, choice, spec.settings)
                if revision.kind == "none":
                    logger.warning(
                        "SANDBOX_LOCAL_UNISOLATED is set: code runs without any isolation"
                    )
            return revision

    async def _hold_current(self, settings: ServiceSettings) -> None:
        """Have the pool of these settings in place of the former, which ends when it is unused."""
        former, key = self._current, repr(settings.sandbox_key)
        if former is None or self._open.get(key) is not former:
            revision = self._open.get(key) or await self._open_one(key, self._choice, settings)
            revision.holders.append(_tell_nobody)
            self._current = revision
            _log_opened(revision)
            self._ready.set()
            if former is not None:
                self.registry.move_what_was_found(former, revision)
                self.leave(former, _tell_nobody)
        assert self._current is not None  # noqa: S101  for the type
        if self._current.settings != settings or former is not self._current:
            await _resize(self._current, settings)

    async def _open_one(
        self, key: Hashable, choice: LauncherChoice, settings: ServiceSettings
    ) -> Revision:
        """Open a pool, over the launcher of another one where that fits. Raises SandboxError."""
        others = [each for each in self._open.values() if each.choice == choice]
        fits = (each for each in others if each.settings.launcher_key == settings.launcher_key)
        revision = self._open[key] = await open_revision(choice, settings, next(fits, None))
        return revision

    @property
    def is_used(self) -> bool:
        """Whether somebody holds a pool, or something is lent or about to be."""
        return bool(
            self._creating
            or self._instances
            or self._changing.locked()
            or any(revision.holders for revision in self._open.values())
        )

    async def run(self, instance_id: str, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """Run the instance's one job, and tell `emit` of it while it runs. When this ends, in
        whatever way, so has the instance.

        Refused with `started` False when this request cannot have started anything.
        """
        instance = self._instances.get(instance_id)
        with before_the_code():
            if instance is None or instance.used:
                raise ProviderUnavailable(
                    f"There is no unused instance {instance_id!r}: it has run, or it was not used "
                    f"for {self._settings.max_lifetime:g} s, or the service was restarted.",
                    started=instance is not None or instance_id in self._spent,
                )
            check_job(job, instance.sandbox.template)
        self._spent[instance_id] = None
        if len(self._spent) > SPENT_REMEMBERED:
            del self._spent[next(iter(self._spent))]
        return await self.run_in(instance, job, emit)

    async def run_in(
        self, instance: Instance, job: Job, emit: Emit | None = None
    ) -> ExecutionResult:
        """As `run`, for who has the instance itself."""
        with before_the_code():
            check_job(job, instance.sandbox.template)
        instance.used = True
        try:
            return await instance.sandbox.run(job, emit)
        finally:
            self.end(instance)

    def destroy(self, instance_id: str) -> bool:
        """End an instance and what runs in it. False when it was not there."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        self.end(instance)
        return True

    def languages(self) -> list[str]:
        """What can be run now."""
        return offered_names(self._current.templates) if self._current else []

    def problem(self) -> str:
        """Why no run could succeed now, "" when it could."""
        if self._draining:
            return "The service is shutting down."
        if self._current is None:
            return self._failure.message if self._failure else "The pool is starting."
        stats = self._current.pool.stats()
        if stats["idle"] + stats["kept"] + stats["busy"] > 0:
            return ""
        for template in stats["templates"].values():
            if template["failing"]:
                return f"Sandboxes cannot be started: {template['failing']}"
        return "" if stats["started"] else "The pool is starting."

    def stats(self) -> dict[str, Any]:
        """The pool's own figures, what they are about, and what is in force."""
        revision = self._current
        return {
            **(self.stats_of(revision) if revision else {}),
            "healthy": not self.problem(),
            "problem": self.problem(),
            "launcher": revision.kind if revision else "",
            "runtime": revision.launcher.runtime if revision else "",
            "languages": self.languages(),
            "has_templates": bool(revision and revision.kind in WITH_TEMPLATES),
            "template_bases": bases_of(revision.kind) if revision else [],
            "instances": len(self._instances),
            "sessions": len(self.registry.sessions.all()),
            "retired_pools": len(self._open) - bool(revision),
        }

    def stats_of(self, revision: Revision) -> dict[str, Any]:
        """The figures of one pool."""
        known = revision.pool.stats()
        if revision.chosen.why:
            known["enforced_by"] = {"isolation level": revision.chosen.why, **known["enforced_by"]}
        return known

    @property
    def is_draining(self) -> bool:
        return self._draining

    def drain(self) -> None:
        """Hand out nothing more. What was handed out may still be used."""
        self._draining = True
        self._ready.set()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is used by a caller, is about to be, or on its way to one."""
        recently = time.monotonic() - UNUSED_SECONDS
        return not self._creating and not any(
            instance.kept.busy
            if instance.kept
            else instance.used or instance.sandbox.handed_out_at > recently
            for instance in self._instances.values()
        )

    async def close(self) -> None:
        """End every sandbox and wait until all are gone."""
        self.drain()
        self._closing = True
        self._ready.set()
        self.registry.leave()
        for instance in list(self._instances.values()):
            self.end(instance)
        revisions = list(self._open.values())
        closed = (each.pool.close() for each in revisions)
        # What is ending already is to come to its end: sandboxes would be left of it.
        await asyncio.gather(*self._endings, *closed, return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.network.close()
        for revision in revisions:
            await _close_templates(revision)
        for launcher in {
            id(revision.launcher): revision.launcher for revision in revisions
        }.values():
            launcher.close()
            await launcher.disconnect()

    async def current(self) -> Revision:
        """The revision in force, waited for while it is being opened for the first time."""
        if self._current is None and self._failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.queue_timeout):
                    await self._ready.wait()
        self._refuse_when_draining()
        if self._current is None:
            message = self._failure.message if self._failure else "The pool is still starting."
            raise ProviderUnavailable(message, retry_after=1)
        return self._current

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise ProviderUnavailable("The pool service is shutting down.", retry_after=5)

    async def _end_what_the_dead_left(self) -> None:
        """End what was lent to a process that has ended before it used it, and the launchers of
        templates that have not been used for long."""
        while not self._closing:
            for instance in list(self._instances.values()):
                if not instance.used and has_ended_here(instance.client):
                    logger.info("ending an instance: the process that had it has ended")
                    self.end(instance)
            for revision in list(self._open.values()):
                try:
                    await revision.template_launchers.close_unused(revision.pool)
                except SandboxError as error:
                    logger.warning("a template was not removed", extra={"reason": error.message})
            await asyncio.sleep(CLIENTS_SECONDS)

    async def _open_until_it_works(self) -> None:
        delay = 0.25
        while not self._closing:
            try:
                async with self._changing:
                    if self._current is None:
                        await self._hold_current(self._settings)
                break
            except Exception as error:
                failure = why_not_opened(error)
                if self._failure is None or self._failure.message != failure.message:
                    unforeseen = None if failure is error else error
                    logger.error(
                        "the pool cannot be opened: %s", failure.message, exc_info=unforeseen
                    )
                self._failure = failure
            await asyncio.sleep(delay)
            delay = min(LONGEST_RETRY_SECONDS, delay * 2)
        self._failure = None
        self._ready.set()

    def close_if_unused(self, revision: Revision) -> None:
        """End a pool that has no holder once nothing of it is lent."""
        if self._closing or revision.holders or revision.instances:
            # Whoever closes all of them closes this one too.
            return
        for key in [key for key, each in self._open.items() if each is revision]:
            del self._open[key]
            self._closing_revisions.append(revision)
            ending = asyncio.get_running_loop().create_task(self._close(revision))
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)

    async def _close(self, revision: Revision) -> None:
        await revision.pool.close()
        await _close_templates(revision)
        # One that is being opened may be about to take over its launcher.
        async with self._changing:
            self._closing_revisions.remove(revision)
            others = (*self._open.values(), *self._closing_revisions)
            if not any(other.launcher is revision.launcher for other in others):
                revision.launcher.close()
                await revision.launcher.disconnect()

    def end(self, instance: Instance) -> None:
        """Have the pool take it back, whatever runs in it."""
        if self._instances.pop(instance.instance_id, None) is None:
            return
        # The sandbox may live on for its owner's next instance.
        self.leave_end(instance)
        self._spawn(self._release(instance))

    async def _release(self, instance: Instance) -> None:
        try:
            await instance.revision.pool.release(instance.sandbox)
        except Exception:
            logger.exception("instance %s could not be destroyed", instance.instance_id)
        instance.revision.instances -= 1
        instance.revision.tell_full()
        self.close_if_unused(instance.revision)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _close_templates(revision: Revision) -> None:
    try:
        await revision.template_launchers.close()
    except SandboxError as error:
        logger.warning("a template was not removed", extra={"reason": error.message})


async def _resize(revision: Revision, settings: ServiceSettings) -> None:
    """Have a pool work by settings that its sandboxes fit too."""
    revision.chosen = await choose_level(revision.launcher, settings.isolation)
    revision.settings = settings
    await revision.pool.resize(settings.pool_settings(revision.chosen.level))
    revision.tell_full()


def _log_opened(revision: Revision) -> None:
    logger.info(
        "pool opened",
        extra={
            "launcher": revision.kind,
            "runtime": revision.launcher.runtime,
            "size": revision.settings.pool_size,
        },
    )


def _tell_nobody(is_full: bool) -> None:
    """For who holds a pool and looks at it himself."""
