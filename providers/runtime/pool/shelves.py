"""All shelves of a pool: one for each template, and one for each template and owner of a kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from providers.errors import CreationFailed, InvalidConfiguration
from providers.runtime.pool.launcher import Launcher, TenantLauncher
from providers.runtime.pool.shelf import Shelf
from providers.runtime.pool.template import Template


class Shelves(dict[str, Shelf]):
    """By the name under which callers wait for what is on them."""

    def __init__(self, launcher: Launcher, templates: Mapping[str, Template]) -> None:
        super().__init__(
            (name, Shelf(name, template, launcher, always_warm=index == 0))
            for index, (name, template) in enumerate(templates.items())
        )
        self._launcher = launcher
        self._templates = templates

    def find(self, template: str, owner: str = "") -> Shelf:
        """That of a template, or of a template in the kernel of this owner. Raises SandboxError."""
        if template not in self._templates:
            raise InvalidConfiguration(f"There is no template {template!r}.", field="language")
        if not owner:
            return self[template]
        # No template's name has a colon.
        name = f"{template}:{owner}"
        if name not in self:
            if not isinstance(self._launcher, TenantLauncher):
                raise CreationFailed(f"{self._launcher.runtime} has no kernel for each tenant.")
            starter = self._launcher.for_owner(owner)
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

    def forget_owners(self, used: Collection[str]) -> None:
        """Keep nothing of owners who have not asked for long, beside what is `used`."""
        for name, shelf in list(self.items()):
            if shelf.owner and shelf.is_empty and not shelf.is_asked_for and name not in used:
                del self[name]
