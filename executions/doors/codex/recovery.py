"""Processes of a session that another web process has started, found by their records.

The idempotency key of each has the name that its client gave it. Its output comes from the events
that were written of it, and then from the sandbox. Each place where a client attaches has a mark in
the session's row: the last one decides which of several processes ends what nobody comes back for.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID, uuid4

from django.db.models import Q
from django.db.models.functions import Now

from executions.doors.codex.messages import Start, plain
from executions.runs import event_log
from executions.runs.advice import advice_text
from executions.runs.event_log import EventLog, RunEvent
from executions.runs.models import Execution
from executions.runs.results import executions_of, may_have_missed
from executions.sessions.background_commands import Follower
from executions.sessions.models import Session
from executions.sessions.queries import sessions_of
from executions.sessions.waiting_commands import Asked, asked_for
from executions.tenants.models import ApiKey

logger = logging.getLogger(__name__)

# How long what has ended is found again: as long as its events are kept.
ENDED = timedelta(seconds=60)
MOST_FOUND = 64
_PREFIX = "cofferdam-codex:"
# Of a key, which has 255 characters.
_MOST_NAME = 180


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
    def of_key(cls, key: str) -> Name:
        _, _, use, name = key.split(":", 3)
        return cls(name, use == "t", use in ("t", "i"))


@dataclass(frozen=True)
class Found:
    """A process by its record. `known` is what was written of its output, `log` where more of it
    is told, and `asked` how it waits, or has waited, for an approval."""

    name: Name
    execution: Execution
    known: Sequence[RunEvent]
    asked: Asked | None
    log: EventLog | None = None
    advice: str = ""


def take_over(session_id: UUID, mark: UUID) -> UUID | None:
    """Note where a session's client is now. Return where it was before."""
    rows = Session.objects.filter(pk=session_id)
    former = rows.values_list("attachment", flat=True).first()
    rows.update(attachment=mark)
    return former


def is_latest(session_id: UUID, mark: UUID) -> bool:
    """Whether the session's client was nowhere else since."""
    return Session.objects.filter(pk=session_id, attachment=mark).exists()


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
    newest = list(lately.order_by("-pk")[:MOST_FOUND])
    return [_found(execution) for execution in reversed(newest)]


def find_again(execution_id: UUID) -> Found:
    """Return one as it is now."""
    return _found(executions_of(None).select_related("session").get(pk=execution_id))


def _found(execution: Execution) -> Found:
    name = Name.of_key(execution.idempotency_key or "")
    log = event_log.log_of(execution.pk)
    known = [] if log is not None else event_log.stored_events(execution.pk)
    has_advice = execution.finished_at is not None and may_have_missed(execution)
    advice = advice_text(execution) if has_advice else ""
    return Found(name, execution, known, asked_for(execution), log, advice)


def follow(found: Found) -> tuple[Execution, EventLog]:
    """Take the output of one that runs, behind what is known of it."""
    if found.log is not None:
        return found.execution, found.log
    execution, session = found.execution, found.execution.session
    if session is None:
        raise ValueError("a process of no session")
    return execution, Follower(session, execution).begin(found.known)
