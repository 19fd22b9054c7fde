"""The names that RAGFlow's design has for what the manager does, for code written to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, NotInitialized

if TYPE_CHECKING:
    from providers.manager import Lease


class RagflowNames(ABC):
    """Thin: what serves is what is configured, for every process, and never a process's own."""

    @abstractmethod
    def lease(self, *, wait: bool = True) -> AbstractContextManager[Lease]: ...

    @abstractmethod
    def in_force(self) -> str: ...

    @abstractmethod
    def look_again(self) -> None: ...

    def set_provider(self, name: str, provider: SandboxProvider | None = None) -> None:
        """Activate the provider that is configured under this name, as the admin does.

        Raises InvalidConfiguration where none is, or where an object of another kind comes along,
        and NotPermitted under the two-person rule, where somebody else has to agree in the admin.
        """
        from providers import registry
        from providers.services import NotPermitted, activate
        from providers.services.rule import two_person_rule

        kind = type(registry.get(name))
        if provider is not None and not isinstance(provider, kind):
            raise InvalidConfiguration(
                f"provider: Must be a {kind.__name__}, the class of {name!r}.", field="provider"
            )
        if two_person_rule():
            raise NotPermitted("This needs two-person approval. Request it in the admin.")
        activate(name)
        self.look_again()

    def get_provider(self) -> SandboxProvider | None:
        """The active provider, None where there is none. It may be closed as soon as another one
        serves: whoever runs something holds a `lease`."""
        try:
            with self.lease() as lease:
                return lease.provider
        except NotInitialized:
            return None

    def get_provider_name(self) -> str | None:
        """Its id, None where none is active."""
        return self.in_force() or None

    def reload_provider(self) -> None:
        """Start the active provider anew, as it is configured now. What runs ends as it would have.

        A changed configuration is taken up by itself: this is for what changed beside it.
        """
        self.look_again()
        self.get_provider()
