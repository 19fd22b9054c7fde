"""What a worker does with the queue: so many executions at once, none of whose tenant fills it.

A worker process of django-q does one task after the other. Executions wait for sandboxes, so each
process runs some of them at once, on threads of its own that look for them, and its tasks, such as
the sweeper's, are never held up by what somebody runs.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import close_old_connections, connections
from django.utils import timezone

from executions.kernel.coroutines import wait_for
from executions.kernel.database import nothing_ran, problem_of
from executions.models.execution import Execution
from executions.models.process import Process
from executions.services import journal, leases, ongoing, payloads
from executions.services.key_bounds import require_known_key
from executions.services.later import refuse_begin
from executions.services.live import EventLog
from executions.services.queue import claim_next
from executions.services.record import Outcome
from executions.services.requests import ExecutionRequest, run_limits
from executions.services.run import carry_out
from executions.services.sessions import due
from executions.services.sessions.cells import steps_of
from executions.services.sessions.clock import tend_in_background
from executions.services.webhooks.delivering import send_in_background
from providers.errors import ProviderUnavailable, SandboxError
from providers.services.ahead import start_ahead
from sandbox_site import draining
from sandbox_site.postgresql import expect_answers_within

logger = logging.getLogger(__name__)

# How often an idle worker process looks for something to run. On average a job that comes then
# begins after half of it, divided by the number of processes; a look is one short query.
LOOK_SECONDS = 0.05
# What a task of the schedule that is being done, or a thread after its run, may take at the end.
TASK_SECONDS = 3.0
TELL_SECONDS = 5.0
# Longer than a web process waits: the tasks of the schedule have statements over all rows.
_ANSWER_SECONDS = 60.0


def run_claimed(execution: Execution) -> Outcome:
    """Run it by the same path as a synchronous one."""
    began = perf_counter()
    try:
        if execution.tenant is None or not execution.tenant.is_active:
            raise ProviderUnavailable("The tenant was removed or made inactive meanwhile.")
        require_known_key(execution)
        request = ExecutionRequest.from_stored(payloads.read(execution))
        refuse_begin(execution, request)
        steps = steps_of(request, execution.tenant_slug)
    except SandboxError as error:
        # The limits may have been lowered since it was queued.
        return journal.end_unrun(execution, error)
    except DatabaseFailure as failure:
        if not (problem := problem_of(failure)):
            raise
        return journal.end_unrun(execution, nothing_ran(problem))
    return wait_for(
        carry_out(
            execution,
            request,
            steps,
            began=began,
            waited_ms=_waited_ms(execution),
            log=EventLog(run_limits()),
        )
    )


class Runner:
    """Threads that run what is queued until the process ends; then each finishes what it has.

    Told to stop, the process has SHUTDOWN_GRACE_SECONDS for that; what is left is ended then.

    A tenant has at most as many of them as are left free, so one alone has half, and there is
    one for whoever comes next. A single thread is anybody's.
    """

    def __init__(self, threads: int, goes_on: Callable[[], bool]) -> None:
        """`goes_on` says whether another one may be begun."""
        self._threads = threads
        self._workers = [
            threading.Thread(target=self._work, name=f"queue-{number}") for number in range(threads)
        ]
        self._goes_on = goes_on
        self._running: Counter[str] = Counter()
        self._counting = threading.Lock()
        # One looks at a time; the others run, or wait for the look.
        self._look = threading.Lock()
        self._woken = threading.Event()

    def start(self) -> None:
        for thread in self._workers:
            thread.start()

    def wake(self) -> None:
        """There may be something to run."""
        self._woken.set()

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
                # The row stays open, and is closed as one that nothing here runs (`leases`).
                logger.exception("execution %s could not be completed", execution.pk)
            finally:
                self._count(execution.tenant_slug, -1)
                self.wake()
        connections.close_all()

    def stop_in_time(self) -> None:
        """Wait until nothing more is to be begun, and end the process in order.

        A process that is told to stop ends its runs after their grace. One whose main thread has
        ended, because django-q replaces it, has all the time they need.
        """
        while self._goes_on():
            time.sleep(LOOK_SECONDS)
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
        ongoing.end_all(draining.ENDING_SECONDS / 2)
        for thread in self._workers:
            thread.join(TASK_SECONDS)
        ongoing.finish()
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
            self._woken.clear()
            close_old_connections()
            try:
                if execution := claim_next(self.may_serve):
                    return execution
            except Exception:
                logger.exception("the queue cannot be read; it is tried again")
            self._woken.wait(LOOK_SECONDS)
        return None


_runner: Runner | None = None


def run_queue_in_background(**signal: Any) -> None:
    """Have this process run what is queued. For a worker's own process, once it was started."""
    global _runner
    if _runner is None:
        leases.begin(Process.Kind.WORKER)
        _runner = Runner(settings.Q_THREADS, _goes_on)
        _runner.start()
        due.begin()
        tend_in_background(_goes_on)
        send_in_background(_goes_on)
        # Not a daemon: the process is there until this is done.
        threading.Thread(target=_runner.stop_in_time, name="queue-stop").start()
        expect_answers_within(_ANSWER_SECONDS)
        journal.start()
        start_ahead()


def _goes_on() -> bool:
    return threading.main_thread().is_alive() and not draining.is_draining()


def _waited_ms(execution: Execution) -> float:
    waited = timezone.now() - (execution.run_at or execution.created_at)
    return max(0.0, round(waited.total_seconds() * 1000, 3))
