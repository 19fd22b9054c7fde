"""What is told of saved files: of a session, and of what ran in it."""

from __future__ import annotations

from typing import Any

from executions.models.session import Session
from executions.models.workspace import Workspace
from executions.runs.models import Execution

# The key of a record's metadata under which it says that files were restored for it.
RESTORED = "restored"


def files_of(session: Session) -> dict[str, Any]:
    """What is saved of a session. `unsaved_since` is null where nothing else is in its sandbox."""
    workspace: Workspace | None = getattr(session, "workspace", None)
    if workspace is None:
        count = size = 0
        saved_at, problem = None, ""
    else:
        count, size = workspace.files, workspace.bytes
        saved_at, problem = workspace.saved_at, workspace.problem
    has_more = session.saves != Session.Saves.NEVER and session.state == Session.State.OPEN
    unsaved = session.unsaved_since if has_more else None
    return {
        "count": count,
        "bytes": size,
        "saved_at": saved_at.isoformat() if saved_at else None,
        "unsaved_since": unsaved.isoformat() if unsaved else None,
        "problem": problem or None,
    }


def files_saved(execution: Execution) -> bool | None:
    """Whether all that there was when it ended is in storage; None outside sessions."""
    if execution.session_id is None:
        return None
    if execution.files_saved is not None:
        return execution.files_saved
    if execution.finished_at is None or execution.turn is None:
        return False
    looks = Workspace.objects.filter(session=execution.session_id)
    found = looks.values_list("seen_turns", "open_turns", "lost_turns").first()
    if found is None:
        return False
    turn, (seen, still_open, lost) = execution.turn, found
    is_lost = any(first <= turn <= last for first, last in lost or ())
    return turn <= seen and turn not in still_open and not is_lost


def is_restored(execution: Execution) -> bool:
    """Whether it is the first since its session was woken: files are there, variables are not."""
    return execution.meta.get(RESTORED) is True


def is_first_after_wake(session: Session, execution: Execution) -> bool:
    """Whether nothing before it has said that files were restored. A run that was to say so may
    have ended without a result: then the next one does.
    """
    if session.woken_turn is None or execution.turn is None:
        return False
    # As it is now: the one before may have said so meanwhile.
    woken = Session.objects.filter(pk=session.pk, woken_turn__lte=execution.turn)
    return woken.exists()


def wake_is_told(session: Session) -> None:
    """Whoever comes next need not hear of this wake."""
    told = Session.objects.filter(pk=session.pk, woken_turn=session.woken_turn)
    told.update(woken_turn=None)
