"""Processes that look at hostile text (`analysis`), so that it is not this one that it holds up."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any, cast

from executions.services.policies import analysis
from executions.services.policies.analysis import LOOKED, MOST, MOST_BYTES, TOO_MUCH, Finding
from executions.services.turns import Bounds, Turns
from providers.errors import ProviderUnavailable

# The processor time of a look has its own bound; this one is for a machine that has no time.
WALL_SECONDS = 60.0
AT_ONCE = 2
# That are looked at or wait for it: no more than a tenant usually runs at once.
OF_ONE_TENANT = 10
Answer = tuple[str, list[Finding]]
_COMMAND = (sys.executable, "-I", "-S", analysis.__file__)
_MOST_ANSWERED = 1 << 20


def submit_look(code: str, rules: Mapping[str, Any], owner: str) -> Future[Answer]:
    """As `look`, by threads of their own, so that slow code holds up nothing else; `owner` is the
    tenant. Raises RateLimited for one that has too many of them, and where no thread can be had.
    """
    return _lookers.submit(code, rules, owner)


class _Lookers(Turns[Answer]):
    def __init__(self) -> None:
        work = "programs of the tenant are being looked at, as its policy asks."
        super().__init__(Bounds(AT_ONCE, OF_ONE_TENANT, work), "policy-look")

    def submit(self, code: str, rules: Mapping[str, Any], owner: str) -> Future[Answer]:
        return self.take(lambda: look(code, rules), owner)


def look(code: str, rules: Mapping[str, Any]) -> Answer:
    """As `analysis.analyse`, in a process of its own; waits. TOO_MUCH where that did not live.

    Raises ProviderUnavailable where no such process can be had.
    """
    if len(code) > MOST_BYTES:
        return TOO_MUCH, []
    with _places:
        analyst = _living() or _Analyst()
        answer = analyst.ask(json.dumps([code, rules]).encode() + b"\n")
        if answer is not None:
            _idle.append(analyst)
    return (TOO_MUCH, []) if answer is None else _checked(answer)


class _Analyst:
    """One process. It ends when its input does, so that it does not outlive this one."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "random"},
                bufsize=0,
            )
        except OSError as error:
            raise ProviderUnavailable(
                f"The policy asks for the code to be looked at, which cannot be done: {error}."
            ) from error
        ends = cast("tuple[IO[bytes], IO[bytes]]", (self._process.stdin, self._process.stdout))
        self._pipes = ends[0].fileno(), ends[1].fileno()
        os.set_blocking(self._pipes[0], False)

    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: bytes) -> bytes | None:
        """Its answer, a line; None when it has ended over the question, or was ended."""
        with suppress(OSError):
            if (answer := self._answer(question)).endswith(b"\n"):
                return answer
        self.end()
        return None

    def end(self) -> None:
        with self._process as ended:
            ended.kill()

    def _answer(self, question: bytes) -> bytes:
        into, out = self._pipes
        poll = select.poll()
        poll.register(out, select.POLLIN)
        poll.register(into, select.POLLOUT)
        deadline = time.monotonic() + WALL_SECONDS
        said, left = b"", memoryview(question)
        while not said.endswith(b"\n"):
            ready = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not ready or len(said) > _MOST_ANSWERED:
                break
            if into in ready:
                left = left[os.write(into, left) :]
                if not left:
                    poll.unregister(into)
            if out in ready:
                if not (piece := os.read(out, 65536)):
                    break
                said += piece
        return said


def _living() -> _Analyst | None:
    """One that waits. What has ended it meanwhile says nothing of the next question."""
    with suppress(IndexError):
        while True:
            if (analyst := _idle.pop()).lives():
                return analyst
            analyst.end()
    return None


def _checked(answer: bytes) -> tuple[str, list[Finding]]:
    """The answer as it must be: it comes from a process that has read hostile text."""
    try:
        outcome, found = json.loads(answer)
        if outcome not in (LOOKED, analysis.UNPARSED):
            return TOO_MUCH, []
        return outcome, [
            (int(line), str(kind)[:10], str(name)[:200]) for line, kind, name in found[:MOST]
        ]
    except (ValueError, TypeError):
        return TOO_MUCH, []


_idle: list[_Analyst] = []
_places = threading.BoundedSemaphore(AT_ONCE)
_lookers = _Lookers()


def _after_fork() -> None:
    """The parent's processes and threads answer the parent."""
    global _idle, _places, _lookers
    _idle, _places, _lookers = [], threading.BoundedSemaphore(AT_ONCE), _Lookers()


os.register_at_fork(after_in_child=_after_fork)
