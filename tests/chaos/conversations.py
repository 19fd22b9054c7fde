"""Callers who hold conversations: a counter kept in a variable and in a file, whatever breaks."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.callers import ANSWER_SECONDS, ENDED, GIVE_UP_SECONDS, ask
from tests.chaos.drivers import Driver

SESSIONS = "/api/v1/sessions"
# Who opened a session may have died over it: for 15 s nothing can run in it, and for longer where
# those who would find him dead die too.
OPENING_SECONDS = 60.0
MOST_CELLS = 12
# What names the processes of a sandbox, so that they are found by it in /proc.
NAME = "talk-"

# Counted in one piece: whoever is interrupted has counted in both places, or in neither.
_COUNTS = """
import signal, time
with open("/proc/self/comm", "w") as name:
    name.write("{name}")
time.sleep({seconds})
former = signal.signal(signal.SIGINT, signal.SIG_IGN)
counter = globals().get("counter", 0) + 1
with open("counted", "a") as file:
    file.write("{token}\\n")
with open("counted") as file:
    lines = file.read().split()
print(counter, len(lines), lines.count("{token}"))
signal.signal(signal.SIGINT, former)
"""


@dataclass
class Cell:
    """One cell and what its caller came to know of it."""

    token: str
    mode: str
    execution_id: str = ""
    outcome: str = ""


@dataclass
class Talk:
    """One session, from its opening to its end, as its caller knows it.

    The counter is between `least` and `most`: what was not answered may have counted. `apart` is
    how much less the variable has than the file, None where its loss was told. `counted` is where
    in the file each execution has its line.
    """

    name: str
    tenant: str
    began: float
    session_id: str = ""
    end: str = ""
    ended: float = 0.0
    cells: list[Cell] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    bare: list[str] = field(default_factory=list)
    cut: int = 0
    least: int = 0
    most: int = 0
    apart: int | None = 0
    counted: list[tuple[int, str]] = field(default_factory=list)

    def take(self, cell: Cell, answer: Mapping[str, Any]) -> list[str]:
        """What came of a cell: it has to go on from where the last one was.

        The executions of what is no longer in the file, where the sandbox is another one: each of
        them has to say so.
        """
        cell.outcome, cell.execution_id = answer["status"], answer["id"]
        is_restored = answer.get("restored") is True
        if is_restored or answer.get("context_kept") is False:
            # Told: what comes next may begin at nothing.
            self.apart = None
        if cell.outcome != "succeeded":
            self.most += 1
            return []
        counter, lines, mine = map(int, answer["stdout"].split())
        if mine != 1:
            self.wrong.append(f"{cell.token} counted {mine} times")
        gone = [pk for place, pk in self.counted if place >= lines]
        if lines > self.most + 1 or (gone and not is_restored):
            self.wrong.append(f"the file has {lines}, not {self.least + 1} to {self.most + 1}")
        if self.apart is None:
            self.apart = lines - counter
        if counter + self.apart != lines:
            self.wrong.append(f"the variable has {counter}, the file {lines}, {self.apart} apart")
            self.apart = lines - counter
        self.least = self.most = lines
        self.counted = [each for each in self.counted if each[0] < lines]
        self.counted.append((lines, cell.execution_id))
        return gone


class Conversations(Driver):
    """Threads that hold one conversation after the other until they are told to stop."""

    def __init__(
        self,
        urls: Sequence[str],
        keys: Mapping[str, str],
        *,
        threads: int,
        longest: float,
        seed: int,
    ) -> None:
        super().__init__(
            urls,
            keys,
            threads=threads,
            seed=seed,
            longest=longest,
            patience=3 * GIVE_UP_SECONDS + ANSWER_SECONDS,
        )
        self.talks: list[Talk] = []

    def _work_once(self, chance: random.Random, tenant: str) -> None:
        name = f"{NAME}{uuid.uuid4().hex[:8]}"
        talk = Talk(name, tenant, time.time())
        with self._lock:
            self.talks.append(talk)
        if self._open(talk, chance):
            for _ in range(chance.randint(3, MOST_CELLS)):
                if talk.end or not self._goes_on:
                    break
                self._say(talk, chance)
        if not talk.end:
            self._close(talk, chance)
        talk.ended = time.time()

    def _open(self, talk: Talk, chance: random.Random) -> bool:
        """Whether it is open. Who was not answered finds it by its name."""
        until = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < until:
            status, answer = self._ask(chance, talk, SESSIONS, {"name": talk.name})
            if status == 409:
                status, answer = self._ask(chance, talk, f"{SESSIONS}?state=open&limit=200")
                found = [each for each in answer.get("results", ()) if each["name"] == talk.name]
                status, answer = (201, found[0]) if found else (0, {})
            if status == 201:
                talk.session_id = answer["id"]
                return True
            time.sleep(chance.uniform(0.1, 0.5))
        talk.end = "no answer"
        return False

    def _say(self, talk: Talk, chance: random.Random) -> None:
        cell = Cell(uuid.uuid4().hex, chance.choice(("sync", "sync", "sync", "async")))
        talk.cells.append(cell)
        seconds = round(chance.uniform(0, self._longest), 2)
        body = {
            "code": _COUNTS.format(token=cell.token, seconds=seconds, name=talk.name),
            "mode": cell.mode,
            "timeout": self._longest + 20,
            "idempotency_key": cell.token,
        }
        path = f"{SESSIONS}/{talk.session_id}/executions"
        told: set[str] = set()
        began = time.monotonic()
        while time.monotonic() < began + GIVE_UP_SECONDS:
            if cell.execution_id:
                seen = f"/api/v1/executions/{cell.execution_id}"
                status, answer = self._ask(chance, talk, seen)
            else:
                status, answer = self._ask(chance, talk, path, body)
            if status in (200, 202):
                cell.execution_id = answer["id"]
                if answer["status"] in ENDED:
                    self._take(talk, cell, answer, chance)
                    return
            elif (known := answer.get("id")) and known in told:
                # The same record once more: it is how this ended, and says more than its error.
                cell.execution_id = known
            elif known:
                told.add(known)
            elif status == 409 and (end := self._end_of(talk, chance)):
                # Nothing was recorded of this one.
                talk.end, cell.outcome = end, "refused"
                return
            elif "being opened" in str(answer.get("error")) and (
                time.monotonic() > began + OPENING_SECONDS
            ):
                talk.wrong.append(f"it was still being opened after {OPENING_SECONDS:g} s")
                cell.outcome = "refused"
                self._close(talk, chance)
                return
            time.sleep(chance.uniform(0.1, 0.5))
        cell.outcome = "no answer"
        talk.end = "no answer"

    def _take(
        self, talk: Talk, cell: Cell, answer: Mapping[str, Any], chance: random.Random
    ) -> None:
        for execution_id in talk.take(cell, answer):
            _, seen = self._ask(chance, talk, f"/api/v1/executions/{execution_id}")
            if seen.get("files_saved") is True:
                talk.wrong.append(f"{execution_id} says that its files are saved, and they are not")

    def _end_of(self, talk: Talk, chance: random.Random) -> str:
        """How the session ended, "" where it has not, or nobody says."""
        _, answer = self._ask(chance, talk, f"{SESSIONS}/{talk.session_id}")
        state = answer.get("state", "open")
        never_opened = str(answer.get("closed_because")).startswith("it could not be opened")
        if state == "closed" and not (never_opened and not talk.most):
            talk.wrong.append(f"was closed by others: {answer.get('closed_because')}")
        return str(state) if state in ("closed", "lost") else ""

    def _close(self, talk: Talk, chance: random.Random) -> None:
        until = time.monotonic() + GIVE_UP_SECONDS
        while talk.session_id and time.monotonic() < until:
            path = f"{SESSIONS}/{talk.session_id}"
            status, _ = self._ask(chance, talk, path, method="DELETE")
            if status == 204:
                talk.end = "closed"
                return
            time.sleep(chance.uniform(0.1, 0.5))
        talk.end = "no answer"

    def _ask(
        self,
        chance: random.Random,
        talk: Talk,
        path: str,
        body: Mapping[str, Any] | None = None,
        method: str | None = None,
    ) -> tuple[int, dict[str, Any]]:
        url = chance.choice(self._urls) + path
        return ask(url, self._keys[talk.tenant], talk, body, method)
