"""Leasing one provider by its id, whether it is the active one or not."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from django.db import Error as DatabaseFailure
from django.db.models import QuerySet

from providers import registry
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, NotInitialized, SandboxError
from providers.manager import Lease, ProviderManager, Slot, StillStarting, manager, start_provider
from providers.models import ConfigVersion, ProviderConfig
from providers.services.history import config_of


@contextmanager
def lease_of(
    provider_id: str, overrides: Mapping[str, Any] | None = None, *, wait: bool = True
) -> Iterator[Lease]:
    """The provider with its stored configuration, or with its defaults where none is stored.

    The active one is shared with everybody who leases the active one. `overrides` hold in place
    of what is stored, for whoever leases with the same ones. Raises as `ProviderManager.lease`.
    """
    with ExitStack() as held:
        lease: Lease | None = None
        if not overrides and manager.in_force() == provider_id:
            try:
                lease = held.enter_context(manager.lease(wait=wait))
            except NotInitialized:
                # None may be active any more; if it is the provider itself, this is told again.
                lease = None
        if lease is None or lease.provider_id != provider_id:
            # Another one may have been activated in between.
            held.close()
            lease = held.enter_context(_named(provider_id, overrides or {}).lease(wait=wait))
        yield lease


@contextmanager
def lease_of_version(provider_id: str, version: int, *, wait: bool = True) -> Iterator[Lease]:
    """The provider as a certain version of its configuration has it, whichever is in force now.

    Raises as `ProviderManager.lease`, and NotInitialized where that version is gone.
    """
    with ExitStack() as held:
        try:
            current = held.enter_context(lease_of(provider_id, wait=wait))
        except StillStarting:
            raise
        except SandboxError:
            # What is wrong with the configuration of today is nothing to the one that is kept.
            current = None
        if current is not None and current.config_version == version:
            yield current
            return
    with _pinned(provider_id, version).lease(wait=wait) as lease:
        yield lease


@contextmanager
def lease_to_wake(provider_id: str, version: int, *, wait: bool = True) -> Iterator[Lease]:
    """The provider for a sandbox in place of one that a version of its configuration has opened.

    It is of that version too, or of the one in force where the provider says so and has one. Raises
    as `lease_of_version`.
    """
    if wakes_in_force(provider_id):
        chosen = lease_of(provider_id, wait=wait)
    else:
        chosen = lease_of_version(provider_id, version, wait=wait)
    with chosen as lease:
        yield lease


def wakes_in_force(provider_id: str) -> bool:
    """Whether its kept sandboxes may have to move by the configuration in force, and it has one."""
    try:
        if not registry.get(provider_id).wakes_in_force:
            return False
    except InvalidConfiguration:
        # It is not installed any more, which is told when it is started.
        return False
    return ProviderConfig.objects.filter(provider_id=provider_id).exists()


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

    def _rows(self) -> QuerySet[ProviderConfig]:
        return ProviderConfig.objects.filter(provider_id=self._provider_id)

    def _without_row(self) -> tuple[Slot, ProviderConfig] | None:
        if not self._is_news(_NO_ROW):
            return None
        row = ProviderConfig(provider_id=self._provider_id, version=0, config={})
        return self._put_in_force(Slot(_NO_ROW, self._provider_id)), row

    def _look(self) -> tuple[Slot, ProviderConfig] | None:
        found = super()._look()
        if found is not None and self._overrides:
            row = found[1]
            row.config = {**row.config, **self._overrides}
        return found


class _PinnedManager(ProviderManager):
    """Lends a provider by one version of its configuration, which never changes, to attach to what
    that version has opened."""

    def __init__(self, provider_id: str, version: int) -> None:
        self._provider_id = provider_id
        self._version = version
        super().__init__()

    def _start(self, row: ProviderConfig) -> SandboxProvider:
        return start_provider(row, to_attach=True)

    def _look(self) -> tuple[Slot, ProviderConfig] | None:
        key = (_PINNED, self._version)
        if not self._is_news(key):
            return None
        versions = ConfigVersion.objects.filter(subject=self._provider_id, version=self._version)
        try:
            found = versions.defer("content").first()
            if found is None and self._version:
                raise NotInitialized(
                    "The stored version of its configuration does not exist any more."
                )
            # The defaults, of a provider that had not been configured, are version 0.
            config = {} if found is None else config_of(found)
        except SandboxError as error:
            self._put_in_force(Slot(key, self._provider_id)).fail(error)
            return None
        except DatabaseFailure as error:
            self._report_database(error)
            return None
        row = ProviderConfig(provider_id=self._provider_id, version=self._version, config=config)
        return self._put_in_force(Slot(key, self._provider_id)), row


_NO_ROW = (0, 0)
# In place of a row's number in the key of a slot.
_PINNED = -1

_managers: dict[tuple[str, str], ProviderManager] = {}
_managers_lock = threading.Lock()


def _named(provider_id: str, overrides: Mapping[str, Any]) -> ProviderManager:
    key = (provider_id, repr(sorted(overrides.items())))
    return _made_once(key, lambda: _NamedManager(provider_id, overrides))


def _pinned(provider_id: str, version: int) -> ProviderManager:
    return _made_once(
        (provider_id, f"version {version}"), lambda: _PinnedManager(provider_id, version)
    )


def _made_once(key: tuple[str, str], make: Callable[[], ProviderManager]) -> ProviderManager:
    with _managers_lock:
        if key not in _managers:
            _managers[key] = make()
            atexit.register(_managers[key].close)
        return _managers[key]
