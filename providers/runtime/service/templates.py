"""Templates of the store as templates of a pool: each with a launcher of its own, while it is used.

A launcher shows its sandboxes the one template that it was made for, and nothing of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.launchers.images import Image, ImageStore
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.pool import Pool
from providers.runtime.pool.requests import make_template
from providers.runtime.service.launchers import WITH_IMAGES, LauncherChoice
from providers.runtime.service.settings import ServiceSettings
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.store import TemplateStore

WITH_TEMPLATES = ("bubblewrap", "gvisor", "runc", "crun", "docker", "kubernetes", "none")


def bases_of(kind: str) -> list[str]:
    """Return what of `providers.templates.base.BASES` templates can have with a launcher."""
    if kind == "docker":
        return ["image", bases.APT]
    if kind == "kubernetes":
        return ["image"]
    if kind not in WITH_TEMPLATES:
        return []
    return ["interpreter", "image"] if kind in WITH_IMAGES else ["interpreter"]


@dataclass(eq=False)
class _Open:
    launcher: Launcher
    # In the pool, by name.
    templates: set[str] = field(default_factory=set)


class TemplateLaunchers:
    """Those of one pool, whose launcher is of this `kind`. Lives in one event loop."""

    def __init__(
        self, choice: LauncherChoice, kind: str, launcher: Launcher, settings: ServiceSettings
    ) -> None:
        self._choice, self._kind, self._launcher = choice, kind, launcher
        self._settings = settings
        self._store = TemplateStore(choice.data_dir)
        self._open: dict[str, _Open] = {}
        self._opening = asyncio.Lock()

    async def add(self, pool: Pool, language: str, digest: str) -> str:
        """Have the pool know the template of this digest; return its name there.

        Raises SandboxError. Nothing waits between the end of this and the caller's next step.
        """
        name = f"{language}@{digest}"
        folder = self._find(digest)
        # Others do not wait for what takes long.
        await self._launcher.hold_template(name, digest, folder)
        async with self._opening:
            found = self._open.get(digest)
            if await self._launcher.hold_template(name, digest, folder):
                found = self._open.setdefault(digest, _Open(self._launcher))
            elif found is None:
                found = self._open[digest] = _Open(await self._prepare(folder))
            if name not in found.templates or not pool.has(name):
                if found.launcher.interpreter(language, name) is None:
                    raise InvalidConfiguration(
                        f"There is no interpreter of {language[:40]!r}.", field="language"
                    )
                limits, advise = self._settings.limits, self._settings.enable_ast_analysis
                # None of its modules is loaded beforehand: that would be done for all sandboxes
                # together, with privileges that no package has.
                template = make_template(name, language, found.launcher, limits, advise=advise)
                pool.add(template, found.launcher)
                found.templates.add(name)
            return name

    def _find(self, digest: str) -> Path:
        """Return the folder of a template. Raises InvalidConfiguration."""
        if self._kind not in WITH_TEMPLATES:
            raise InvalidConfiguration(
                f"template: The launcher {self._kind} has no templates.", field="template"
            )
        folder = self._store.folder(digest)
        if folder is None:
            raise InvalidConfiguration(
                f"template: The files of {digest[:12]} are not on this machine. Build the template "
                "again.",
                field="template",
            )
        lacking = bases.needs(folder) - set(bases_of(self._kind))
        if bases.APT in lacking:
            raise InvalidConfiguration("template: apt packages need Docker.", field="template")
        if lacking:
            raise InvalidConfiguration(
                f"template: The launcher {self._kind} has no templates whose base is "
                f"{bases.read(folder).name}.",
                field="template",
            )
        return folder

    async def _prepare(self, folder: Path) -> Launcher:
        """Return a launcher that shows its sandboxes this folder. Raises SandboxError."""
        base = bases.read(folder)
        if base.kind == "image":
            image = self._image(base)
            if not base.look:
                image = replace(image, folder=folder)
            choice = replace(self._choice, image=image)
        else:
            python = str(folder / "bin" / "python")
            choice = replace(self._choice, python=python, has_foreign_packages=True)
        launcher = choice.make(self._kind, replace(self._settings, templates={}))
        try:
            await launcher.prepare()
        except BaseException:
            launcher.close()
            raise
        return launcher

    def _image(self, base: Base) -> Image:
        """Return the imported image that a template is based on. Raises InvalidConfiguration."""
        try:
            image = ImageStore(self._choice.data_dir).find(base.image_name)
        except ProviderUnavailable as error:
            raise InvalidConfiguration(f"template: {error.message}", field="template") from None
        bases.check_unchanged(base, image.digest)
        return image

    def launcher_of(self, template: str) -> Launcher | None:
        """Return the launcher of a template by its name in the pool, None for the pool's own."""
        _, _, digest = template.partition("@")
        found = self._open.get(digest)
        return found.launcher if found else None

    async def close_unused(self, pool: Pool) -> None:
        """Close the launchers of templates that the pool has forgotten. Raises SandboxError."""
        async with self._opening:
            for digest, found in list(self._open.items()):
                if not any(map(pool.has, found.templates)):
                    await self._close(self._open.pop(digest))
                    self._forget_look(digest)

    def _forget_look(self, digest: str) -> None:
        """Remove what a base was only read in, which another machine may have sent."""
        folder = self._store.folder(digest)
        if folder is not None and bases.read(folder).look:
            self._store.remove(digest)

    async def close(self) -> None:
        """Close all of them. Every sandbox is gone. Raises SandboxError."""
        async with self._opening:
            while self._open:
                _, found = self._open.popitem()
                await self._close(found)

    async def _close(self, found: _Open) -> None:
        if found.launcher is not self._launcher:
            found.launcher.close()
        for name in found.templates:
            await found.launcher.drop_template(name)

    @property
    def digests(self) -> Sequence[str]:
        """Return the digests of the templates that are in use."""
        return list(self._open)
