"""A pool with the settings it was made for, and its sandboxes that callers hold."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from providers.errors import ProviderUnavailable, SandboxError
from providers.languages import OURS
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.pool import Pool
from providers.runtime.pool.requests import command_of, make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.sharing_level import ChosenLevel, choose_level
from providers.runtime.pool.template import Template
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.settings import ServiceSettings

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Revision:
    """One pool and what it was made for. Retired when another one is in force."""

    settings: ServiceSettings
    kind: str
    launcher: Launcher
    pool: Pool
    templates: Mapping[str, Template]
    chosen: ChosenLevel
    instances: int = 0
    retired: bool = False
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
        launcher, name = self.launcher, template.name
        return {
            language: command_of(name, language, launcher, template.limits)
            for language in OURS
            if launcher.interpreter(language, name)
        }


async def open_line(
    choice: LauncherChoice, settings: ServiceSettings, former: Revision | None = None
) -> Revision:
    """A pool for these settings, over the former's launcher if that fits them too."""
    if former is not None and settings.launcher_key == former.settings.launcher_key:
        chosen = await choose_level(former.launcher, settings.isolation)
        return _over(former.kind, former.launcher, chosen, settings)
    kind, launcher, chosen = await choice.open(settings)
    try:
        return _over(kind, launcher, chosen, settings)
    except BaseException:
        # Nobody else has it yet.
        launcher.close()
        raise


def _over(
    kind: str, launcher: Launcher, chosen: ChosenLevel, settings: ServiceSettings
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
    logger.info(
        "pool opened",
        extra={"launcher": kind, "runtime": launcher.runtime, "size": settings.pool_size},
    )
    return Revision(settings, kind, launcher, pool, templates, chosen)


def why_not_opened(error: Exception) -> SandboxError:
    """What is told of a line that cannot be opened. What nobody has foreseen may name files and
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
    line: Revision
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
