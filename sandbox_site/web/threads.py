"""The threads that handle requests: so many, in lanes that leave threads for one another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

Job = Callable[[], None]

# Jobs that may wait for a thread in one lane. Whoever comes then is better told at once.
LONGEST_QUEUE = 1000
# What has begun goes first, since its end gives back what it holds; but after so many of it a new
# job is next, so that new jobs have a third of the lane whatever waits.
MOST_BEGUN_IN_A_ROW = 2


class LaneFull(Exception):
    """So many requests wait in the lane that another is not taken."""


class _Lane:
    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = 0
        # By their owners, who take turns: the first one is next.
        self.begun: dict[str, deque[Job]] = {}
        self.new: deque[Job] = deque()
        self._in_a_row = 0

    def next(self) -> Job | None:
        if self.busy >= self.most or not (self.begun or self.new):
            return None
        self.busy += 1
        if self.begun and not (self.new and self._in_a_row >= MOST_BEGUN_IN_A_ROW):
            self._in_a_row += 1
            return self._next_begun()
        self._in_a_row = 0
        return self.new.popleft()

    def _next_begun(self) -> Job:
        owner, jobs = next(iter(self.begun.items()))
        del self.begun[owner]
        job = jobs.popleft()
        if jobs:
            self.begun[owner] = jobs
        return job


class _Thread:
    def __init__(self) -> None:
        # Held while the thread sleeps: a bare lock is the cheapest way to wake one.
        self.asleep = threading.Lock()
        self.asleep.acquire()
        self.task: tuple[_Lane, Job]


class HandlerThreads:
    """Permanent threads, so that each keeps its database connection.

    `lanes` maps a name to how many threads it may occupy at once: less than all of them, so that
    whatever fills one lane leaves threads for the others. The thread that was used last is taken
    first: its caches are warm.
    """

    def __init__(self, count: int, lanes: Mapping[str, int]) -> None:
        self._lock = threading.Lock()
        self._lanes = {name: _Lane(most) for name, most in lanes.items()}
        self._idle: list[_Thread] = []
        self._open = 0
        for number in range(count):
            thread = _Thread()
            self._idle.append(thread)
            threading.Thread(
                target=self._work, args=(thread,), name=f"handler-{number}", daemon=True
            ).start()

    @property
    def open(self) -> int:
        """Jobs that were taken and are not done."""
        return self._open

    def submit(self, name: str, job: Job, *, has_begun: bool = False, owner: str = "") -> None:
        """Have a thread do the job.

        What has begun already is never refused, and goes before what is new, up to
        MOST_BEGUN_IN_A_ROW. Of what has begun each owner has one job done in turn. Raises LaneFull.
        """
        lane = self._lanes[name]
        with self._lock:
            if len(lane.new) >= LONGEST_QUEUE and not has_begun:
                raise LaneFull
            self._open += 1
            if lane.busy < lane.most and self._idle:
                lane.busy += 1
                thread = self._idle.pop()
                thread.task = (lane, job)
            elif has_begun:
                lane.begun.setdefault(owner, deque()).append(job)
                return
            else:
                lane.new.append(job)
                return
        thread.asleep.release()

    def _work(self, thread: _Thread) -> None:
        while True:
            thread.asleep.acquire()
            task: tuple[_Lane, Job] | None = thread.task
            while task is not None:
                lane, job = task
                try:
                    job()
                except BaseException:
                    # One thread less for good would be worse than whatever it was.
                    logger.exception("a job of a handler thread failed")
                del job, task
                task = self._next(lane, thread)

    def _next(self, done: _Lane, thread: _Thread) -> tuple[_Lane, Job] | None:
        """What to do next, of the lane that has the fewest threads; nothing, and it is idle."""
        with self._lock:
            done.busy -= 1
            self._open -= 1
            for lane in sorted(self._lanes.values(), key=lambda each: each.busy):
                if job := lane.next():
                    return lane, job
            self._idle.append(thread)
            return None
