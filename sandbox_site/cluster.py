"""The worker processes of `manage.py qcluster`, and the one that starts them and keeps them there.

django-q would have a process for each step between its broker and a worker. Here a worker takes its
tasks itself (`sandbox_site.worker`), and this process has the rest: it replaces workers that have
died or hang, and queues what is due.

Told to stop once, the workers finish; told twice, they end now. They learn of it from `draining`,
and keep the time (`runs/worker.py`).
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import time
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from django.db import connections
from django_q.brokers import get_broker
from django_q.conf import Conf

from executions.runs.worker import enqueue_due
from providers import draining
from sandbox_site.worker import work

logger = logging.getLogger(__name__)

GUARD_SECONDS = 0.5
SCHEDULE_SECONDS = 30.0

# Of a worker's timer, beside the seconds that its task has left.
_IDLE, _TIMED_OUT, _RECYCLED = -1.0, 0.0, -2.0

_FORK = get_context("fork")


@dataclass
class _Worker:
    process: ForkProcess
    timer: Synchronized[float]

    def count_down(self, seconds: float) -> None:
        """Take the seconds from those that the task has left, if there is one."""
        lock = self.timer.get_lock()
        # A worker holds it while it ends a task, and one that was killed then holds it for good.
        if lock.acquire(block=False):
            try:
                if self.timer.value > _TIMED_OUT:
                    self.timer.value = max(_TIMED_OUT, self.timer.value - seconds)
            finally:
                lock.release()

    def is_timed_out(self) -> bool:
        return bool(self.timer.get_obj().value == _TIMED_OUT)

    def is_recycled(self) -> bool:
        """Whether it has done as many tasks as one worker does."""
        return bool(self.timer.get_obj().value == _RECYCLED)


class Cluster:
    """Worker processes, for the main thread of a process that does nothing else."""

    def __init__(self, workers: int) -> None:
        self._size = workers
        self._workers: list[_Worker] = []
        self._pid = os.getpid()
        self._stopped, self._stop = os.pipe()

    def run(self) -> None:
        """Keep the workers there until a signal tells to stop; return when all have ended."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(number, self._on_signal)
        broker = get_broker()
        # The workers share the pages of what is loaded here, unless collections write to them. This
        # is what each loads otherwise for its first task.
        import_module("providers.local.provider")
        gc.collect()
        gc.freeze()
        self._workers = [self._start_worker() for _ in range(self._size)]
        looked_at = scheduled_at = time.monotonic()
        while not select.select([self._stopped], [], [], GUARD_SECONDS)[0]:
            now = time.monotonic()
            self._guard(now - looked_at)
            looked_at = now
            if now - scheduled_at >= SCHEDULE_SECONDS:
                scheduled_at = now
                enqueue_due(broker)
        for worker in self._workers:
            worker.process.join()

    def _guard(self, seconds: float) -> None:
        for number, worker in enumerate(self._workers):
            if not worker.process.is_alive() and worker.is_recycled():
                logger.info("worker %s has done its tasks and is replaced", worker.process.pid)
            elif not worker.process.is_alive():
                logger.critical("worker %s has died and is replaced", worker.process.pid)
            elif worker.is_timed_out():
                logger.critical("worker %s took too long and is replaced", worker.process.pid)
                worker.process.terminate()
            else:
                worker.count_down(seconds)
                continue
            try:
                self._workers[number] = self._start_worker()
            except OSError:
                # The next round tries again, and the other workers go on.
                logger.exception("a worker could not be started")

    def _start_worker(self) -> _Worker:
        # A connection must not be shared.
        connections.close_all()
        timer: Synchronized[float] = _FORK.Value("f", _IDLE)
        process = _FORK.Process(target=_work, args=(timer,), daemon=True)
        process.start()
        return _Worker(process, timer)

    def _on_signal(self, number: int, frame: Any) -> None:
        if os.getpid() != self._pid:
            # A worker has inherited this, and is told by `draining`.
            return
        again = draining.is_draining()
        draining.begin(for_all=True)
        if again or number == signal.SIGQUIT:
            draining.begin_ending(for_all=True)
        os.write(self._stop, b".")


def _work(timer: Synchronized[float]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    work(timer, Conf.TIMEOUT)
