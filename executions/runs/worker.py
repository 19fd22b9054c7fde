"""What a worker does with the queue, and the tasks that the workers do at intervals."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from time import perf_counter
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections, transaction
from django.db.models import Q
from django.utils import timezone
from django_q.models import Schedule
from django_q.tasks import async_task

from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.kernel.database import nothing_ran, problem_of
from executions.kernel.postgresql import expect_answers_within
from executions.runs import active_runs, extensions, heartbeat, journal, payloads
from executions.runs.event_log import EventLog
from executions.runs.models import Execution, Process
from executions.runs.provider_calls import Step
from executions.runs.queue import claim_next, is_empty_for
from executions.runs.queue_wake import Waiter
from executions.runs.record import Outcome
from executions.runs.requests import ExecutionRequest, run_limits
from executions.runs.routing import allows_template, ensure_known_key, steps_for
from executions.runs.service import carry_out
from executions.tenants.models import Scope
from providers import draining
from providers.errors import ProviderUnavailable, SandboxError
from providers.languages import normalize_language
from providers.services.preload import start_ahead
from providers.threads import start_thread

logger = logging.getLogger(__name__)

# How often a worker process looks for something to run, while something waits in the queue or may
# come without a notice (`queue_wake`). On average a job that comes then begins after half of it,
# divided by the number of processes; a look is one short query.
LOOK_SECONDS = 0.05
# How often it looks otherwise. A file that was removed gives no notice.
IDLE_SECONDS = 2.0
# How often it sees whether its main thread has ended.
_END_SECONDS = 1.0
# What a task of the schedule that is being done, or a thread after its run, may take at the end.
TASK_SECONDS = 3.0
TELL_SECONDS = 5.0
# Longer than a web process waits: the tasks of the schedule have statements over all rows.
ANSWER_SECONDS = 60.0


def run_claimed(execution: Execution) -> Outcome:
    """Run it by the same path as a synchronous one."""
    began = perf_counter()
    try:
        if execution.tenant is None or not execution.tenant.is_active:
            raise ProviderUnavailable("The tenant was removed or made inactive meanwhile.")
        ensure_known_key(execution)
        request = ExecutionRequest.from_stored(payloads.read(execution))
        ensure_may_begin(execution, request)
        steps = _steps_of(request, execution.tenant_slug)
    except SandboxError as error:
        # The limits may have been lowered since it was queued.
        return journal.end_unrun(execution, error)
    except DatabaseFailure as failure:
        if not (problem := problem_of(failure)):
            raise
        return journal.end_unrun(execution, nothing_ran(problem))
    return run_sync(
        carry_out(
            execution,
            request,
            steps,
            began=began,
            waited_ms=_wait_ms(execution),
            received_ms=execution.received_ms,
            log=EventLog(run_limits()),
        )
    )


def _steps_of(request: ExecutionRequest, tenant_slug: str) -> Sequence[Step]:
    for each in extensions.installed():
        if (steps := each.place_queued(request)) is not None:
            return steps
    return steps_for(request.language, tenant_slug, chosen=request.provider)


class Runner:
    """Threads that run what is queued until the process ends; then each finishes what it has.

    Told to stop, the process has SHUTDOWN_GRACE_SECONDS for that; what is left is ended then.

    A tenant has at most as many of them as are left free, so one alone has half, and there is
    one for whoever comes next. A single thread is anybody's.
    """

    def __init__(self, threads: int, goes_on: Callable[[], bool]) -> None:
        """`goes_on` says whether another one may be begun."""
        self._threads = threads
        self._workers: list[threading.Thread] = []
        self._goes_on = goes_on
        self._running: Counter[str] = Counter()
        self._counting = threading.Lock()
        # One looks at a time; the others run, or wait for the look.
        self._look = threading.Lock()
        self._waiter = Waiter()

    def start(self) -> None:
        # No daemons: the process is there until each has finished what it has.
        self._workers = [
            start_thread(f"queue-{number}", self._work, daemon=False)
            for number in range(self._threads)
        ]

    def wake(self) -> None:
        """There may be something to run."""
        self._waiter.wake()

    def may_serve(self, tenant_slug: str) -> bool:
        with self._counting:
            return self._running[tenant_slug] < self._threads - self._running.total()

    def _work(self) -> None:
        while True:
            with self._look:
                execution = self._next()
                if execution is None:
                    break
                self._count(execution.tenant_slug, 1)
            try:
                run_claimed(execution)
            except Exception:
                # The row stays open, and `orphaned_runs` closes it as one that nothing runs.
                logger.exception("execution %s could not be completed", execution.pk)
            finally:
                self._count(execution.tenant_slug, -1)
                self.wake()

    def stop_in_time(self) -> None:
        """Wait until nothing more is to be begun, and end the process in order.

        A process that is told to stop ends its runs after their grace. One whose main thread has
        ended, because django-q replaces it, has all the time they need.
        """
        while self._goes_on():
            draining.wait_until_begun(_END_SECONDS)
        self.wake()
        # Whoever was about to claim something has done so once the look is free.
        if self._look.acquire(timeout=TASK_SECONDS):
            self._look.release()
        next_line = time.monotonic()
        deadline = math.inf
        while number := self._running.total():
            now = time.monotonic()
            if draining.is_draining():
                deadline = min(deadline, now + settings.SHUTDOWN_GRACE_SECONDS)
            if draining.is_ending() or now >= deadline:
                break
            if now >= next_line:
                next_line = now + TELL_SECONDS
                logger.info("stopping: %d runs have not ended", number)
            time.sleep(0.05)
        active_runs.end_all(draining.ENDING_SECONDS / 2)
        for thread in self._workers:
            thread.join(TASK_SECONDS)
        background.wait_for_keyed_work(background.LAST_SECONDS)
        active_runs.shutdown()
        # A task of the schedule may be anything, and is done again by another worker.
        threading.main_thread().join(TASK_SECONDS)
        if threading.main_thread().is_alive() or any(each.is_alive() for each in self._workers):
            os._exit(0)

    def _count(self, tenant_slug: str, one: int) -> None:
        with self._counting:
            self._running[tenant_slug] += one
            self._running += Counter()  # forgets who runs nothing

    def _next(self) -> Execution | None:
        """Waits for one. None when the process goes on no longer."""
        while self._goes_on():
            self._waiter.clear()
            close_old_connections()
            seconds = LOOK_SECONDS
            try:
                if execution := claim_next(self.may_serve):
                    return execution
                if self._waiter.is_notified and is_empty_for(IDLE_SECONDS):
                    seconds = IDLE_SECONDS
            except Exception:
                logger.exception("the queue cannot be read; it is tried again")
            self._waiter.wait(seconds)
        return None


_runner: Runner | None = None


def run_queue_in_background(**signal: Any) -> None:
    """Have this process run what is queued. For a worker's own process, once it was started."""
    global _runner
    if _runner is None:
        heartbeat.begin(Process.Kind.WORKER)
        _runner = Runner(settings.Q_THREADS, _goes_on)
        _runner.start()
        for each in extensions.installed():
            each.start_worker(_goes_on)
        # Not a daemon: the process is there until this is done.
        start_thread("queue-stop", _runner.stop_in_time, daemon=False)
        expect_answers_within(ANSWER_SECONDS)
        journal.start()
        start_ahead()


def _goes_on() -> bool:
    return threading.main_thread().is_alive() and not draining.is_draining()


def _wait_ms(execution: Execution) -> float:
    waited = timezone.now() - (execution.run_at or execution.created_at)
    return max(0.0, round(waited.total_seconds() * 1000, 3))


_OF_THE_CORE = {
    "executions.tasks.end_stale_executions": 1,
    "executions.tasks.forget_events": 1,
    "executions.tasks.tend_sessions": 1,
    "executions.tasks.check_ledger": 1,
    "executions.tasks.remove_tenants": 1,
    "executions.tasks.give_space_back": 5,
    "executions.tasks.collect_blobs": 20,
    "executions.tasks.write_ledger_checkpoint": 60,
    "executions.tasks.discard_unfinished_uploads": 24 * 60,
    "providers.tasks.check_health": 1,
    "providers.tasks.sweep_leftovers": 5,
}


def recurring_tasks() -> dict[str, int]:
    """Return the tasks of the workers, and after how many minutes each is due again."""
    of_extensions = (each.tasks.items() for each in extensions.installed())
    return _OF_THE_CORE | {task: minutes for tasks in of_extensions for task, minutes in tasks}


# Whose names begin so is a task of this or another version, which may be running beside this one.
_OURS = ("executions.tasks.", "providers.tasks.")


def ensure_schedules() -> None:
    """Have the workers do what is due. Safe to call at every start.

    Of a row only its name and its next time count. What nobody of ours can have written is removed.
    """
    _remove_unknown()
    for task, minutes in recurring_tasks().items():
        values = {
            "func": task,
            "schedule_type": Schedule.MINUTES,
            "minutes": minutes,
            "repeats": -1,
            "hook": None,
            "args": None,
            "kwargs": None,
        }
        if not Schedule.objects.filter(name=task).update(**values):
            Schedule.objects.create(name=task, **values)


def enqueue_due(broker: Any = None) -> None:
    """Queue what is due. Of several clusters one does: whose UPDATE counted.

    A time that lies further ahead than it can be was not written by us, and is due.
    """
    close_old_connections()
    try:
        _remove_unknown()
        for task, minutes in recurring_tasks().items():
            _enqueue_if_due(task, timedelta(minutes=minutes), broker)
    except Exception:
        # The cluster's guard calls this, and is to go on guarding.
        logger.exception("the due tasks could not be queued")


def record_done(task: str, began: datetime) -> None:
    """Have a task that succeeded wait for its next time, counted from when it was queued."""
    interval = timedelta(minutes=recurring_tasks().get(task, 0))
    if interval > _trial():
        close_old_connections()
        Schedule.objects.filter(name=task).update(next_run=began + interval)


def _enqueue_if_due(task: str, interval: timedelta, broker: Any) -> None:
    """A broker may lose a task, with the cluster it was sent to or by itself: until it is done it
    is due again after `_trial`, however rare it is."""
    now = timezone.now()
    rows = Schedule.objects.filter(name=task)
    due = rows.filter(Q(next_run__lte=now) | Q(next_run__gt=now + interval) | Q(next_run=None))
    with transaction.atomic():
        if due.update(next_run=now + min(interval, _trial())) or not rows.exists():
            async_task(task, broker=broker)
    if not rows.exists():
        ensure_schedules()


def _trial() -> timedelta:
    return timedelta(seconds=settings.Q_CLUSTER["retry"])


def _remove_unknown() -> None:
    unknown = Schedule.objects.exclude(name__in=recurring_tasks()) | Schedule.objects.filter(
        name=None
    )
    for pk, name, func in unknown.values_list("pk", "name", "func"):
        if name == func and name.startswith(_OURS):
            continue
        logger.error(
            "a schedule does not belong to this service and was removed: %s",
            repr(func)[:200],
            extra={"alert": "unknown_schedule", "task": repr(func)[:200]},
        )
        Schedule.objects.filter(pk=pk).delete()


def ensure_may_begin(execution: Execution, request: ExecutionRequest) -> None:
    """Raise what keeps a claimed execution from beginning.

    What may have changed while it waited is asked again: ProviderUnavailable where its key was
    revoked, or may not run code in this language. What had a time of its own is also not begun
    with a key that has expired, and raises RateLimited where a budget is used up. The
    request is encrypted and the row is not: whoever changes the time there has nothing run sooner,
    and later only by changing it back.
    """
    if execution.run_at != request.run_at:
        raise ProviderUnavailable(
            "The stored run time is not the requested one; nothing was run. Send the request again."
        )
    had_a_time = request.run_at is not None or execution.schedule_id is not None
    if (key := execution.api_key) is not None:
        if key.revoked_at is not None or (had_a_time and not key.is_valid(timezone.now())):
            raise ProviderUnavailable(
                "The key of the request was revoked or has expired meanwhile."
            )
        language = normalize_language(request.language)
        if not (key.has_scope(Scope.EXECUTE) and key.allows("languages", language)):
            raise ProviderUnavailable(f"The key of the request may no longer run {language}.")
        if request.session is None and not allows_template(key, request.template):
            raise ProviderUnavailable("The key of the request may no longer use its template.")
    if had_a_time:
        extensions.ensure_allowance(execution.tenant_slug)
