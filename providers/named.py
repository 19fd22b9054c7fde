"""Leasing one provider by its id, whether it is the active one or not."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from providers.manager import Lease, ProviderManager, Slot, manager
from providers.models import ProviderConfig


@contextmanager
def lease_of(provider_id: str, overrides: Mapping[str, Any] | None = None) -> Iterator[Lease]:
    """The provider with its stored configuration, or with its defaults where none is stored.

    The active one is shared with everybody who leases the active one. `overrides` hold in place
    of what is stored, for whoever leases with the same ones.
    """
    if (
        not overrides
        and ProviderConfig.objects.filter(is_active=True, provider_id=provider_id).exists()
    ):
        with manager.lease() as lease:
            # Another one may have been activated in between.
            if lease.provider_id == provider_id:
                yield lease
                return
    with _named(provider_id, overrides or {}).lease() as lease:
        yield lease


def close_all() -> None:
    """End every provider leased by its id. A later lease loads it anew."""
    with _managers_lock:
        managers = list(_managers.values())
    for one in managers:
        one.close()


class _NamedManager(ProviderManager):
    """Lends one provider whether it is active or not, by its stored configuration or defaults."""

    def __init__(self, provider_id: str, overrides: Mapping[str, Any]) -> None:
        self._provider_id = provider_id
        self._overrides = overrides
        super().__init__()

    def _look(self) -> tuple[Slot, ProviderConfig] | None:
        row = ProviderConfig.objects.filter(provider_id=self._provider_id).first()
        if row is None:
            row = ProviderConfig(provider_id=self._provider_id, version=0, config={})
        if self._overrides:
            row.config = {**row.config, **self._overrides}
        key = (row.pk or 0, row.version)
        return (self._put_in_force(Slot(key)), row) if self._is_news(key) else None


_managers: dict[tuple[str, str], _NamedManager] = {}
_managers_lock = threading.Lock()


def _named(provider_id: str, overrides: Mapping[str, Any]) -> _NamedManager:
    key = (provider_id, repr(sorted(overrides.items())))
    with _managers_lock:
        if key not in _managers:
            _managers[key] = _NamedManager(provider_id, overrides)
            atexit.register(_managers[key].close)
        return _managers[key]
