"""Which provider serves now: the active one, in every process, started from its stored
configuration and changed without a restart. `RagflowNames` has RAGFlow's names for it.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from weakref import WeakSet

from django.db import Error as DatabaseFailure
from django.db.models import QuerySet
from django.views.decorators.debug import sensitive_variables

from providers import provider_status, registry
from providers.addresses import AddressRefused, check_resolved
from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, NotInitialized, ProviderUnavailable, SandboxError
from providers.fields import DecryptionError
from providers.models import ProviderConfig
from providers.threads import NoThreadLeft, reset_after_fork, start_thread

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.5
RETRY_SECONDS = 5.0
LOAD_SECONDS = 30.0
WARM_SECONDS = 20.0
CLOSE_SECONDS = 3.0

_Key = tuple[int, int]
_NO_ROW: _Key = (0, 0)


class StillStarting(ProviderUnavailable):
    """The provider is being started. `ready` is done when that has come to an end, whichever."""

    def __init__(self, ready: Future[None]) -> None:
        super().__init__("The provider is still starting. Try again later.")
        self.ready = ready


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
    provider_id: str = ""
    ready: Future[None] = field(default_factory=Future)
    lease: Lease | None = None
    error: SandboxError | None = None
    failed_at: float = 0.0
    users: int = 0
    retired: bool = False
    closed: bool = False

    def fail(self, error: SandboxError) -> None:
        self.error = error
        self.failed_at = time.monotonic()
        self.settle()

    def settle(self) -> None:
        """Let go on whoever waits: for this one, or because another one is in its place."""
        with suppress(InvalidStateError):
            self.ready.set_result(None)


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
        from providers.guarded import two_person_rule
        from providers.services import NotPermitted, activate

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


class ProviderManager(RagflowNames):
    """Hands out the active provider. One per process, used from many threads.

    A changed configuration is noticed within `check_seconds`. From then on nothing new runs
    under the old one, not even while the new one starts or when it fails to: an admin who
    switches the isolation must not see code run under the former. What already runs finishes,
    and then the old provider is closed in the background. One that failed to start is tried
    again after `retry_seconds`; a caller waits at most `load_seconds` for one that is starting,
    or is told at once that it is, and then a thread of its own starts it.
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
        reset_after_fork(self.forget)

    def _start_afresh(self) -> None:
        # Reentrant: a lease of a stream that nobody reads on is given back by whoever's thread
        # collects the garbage, and that may hold it already.
        self._lock = threading.RLock()
        self._checking = threading.Lock()
        self._slot: Slot | None = None
        self._slots: set[Slot] = set()
        self._closers: set[threading.Thread] = set()
        self._next_check = 0.0
        self._known = (0.0, "")
        self._database_failed = False

    @contextmanager
    def lease(self, *, wait: bool = True) -> Iterator[Lease]:
        """The active provider, kept open until the block ends.

        Raises NotInitialized when none is active or its configuration cannot be used, and
        whatever SandboxError the provider raised when it failed to start. Without `wait` it raises
        StillStarting for one that is not there yet.
        """
        slot, lease = self._take(wait)
        try:
            yield lease
        finally:
            self._give_back(slot)

    def warm(self) -> bool:
        """Load the active provider now, so that the first request need not.

        False if it failed, or takes longer than WARM_SECONDS: a process must get to serve, whatever
        one backend does.
        """
        try:
            try:
                with self.lease(wait=False):
                    return True
            except StillStarting as starting:
                with suppress(TimeoutError):
                    starting.ready.exception(WARM_SECONDS)
            with self.lease(wait=False):
                return True
        except SandboxError as error:
            logger.warning("No provider is ready. %s: %s", error.code, error.message)
            return False

    def in_force(self) -> str:
        """The id of the provider that serves or would, as of `check_seconds` ago at most.

        Starts none. Raises ProviderUnavailable while the database has never been reached.
        """
        until, known = self._known
        if time.monotonic() < until:
            return known
        try:
            known = self._rows().order_by().values_list("provider_id", flat=True).first() or ""
        except DatabaseFailure as error:
            self._report_database(error)
            return self._slot.provider_id if self._slot is not None else known
        self._known = (time.monotonic() + self._check_seconds, known)
        return known

    def look_again(self) -> None:
        """Have the next lease start what is configured then, whatever serves now."""
        self._put_in_force(Slot(_NO_ROW))
        self._next_check = 0.0
        self._known = (0.0, "")

    def close(self) -> None:
        """End every provider, leased or not, and wait for it. A later lease loads anew."""
        with self._lock:
            slots, self._slots, self._slot = self._slots, set(), None
            self._known = (0.0, "")
            closers = list(self._closers)
        for slot in slots:
            slot.settle()
            self._close(slot)
        deadline = time.monotonic() + CLOSE_SECONDS
        for closer in closers:
            closer.join(max(0.0, deadline - time.monotonic()))

    def slots(self) -> list[Slot]:
        """What is loaded or being loaded now."""
        with self._lock:
            return list(self._slots)

    def forget(self) -> None:
        """Let go, in a forked child, of what belongs to the parent: unclosed, and kept alive.

        Closing it, or a finalizer of it, would end the parent's sandboxes.
        """
        _inherited.append(self._slots)
        self._start_afresh()

    def _take(self, wait: bool) -> tuple[Slot, Lease]:
        deadline = time.monotonic() + self._load_seconds
        while True:
            self._check(wait)
            with self._lock:
                slot = self._slot
                if slot is not None and slot.lease is not None:
                    slot.users += 1
                    return slot, slot.lease
            if slot is not None:
                if slot.error is not None:
                    raise _copy(slot.error)
                if wait:
                    with suppress(TimeoutError):
                        slot.ready.exception(max(0.0, deadline - time.monotonic()))
                elif not slot.ready.done():
                    raise StillStarting(slot.ready)
            if time.monotonic() > deadline:
                raise StillStarting(slot.ready if slot is not None else Future())

    def _give_back(self, slot: Slot) -> None:
        with self._lock:
            slot.users -= 1
            unused = slot in self._slots and slot.retired and slot.users == 0
        if unused:
            self._close_in_background(slot)

    def _is_due(self) -> bool:
        with self._lock:
            return self._slot is None or time.monotonic() >= self._next_check

    def _check(self, wait: bool) -> None:
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
        if found is None:
            return
        if wait:
            self._load(*found)
        else:
            try:
                start_thread("provider-load", partial(self._load, *found))
            except NoThreadLeft as error:
                found[0].fail(ProviderUnavailable(error.message))

    def _rows(self) -> QuerySet[ProviderConfig]:
        """The row in force, if there is one."""
        return ProviderConfig.objects.filter(is_active=True)

    def _without_row(self) -> tuple[Slot, ProviderConfig] | None:
        """What has to be loaded where there is no row."""
        if self._is_news(None):
            self._put_in_force(Slot(None)).fail(
                NotInitialized("No provider is active. Configure and activate one in the admin.")
            )
        return None

    def _look(self) -> tuple[Slot, ProviderConfig] | None:
        """What has to be loaded now: its slot, already in force, and its row."""
        rows = self._rows().order_by()
        try:
            found = next(iter(rows.values_list("pk", "version", "provider_id")), None)
            self._database_failed = False
            if found is None:
                return self._without_row()
            *numbers, provider_id = found
            key = numbers[0], numbers[1]
            if not self._is_news(key):
                return None
            row = rows.first()
        except DatabaseFailure as error:
            self._report_database(error)
            return None
        except DecryptionError as error:
            # One that cannot be read is that provider's failure: others may serve.
            self._put_in_force(Slot(key, provider_id)).fail(NotInitialized(str(error)))
            return None
        if row is None:
            return self._without_row()
        return self._put_in_force(Slot((row.pk, row.version), row.provider_id)), row

    def _is_news(self, key: _Key | None) -> bool:
        slot = self._slot
        if slot is None or slot.key != key:
            return True
        failed = key is not None and slot.error is not None
        return failed and time.monotonic() - slot.failed_at >= self._retry_seconds

    def _report_database(self, error: DatabaseFailure) -> None:
        if not self._database_failed:
            logger.error("The active provider cannot be read. %s", error)
        self._database_failed = True
        if self._slot is None:
            raise ProviderUnavailable("The database cannot be reached.") from None

    def _put_in_force(self, slot: Slot) -> Slot:
        with self._lock:
            former, self._slot = self._slot, slot
            self._slots.add(slot)
            if former is not None:
                former.retired = True
                former.settle()
            if former is not None and former.lease is None:
                self._slots.discard(former)
        if former is not None and former.lease is not None and former.users == 0:
            self._close_in_background(former)
        return slot

    def _start(self, row: ProviderConfig) -> SandboxProvider:
        return start_provider(row)

    def _load(self, slot: Slot, row: ProviderConfig) -> None:
        try:
            provider = self._start(row)
            provider_status.take(provider)
        except SandboxError as error:
            logger.error("Provider %r did not start. %s: %s", row.provider_id, error.code, error)
            slot.fail(error)
            return
        except BaseException:
            slot.fail(ProviderUnavailable(f"The start of {row.provider_id!r} was interrupted."))
            raise
        with self._lock:
            slot.lease = Lease(provider, row.provider_id, row.version)
            replaced = slot.retired or slot not in self._slots
        slot.settle()
        if replaced:
            self._close_in_background(slot)

    def _close_in_background(self, slot: Slot) -> None:
        try:
            with self._lock:
                closer = start_thread("provider-close", partial(self._close, slot))
                self._closers = {thread for thread in self._closers if thread.is_alive()} | {closer}
        except NoThreadLeft:
            self._close(slot)

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


def loaded() -> list[Lease]:
    """What this process has loaded now, to be looked at. Starts nothing, and keeps nothing open."""
    return [
        slot.lease
        for one in list(_managers)
        for slot in one.slots()
        if slot.lease is not None and not slot.closed
    ]


def _copy(error: SandboxError) -> SandboxError:
    """A new exception for each caller: a shared one would collect all their tracebacks."""
    copied = type(error).__new__(type(error), *error.args)
    copied.__dict__.update(error.__dict__)
    return copied


_managers: WeakSet[ProviderManager] = WeakSet()
_inherited: list[set[Slot]] = []

manager = ProviderManager()
atexit.register(manager.close)


@sensitive_variables()
def start_provider(row: ProviderConfig, *, to_attach: bool = False) -> SandboxProvider:
    """The provider, initialized. Raises SandboxError, whatever went wrong.

    `to_attach`: only to use what it has opened before with this configuration.
    """
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
        start = provider.initialize_to_attach if to_attach else provider.initialize
        if not start(config):
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
