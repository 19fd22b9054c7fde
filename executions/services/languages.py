"""Which languages the provider in force serves, asked for often and looked up rarely."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from time import monotonic
from weakref import WeakKeyDictionary

from executions.services.asking import guarded
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, SandboxError
from providers.manager import Lease

_KEPT_SECONDS = 5.0

_known: WeakKeyDictionary[SandboxProvider, tuple[float, list[str]]] = WeakKeyDictionary()


def supported_languages(lease: Lease) -> list[str]:
    """What the leased provider runs, at most 5 seconds old. Raises SandboxError."""
    known = _known.get(lease.provider)
    if known is None or monotonic() - known[0] > _KEPT_SECONDS:
        told = guarded(lease.provider_id, lambda: list(lease.provider.get_supported_languages()))
        known = monotonic(), sorted(name for name in told if isinstance(name, str))
        _known[lease.provider] = known
    return known[1]


def refuse_unsupported(
    language: str, routes: Iterable[Callable[[], AbstractContextManager[Lease]]]
) -> None:
    """Raise InvalidConfiguration for a language that none of the providers runs.

    A provider that cannot be asked is no reason to refuse: the attempt is then made, and
    recorded with what became of it.
    """
    known: set[str] = set()
    for route in routes:
        try:
            with route() as lease:
                known.update(supported_languages(lease))
        except SandboxError:
            return
        if language in known:
            return
    raise InvalidConfiguration(
        f"language: Must be one of: {', '.join(sorted(known))}.", field="language"
    )
