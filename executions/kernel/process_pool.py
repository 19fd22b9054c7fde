"""Processes apart that work on hostile text, so that it is not this one that it holds up or ends.

A program reads questions from its input, a line each, and answers each with a line. It has bounds
of memory and processor time that it sets itself; this side bounds how many there are, how long an
answer may take and how large it may be. Whatever breaks a bound is ended, and the next question
gets another process.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, cast

from providers.threads import reset_after_fork


class PoolBusy(Exception):
    """No place in the pool came free within the time that the caller waits."""


class ProcessPool:
    """At most `at_once` processes of one command, started when they are needed and kept.

    An answer has `wall_seconds` and `most_answered` bytes.
    """

    def __init__(
        self, command: Sequence[str], *, at_once: int, wall_seconds: float, most_answered: int
    ) -> None:
        self._command = tuple(command)
        self._at_once = at_once
        self.wall_seconds = wall_seconds
        self._most_answered = most_answered
        self._begin()
        # The parent's processes answer the parent.
        reset_after_fork(self._begin)

    def _begin(self) -> None:
        self._idle: list[_Process] = []
        self._places = threading.BoundedSemaphore(self._at_once)

    def ask(self, question: bytes, patience: float | None = None) -> bytes | None:
        """The answer's line to a question, which is a line too; waits. None where the process has
        ended over it, or was ended.

        `patience` is how many seconds to wait for a place, None is for as long as it takes. Raises
        PoolBusy where there was none, and OSError where no process can be started.
        """
        if not self._places.acquire(timeout=patience):
            raise PoolBusy
        try:
            process = self._waiting() or _Process(self._command)
            answer = process.ask(question, self.wall_seconds, self._most_answered)
            if answer is not None:
                self._idle.append(process)
            return answer
        finally:
            self._places.release()

    def _waiting(self) -> _Process | None:
        """One that waits. What has ended it meanwhile says nothing of the next question."""
        with suppress(IndexError):
            while True:
                if (process := self._idle.pop()).lives():
                    return process
                process.end()
        return None


class _Process:
    """One process. It ends when its input does, so that it does not outlive this one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONHASHSEED": "random"},
            bufsize=0,
        )
        ends = cast("tuple[IO[bytes], IO[bytes]]", (self._process.stdin, self._process.stdout))
        self._pipes = ends[0].fileno(), ends[1].fileno()
        os.set_blocking(self._pipes[0], False)

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes, seconds: float, most: int) -> bytes | None:
        """The answer, a line; None when it has ended over the question, or was ended."""
        with suppress(OSError):
            if (answer := self._answer(question, seconds, most)).endswith(b"\n"):
                return answer
        self.end()
        return None

    def end(self) -> None:
        with self._process as ended:
            ended.kill()

    def _answer(self, question: bytes, seconds: float, most: int) -> bytes:
        into, out = self._pipes
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(into, select.POLLOUT)
        deadline = time.monotonic() + seconds
        said, left = bytearray(), memoryview(question)
        while not said.endswith(b"\n"):
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready or len(said) > most:
                break
            if into in ready:
                left = left[os.write(into, left) :]
                if not left:
                    poll.unregister(into)
            if out in ready:
                if not (piece := os.read(out, 65536)):
                    break
                said += piece
        return bytes(said)
