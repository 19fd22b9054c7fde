"""What must hold after all faults, and the table that says so."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.chaos.callers import Call
from tests.chaos.hosts import Death, Host, Server
from tests.chaos.witness import Witness

SAMPLE_SECONDS = 0.25
# What was asked for: of 99 in 100 orphans, once there is somebody who could find them.
ORPHAN_SECONDS = 15.0
# A process that shows no sign of life for so long has to begin its watch anew.
GAP_SECONDS = 4.0

_OPEN = """
SELECT e.id::text, p.instance, p.pid FROM executions_execution e
JOIN executions_process p ON p.id = e.process_id
WHERE e.finished_at IS NULL AND e.status = 'running'
"""
_ROWS = """
SELECT idempotency_key, status, retryable, finished_at IS NULL, error_message
FROM executions_execution
WHERE idempotency_key IS NOT NULL AND session_id IS NULL
"""

_RUNNING = """
SELECT tenant_slug, COUNT(*) FROM executions_execution
WHERE finished_at IS NULL AND status = 'running' GROUP BY tenant_slug
"""
_LIVING = "SELECT id::text, beat FROM executions_process WHERE ended_at IS NULL"


@dataclass
class Sight:
    """An open row: whose it is, when it was seen last, and since when somebody has lived by then
    without a gap: the longest of all.
    """

    owner: tuple[str, int]
    at: float
    survivor_since: float


@dataclass(frozen=True)
class Orphan:
    """Seconds that a row was open after its owner's death, and of these in a survivor's sight."""

    open_for: float
    watched_for: float


class Watch:
    """Looks at the open rows while everything breaks, by a connection of its own."""

    def __init__(self, database_url: str) -> None:
        self._url = database_url
        self._goes_on = True
        self._seen: dict[str, Sight] = {}
        # The beat of each process, when it was new, and since when it has come without a gap.
        self._living: dict[str, tuple[int, float, float]] = {}
        # Of each tenant, what ran at once.
        self.most_running: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._goes_on = False
        self._thread.join(10)

    def orphans(
        self, deaths: Iterable[Death], outages: Sequence[tuple[float, float]]
    ) -> list[Orphan]:
        """Each, counted from its owner's death, or from when the database was back where it was
        away in between."""
        died = {(death.host, death.pid): death.at for death in deaths}
        found = []
        for sight in self._seen.values():
            at = died.get(sight.owner)
            if at is None or sight.at <= at:
                continue
            back = max((end for start, end in outages if start < sight.at and end > at), default=at)
            since = max(at, back)
            watched = sight.at - max(since, sight.survivor_since)
            found.append(Orphan(max(0.0, sight.at - since), max(0.0, watched)))
        return found

    def _work(self) -> None:
        connection: psycopg.Connection[tuple[Any, ...]] | None = None
        while self._goes_on:
            try:
                if connection is None:
                    connection = psycopg.connect(self._url, autocommit=True, connect_timeout=2)
                self._look(connection)
            except psycopg.OperationalError:
                connection = None
            time.sleep(SAMPLE_SECONDS)

    def _look(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        now = time.time()
        living = {}
        for pk, beat in connection.execute(_LIVING).fetchall():
            known, new_at, since = self._living.get(pk, (beat, now, now))
            if beat != known:
                since = now if now - new_at > GAP_SECONDS else since
                new_at = now
            living[pk] = (beat, new_at, since)
        self._living = living
        awake = [since for _, new_at, since in living.values() if now - new_at <= GAP_SECONDS]
        for execution_id, instance, pid in connection.execute(_OPEN).fetchall():
            self._seen[execution_id] = Sight((instance, pid), now, min(awake, default=now))
        self.most_running |= Counter(dict(connection.execute(_RUNNING).fetchall()))


@dataclass
class Verdict:
    """Figures by name, and what is wrong in words: empty when everything held."""

    figures: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def table(self) -> str:
        width = max(map(len, self.figures))
        lines = [f"{name:<{width}}  {value}" for name, value in self.figures.items()]
        return "\n".join([*lines, *(f"WRONG: {reason}" for reason in self.wrong)])


def judge(
    calls: Sequence[Call],
    witness: Witness,
    database_url: str,
    watch: Watch,
    hosts: Sequence[Host],
    database: Server,
) -> Verdict:
    """Compare what callers were told, what is recorded and what the code itself wrote."""
    verdict = Verdict()
    with psycopg.connect(database_url) as connection:
        rows = connection.execute(_ROWS).fetchall()
    verdict.figures |= {
        "calls": str(len(calls)),
        "outcomes": counted(call.outcome for call in calls),
        "connections cut or refused": str(sum(call.cut for call in calls)),
        "asked again at most": str(max((call.attempts for call in calls), default=0)),
    }
    _judge_records(verdict, calls, rows, witness)
    for call in calls:
        if call.bare:
            verdict.wrong.append(f"{call.token} was told {call.bare[0]}")
    _judge_orphans(verdict, watch, hosts, database)
    verdict.wrong += [f"{token} still runs" for token in witness.running()]
    checked = hosts[0].manage("verify_ledger")
    verdict.figures["ledger"] = checked.stdout.strip().splitlines()[-1] if checked.stdout else ""
    if checked.returncode:
        verdict.wrong.append(f"verify_ledger: {checked.stdout}{checked.stderr}")
    return verdict


def _judge_records(
    verdict: Verdict,
    calls: Sequence[Call],
    rows: Sequence[tuple[str, str, bool, bool, str]],
    witness: Witness,
) -> None:
    ran, ended = witness.began(), witness.ended()
    final: dict[str, list[str]] = {}
    for token, status, retryable, is_open, _ in rows:
        if is_open:
            verdict.wrong.append(f"{token} is still {status}")
        if not retryable:
            final.setdefault(token, []).append(status)
    for call in calls:
        began = ran.get(call.token, 0)
        records = final.get(call.token, [])
        if began > 1:
            verdict.wrong.append(f"{call.token} ran {began} times")
        if len(records) > 1:
            verdict.wrong.append(f"{call.token} has {len(records)} final records")
        if began and not records:
            verdict.wrong.append(f"{call.token} ran and has no final record")
        is_ended = ended is None or ended.get(call.token, 0) > 0
        if call.outcome == "succeeded" and (records != ["succeeded"] or not is_ended):
            verdict.wrong.append(f"{call.token}: told succeeded, recorded {records}, {is_ended=}")
        if call.outcome == "no answer":
            verdict.wrong.append(f"{call.token} ({call.mode}) had no answer; recorded {records}")
    verdict.figures |= {
        "final records": counted(status for each in final.values() for status in each),
        "attempts that ran nothing": str(sum(bool(retryable) for _, _, retryable, _, _ in rows)),
        "errors most often": counted((_no_figures(row[4]) for row in rows if row[4]), most=4),
        "programs that ran": str(len(ran)),
        "more than once": str(sum(began > 1 for began in ran.values())),
    }


def _judge_orphans(verdict: Verdict, watch: Watch, hosts: Sequence[Host], database: Server) -> None:
    deaths = [death for host in hosts for death in host.deaths]
    orphans = watch.orphans(deaths, database.down)
    verdict.figures["processes killed"] = str(len(deaths))
    verdict.figures["orphans"] = str(len(orphans))
    if len(orphans) < 2:
        return
    verdict.figures["open after their owner's death"] = _spread([one.open_for for one in orphans])
    watched = [one.watched_for for one in orphans]
    verdict.figures["while one other process lived"] = _spread(watched)
    if (p99 := _p99(watched)) > ORPHAN_SECONDS:
        verdict.wrong.append(f"orphans stayed open for {p99:.1f} s (p99)")


def _spread(values: Sequence[float]) -> str:
    return (
        f"p50 {statistics.median(values):.1f} s, p99 {_p99(values):.1f} s, "
        f"longest {max(values):.1f} s"
    )


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def counted(values: Iterable[str], most: int | None = None) -> str:
    return ", ".join(f"{number} {value}" for value, number in Counter(values).most_common(most))


def _no_figures(message: str) -> str:
    """So that two of the same kind are the same."""
    return re.sub(r"[0-9]+", "N", message)[:60]
