"""Callers who want an answer: whatever breaks, each asks again until it knows what became of it."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tests.chaos.drivers import Driver
from tests.chaos.witness import Witness

ANSWER_SECONDS = 20.0
GIVE_UP_SECONDS = 90.0
ENDED = ("succeeded", "failed", "timed_out", "out_of_memory", "blocked", "cancelled", "error")


@dataclass
class Call:
    """One piece of work and what its caller came to know of it."""

    token: str
    tenant: str
    mode: str
    began: float
    execution_id: str = ""
    outcome: str = ""
    attempts: int = 0
    cut: int = 0
    bare: list[str] = field(default_factory=list)
    ended: float = 0.0


class Callers(Driver):
    """Threads that send work to both hosts until they are told to stop."""

    def __init__(
        self,
        urls: Sequence[str],
        keys: Mapping[str, str],
        witness: Witness,
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
            patience=GIVE_UP_SECONDS + ANSWER_SECONDS,
        )
        self.calls: list[Call] = []
        self._witness = witness

    def _work_once(self, chance: random.Random, tenant: str) -> None:
        call = Call(
            uuid.uuid4().hex,
            tenant,
            chance.choice(("sync", "sync", "async")),
            time.time(),
        )
        with self._lock:
            self.calls.append(call)
        self._see_through(call, chance)
        call.ended = time.time()

    def _see_through(self, call: Call, chance: random.Random) -> None:
        seconds = round(chance.uniform(0, self._longest), 2)
        body = {
            "code": self._witness.code(call.token, seconds),
            "mode": call.mode,
            "timeout": self._longest + 10,
            "idempotency_key": call.token,
        }
        until = time.monotonic() + GIVE_UP_SECONDS
        told: set[str] = set()
        while time.monotonic() < until:
            call.attempts += 1
            if call.execution_id:
                status, answer = self._ask(chance, call, f"/api/v1/executions/{call.execution_id}")
            else:
                status, answer = self._ask(chance, call, "/api/v1/executions", body)
            state = answer.get("status")
            if status in (200, 202) and state in ENDED:
                call.outcome, call.execution_id = state, answer["id"]
                return
            if status in (200, 202):
                call.execution_id = answer["id"]
            elif (known := answer.get("id")) and known in told:
                # The same record once more: it is how this ended, and not to be tried again.
                call.outcome, call.execution_id = "error", known
                return
            elif known:
                told.add(known)
            time.sleep(chance.uniform(0.1, 0.5))
        call.outcome = "no answer"

    def _ask(
        self, chance: random.Random, call: Call, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        return ask(chance.choice(self._urls) + path, self._keys[call.tenant], call, body)


class Asked(Protocol):
    """Who asks: what was cut off, and what came that is no answer of the service's own."""

    cut: int
    bare: list[str]


def ask(
    url: str,
    key: str,
    asked: Asked,
    body: Mapping[str, Any] | None = None,
    method: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """Status and answer; 0 where the connection gave none."""
    request = urllib.request.Request(
        url,
        data=None if body is None else json.dumps(body).encode(),
        headers={"X-API-Key": key, "Content-Type": "application/json"},
        method=method,
    )
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return answer.status, json.loads(answer.read() or b"{}")
    except urllib.error.HTTPError as error:
        content = error.read()
        try:
            told: dict[str, Any] = json.loads(content)
        except ValueError:
            told = {}
        if "error" not in told or error.code == 500:
            asked.bare.append(f"{error.code} {content[:100]!r}")
        return error.code, told
    except (OSError, ValueError, http.client.HTTPException):
        asked.cut += 1
        return 0, {}
