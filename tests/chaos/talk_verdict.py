"""What must hold of conversations after all faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psycopg

from tests.chaos.conversations import NAME, Talk
from tests.chaos.verdict import Verdict, counted

# Launchers whose kept sandboxes are found again by a pool service that was killed.
OUTLIVE_THE_POOL = frozenset({"docker"})

_RECORDS = """
SELECT idempotency_key, status, finished_at IS NULL FROM executions_execution
WHERE session_id IS NOT NULL AND NOT retryable
"""
_SESSIONS = "SELECT id::text, state, released_at IS NULL FROM executions_session"


def judge_talks(
    verdict: Verdict,
    talks: Sequence[Talk],
    database_url: str,
    explains_loss: Callable[[Talk], bool],
) -> None:
    """Every acknowledged cell has one terminal record, every session counts right or is lost, and
    nothing is left. `explains_loss` is whether a fault has taken the sandbox of a session."""
    with psycopg.connect(database_url) as connection:
        records = connection.execute(_RECORDS).fetchall()
        sessions = {pk: (state, is_held) for pk, state, is_held in connection.execute(_SESSIONS)}
    cells = [cell for talk in talks for cell in talk.cells]
    verdict.figures |= {
        "conversations": counted(talk.end for talk in talks),
        "cells": counted(cell.outcome for cell in cells),
        "cells in a row at most": str(max((talk.least for talk in talks), default=0)),
        "answers of conversations cut": str(sum(talk.cut for talk in talks)),
        "sessions": counted(state for state, _ in sessions.values()),
    }
    final: dict[str, list[str]] = {}
    for token, status, is_open in records:
        final.setdefault(token, []).append(status)
        if is_open:
            verdict.wrong.append(f"cell {token} is still {status}")
    for talk in talks:
        verdict.wrong += [f"{talk.name}: {each}" for each in (*talk.wrong, *talk.bare)]
        if talk.end not in ("closed", "lost"):
            verdict.wrong.append(f"{talk.name}: {talk.end or 'it has not ended'}")
        if talk.end == "lost" and not explains_loss(talk):
            verdict.wrong.append(f"{talk.name} is lost, and nothing has taken it")
        for cell in talk.cells:
            found = final.get(cell.token, [])
            if cell.outcome == "refused" and found:
                verdict.wrong.append(f"{talk.name}: {cell.token} was refused, recorded {found}")
            elif cell.execution_id and found not in _fitting(cell.outcome):
                verdict.wrong.append(
                    f"{talk.name}: {cell.token} told {cell.outcome}, recorded {found}"
                )
    for pk, (state, is_held) in sessions.items():
        if state == "open" or is_held:
            verdict.wrong.append(f"session {pk} is {state}, its sandbox held: {is_held}")


def _fitting(outcome: str) -> tuple[list[str], ...]:
    """What may be recorded of a cell whose end was told. An error may be of one that ran nothing,
    whose record does not count."""
    return ([outcome], []) if outcome == "error" else ([outcome],)


def fault_explains_loss(
    launcher: str, faults: Mapping[str, Sequence[float]]
) -> Callable[[Talk], bool]:
    """By when the pool and the engine were hit."""
    kinds = [kind for kind in faults if kind != "pool" or launcher not in OUTLIVE_THE_POOL]
    hits = [at for kind in kinds for at in faults[kind]]
    return lambda talk: any(talk.began - 1 < at < talk.ended + 1 for at in hits)


def processes_left() -> list[str]:
    """Of sandboxes of conversations, by the name that their cells took."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "comm").read_text().strip()
        except OSError:
            continue
        if name.startswith(NAME):
            found.append(f"{name} ({folder.name})")
    return found
