"""Conversations of Agent Sandbox: a user and a session id of a tenant, which own one session.

The ids are the caller's own and may be any text, so they are hashed: the database sees to it that
no two open sessions of a tenant are one conversation.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from django.conf import settings

from executions.kernel.coroutines import Waits
from executions.kernel.declarations import refuse
from executions.kernel.paths import from_text, is_path, key_of, to_text
from executions.kernel.text import storable
from executions.runs.models import Execution
from executions.runs.record import Caller
from executions.runs.requests import ExecutionRequest
from executions.sessions import cell_order
from executions.sessions.ending import close_if_due
from executions.sessions.lifecycle import opening
from executions.sessions.models import Session
from executions.sessions.requests import Conflict, SessionRequest
from executions.sessions.storage.carry_over import kept_of
from executions.sessions.storage.models import WorkspaceFile
from executions.tenants.models import Tenant
from executions.tenants.tenant_scope import sessions_of
from providers.guest.names import unescape
from providers.waiting import within

DEFAULT = "default"
# What Agent Sandbox has in its own folder of a conversation: never told of, and nobody's to write.
INTERNAL_FILES = (
    "__mcp_exec__.py",
    "__sandboxd__.py",
    "__sb_client__.py",
    ".sb_meta.json",
    ".sb_snapshot.json",
)
_OPENING_SECONDS = 60.0
_LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Conversation:
    """Whose sandbox it is."""

    user_id: str
    session_id: str = DEFAULT

    @property
    def key(self) -> str:
        """What stands for it in the database, whatever the ids are."""
        text = f"{len(self.user_id)}:{self.user_id}{self.session_id}"
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find(tenant: Tenant, conversation: Conversation) -> Session | None:
    """Its session, if it has one now."""
    found = sessions_of(tenant).filter(conversation=conversation.key, closed_at=None)
    session = found.select_related("workspace").order_by("-id").first()
    if session is not None and close_if_due(session.pk):
        return None
    return session


def find_files(tenant: Tenant, conversation: Conversation) -> Session | None:
    """The session whose saved files are the conversation's, if it has any: its own now, or its last
    where files outlive their sessions.
    """
    session = find(tenant, conversation)
    return kept_of(sessions_of(tenant).filter(conversation=conversation.key)) or session


def held(caller: Caller, conversation: Conversation) -> Waits[Session]:
    """Its session, opened where it has none. Of several callers at once one opens it, and the
    others wait for that. Raises as `opening` does.
    """
    until = time.monotonic() + _OPENING_SECONDS
    while True:
        session = find(caller.tenant, conversation)
        if session is None:
            try:
                return (yield from opening(_request(conversation), caller))
            except Conflict:
                # Somebody else was faster.
                session = find(caller.tenant, conversation)
        if session is not None and _is_open(session):
            return session
        if time.monotonic() >= until:
            raise Conflict("The sandbox is still being opened. Try again.", retry_after=1)
        if session is None:
            yield within(_LOOK_SECONDS, Future[None]())
        else:
            yield from _until_open(session, until)


def _is_open(session: Session) -> bool:
    return session.ref is not None or session.state != Session.State.OPEN


def _until_open(session: Session, until: float) -> Waits[None]:
    """Wait until another has opened it, or has failed to."""
    with cell_order.looking(session.pk) as pause:
        while time.monotonic() < until:
            with cell_order.hung(session.pk) as bell:
                found = Session.objects.filter(pk=session.pk, closed_at=None).first()
                if found is None or _is_open(found):
                    return
                yield within(pause(_LOOK_SECONDS), bell)


def _request(conversation: Conversation) -> SessionRequest:
    ours = settings.AGENT_SANDBOX
    return SessionRequest(
        idle_seconds=min(ours.idle_seconds, settings.SESSION_MAX_SECONDS),
        max_seconds=min(ours.total_seconds, settings.SESSION_MAX_SECONDS),
        subject=storable(conversation.user_id)[:255],
        saves=Session.Saves.ANSWER,
        conversation=conversation.key,
    )


def cell(session: Session, code: str, **claims: Any) -> ExecutionRequest:
    """Code of a conversation, and who asked for it. Its time is Agent Sandbox's, not ours."""
    seconds = min(settings.AGENT_SANDBOX.execution_seconds, settings.SANDBOX_MAX_TIMEOUT_SEC)
    return ExecutionRequest(code, session=session.pk, usual_timeout=seconds, **claims)


def path_of(name: str, text: str) -> str:
    """The path of a workspace that a caller names. Raises InvalidConfiguration."""
    path = unescape(text.removeprefix("./"))
    if not is_path(path):
        refuse(name, "Must be a relative path, without '..' and empty parts.")
    if path in INTERNAL_FILES:
        refuse(name, "This name is reserved for Agent Sandbox.")
    return path


@dataclass(frozen=True)
class Saved:
    """A file of a conversation, as storage has it."""

    path: str
    row: WorkspaceFile


def files(session: Session) -> Iterator[Saved]:
    """All files that are saved, by path."""
    rows = WorkspaceFile.objects.filter(workspace__session=session, type=WorkspaceFile.Type.FILE)
    for row in rows.exclude(path__in=INTERNAL_FILES).order_by("path").iterator():
        yield Saved(from_text(row.path), row)


def file(session: Session, path: str) -> Saved | None:
    """One of them."""
    return next(iter(_named(session, [path])), None)


def names_in(session: Session, folder: str) -> list[str]:
    """What stands in a folder, as it was saved last: names."""
    prefix = f"{folder}/" if folder else ""
    rows = WorkspaceFile.objects.filter(workspace__session=session)
    if prefix:
        rows = rows.filter(path__startswith=to_text(prefix))
    paths = map(from_text, rows.values_list("path", flat=True).iterator())
    return [path.removeprefix(prefix) for path in paths if "/" not in path.removeprefix(prefix)]


def those_saved(session: Session, paths: Sequence[str]) -> set[str]:
    """Those of them that are saved files."""
    return {saved.path for saved in _named(session, paths)}


def made_by(execution: Execution) -> list[Saved]:
    """The files that a run has made or changed, and that were saved with it."""
    if execution.session is None:
        return []
    return sorted(_named(execution.session, execution.changed_files), key=lambda saved: saved.path)


def missing(session: Session, paths: Sequence[str]) -> list[str]:
    """Those of them that are no saved files."""
    there = those_saved(session, paths)
    return [path for path in paths if path not in there]


def _named(session: Session, paths: Sequence[str]) -> Iterator[Saved]:
    wanted = [key_of(path) for path in paths]
    rows = WorkspaceFile.objects.filter(
        workspace__session=session, type=WorkspaceFile.Type.FILE
    ).select_related("blob")
    for start in range(0, len(wanted), 500):
        for row in rows.filter(key__in=wanted[start : start + 500]):
            if (path := from_text(row.path)) not in INTERNAL_FILES:
                yield Saved(path, row)
