"""The results of runs that could not be recorded: kept in files, until they can be.

A run ends where it was begun, whatever became of the database or the ledger meanwhile. What
`runs.service` cannot write into the row is kept in `journal` of DATA_DIR, and recorded later by the
usual path: by this process, or by any later one of this host.

A file has one run's end, under AES-256 in GCM, as all that we store of our callers
(`providers.aes_gcm`), with a key of the installation's: whoever can write to the folder can make no
result up, and a file under another's name does not open.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db import connections
from django.utils import timezone

from executions.kernel.database import DatabaseUnavailable, problem_of
from executions.ledger.entry import LedgerUnavailable
from executions.runs import extensions
from executions.runs.admission import disk_problem
from executions.runs.artifacts import remove_files
from executions.runs.models import Artifact, Execution
from executions.runs.record import (
    Outcome,
    close_record,
    error_changes,
    log_execution,
    record_late,
    reject,
)
from providers.aes_gcm import NotOpened, seal, unseal
from providers.errors import UNAVAILABLE, SandboxError
from providers.key_ring import fernet_keys, opened
from providers.services import Rotation
from providers.threads import Loop

logger = logging.getLogger(__name__)

# A file is as large as what is kept of a run, whose bounds are those of the settings.
MOST_FILES = 1000
MOST_BYTES = 256 * 1024 * 1024
# A file that is being written is that for no longer.
DRAFT_SECONDS = 60.0

ENDED, DRAFT, ASIDE = ".ended", ".draft", ".aside"
_CONTEXT = "journal"
_FACTS = ("name", "mime_type", "size_bytes", "sha256")

_writing = threading.Lock()
# What could not even be renamed. This process looks at it no more.
_passed_over: set[str] = set()


class CannotBeKept(Exception):
    """The journal holds as much as it may."""


class Unreadable(Exception):
    """No result of ours is in the file."""


@dataclass(frozen=True)
class Ended:
    """How a run ended: what `close_record` is told, with the time it really ended in `values`.

    The artifacts' files are in their storage already. `ran` is None where it is not known. What
    ended unrun counts only while `owner` has it: it may have gone back to the queue.
    """

    execution_id: UUID
    status: Execution.Status
    values: Mapping[str, Any]
    artifacts: Sequence[Artifact] = ()
    ran: bool | None = True
    owner: UUID | None = None


def write(ended: Ended) -> None:
    """Raises OSError and CannotBeKept."""
    folder = _folder()
    path = folder / f"{ended.execution_id.hex}{ENDED}"
    sealed = seal(fernet_keys(), _CONTEXT, _pack(ended))
    with _writing:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = [_size(each) for each in folder.iterdir()]
        if len(there) >= MOST_FILES or sum(there) + len(sealed) > MOST_BYTES:
            raise CannotBeKept("The journal is full.")
        _put(path, sealed)


def read(path: Path) -> Ended:
    """Raises OSError and Unreadable."""
    try:
        stored = json.loads(_decrypt(path.read_bytes()))
    except NotOpened:
        raise Unreadable("no key of FERNET_KEYS opens it, or it was changed") from None
    execution_id = UUID(stored["execution"])
    if execution_id.hex != path.stem:
        raise Unreadable("it holds the result of another execution than its name says")
    values = stored["values"]
    values["finished_at"] = datetime.fromisoformat(values["finished_at"])
    if values.get("cost") is not None:
        values["cost"] = Decimal(values["cost"])
    artifacts = [
        Artifact(
            **{
                **facts,
                "execution_id": execution_id,
                "created_at": datetime.fromisoformat(facts["created_at"]),
            }
        )
        for facts in stored["artifacts"]
    ]
    status = Execution.Status(stored["status"])
    owner = UUID(stored["owner"]) if stored.get("owner") else None
    return Ended(execution_id, status, values, artifacts, stored["ran"], owner)


def rotate(dry_run: bool) -> Rotation:
    """Encrypt what waits here under the newest key; what is being recorded is left as it is."""
    rotation = Rotation(Execution._meta.label, "its end, in the journal")
    with alone() as ours:
        for path in [*_files(ENDED), *_files(ASIDE)] if ours or dry_run else []:
            try:
                sealed = path.read_bytes()
                plain = _decrypt(sealed)
            except FileNotFoundError:
                continue
            except NotOpened:
                rotation.failed.append(path.name)
                continue
            try:
                unseal(fernet_keys()[:1], _CONTEXT, sealed)
                rotation.current += 1
            except NotOpened:
                rotation.rotated += 1
                if not dry_run:
                    _put(path, seal(fernet_keys(), _CONTEXT, plain))
    return rotation


def waiting_files() -> list[Path]:
    """List the files that wait to be recorded, those of the oldest executions first."""
    return [path for path in _files(ENDED) if path.name not in _passed_over]


def waiting_ids() -> set[UUID]:
    """List the executions whose ends wait here, which nobody has to close."""
    found: set[UUID] = set()
    for path in waiting_files():
        with suppress(ValueError):
            found.add(UUID(hex=path.stem))
    return found


def leftover_files() -> list[Path]:
    """List the files that nothing could be made of, and those whose writing was broken off."""
    broken_off = [path for path in _files(DRAFT) if _age(path) > DRAFT_SECONDS]
    return [*_files(ASIDE), *broken_off]


def put_back() -> None:
    """Have what was set aside looked at once more, as after a key was put back."""
    for path in _files(ASIDE):
        path.rename(path.with_suffix(ENDED))


def set_aside(path: Path, reason: str) -> None:
    """Take it from those that wait, and tell of it once."""
    logger.critical(
        "ALERT: %s of the journal holds the result of a run and was set aside: %s. See "
        "docs/database-outages.md.",
        path.name,
        reason,
        extra={"alert": "journal_set_aside", "file": path.name},
    )
    try:
        path.rename(path.with_suffix(ASIDE))
    except OSError:
        _passed_over.add(path.name)


@contextmanager
def alone() -> Iterator[bool]:
    """Whether no other process records the journal meanwhile."""
    try:
        descriptor = os.open(_folder(), os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        # Nothing was ever written here: there is only what this process has in memory.
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
    else:
        yield True
    finally:
        os.close(descriptor)


def _decrypt(sealed: bytes) -> bytes:
    return opened(lambda keys: unseal(keys, _CONTEXT, sealed))


def _put(path: Path, sealed: bytes) -> None:
    """Whole or not at all. Raises OSError."""
    draft = path.with_suffix(DRAFT)
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(sealed)
            stream.flush()
            os.fsync(stream.fileno())
        draft.rename(path)
    except OSError:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    _sync(path.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _pack(ended: Ended) -> bytes:
    values = dict(ended.values)
    values["finished_at"] = values["finished_at"].isoformat()
    if values.get("cost") is not None:
        values["cost"] = str(values["cost"])
    return json.dumps(
        {
            "execution": str(ended.execution_id),
            "status": ended.status,
            "ran": ended.ran,
            "owner": str(ended.owner) if ended.owner else None,
            "values": values,
            "artifacts": [
                {
                    **{name: getattr(artifact, name) for name in _FACTS},
                    "file": artifact.file.name,
                    "created_at": artifact.created_at.isoformat(),
                }
                for artifact in ended.artifacts
            ],
        }
    ).encode()


def _files(suffix: str) -> list[Path]:
    try:
        return sorted(path for path in _folder().iterdir() if path.suffix == suffix)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.critical(
            "ALERT: the journal cannot be read: %s", error.strerror, extra={"alert": "journal"}
        )
        return []


def _size(path: Path) -> int:
    """0 for one that was recorded meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0


def _folder() -> Path:
    return Path(settings.DATA_DIR) / "journal"


# How often it is looked whether the database is back, and whether another process left something.
RETRY_SECONDS = 1.0
LOOK_SECONDS = 5.0
# What is wrong with a file itself, and stays wrong.
_LASTING = {errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP}
_BODIES = ("result", "outputs", "exception", "stdout", "stderr")


def record(
    execution: Execution,
    status: Execution.Status,
    values: Mapping[str, Any],
    artifacts: Sequence[Artifact],
    ran: bool | None,
) -> bool:
    """Complete the row, or attach the result to one that was closed meanwhile, which returns False.

    Called again after a commit that was not answered, it finds its own and returns True.
    """
    # What was computed when it ended holds, also where it is recorded later.
    values = extensions.end_values(values.get("provider", ""), values) | dict(values)
    if close_record(execution, status, values, artifacts):
        return True
    if (execution.status, execution.finished_at) == (status, values["finished_at"]):
        return True
    if ran:
        record_late(execution, status, values, artifacts)
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


def record_waiting() -> int:
    """Record everything that waits, and return how much it was.

    Raises django.db.Error while the database is away and LedgerUnavailable while the ledger takes
    nothing; what was not recorded waits on. A file that is none of ours, or that cannot be recorded
    whatever is done, is set aside with an alert, and never looked at again by itself.
    """
    with alone() as is_ours:
        if not is_ours:
            return 0
        recorded = 0
        for path in waiting_files():
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


def _tick() -> float:
    global _retry_at
    # Not by the next result, which wakes the loop: the database is away for that one too.
    if (pause := _retry_at - time.monotonic()) > 0:
        return pause
    # Said also where nobody asks for anything.
    disk_problem()
    if waiting_files() or _lost:
        try:
            if recorded := record_waiting():
                logger.warning("%s runs of the journal have been recorded", recorded)
        except (DatabaseFailure, LedgerUnavailable) as error:
            logger.info("the journal waits: %s", error)
        except Exception:
            logger.exception("the journal cannot be recorded; it is tried again")
        finally:
            connections.close_all()
        if waiting_files() or _lost:
            _retry_at = time.monotonic() + RETRY_SECONDS
            return RETRY_SECONDS
    return LOOK_SECONDS


_loop = Loop("journal", _tick)


def _record(ended: Ended) -> bool:
    """False for an execution that the database does not know."""
    execution = Execution.objects.defer("pending").filter(pk=ended.execution_id).first()
    if execution is None:
        # Of a row that was never committed nothing is missing.
        return ended.ran is False
    if ended.ran is False and ended.owner is not None and execution.is_open:
        execution.process_id = ended.owner
    if record(execution, ended.status, ended.values, ended.artifacts, ended.ran):
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
