"""The files of the journal: one run's end each, encrypted, authenticated, and few enough.

Under AES-256 in GCM, as all that we store of our callers (`providers.aes_gcm`), with a key of the
installation's: whoever can write to the folder can make no result up, and a file under another's
name does not open.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from django.conf import settings

from executions.runs.models import Artifact, Execution
from providers.aes_gcm import NotOpened, seal, unseal
from providers.key_ring import fernet_keys, opened
from providers.services import Rotation

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
    sealed = seal(fernet_keys(), _CONTEXT, _packed(ended))
    with _writing:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        there = [_size(each) for each in folder.iterdir()]
        if len(there) >= MOST_FILES or sum(there) + len(sealed) > MOST_BYTES:
            raise CannotBeKept("The journal is full.")
        _put(path, sealed)


def read(path: Path) -> Ended:
    """Raises OSError and Unreadable."""
    try:
        stored = json.loads(_opened(path.read_bytes()))
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
                plain = _opened(sealed)
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


def waiting() -> list[Path]:
    """The files that wait to be recorded, those of the oldest executions first."""
    return [path for path in _files(ENDED) if path.name not in _passed_over]


def kept_ids() -> set[UUID]:
    """The executions whose ends wait here, which nobody has to close."""
    found: set[UUID] = set()
    for path in waiting():
        with suppress(ValueError):
            found.add(UUID(hex=path.stem))
    return found


def left_over() -> list[Path]:
    """The files that nothing could be made of, and those whose writing was broken off."""
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


def _opened(sealed: bytes) -> bytes:
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


def _packed(ended: Ended) -> bytes:
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
