"""What a worker does with the queue: so many executions at once, none of whose tenant fills it.

A worker process of django-q does one task after the other. Executions wait for sandboxes, so each
process runs some of them at once, on threads of its own; the tasks that name them only wake these,
and other tasks, such as the sweeper's, are never held up by what somebody runs.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from time import perf_counter
from typing import Any

from django.conf import settings
from django.db import close_old_connections, connections
from django.utils import timezone

from executions.models import Execution
from executions.services import payloads
from executions.services.queue import claim_next
from executions.services.record import Outcome, close_unrun
from executions.services.requests import ExecutionRequest
from executions.services.routing import Route, steps_for
from executions.services.run import carry_out
from executions.services.waiting import wait_for
from providers.errors import ProviderUnavailable, SandboxError

logger = logging.getLogger(__name__)

# How often a worker looks by itself: room is made elsewhere too, and a broker may lose a task.
LOOK_SECONDS = 0.25


def run_queued(execution_id: str = "", *, route: Route | None = None) -> Outcome | None:
    """Have the next queued execution run. `execution_id` is what was delivered, not what is next.

    Where threads of this process run them, they are woken and None is returned; elsewhere it is
    run here. None also when nothing is to be run now.
    """
    if _runner is not None:
        _runner.wake()
        return None
    execution = claim_next()
    if execution is None:
        logger.info("execution %s was delivered, and nothing is to be run now", execution_id)
        return None
    return run_claimed(execution, route=route)


def run_claimed(execution: Execution, *, route: Route | None = None) -> Outcome:
    """Run it by the same path as a synchronous one."""
    began = perf_counter()
    if execution.tenant is None or not execution.tenant.is_active:
        return close_unrun(
            execution, ProviderUnavailable("The tenant was removed or made inactive meanwhile.")
        )
    try:
        request = ExecutionRequest.from_stored(payloads.take(execution))
        steps = steps_for(request.language, execution.tenant_slug, route)
    except SandboxError as error:
        # The limits may have been lowered since it was queued.
        return close_unrun(execution, error)
    execution.pending = None
    return wait_for(
        carry_out(execution, request, steps, began=began, waited_ms=_waited_ms(execution))
    )


class Runner:
    """Threads that run what is queued until the process ends; then each finishes what it has.

    A tenant has at most as many of them as are left free, so one alone has half, and there is
    one for whoever comes next. A single thread is anybody's.
    """

    def __init__(self, threads: int, goes_on: Callable[[], bool]) -> None:
        """`goes_on` says whether another one may be begun."""
        self._threads = threads
        self._goes_on = goes_on
        self._running: Counter[str] = Counter()
        self._counting = threading.Lock()
        # One looks at a time; the others run, or wait for the look.
        self._look = threading.Lock()
        self._woken = threading.Event()

    def start(self) -> None:
        for number in range(self._threads):
            threading.Thread(target=self._work, name=f"queue-{number}").start()

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
                # The row stays open, and the sweeper ends it at its deadline.
                logger.exception("execution %s could not be completed", execution.pk)
            finally:
                self._count(execution.tenant_slug, -1)
                self.wake()
        connections.close_all()

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
        _runner = Runner(settings.Q_THREADS, threading.main_thread().is_alive)
        _runner.start()


def _waited_ms(execution: Execution) -> float:
    waited = timezone.now() - execution.created_at
    return max(0.0, round(waited.total_seconds() * 1000, 3))
