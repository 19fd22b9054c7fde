"""What a queued execution needs to run: in its row, or in a file beside it when it is large.

A request may bring 40 MiB of files. In the row they were written twice, held up every other writer
meanwhile, and left a log and a database that stayed as large when they had gone. A file costs
nobody a lock, and all of it is free again once it is removed. Encrypted, as the column is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from uuid import UUID

from django.conf import settings
from django.db import models

from executions.models import Execution
from executions.services.requests import ExecutionRequest
from providers.errors import ProviderUnavailable
from providers.fields import DecryptionError

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024
# The row is committed right after the file was written.
ORPHAN_SECONDS = 600
_ELSEWHERE = {"in_file": True}


def size_of(request: ExecutionRequest) -> int:
    """About how many bytes it takes to keep the request, before there is any need to encode it."""
    text = len(request.code.encode()) + len(request.arguments_json)
    return text + sum(len(file.content) * 4 // 3 + len(file.path) for file in request.files)


def keep(execution: Execution, request: ExecutionRequest) -> None:
    """Put the request into the row that is about to be saved, or into its file.

    Raises ProviderUnavailable when it cannot be written. Whoever then does not save the row
    calls `forget`.
    """
    if size_of(request) <= LARGE_BYTES:
        execution.pending = request.to_stored()
        return
    path = _path(execution.pk)
    draft = path.with_suffix(".draft")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            stream.write(_encrypted(request.to_stored()))
        draft.rename(path)
    except OSError as error:
        _remove(draft)
        logger.exception("the request of execution %s could not be stored", execution.pk)
        raise ProviderUnavailable(
            f"The request cannot be queued, DATA_DIR cannot be written: {error.strerror}."
        ) from error
    execution.pending = dict(_ELSEWHERE)


def take(execution: Execution) -> Mapping[str, Any]:
    """What was kept, which is then gone from the disk: it is run now or never.

    Raises ProviderUnavailable when it is not there or cannot be read.
    """
    kept: Mapping[str, Any] | None = execution.pending
    if kept is None:
        raise ProviderUnavailable("The queued request cannot be read. Send it again.")
    if kept != _ELSEWHERE:
        return kept
    try:
        text = _path(execution.pk).read_text(encoding="ascii")
        return cast("Mapping[str, Any]", _pending().to_python(text))
    except (OSError, UnicodeDecodeError, DecryptionError) as error:
        logger.exception("the request of execution %s cannot be read", execution.pk)
        raise ProviderUnavailable("The queued request is lost. Send it again.") from error
    finally:
        forget(execution.pk)


def forget(execution_id: UUID) -> None:
    """Remove the file, if there is one."""
    _remove(_path(execution_id))


def remove_orphans() -> int:
    """Remove the files whose executions do not wait any more, as after a crash. How many."""
    oldest = time.time() - ORPHAN_SECONDS
    try:
        files = [each for each in _folder().iterdir() if each.stat().st_mtime < oldest]
    except OSError:
        return 0
    removed = 0
    for file in files:
        try:
            waits = Execution.objects.filter(
                pk=UUID(hex=file.stem), status=Execution.Status.QUEUED, finished_at=None
            ).exists()
        except ValueError:
            waits = False
        if not waits or file.suffix == ".draft":
            _remove(file)
            removed += 1
    return removed


def _encrypted(stored: dict[str, Any]) -> str:
    """As a fixture holds the column, which is ciphertext under the keys in force."""
    return _pending().value_to_string(Execution(pending=stored))


def _pending() -> models.Field[Any, Any]:
    return cast("models.Field[Any, Any]", Execution._meta.get_field("pending"))


def _remove(file: Path) -> None:
    try:
        with suppress(FileNotFoundError, NotADirectoryError):
            file.unlink()
    except OSError:
        logger.exception("the queued request in %s could not be removed", file.name)


def _folder() -> Path:
    return Path(settings.DATA_DIR) / "queue"


def _path(execution_id: UUID) -> Path:
    return _folder() / execution_id.hex
