"""Which providers exist: the built-in ones, and those of other installed packages.

Another package adds a provider with an entry point in the group `cofferdam.providers`, whose name
is the provider's id and whose value is its class. Nothing is imported until it is asked for.

A class may be configured several times. The first configuration has the class's id, every other one
a name behind it: `e2b`, `e2b@eu`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration

logger = logging.getLogger(__name__)

GROUP = "cofferdam.providers"

BUILT_IN = {
    "local": "providers.local.provider:LocalProvider",
    "self_managed": "providers.self_managed.provider:SelfManagedProvider",
    "e2b": "providers.e2b.provider:E2BProvider",
    "aliyun_codeinterpreter": "providers.aliyun_codeinterpreter.provider:"
    "AliyunCodeInterpreterProvider",
}

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_CONFIGURED = re.compile(r"[a-z][a-z0-9_]*(@[a-z0-9][a-z0-9-]*)?")
_MOST_CHARACTERS = 64


@dataclass(frozen=True)
class BrokenProvider:
    """A declared provider that cannot be used. `source` is the package that declares it."""

    provider_id: str
    source: str
    reason: str


@dataclass(frozen=True)
class _Declared:
    entry_point: EntryPoint
    source: str


class _Registry:
    """What was found so far. No lock: a process forked while one is held would never get it.

    Two threads that load the same class at once get the same one from Python's import system.
    """

    def __init__(self) -> None:
        self.broken: list[BrokenProvider] = []
        self.declared = self._discover()
        self._classes: dict[str, type[SandboxProvider]] = {}

    def load(self, provider_id: str) -> type[SandboxProvider] | None:
        declared = self.declared.get(provider_id)
        if declared is None:
            return None
        if provider_id not in self._classes:
            try:
                self._classes[provider_id] = _load(declared.entry_point)
            # A package that calls sys.exit() while it is imported must not end the server.
            except (Exception, SystemExit) as error:
                if self.declared.pop(provider_id, None):
                    reason = f"{type(error).__name__}: {error}"
                    self._report(provider_id, declared.source, reason, error)
                return None
        return self._classes[provider_id]

    def _discover(self) -> dict[str, _Declared]:
        found = {
            provider_id: _Declared(EntryPoint(provider_id, path, GROUP), "Cofferdam itself")
            for provider_id, path in BUILT_IN.items()
        }
        others: dict[str, list[_Declared]] = defaultdict(list)
        for entry_point in entry_points(group=GROUP):
            source = entry_point.dist.name if entry_point.dist else "an unknown package"
            others[entry_point.name].append(_Declared(entry_point, source))
        for provider_id, claims in others.items():
            if problem := _claim_error(provider_id, claims):
                for claim in claims:
                    self._report(provider_id, claim.source, problem)
            else:
                found[provider_id] = claims[0]
        return found

    def _report(
        self, provider_id: str, source: str, reason: str, error: BaseException | None = None
    ) -> None:
        text = "Provider %r of %s cannot be used. %s"
        logger.error(text, provider_id, source, reason, exc_info=error)
        self.broken.append(BrokenProvider(provider_id, source, reason))


def _claim_error(provider_id: str, claims: list[_Declared]) -> str | None:
    if provider_id in BUILT_IN:
        return "The id belongs to a built-in provider."
    if not _NAME.fullmatch(provider_id):
        return "An id is lower case letters, digits and underscores, at most 64."
    if len(claims) > 1:
        sources = ", ".join(sorted(claim.source for claim in claims))
        return f"Several packages claim the id: {sources}."
    return None


def _load(entry_point: EntryPoint) -> type[SandboxProvider]:
    loaded = entry_point.load()
    if not (inspect.isclass(loaded) and issubclass(loaded, SandboxProvider)):
        raise TypeError(f"{entry_point.value} is not a subclass of SandboxProvider.")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))
        raise TypeError(f"{entry_point.value} does not implement {missing}.")
    if getattr(loaded, "id", None) != entry_point.name or not getattr(loaded, "name", ""):
        raise ValueError(f"{entry_point.value} must have id = {entry_point.name!r} and a name.")
    for key in loaded.config_fields:
        if not _NAME.fullmatch(key):
            raise ValueError(
                f"{entry_point.value} declares the field {key!r}, which is not a valid name."
            )
    return loaded


@cache
def _registry() -> _Registry:
    return _Registry()


def class_id(provider_id: str) -> str:
    """The id of the class that a configuration is of."""
    return provider_id.partition("@")[0]


def named(class_id: str, name: str) -> str:
    """The id of another configuration of a class. Raises InvalidConfiguration."""
    provider_id = f"{class_id}@{name}"
    if not _CONFIGURED.fullmatch(provider_id) or len(provider_id) > _MOST_CHARACTERS:
        raise InvalidConfiguration(
            "A name is lower case letters, digits and dashes, and begins with no dash; with "
            f"the provider's id it has at most {_MOST_CHARACTERS - 1} characters.",
            field="name",
        )
    return provider_id


def get(provider_id: str) -> type[SandboxProvider]:
    """The class of a configuration. Raises InvalidConfiguration where none can be used."""
    known = _registry()
    found = class_id(provider_id)
    is_id = _CONFIGURED.fullmatch(provider_id) and len(provider_id) <= _MOST_CHARACTERS
    if is_id and (loaded := known.load(found)):
        return loaded
    for entry in known.broken:
        if entry.provider_id == found:
            raise InvalidConfiguration(
                f"Provider {provider_id!r} of {entry.source} cannot be used. {entry.reason}",
                field="provider",
            )
    raise InvalidConfiguration(
        f"There is no provider {provider_id!r}. Known: {', '.join(sorted(known.declared))}.",
        field="provider",
    )


def all_providers() -> dict[str, type[SandboxProvider]]:
    """Every usable provider by id, each class loaded. Built-in ones come first."""
    known = _registry()
    loaded = {provider_id: known.load(provider_id) for provider_id in list(known.declared)}
    return {provider_id: provider for provider_id, provider in loaded.items() if provider}


def broken() -> list[BrokenProvider]:
    """What was declared but cannot be used, as far as it has been loaded, with the reason."""
    return list(_registry().broken)


def refresh() -> None:
    """Forget everything and look at the installed packages anew, as after an installation."""
    _registry.cache_clear()
