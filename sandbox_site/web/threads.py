"""The threads that handle requests: so many, in lanes that leave threads for one another."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping

logger = logging.getLogger(__name__)

Job = Callable[[], None]

# Jobs that may wait for a thread in one lane, of one owner half of them. Whoever comes then is
# better told at once.
LONGEST_QUEUE = 1000
# What has begun goes first, since its end gives back what it holds; but after so many of it a new
# job is next, so that new jobs have a third of the lane whatever waits.
MOST_BEGUN_IN_A_ROW = 2


class LaneFull(Exception):
    """So many requests wait in the lane, or so many of one owner, that another is not taken."""


class _Turns:
    """Jobs by their owners, of whom each has one done in turn."""

    def __init__(self) -> None:
        self._jobs: dict[str, deque[Job]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def of(self, owner: str) -> int:
        return len(self._jobs.get(owner, ()))

    def append(self, job: Job, owner: str) -> None:
        self._jobs.setdefault(owner, deque()).append(job)
        self._count += 1

    def popleft(self) -> Job:
        owner, jobs = next(iter(self._jobs.items()))
        del self._jobs[owner]
        if len(jobs) > 1:
            self._jobs[owner] = jobs
        self._count -= 1
        return jobs.popleft()


class _Lane:
    def __init__(self, most: int) -> None:
        self.most = most
        self.busy = 0
        self.begun = _Turns()
        self.new = _Turns()
        self._in_a_row = 0

    def next(self) -> Job | None:
        if self.busy >= self.most or not (self.begun or self.new):
            return None
        self.busy += 1
        if self.begun and not (self.new and self._in_a_row >= MOST_BEGUN_IN_A_ROW):
            self._in_a_row += 1
            return self.begun.popleft()
        self._in_a_row = 0
        return self.new.popleft()


class _Thread:
    def __init__(self) -> None:
        # Held while the thread sleeps: a bare lock is the cheapest way to wake one.
        self.asleep = threading.Lock()
        self.asleep.acquire()
        self.task: tuple[_Lane, Job] | None = None


class HandlerThreads:
    """Permanent threads, so that each keeps its database connection. They never end, so that
    `providers.threads` has nothing to do for them.

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
        MOST_BEGUN_IN_A_ROW. Each owner has one job done in turn, of what is new and of what has
        begun, and at most half of the queue; "" stands for many. Raises LaneFull.
        """
        lane = self._lanes[name]
        with self._lock:
            # Jobs stay whose clients have left, and whose places others have: no owner has all.
            is_greedy = bool(owner) and lane.new.of(owner) >= LONGEST_QUEUE // 2
            if not has_begun and (is_greedy or len(lane.new) >= LONGEST_QUEUE):
                raise LaneFull
            self._open += 1
            if lane.busy < lane.most and self._idle:
                lane.busy += 1
                thread = self._idle.pop()
                thread.task = (lane, job)
            elif has_begun:
                lane.begun.append(job, owner)
                return
            else:
                lane.new.append(job, owner)
                return
        thread.asleep.release()

    def _work(self, thread: _Thread) -> None:
        while True:
            thread.asleep.acquire()
            # What a job leaves is not kept until there is another one.
            task, thread.task = thread.task, None
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
