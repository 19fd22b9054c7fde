"""The result of a run that could not be recorded: kept in a file, until it can be.

A run ends where it was begun, whatever became of the database or the ledger meanwhile. What
`runs.service` cannot write into the row is kept in `journal` of DATA_DIR (`journal_files.py`), and
recorded later by the usual path: by this process, or by any later one of this host.
"""

from __future__ import annotations

import errno
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID

from django.db import Error as DatabaseFailure
from django.db import connections
from django.utils import timezone

from executions.kernel.database import DatabaseUnavailable, problem_of
from executions.ledger.entry import LedgerUnavailable
from executions.runs import extensions
from executions.runs.admission import disk_problem
from executions.runs.artifacts import remove_files
from executions.runs.journal_files import (
    CannotBeKept,
    Ended,
    Unreadable,
    alone,
    read,
    set_aside,
    waiting,
    write,
)
from executions.runs.listing import log_execution
from executions.runs.models import Execution
from executions.runs.record import Outcome, close_record, error_changes, record_late, reject
from providers.errors import UNAVAILABLE, SandboxError
from providers.threads import Loop

logger = logging.getLogger(__name__)

# How often it is looked whether the database is back, and whether another process left something.
RETRY_SECONDS = 1.0
LOOK_SECONDS = 5.0
# What is wrong with a file itself, and stays wrong.
_LASTING = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}
_BODIES = ("result", "outputs", "exception", "stdout", "stderr")


def record(execution: Execution, ended: Ended) -> bool:
    """Complete the row, or attach the result to one that was closed meanwhile, which returns False.

    Called again after a commit that was not answered, it finds its own and returns True.
    """
    values = dict(ended.values)
    # What was computed when it ended holds, also where it is recorded later.
    values = extensions.end_values(values.get("provider", ""), values) | values
    if close_record(execution, ended.status, values, ended.artifacts):
        return True
    if (execution.status, execution.finished_at) == (ended.status, values["finished_at"]):
        return True
    if ended.ran:
        record_late(execution, ended.status, values, ended.artifacts)
    return False


def obstacle_of(error: Exception) -> str:
    """Why nothing can be recorded now, in a sentence; "" for every other error."""
    return error.message if isinstance(error, LedgerUnavailable) else problem_of(error)


def keep(ended: Ended, problem: str) -> DatabaseUnavailable:
    """Write down what cannot be recorded now because of `problem`. Returns what to tell."""
    try:
        write(ended)
    except (OSError, CannotBeKept) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        told = _lose(ended, problem, f"the journal could not be written: {why}")
    else:
        logger.error(
            "execution %s ended as %s; its result waits in the journal. %s",
            *(ended.execution_id, ended.status, problem),
            extra={"alert": "journal", "execution_id": str(ended.execution_id)},
        )
        told = DatabaseUnavailable(
            f"{problem} {_TELL[ended.ran].format(status=ended.status)}",
            ran=ended.ran,
            record_id=ended.execution_id,
            kept=True,
        )
    start()
    _loop.wake()
    return told


_TELL: Mapping[bool | None, str] = {
    True: "The code ran and ended as {status}. The result is kept, and recorded as soon as "
    "possible. Request the execution by its id.",
    None: "The code may have run. Its result is kept, and recorded as soon as possible. Request "
    "the execution by its id.",
    False: "No code ran. Send the request again.",
}


def keep_unrun(away: DatabaseUnavailable) -> None:
    """Have the row that an unanswered commit may have left behind closed: nothing will run it."""
    if away.record_id is None or away.ran is not False:
        return
    values = {
        **error_changes(away.code, away.message),
        "retryable": True,
        "finished_at": timezone.now(),
        "cost": None,
    }
    keep(Ended(away.record_id, Execution.Status.ERROR, values, ran=False), away.message)


def end_unrun(execution: Execution, error: SandboxError) -> Outcome:
    """As `reject`, and in the journal where the row cannot be closed now."""
    ended_at = timezone.now()
    try:
        return reject(execution, error)
    except (DatabaseFailure, LedgerUnavailable) as failure:
        if not (problem := obstacle_of(failure)):
            raise
        values = {
            **error_changes(error.code, error.message, error.field),
            "retryable": True,
            "finished_at": ended_at,
            "cost": None,
        }
        ended = Ended(
            execution.pk, Execution.Status.ERROR, values, ran=False, owner=execution.process_id
        )
        return Outcome(execution, error=keep(ended, problem))


def record_kept() -> int:
    """Record everything that waits. How much it was.

    Raises django.db.Error while the database is away and LedgerUnavailable while the ledger takes
    nothing; what was not recorded waits on. A file that is none of ours, or that cannot be
    recorded whatever is done, is set aside with an alert, and never looked at again by itself.
    """
    with alone() as is_ours:
        if not is_ours:
            return 0
        recorded = 0
        for path in waiting():
            try:
                ended = read(path)
                is_known = _record(ended)
            except FileNotFoundError:
                # Another host, which shares the folder, was faster.
                continue
            except Unreadable as error:
                set_aside(path, str(error))
                continue
            except OSError as error:
                if error.errno in _LASTING:
                    set_aside(path, str(error))
                else:
                    # As when the process has no descriptor left: the file is as good as before.
                    logger.warning("%s of the journal is read again later: %s", path.name, error)
                continue
            except LedgerUnavailable:
                raise
            except Exception as error:
                if problem_of(error):
                    raise
                logger.exception("%s cannot be recorded", path.name)
                set_aside(path, f"it cannot be recorded: {type(error).__name__}")
                continue
            if not is_known:
                set_aside(path, "the database has no such execution")
                continue
            path.unlink(missing_ok=True)
            recorded += 1
        for ended in list(_lost.values()):
            recorded += _record_lost(ended)
    return recorded


def _record_lost(ended: Ended) -> bool:
    try:
        _record(ended)
    except LedgerUnavailable:
        raise
    except Exception as error:
        if problem_of(error):
            raise
        logger.exception("the end of execution %s cannot be recorded", ended.execution_id)
    _lost.pop(ended.execution_id, None)
    return True


def start() -> None:
    """Have a thread of this process record what waits, unless one does. It touches the database
    only when something waits."""
    _loop.start_if_possible()


# Results that not even a file could be made of, without the results.
_lost: dict[UUID, Ended] = {}
_retry_at = -math.inf


def _record_waiting() -> float:
    global _retry_at
    # Not by the next result, which wakes the loop: the database is away for that one too.
    if (pause := _retry_at - time.monotonic()) > 0:
        return pause
    # Said also where nobody asks for anything.
    disk_problem()
    if waiting() or _lost:
        try:
            if recorded := record_kept():
                logger.warning("%s runs of the journal have been recorded", recorded)
        except (DatabaseFailure, LedgerUnavailable) as error:
            logger.info("the journal waits: %s", error)
        except Exception:
            logger.exception("the journal cannot be recorded; it is tried again")
        finally:
            connections.close_all()
        if waiting() or _lost:
            _retry_at = time.monotonic() + RETRY_SECONDS
            return RETRY_SECONDS
    return LOOK_SECONDS


_loop = Loop("journal", _record_waiting)


def _record(ended: Ended) -> bool:
    """False for an execution that the database does not know."""
    execution = Execution.objects.defer("pending").filter(pk=ended.execution_id).first()
    if execution is None:
        # Of a row that was never committed nothing is missing.
        return ended.ran is False
    if ended.ran is False and ended.owner is not None and execution.is_open:
        execution.process_id = ended.owner
    if record(execution, ended):
        log_execution(execution)
    else:
        remove_files(ended.artifacts)
    return True


def _lose(ended: Ended, problem: str, why: str) -> DatabaseUnavailable:
    """Keep in memory that it ended, so that at least this is recorded."""
    logger.critical(
        "ALERT: the result of execution %s, which ended as %s, is lost: %s, and %s.",
        *(ended.execution_id, ended.status, problem.rstrip("."), why),
        extra={"alert": "result_lost", "execution_id": str(ended.execution_id)},
    )
    told = problem + " " + _TELL[False]
    if ended.ran is not False:
        ran = "The code ran" if ended.ran else "The code may have run"
        told = f"{problem} {ran}, but its result is lost: {why}."
        values = {name: ended.values[name] for name in ended.values if name not in _BODIES}
        values |= {**error_changes(UNAVAILABLE.code, told), "has_result": False, "exit_code": None}
        ended = replace(ended, status=Execution.Status.ERROR, values=values, artifacts=())
    _lost[ended.execution_id] = ended
    return DatabaseUnavailable(told, ran=ended.ran, record_id=ended.execution_id)
