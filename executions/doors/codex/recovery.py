"""Processes of a session that another web process has started, found by their records.

The idempotency key of each has the name that its client gave it. Its output comes from the events
that were written of it, and then from the sandbox. Each place where a client attaches has a mark in
the session's row: the last one decides which of several processes ends what nobody comes back for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

from django.db.models import F, Q
from django.db.models.functions import Now

from executions.doors.codex.messages import Start, plain
from executions.runs import event_log
from executions.runs.advice import advice_text
from executions.runs.event_log import STREAMS, EventLog, RunEvent
from executions.runs.models import Execution
from executions.runs.results import executions_of, may_have_missed
from executions.sessions.background_commands import Follower
from executions.sessions.queries import sessions_of
from executions.sessions.waiting_commands import Asked, asked_for
from executions.tenants.models import ApiKey

# How long what has ended is found again: as long as its events are kept.
ENDED = timedelta(seconds=60)
MOST_FOUND = 64
_PREFIX = "cofferdam-codex:"
# Of a key, which has 255 characters.
_MOST_NAME = 180
_KEY = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}:([tio]):(.+)")
# Of the output of one that has ended, for a client that asks again.
_TOLD_BYTES = 256 * 1024


class Moved(Exception):
    """The client of a session has connected elsewhere since, and what waits goes on there."""


@dataclass(frozen=True)
class Name:
    """What a client has called a process, and how it may be used."""

    process_id: str
    is_tty: bool = False
    takes_input: bool = False

    @classmethod
    def of(cls, wanted: Start) -> Name:
        return cls(wanted.process_id, wanted.tty, wanted.tty or wanted.pipe_stdin)

    def new_key(self) -> str | None:
        """Return an idempotency key for one more execution of this name, None for a name that no
        record can have: it is found in this process alone."""
        name = plain(self.process_id, _MOST_NAME)
        use = "t" if self.is_tty else "i" if self.takes_input else "o"
        return f"{_PREFIX}{uuid4().hex}:{use}:{name}" if name else None

    @classmethod
    def of_key(cls, key: str) -> Name | None:
        """The name in a key, None for a key of another kind."""
        found = _KEY.fullmatch(key)
        return None if found is None else cls(found[2], found[1] == "t", found[1] in "ti")


@dataclass(frozen=True)
class Found:
    """A process by its record. `known` is what was written of its output, without the first
    `left_out` pieces, `log` where more of it is told, and `asked` how it waits, or has waited, for
    an approval."""

    name: Name
    execution: Execution
    known: Sequence[RunEvent]
    asked: Asked | None
    log: EventLog | None = None
    advice: str = ""
    left_out: int = 0


def take_over(session_id: UUID, mark: UUID) -> UUID | None:
    """Note where a session's client is now. Return where it was before."""
    rows = sessions_of(None).filter(pk=session_id)
    while True:
        former = rows.values_list("attachment", flat=True).first()
        # Two that come at once are told of each other.
        if rows.filter(attachment=former).update(attachment=mark) or not rows.exists():
            return former


def is_latest(session_id: UUID, mark: UUID) -> bool:
    """Whether the session's client was nowhere else since."""
    return sessions_of(None).filter(pk=session_id, attachment=mark).exists()


def resumable(key: ApiKey, session_id: UUID) -> bool:
    """Whether the key's session lives, or has ended so lately that its client is to be told of the
    end of what ran in it."""
    found = sessions_of(key.tenant).filter(pk=session_id, api_key=key.pk)
    return found.filter(Q(closed_at=None) | Q(closed_at__gte=Now() - ENDED)).exists()


def find(session_id: UUID) -> list[Found]:
    """Return the processes of a session that run, wait, or have ended lately, the oldest first."""
    rows = executions_of(None).select_related("session")
    mine = rows.filter(session=session_id, background=True, idempotency_key__startswith=_PREFIX)
    lately = mine.filter(Q(finished_at=None) | Q(finished_at__gte=Now() - ENDED))
    # However much has ended lately: who is not told of what runs cannot end it.
    first = list(lately.order_by(F("finished_at").desc(nulls_first=True), "-pk")[:MOST_FOUND])
    first.sort(key=lambda each: each.pk)
    named = [(each, Name.of_key(each.idempotency_key or "")) for each in first]
    return [_found(each, name) for each, name in named if name is not None]


def find_again(execution_id: UUID, name: Name) -> Found:
    """Return one as it is now."""
    return _found(executions_of(None).select_related("session").get(pk=execution_id), name)


def output_in(entries: Iterable[RunEvent]) -> list[RunEvent]:
    """Return the events that are pieces of output."""
    return [entry for entry in entries if entry.type in STREAMS and entry.data]


def _found(execution: Execution, name: Name) -> Found:
    log = event_log.log_of(execution.pk)
    known = [] if log is not None else event_log.stored_events(execution.pk)
    asked = asked_for(execution)
    if execution.finished_at is None:
        return Found(name, execution, known, asked, log)
    advice = advice_text(execution) if may_have_missed(execution) else ""
    pieces, room = output_in(known), _TOLD_BYTES
    first = len(pieces)
    while first and (room := room - len(pieces[first - 1].data)) >= 0:
        first -= 1
    return Found(name, execution, pieces[first:], asked, log, advice, first)


def follow(found: Found) -> tuple[Execution, EventLog]:
    """Take the output of one that runs, behind what is known of it."""
    # It may be followed here since it was found.
    log = found.log or event_log.log_of(found.execution.pk)
    if log is not None:
        return found.execution, log
    execution, session = found.execution, found.execution.session
    if session is None:
        raise ValueError("a process of no session")
    return execution, Follower(session, execution).begin(found.known)
