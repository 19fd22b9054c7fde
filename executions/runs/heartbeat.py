"""The lease of this process, which each execution that it runs names, and its figures."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connection
from django.db.models import Exists, F, OuterRef
from django.db.models.functions import Now

from executions.kernel.background import run_once_in_background
from executions.runs import active_runs
from executions.runs.models import Execution, Process
from executions.runs.standby import Standby
from providers import draining
from providers.manager import loaded
from providers.remote.reclaim import process_tag
from providers.services.health import figures_of
from providers.threads import reset_after_fork, start_thread

logger = logging.getLogger(__name__)


_latest: dict[str, Any] = {}


def latest_figures() -> dict[str, Any]:
    """What was found last, while the next look is begun: a beat waits for no disk and no provider.

    Empty before the first one.
    """
    run_once_in_background("figures", _look)
    return _latest


def _look() -> None:
    global _latest
    _latest = process_figures()


def _forget() -> None:
    """The figures are the parent's."""
    global _latest
    _latest = {}


reset_after_fork(_forget)


def process_figures() -> dict[str, Any]:
    """`host` and `pools`, by provider. Asks memory, the kernel and each provider."""
    return {"host": host_figures(), "pools": _pools()}


def pools_of(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """Each pool of the processes' figures once for each host, whose processes share it: the row,
    the provider and what its pool has. Rows have `instance` and `figures`; the first one counts."""
    seen: set[tuple[str, str]] = set()
    for row in rows:
        for provider, found in sorted(((row["figures"] or {}).get("pools") or {}).items()):
            if (row["instance"], provider) not in seen:
                seen.add((row["instance"], provider))
                yield row, provider, found


def host_figures() -> dict[str, float]:
    """Of this host: load and processors, memory and the disk of DATA_DIR in bytes.

    What cannot be read is left out.
    """
    found: dict[str, float] = {}
    for look in (_load, _memory, _disk):
        try:
            found |= look()
        except (OSError, ValueError):
            # The kernel of a sandboxed service may hide it.
            continue
    return found


def _pools() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for lease in loaded():
        try:
            own = figures_of(lease.provider.pool_figures())
        except Exception:
            # Whoever wrote the provider: the beat that asks must not fail because of it.
            logger.exception(
                "provider %s does not report the metrics of its pool", lease.provider_id
            )
            continue
        if not own:
            continue
        # It may be loaded twice for a moment, over the same pool of the host.
        found.setdefault(lease.provider_id, own)
    return found


def _load() -> dict[str, float]:
    return {"load1": round(os.getloadavg()[0], 2), "processors": os.cpu_count() or 1}


def _memory() -> dict[str, float]:
    wanted = {"MemTotal": "memory_bytes", "MemAvailable": "memory_free_bytes"}
    found: dict[str, float] = {}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in wanted:
                found[wanted[name]] = int(rest.split()[0]) * 1024
            if len(found) == len(wanted):
                break
    return found


def _disk() -> dict[str, float]:
    disk = os.statvfs(settings.DATA_DIR)
    return {
        "disk_bytes": disk.f_blocks * disk.f_frsize,
        "disk_free_bytes": disk.f_bavail * disk.f_frsize,
    }


BEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0
# A lease renewed within this time cannot have been taken.
FRESH_SECONDS = 6.0
_JOIN_SECONDS = 2.0


class OwnershipLost(Exception):
    """An execution whose code must not be handed over: its record is closed, or will be."""


def clock() -> float:
    """Seconds that pass in every sleep of the machine too, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class PeriodicStep:
    """What the thread does in each turn, or every `seconds`, once it has renewed the lease.

    `run` is called with the id of the lease, None where there is none. If it raises, the turn ends.
    While `is_behind` says so, the next turn follows at once.
    """

    name: str
    run: Callable[[UUID | None], object]
    seconds: float = 0.0
    is_behind: Callable[[], bool] = lambda: False


_create_steps: Callable[[], Sequence[PeriodicStep]] = tuple


def register_steps(create: Callable[[], Sequence[PeriodicStep]]) -> None:
    """Set what creates the periodic steps, in their order. Each thread creates its own."""
    global _create_steps
    _create_steps = create


def registered_steps() -> Sequence[PeriodicStep]:
    """Create the registered steps."""
    return _create_steps()


@dataclass
class _Lease:
    id: UUID
    renewed_at: float


class Heartbeat:
    """The lease of one process, taken when it first needs one, and the thread that keeps it."""

    def __init__(
        self,
        *,
        beat_seconds: float = BEAT_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        now: Callable[[], float] = clock,
    ) -> None:
        self._beat_seconds = beat_seconds
        self._look_seconds = look_seconds
        self._now = now
        self._beat_at = -math.inf
        # When each periodic step was last done, by its name.
        self._done_at: dict[str, float] = {}
        self.kind = Process.Kind.COMMAND
        self._lease: _Lease | None = None
        self._taking = threading.RLock()
        self._thread: threading.Thread | None = None
        self._serves = False
        self._stop = threading.Event()
        self._is_ending = False

    def begin(self, kind: Process.Kind) -> None:
        """Take the lease in the background, and have a standby. For a process that serves, when it
        starts: what it is asked to do may hold its interpreter.
        """
        self.kind = kind
        with self._taking:
            self._serves = True
            self._start_thread()

    def mine(self) -> UUID | None:
        """The id of the lease. None in a transaction of a process that has none yet: until it is
        committed nobody else sees what is recorded in it, so nobody can close that either.
        """
        lease = self._lease
        if lease is not None:
            return lease.id
        return None if connection.in_atomic_block else self.take()

    def take(self) -> UUID:
        """A lease, taken now where there is none. Raises what the database does."""
        with self._taking:
            if self._lease is None:
                began = self._now()
                row = Process.objects.create(
                    instance=settings.INSTANCE,
                    kind=self.kind,
                    pid=os.getpid(),
                    tag=process_tag(),
                    draining=draining.is_draining(),
                )
                # A lease that nobody renews is none: the row is then one of a dead process.
                self._start_thread()
                self._lease = _Lease(row.pk, began)
            return self._lease.id

    def confirm(self, execution: Execution) -> None:
        """Raise OwnershipLost unless the execution is open and this process's. Right before its
        code is handed over; reads nothing where the lease was just renewed.
        """
        lease, owner = self._lease, execution.process_id
        if owner is None:
            return
        if lease and lease.id == owner and self._now() - lease.renewed_at < FRESH_SECONDS:
            return
        open_and_ours = Execution.objects.filter(
            pk=execution.pk, finished_at=None, process_id=owner, process__ended_at=None
        )
        if not open_and_ours.exists():
            raise OwnershipLost(
                "The service lost this execution before its code was sent to the sandbox; nothing "
                "was run. Send the request again."
            )

    def renew(self) -> None:
        """Show a sign of life; where the lease was taken, end what runs and take another."""
        lease = self._lease
        if lease is None:
            self._take_again()
            return
        began = self._now()
        row = Process.objects.filter(pk=lease.id, ended_at=None)
        if row.update(
            beat=F("beat") + 1,
            renewed_at=Now(),
            draining=draining.is_draining(),
            figures=latest_figures(),
        ):
            lease.renewed_at = began
        elif not self._is_ending:
            self._lose(lease)

    def end(self) -> bool:
        """Give the lease back, once every record of this process is closed; False before that.

        What a process leaves open that ends all the same is closed when it is found dead.
        """
        with self._taking:
            # From here on, a beat that finds the lease ended finds what we did.
            self._is_ending = True
            lease = self._lease
        if lease is not None:
            left = Execution.objects.filter(process_id=OuterRef("pk"), finished_at=None)
            row = Process.objects.filter(pk=lease.id, ended_at=None)
            given = row.exclude(Exists(left)).update(ended_at=Now(), renewed_at=Now())
            # One that was taken is not to be given back.
            if not given and row.exists():
                self._is_ending = False
                return False
        self.stop()
        return True

    def stop(self) -> None:
        """End the thread and forget the lease, whose row stays as it is."""
        with self._taking:
            thread, self._thread = self._thread, None
            self._stop.set()
            self._lease = None
        if thread is not None:
            thread.join(_JOIN_SECONDS)
        self._is_ending = False

    def _lose(self, lease: _Lease) -> None:
        # What waits for a sandbox under it is looked up from now on, and not run.
        lease.renewed_at = -math.inf
        runs = active_runs.runs()
        logger.error(
            "this process lost its lease, because its heartbeat was missing; its %d runs are ended",
            len(runs),
            extra={"alert": "lease_lost", "process_id": str(lease.id), "running": len(runs)},
        )
        for run in runs:
            try:
                run.lose()
            except Exception:
                logger.exception("execution %s could not be ended", run.execution_id)
        with self._taking:
            self._lease = None
        self._take_again()

    def _take_again(self) -> None:
        """Unless the process ends: nobody would give that one back."""
        with self._taking:
            if not (self._is_ending or self._stop.is_set()):
                self.take()

    def _start_thread(self) -> None:
        if self._thread is None:
            atexit.register(end)
            self._stop = threading.Event()
            self._thread = start_thread("lease", partial(self._keep, self._stop))

    def _keep(self, stop: threading.Event) -> None:
        steps = registered_steps()
        # It ends with the thread that has started it.
        standby = Standby(
            connection.settings_dict, settings.LOGGING, settings.DATABASE_WAIT_SECONDS
        )
        failed = False
        while not stop.is_set():
            try:
                close_old_connections()
                self.turn(steps, standby if self._serves else None)
                if failed:
                    logger.info("the lease is renewed again")
                failed = False
            except Exception as problem:
                if not failed:
                    is_known = isinstance(problem, DatabaseFailure)
                    logger.warning(
                        "the lease cannot be renewed; it is tried again: %s",
                        problem,
                        exc_info=None if is_known else problem,
                    )
                failed = True
            is_behind = not failed and any(step.is_behind() for step in steps)
            stop.wait(0 if is_behind else self._look_seconds)
        standby.stop()

    def turn(self, steps: Sequence[PeriodicStep], standby: Standby | None = None) -> None:
        """Do what is due. Raises what the database does, and has then not done the steps that
        follow: who cannot show that he lives himself cannot tell whether others could.
        """
        now = self._now()
        if now - self._beat_at >= self._beat_seconds:
            self.renew()
            self._beat_at = now
            if standby and (lease := self._lease):
                standby.tell(str(Process._meta.pk.get_db_prep_value(lease.id, connection)))
        for step in steps:
            if now - self._done_at.get(step.name, -math.inf) >= step.seconds:
                self._done_at[step.name] = now
                step.run(self._lease.id if self._lease else None)


_heartbeat = Heartbeat()


def _start_afresh() -> None:
    """A forked child is a process of its own."""
    global _heartbeat
    _heartbeat = Heartbeat()


reset_after_fork(_start_afresh)


def begin(kind: Process.Kind) -> None:
    _heartbeat.begin(kind)


def current_process_id() -> UUID | None:
    return _heartbeat.mine()


def assert_owner(execution: Execution) -> None:
    _heartbeat.confirm(execution)


def end() -> bool:
    """End the lease at the end of a process. If it fails, the process is found dead instead."""
    try:
        return _heartbeat.end()
    except DatabaseFailure as problem:
        logger.info("the lease could not be released: %s", problem)
        return False
