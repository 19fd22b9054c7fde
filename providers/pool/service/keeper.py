"""One pool that fits the settings in force, and the instances handed out of it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Any

from providers.base import ExecutionResult
from providers.errors import ProviderUnavailable, SandboxError
from providers.pool.launcher import Launcher
from providers.pool.pool import Pool
from providers.pool.requests import Job, make_template, run_request
from providers.pool.sandbox import Sandbox
from providers.pool.service.launchers import LauncherChoice
from providers.pool.service.settings import ServiceSettings
from providers.pool.template import Template, normalize_language

logger = logging.getLogger(__name__)

LONGEST_RETRY_SECONDS = 5.0


@dataclass(eq=False)
class _Line:
    """One pool and what it was made for. Retired when another one is in force."""

    settings: ServiceSettings
    kind: str
    launcher: Launcher
    pool: Pool
    templates: Mapping[str, Template]
    instances: int = 0
    retired: bool = False


@dataclass(eq=False)
class Instance:
    """A sandbox in a caller's hands. It runs one job, then it is gone."""

    instance_id: str
    template: str
    sandbox: Sandbox
    line: _Line
    used: bool = False
    forget: Callable[[asyncio.Future[None]], None] | None = None

    @property
    def runtime(self) -> str:
        return self.sandbox.runtime

    @property
    def sharing(self) -> str:
        return "tenant" if self.sandbox.reusable else "execution"


class PoolKeeper:
    """Lives in one event loop. What cannot be started yet is tried again until it can."""

    def __init__(self, choice: LauncherChoice, settings: ServiceSettings) -> None:
        self._choice = choice
        self._settings = settings
        self._line: _Line | None = None
        self._retired: set[_Line] = set()
        self._failure: SandboxError | None = None
        self._instances: dict[str, Instance] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changing = asyncio.Lock()
        self._ready = asyncio.Event()
        self._closing = False

    @property
    def settings(self) -> ServiceSettings:
        return self._settings

    def open(self) -> None:
        """Start warming up, and keep trying while the isolation tool cannot be used."""
        self._spawn(self._open_until_it_works())

    async def apply(self, settings: ServiceSettings) -> None:
        """Have the pool fit these settings; what runs is left alone.

        Raises SandboxError when they cannot be had here. Then nothing has changed.
        """
        async with self._changing:
            if self._line is None:
                self._line = await self._open_line(settings)
                self._ready.set()
            elif _same_sandboxes(settings, self._line.settings):
                self._line.settings = settings
                await self._line.pool.resize(settings.pool_settings())
            else:
                former, self._line = self._line, await self._open_line(settings, self._line)
                await self._retire(former)
            self._settings = settings
            self._failure = None

    async def create(self, template: str, owner: str = "") -> Instance:
        """A warm sandbox for this owner alone. Raises SandboxError; nothing has run then."""
        return await self._create_in(await self._current(), template, owner)

    async def create_apart(
        self, settings: ServiceSettings, template: str, owner: str = ""
    ) -> Instance:
        """A sandbox such as these settings ask for, started for this caller. They do not come
        into force. Raises SandboxError."""
        async with self._changing:
            line = await self._open_line(settings.for_one(), self._line)
        line.retired = True
        self._retired.add(line)
        return await self._create_in(line, template, owner)

    async def _create_in(self, line: _Line, template: str, owner: str) -> Instance:
        name = normalize_language(template)
        line.instances += 1
        try:
            sandbox = await line.pool.acquire(name, owner)
        except BaseException:
            line.instances -= 1
            self._close_if_unused(line)
            raise
        instance = Instance(secrets.token_urlsafe(12), name, sandbox, line)
        self._instances[instance.instance_id] = instance
        # Whatever ends the sandbox, such as the pool when nobody used it for too long.
        instance.forget = lambda _: self._end(instance)
        sandbox.closed.add_done_callback(instance.forget)
        return instance

    async def run(self, instance_id: str, job: Job) -> ExecutionResult:
        """Run the instance's one job. When this ends, in whatever way, so has the instance.

        Refused with `started` False when this request cannot have started anything.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.used:
            raise ProviderUnavailable(
                f"There is no unused instance {instance_id!r}: it has run, or nobody used it for "
                f"{self._settings.max_lifetime:g} s, or the service was started anew.",
                started=instance is not None,
            )
        request = run_request(job, instance.sandbox.template)
        instance.used = True
        try:
            return await instance.sandbox.run(request)
        finally:
            self._end(instance)

    def destroy(self, instance_id: str) -> bool:
        """End an instance and what runs in it. False when it was not there."""
        instance = self._instances.get(instance_id)
        if instance is None:
            return False
        self._end(instance)
        return True

    def languages(self) -> list[str]:
        """What can be run now."""
        if self._line is None:
            return []
        languages = list(self._line.templates)
        return languages + (["javascript"] if "nodejs" in languages else [])

    def problem(self) -> str:
        """Why no run could succeed now, "" when it could."""
        if self._closing:
            return "The service is shutting down."
        if self._line is None:
            return self._failure.message if self._failure else "The pool is starting."
        stats = self._line.pool.stats()
        if stats["idle"] + stats["kept"] + stats["busy"] > 0:
            return ""
        for template in stats["templates"].values():
            if template["failing"]:
                return f"Sandboxes cannot be started: {template['failing']}"
        return "" if stats["started"] else "The pool is starting."

    def stats(self) -> dict[str, Any]:
        """The pool's own figures, what they are about, and what is in force."""
        line = self._line
        known = line.pool.stats() if line else {}
        return {
            **known,
            "healthy": not self.problem(),
            "problem": self.problem(),
            "launcher": line.kind if line else "",
            "runtime": line.launcher.runtime if line else "",
            "languages": self.languages(),
            "instances": len(self._instances),
            "retired_pools": len(self._retired),
        }

    async def close(self) -> None:
        """End every sandbox and wait until all are gone."""
        self._closing = True
        self._ready.set()
        for instance in list(self._instances.values()):
            self._end(instance)
        lines = [line for line in (self._line, *self._retired) if line]
        await asyncio.gather(*(line.pool.close() for line in lines), return_exceptions=True)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for launcher in {id(line.launcher): line.launcher for line in lines}.values():
            launcher.close()

    async def _current(self) -> _Line:
        """The line in force, waited for while it is being opened for the first time."""
        if self._line is None and self._failure is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.queue_timeout):
                    await self._ready.wait()
        if self._closing:
            raise ProviderUnavailable("The pool service is shutting down.")
        if self._line is None:
            message = self._failure.message if self._failure else "The pool is still starting."
            raise ProviderUnavailable(message, retry_after=1)
        return self._line

    async def _open_until_it_works(self) -> None:
        delay = 0.25
        while not self._closing:
            try:
                async with self._changing:
                    if self._line is None:
                        self._line = await self._open_line(self._settings)
                break
            except SandboxError as error:
                if self._failure is None or self._failure.message != error.message:
                    logger.error("the pool cannot be opened: %s", error.message)
                self._failure = error
            await asyncio.sleep(delay)
            delay = min(LONGEST_RETRY_SECONDS, delay * 2)
        self._failure = None
        self._ready.set()

    async def _open_line(self, settings: ServiceSettings, former: _Line | None = None) -> _Line:
        """A pool for these settings, over the former's launcher if that fits them too."""
        key = self._choice.key
        if former is not None and key(settings) == key(former.settings):
            kind, launcher = former.kind, former.launcher
        else:
            kind, launcher = await self._choice.open(settings)
        wanted = {language: language for language in launcher.languages()}
        if kind == "docker":
            wanted |= settings.templates
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
        pool = Pool(launcher, templates, settings.pool_settings())
        pool.open()
        logger.info(
            "pool opened",
            extra={"launcher": kind, "runtime": launcher.runtime, "size": settings.pool_size},
        )
        return _Line(settings, kind, launcher, pool, templates)

    async def _retire(self, line: _Line) -> None:
        """Let what runs in it finish, and keep nothing warm for others."""
        line.retired = True
        self._retired.add(line)
        nothing = replace(line.settings.pool_settings(), size=0, minimum=0, burst=0)
        await line.pool.resize(nothing)
        self._close_if_unused(line)

    def _close_if_unused(self, line: _Line) -> None:
        if line.retired and line.instances == 0 and line in self._retired:
            self._retired.discard(line)
            self._spawn(self._close_line(line))

    async def _close_line(self, line: _Line) -> None:
        await line.pool.close()
        others = (self._line, *self._retired)
        if not any(other and other.launcher is line.launcher for other in others):
            line.launcher.close()

    def _end(self, instance: Instance) -> None:
        if self._instances.pop(instance.instance_id, None) is None:
            return
        if instance.forget:
            # The sandbox may live on for its owner's next instance.
            instance.sandbox.closed.remove_done_callback(instance.forget)
        self._spawn(self._release(instance))

    async def _release(self, instance: Instance) -> None:
        try:
            await instance.line.pool.release(instance.sandbox)
        except Exception:
            logger.exception("instance %s could not be destroyed", instance.instance_id)
        instance.line.instances -= 1
        self._close_if_unused(instance.line)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _same_sandboxes(one: ServiceSettings, other: ServiceSettings) -> bool:
    """Whether sandboxes made under the one are what the other asks for."""

    def about(settings: ServiceSettings) -> tuple[Any, ...]:
        return (
            settings.memory_bytes,
            settings.runtime,
            settings.require_gvisor,
            settings.preload,
            settings.enable_seccomp,
            settings.enable_ast_analysis,
            dict(settings.images),
            dict(settings.templates),
        )

    return about(one) == about(other)
