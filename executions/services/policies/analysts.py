"""Processes that look at hostile text (`analysis`), so that it is not this one that it holds up."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from executions.services.policies import analysis
from executions.services.policies.analysis import LOOKED, MOST, MOST_BYTES, TOO_MUCH, Finding
from executions.services.process_pool import ProcessPool
from providers.errors import ProviderUnavailable, RateLimited

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


class _Lookers:
    """AT_ONCE threads, as long as there is something to look at. Tenants have turns of them, and
    of those that look at once one tenant never has all: its slow code holds up itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # What waits of each tenant, whose turn it is first.
        self._todo: dict[str, deque[tuple[Future[Answer], str, Mapping[str, Any]]]] = {}
        self._looking: Counter[str] = Counter()
        self._threads = 0

    def submit(self, code: str, rules: Mapping[str, Any], owner: str) -> Future[Answer]:
        looked: Future[Answer] = Future()
        with self._lock:
            waiting = deque(each for each in self._todo.get(owner, ()) if not each[0].cancelled())
            if len(waiting) + self._looking[owner] >= OF_ONE_TENANT:
                raise RateLimited(
                    f"{OF_ONE_TENANT} programs of the tenant are being looked at, as its policy "
                    "asks. Send it again.",
                    retry_after=1.0,
                )
            if self._threads < AT_ONCE:
                self._start()
            waiting.append((looked, code, rules))
            self._todo[owner] = waiting
        return looked

    def _start(self) -> None:
        try:
            threading.Thread(target=self._work, name="policy-look", daemon=True).start()
        except RuntimeError as error:
            # One that is there looks at it in its turn.
            if not self._threads:
                raise RateLimited(
                    f"The process has no thread left to look at the code: {error}.", retry_after=1.0
                ) from error
        else:
            self._threads += 1

    def _work(self) -> None:
        try:
            while taken := self._next():
                self._carry_out(*taken)
        except BaseException:
            with self._lock:
                self._threads -= 1
            raise

    def _next(self) -> tuple[str, Future[Answer], str, Mapping[str, Any]] | None:
        """What waits of the tenant whose turn it is, who is then the last. None for a thread that
        is not needed any more, and is not counted from here on."""
        with self._lock:
            for owner, waiting in self._todo.items():
                if self._looking[owner] < AT_ONCE - 1:
                    del self._todo[owner]
                    taken = waiting.popleft()
                    if waiting:
                        self._todo[owner] = waiting
                    self._looking[owner] += 1
                    return owner, *taken
            self._threads -= 1
            return None

    def _carry_out(
        self, owner: str, looked: Future[Answer], code: str, rules: Mapping[str, Any]
    ) -> None:
        if not looked.set_running_or_notify_cancel():
            self._let_go(owner)
            return
        try:
            answer = look(code, rules)
        except BaseException as error:
            self._let_go(owner)
            looked.set_exception(error)
        else:
            self._let_go(owner)
            looked.set_result(answer)

    def _let_go(self, owner: str) -> None:
        """Before anybody hears of it, so that there is room for the tenant's next one."""
        with self._lock:
            self._looking[owner] -= 1
            if not self._looking[owner]:
                del self._looking[owner]


def look(code: str, rules: Mapping[str, Any]) -> Answer:
    """As `analysis.analyse`, in a process of its own; waits. TOO_MUCH where that did not live.

    Raises ProviderUnavailable where no such process can be had.
    """
    if len(code) > MOST_BYTES:
        return TOO_MUCH, []
    try:
        answer = _analysts.ask(json.dumps([code, rules]).encode() + b"\n")
    except OSError as error:
        raise ProviderUnavailable(
            f"The policy asks for the code to be looked at, which cannot be done: {error}."
        ) from error
    return (TOO_MUCH, []) if answer is None else _checked(answer)


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


_analysts = ProcessPool(
    _COMMAND, at_once=AT_ONCE, wall_seconds=WALL_SECONDS, most_answered=_MOST_ANSWERED
)
_lookers = _Lookers()


def _after_fork() -> None:
    """The parent's threads answer the parent."""
    global _lookers
    _lookers = _Lookers()


os.register_at_fork(after_in_child=_after_fork)
