"""Which provider serves now: the active one, in every process, changed without a restart."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

from django.db import Error as DatabaseFailure
from django.views.decorators.debug import sensitive_variables

from providers import registry
from providers.addresses import AddressRefused, check_resolved
from providers.base import SandboxProvider
from providers.errors import (
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
)
from providers.fields import DecryptionError
from providers.models import ProviderConfig

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
RETRY_SECONDS = 5.0
LOAD_SECONDS = 30.0
CLOSE_SECONDS = 3.0

_Key = tuple[int, int]


@dataclass(frozen=True)
class Lease:
    """The right to use a provider until the `with` block ends."""

    provider: SandboxProvider
    provider_id: str
    config_version: int


@dataclass(eq=False)
class Slot:
    """One loading of one configuration: being loaded until `ready`, then a lease or an error."""

    key: _Key | None
    ready: threading.Event = field(default_factory=threading.Event)
    lease: Lease | None = None
    error: SandboxError | None = None
    failed_at: float = 0.0
    users: int = 0
    retired: bool = False
    closed: bool = False

    def fail(self, error: SandboxError) -> None:
        self.error = error
        self.failed_at = time.monotonic()
        self.ready.set()


class ProviderManager:
    """Hands out the active provider. One per process, used from many threads.

    A changed configuration is noticed within `check_seconds`. From then on nothing new runs
    under the old one, not even while the new one starts or when it fails to: an admin who
    switches the isolation must not see code run under the former. What already runs finishes,
    and then the old provider is closed in the background. One that failed to start is tried
    again after `retry_seconds`; a caller waits at most `load_seconds` for one that is starting.
    """

    def __init__(
        self,
        *,
        check_seconds: float = CHECK_SECONDS,
        retry_seconds: float = RETRY_SECONDS,
        load_seconds: float = LOAD_SECONDS,
    ) -> None:
        self._check_seconds = check_seconds
        self._retry_seconds = retry_seconds
        self._load_seconds = load_seconds
        self._start_afresh()
        _managers.add(self)

    def _start_afresh(self) -> None:
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._slot: Slot | None = None
        self._slots: set[Slot] = set()
        self._closers: set[threading.Thread] = set()
        self._next_check = 0.0
        self._database_failed = False

    @contextmanager
    def lease(self) -> Iterator[Lease]:
        """The active provider, kept open until the block ends.

        Raises NotInitialized when none is active or its configuration cannot be used, and
        whatever SandboxError the provider raised when it failed to start.
        """
        slot, lease = self._take()
        try:
            yield lease
        finally:
            self._give_back(slot)

    def warm(self) -> bool:
        """Load the active provider now, so that the first request need not. False if it failed."""
        try:
            with self.lease():
                return True
        except SandboxError as error:
            logger.warning("No provider is ready. %s: %s", error.code, error.message)
            return False

    def close(self) -> None:
        """End every provider, leased or not, and wait for it. A later lease loads anew."""
        with self._lock:
            slots, self._slots, self._slot = self._slots, set(), None
            closers = list(self._closers)
        for slot in slots:
            slot.ready.set()
            self._close(slot)
        deadline = time.monotonic() + CLOSE_SECONDS
        for closer in closers:
            closer.join(max(0.0, deadline - time.monotonic()))

    def forget(self) -> None:
        """Let go, in a forked child, of what belongs to the parent: unclosed, and kept alive.

        Closing it, or a finalizer of it, would end the parent's sandboxes.
        """
        _inherited.append(self._slots)
        self._start_afresh()

    def _take(self) -> tuple[Slot, Lease]:
        deadline = time.monotonic() + self._load_seconds
        while True:
            self._check()
            with self._lock:
                slot = self._slot
                if slot is not None and slot.lease is not None:
                    slot.users += 1
                    return slot, slot.lease
            if slot is not None:
                if slot.error is not None:
                    raise _copy(slot.error)
                slot.ready.wait(max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise ProviderUnavailable("The provider is still starting. Try again later.")

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            slot.users -= 1
            unused = slot in self._slots and slot.retired and slot.users == 0
        if unused:
            self._close_in_background(slot)

    def _is_due(self) -> bool:
        with self._lock:
            return self._slot is None or time.monotonic() >= self._next_check

    def _check(self) -> None:
        """Look at the database if it is time to, and load what is new there."""
        if not self._is_due():
            return
        # One thread looks, the others go on with what is loaded. With nothing loaded they wait.
        if not self._checking.acquire(blocking=self._slot is None):
            return
        try:
            if not self._is_due():
                return
            self._next_check = time.monotonic() + self._check_seconds
            found = self._look()
        finally:
            self._checking.release()
        if found is not None:
            self._load(*found)

    def _look(self) -> tuple[Slot, ProviderConfig] | None:
        """What has to be loaded now: its slot, already in force, and its row."""
        active = ProviderConfig.objects.filter(is_active=True).order_by()
        try:
            key = next(iter(active.values_list("pk", "version")), None)
            if not self._is_news(key):
                self._database_failed = False
                return None
            row = active.first()
        except DatabaseFailure as error:
            self._report_database(error)
            return None
        except DecryptionError as error:
            self._put_in_force(Slot(key)).fail(NotInitialized(str(error)))
            return None
        self._database_failed = False
        if row is None:
            self._put_in_force(Slot(None)).fail(
                NotInitialized("No provider is active. Configure and activate one in the admin.")
            )
            return None
        return self._put_in_force(Slot((row.pk, row.version))), row

    def _is_news(self, key: _Key | None) -> bool:
        slot = self._slot
        if slot is None or slot.key != key:
            return True
        failed = key is not None and slot.error is not None
        return failed and time.monotonic() - slot.failed_at >= self._retry_seconds

    def _report_database(self, error: DatabaseFailure) -> None:
        if not self._database_failed:
            logger.error("The active provider cannot be looked up. %s", error)
        self._database_failed = True
        if self._slot is None:
            raise ProviderUnavailable("The database cannot be reached.") from None

    def _put_in_force(self, slot: Slot) -> Slot:
        with self._lock:
            former, self._slot = self._slot, slot
            self._slots.add(slot)
            if former is not None:
                former.retired = True
                former.ready.set()
            if former is not None and former.lease is None:
                self._slots.discard(former)
        if former is not None and former.lease is not None and former.users == 0:
            self._close_in_background(former)
        return slot

    def _load(self, slot: Slot, row: ProviderConfig) -> None:
        try:
            provider = start_provider(row)
        except SandboxError as error:
            logger.error("Provider %r did not start. %s: %s", row.provider_id, error.code, error)
            slot.fail(error)
            return
        except BaseException:
            slot.fail(ProviderUnavailable(f"The start of {row.provider_id!r} was broken off."))
            raise
        with self._lock:
            slot.lease = Lease(provider, row.provider_id, row.version)
            replaced = slot.retired or slot not in self._slots
        slot.ready.set()
        if replaced:
            self._close_in_background(slot)

    def _close_in_background(self, slot: Slot) -> None:
        closer = threading.Thread(target=self._close, args=(slot,), name="provider-close")
        closer.daemon = True
        with self._lock:
            self._closers = {thread for thread in self._closers if thread.is_alive()} | {closer}
            closer.start()

    def _close(self, slot: Slot) -> None:
        with self._lock:
            self._slots.discard(slot)
            lease = slot.lease
            if slot.closed or lease is None:
                return
            slot.closed = True
        try:
            lease.provider.close()
        except BaseException:
            logger.exception("Provider %r did not close properly.", lease.provider_id)


@sensitive_variables()
def start_provider(row: ProviderConfig) -> SandboxProvider:
    """The provider, initialized. Raises SandboxError, whatever went wrong."""
    secrets: list[str] = []
    try:
        provider_class = registry.get(row.provider_id)
        secrets = [
            str(row.config[key])
            for key, declared in provider_class.config_fields.items()
            if declared.secret and row.config.get(key)
        ]
        config = provider_class.check_config(row.config)
        check_resolved(provider_class.config_fields, config)
        provider = provider_class()
        if not provider.initialize(config):
            raise NotInitialized(f"Provider {row.provider_id!r} did not start.")
    except InvalidConfiguration as error:
        # Not the caller's mistake: SB002 would tell him with a 400 that it was.
        raise NotInitialized(
            f"The configuration of provider {row.provider_id!r} cannot be used. {error.message}"
        ) from None
    except AddressRefused:
        raise NotInitialized(
            f"The configuration of provider {row.provider_id!r} names an address that is not "
            "allowed. The server's log has the details."
        ) from None
    except SandboxError:
        raise
    except BaseException as error:  # a provider of another package may raise SystemExit
        if isinstance(error, KeyboardInterrupt) and _is_main_thread():
            raise
        report = traceback.format_exc()
        for secret in secrets:
            report = report.replace(secret, "••••")
        logger.error("Provider %r failed to start.\n%s", row.provider_id, report)
        raise NotInitialized(
            f"Provider {row.provider_id!r} failed to start ({type(error).__name__}). "
            "The server's log has the details."
        ) from None
    return provider


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _copy(error: SandboxError) -> SandboxError:
    """A new exception for each caller: a shared one would collect all their tracebacks."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    return copied


_managers: WeakSet[ProviderManager] = WeakSet()
_inherited: list[set[Slot]] = []


def _after_fork() -> None:
    for inherited in list(_managers):
        inherited.forget()


os.register_at_fork(after_in_child=_after_fork)

manager = ProviderManager()
atexit.register(manager.close)
