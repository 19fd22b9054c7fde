"""Work in several processes, with the answers in the order of the questions.

The processes are forked, so they know what this one knows; a connection to a database they make
themselves. They end with this process, whatever ends it.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

from django.db import connections

from executions.kernel.own_process import die_with_parent

Question = TypeVar("Question")
Answer = TypeVar("Answer")

# Of a forked process: what it does.
_work: Callable[[Any], Any]


def processors() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0))


def map_in_order(
    work: Callable[[Question], Answer], questions: Iterable[Question], processes: int
) -> Iterator[Answer]:
    """Yield what `work` returns for each question, in the order of the questions.

    With one process, this one does the work. With more, they are forked: call it outside of a
    transaction and where no other thread uses the database. Questions and answers are pickled, and
    the processes are at most one question each ahead. Raises what `work` raises, and
    BrokenProcessPool where a process was killed.
    """
    if processes == 1:
        yield from map(work, questions)
        return
    # A connection must not be shared.
    connections.close_all()
    pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, (os.getpid(), work))
    try:
        # The first one forks them all, before a question opens a connection of this process.
        pool.submit(os.getpid).result()
        asked: deque[Future[Answer]] = deque()
        for question in questions:
            asked.append(pool.submit(_answer, question))
            if len(asked) > processes:
                yield asked.popleft().result()
        while asked:
            yield asked.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, work: Callable[[Any], Any]) -> None:
    global _work
    die_with_parent(parent)
    # Ctrl-C reaches every process of a terminal; the parent ends these.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _work = work


def _answer(question: Any) -> Any:
    return _work(question)
