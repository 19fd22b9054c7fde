"""Whose run it is: the lease of this process, which every execution that it runs names.

A thread raises the lease's `beat` every BEAT_SECONDS, and watches those of other processes
(`services.deaths`). A process beside raises it while a long call holds all threads of this one
(`sandbox_site.standby`). A lease that shows no beat for long is taken by whoever watches it, and
its runs are closed. So a process that was stopped, or cut off from the database, must find out
before it hands code over, and end what it runs once it has read that its lease is gone. That the
database is away ends nothing.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connection
from django.db.models import Exists, F, OuterRef, Q
from django.db.models.functions import Now

from executions.models import Execution, Process
from executions.services import ongoing
from executions.services.journal_files import kept_ids
from executions.services.process_figures import latest_figures
from providers.remote.owner import process_tag
from sandbox_site import draining
from sandbox_site.standby import Standby

if TYPE_CHECKING:
    from executions.services.deaths import Watcher

logger = logging.getLogger(__name__)

BEAT_SECONDS = 2.0
LOOK_SECONDS = 1.0
# A process of another host whose beat stayed the same for so long is dead, if its watcher looked
# without a gap.
# Five beats; with a look each second a death is recorded within 12 s.
DEAD_SECONDS = 10.0
GAP_SECONDS = 4.0
# A lease renewed within this time cannot have been taken.
FRESH_SECONDS = 6.0
# How long a record of this process stays open when nothing here runs it any more.
UNATTENDED_SECONDS = 60.0
_UNATTENDED_LOOK_SECONDS = 10.0
# How long a command may be being started in the background, which nothing here counts as a run:
# its session may have to be woken first, with all of its files.
_STARTING = timedelta(minutes=20)
_FORGET_SECONDS = 3600.0
_JOIN_SECONDS = 2.0

_UNRECORDED = "The service could not record how it ended; the code may have run in part."


class NotOurs(Exception):
    """An execution whose code must not be handed over: its record is closed, or will be."""


def clock() -> float:
    """Seconds that pass in every sleep of the machine too, and that nobody can set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass
class _Lease:
    id: UUID
    renewed_at: float


class Keeper:
    """The lease of one process, taken when it first needs one, and the thread that keeps it."""

    def __init__(
        self,
        *,
        beat_seconds: float = BEAT_SECONDS,
        look_seconds: float = LOOK_SECONDS,
        dead_seconds: float = DEAD_SECONDS,
        gap_seconds: float = GAP_SECONDS,
        now: Callable[[], float] = clock,
    ) -> None:
        self._beat_seconds = beat_seconds
        self._look_seconds = look_seconds
        self._dead_seconds = dead_seconds
        self._gap_seconds = gap_seconds
        self._now = now
        self._beat_at = self._unattended_at = self._forget_at = -math.inf
        self.kind = Process.Kind.COMMAND
        self._lease: _Lease | None = None
        self._taking = threading.RLock()
        self._thread: threading.Thread | None = None
        self._serves = False
        self._stop = threading.Event()
        self._is_ending = False
        self._unattended: dict[UUID, float] = {}

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
        """Raise NotOurs unless the execution is open and this process's. Right before its code is
        handed over; reads nothing where the lease was just renewed.
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
            raise NotOurs(
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
        runs = ongoing.runs()
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
        self._unattended = {}
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
            thread = threading.Thread(
                target=self._keep, args=(self._stop,), name="lease", daemon=True
            )
            thread.start()
            self._thread = thread

    def _keep(self, stop: threading.Event) -> None:
        # They close records, and a record that is opened asks for the lease.
        from executions.services.deaths import Watcher

        watcher = Watcher(dead_seconds=self._dead_seconds, gap_seconds=self._gap_seconds)
        # It ends with the thread that has started it.
        standby = Standby(
            connection.settings_dict, settings.LOGGING, settings.DATABASE_WAIT_SECONDS
        )
        failed = False
        while not stop.is_set():
            try:
                close_old_connections()
                self.turn(watcher, standby if self._serves else None)
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
            stop.wait(0 if watcher.is_behind and not failed else self._look_seconds)
        standby.stop()
        connection.close()

    def turn(self, watcher: Watcher, standby: Standby | None = None) -> None:
        """Do what is due. Raises what the database does, and has then not watched the others: who
        cannot show that he lives himself cannot tell whether they could.
        """
        from executions.services.deaths import forget_ended
        from executions.services.signals import attend
        from executions.services.workspaces.waking import give_back_left

        now = self._now()
        if now - self._beat_at >= self._beat_seconds:
            self.renew()
            self._beat_at = now
            if standby and (lease := self._lease):
                standby.tell(str(Process._meta.pk.get_db_prep_value(lease.id, connection)))
        attend(self._lease.id if self._lease else None)
        watcher.look(self._lease.id if self._lease else None)
        give_back_left()
        if now - self._unattended_at >= _UNATTENDED_LOOK_SECONDS:
            self._unattended_at = now
            self.close_unattended()
        if now - self._forget_at >= _FORGET_SECONDS:
            self._forget_at = now
            forget_ended()

    def close_unattended(self, seconds: float = UNATTENDED_SECONDS) -> int:
        """Close the records of this lease that nothing here has run for so long. How many.

        Whatever was to close them has failed; nobody else does while this process lives.
        """
        from executions.services.deaths import try_to_close

        lease, now, closed = self._lease, self._now(), 0
        if lease is None:
            return 0
        open_rows = Execution.objects.filter(process_id=lease.id, finished_at=None)
        starting = Q(background=True, created_at__gt=Now() - _STARTING)
        mine = set(open_rows.exclude(starting).values_list("pk", flat=True))
        # What waits in the journal is recorded from there, as soon as anything can be written.
        found = mine - {run.execution_id for run in ongoing.runs()} - kept_ids()
        self._unattended = {pk: self._unattended.get(pk, now) for pk in found}
        late = [pk for pk, since in self._unattended.items() if now - since >= seconds]
        for execution in open_rows.filter(pk__in=late).defer("code", "arguments"):
            closed += try_to_close(execution, _UNRECORDED)
        return closed


_keeper = Keeper()


def _start_afresh() -> None:
    """A forked child is a process of its own."""
    global _keeper
    _keeper = Keeper()


os.register_at_fork(after_in_child=_start_afresh)


def begin(kind: Process.Kind) -> None:
    _keeper.begin(kind)


def mine() -> UUID | None:
    return _keeper.mine()


def confirm(execution: Execution) -> None:
    _keeper.confirm(execution)


def end() -> bool:
    """As `Keeper.end`, at the end of a process. If it fails, the process is found dead instead."""
    try:
        return _keeper.end()
    except DatabaseFailure as problem:
        logger.info("the lease could not be released: %s", problem)
        return False
