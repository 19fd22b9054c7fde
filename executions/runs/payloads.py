"""What a queued execution needs to run: in its row, or in a file beside it when it is large.

A request may bring 40 MiB of files. In the row they were written twice, held up every other writer
meanwhile, and left a log and a database that stayed as large when they had gone. A file costs
nobody a lock, and all of it is free again once it is removed. Encrypted, as the column is, and
where every host finds it, for the worker of any may take it.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast
from uuid import UUID

from executions.kernel.storage import QUEUE, file_store
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from providers import slices
from providers.errors import ProviderUnavailable
from providers.fields import DecryptionError, EncryptedJSONField
from providers.services import Rotation

logger = logging.getLogger(__name__)

LARGE_BYTES = 64 * 1024
# The row is committed right after the file was written.
ORPHAN_SECONDS = 600
_ELSEWHERE = {"in_file": True}
_CONTENT_NAME = "content_base64"
_CONTENT = b'"content_base64":"'


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
    storage = file_store(QUEUE)
    content = _pending().dumped_in_slices(slices.in_slices(request.to_stored_pieces()))
    try:
        storage.save_stream(execution.pk.hex, content)
    except OSError as error:
        logger.exception("the request of execution %s could not be stored", execution.pk)
        raise ProviderUnavailable(
            f"The request cannot be queued, {storage.setting} cannot be written: {error.strerror}."
        ) from error
    execution.pending = dict(_ELSEWHERE)


def read(execution: Execution) -> Mapping[str, Any]:
    """What was kept. It stays until the code is handed over: its reader may end before that.

    Raises ProviderUnavailable when it is not there or cannot be read.
    """
    stored: Mapping[str, Any] | None = execution.pending
    if stored is None:
        raise ProviderUnavailable("The queued request cannot be read. Send it again.")
    if stored != _ELSEWHERE:
        return stored
    try:
        with file_store(QUEUE).open(execution.pk.hex) as stream:
            dumped = stream.read()
        return _value_of(_pending().text_of(dumped))
    except (OSError, ValueError, DecryptionError) as error:
        logger.exception("the request of execution %s cannot be read", execution.pk)
        raise ProviderUnavailable("The queued request is lost. Send it again.") from error


def forget(execution_id: UUID) -> None:
    """Remove the file, if there is one."""
    remove(execution_id.hex)


def may_have_file(execution: Execution) -> bool:
    """Whether it is worth asking for, which costs something."""
    return "pending" in execution.get_deferred_fields() or execution.pending == _ELSEWHERE


def remove_orphans() -> int:
    """Remove the files whose executions do not wait any more, as after a crash. How many."""
    try:
        found = orphans()
    except OSError:
        logger.exception("the queued requests cannot be listed")
        return 0
    for name in found:
        remove(name)
    return len(found)


def orphans() -> list[str]:
    """The names of the files that no execution waits for. Raises OSError."""
    oldest = time.time() - ORPHAN_SECONDS
    old = [entry.name for entry in file_store(QUEUE).entries() if entry.modified < oldest]
    return [name for name in old if not _is_waited_for(name)]


def missing_payloads() -> Iterator[UUID]:
    """Find the executions that wait for a worker and whose files are not there. Raises OSError."""
    waiting = Execution.objects.filter(finished_at=None, status=Execution.Status.QUEUED)
    for pk in waiting.order_by("pk").values_list("pk", flat=True).iterator():
        execution = waiting.filter(pk=pk).first()
        if execution is None or execution.pending != _ELSEWHERE or file_store(QUEUE).exists(pk.hex):
            continue
        # It may have been taken just now.
        if waiting.filter(pk=pk).exists():
            yield pk


def _is_waited_for(name: str) -> bool:
    try:
        execution_id = UUID(hex=name)
    except ValueError:
        return False
    return Execution.objects.filter(
        pk=execution_id, pending__isnull=False, finished_at=None
    ).exists()


def rotate(dry_run: bool) -> Rotation:
    """Encrypt what waits in files under the newest key. One that was taken meanwhile is passed over
    or, at worst, an orphan."""
    rotation = Rotation(Execution._meta.label, "pending, in files")
    storage = file_store(QUEUE)
    for name in sorted(entry.name for entry in storage.entries() if "." not in entry.name):
        try:
            with storage.open(name) as stream:
                text = stream.read().decode("ascii")
            sealed = _pending().dumped_anew(text)
        except FileNotFoundError:
            continue
        except (OSError, UnicodeDecodeError, DecryptionError):
            rotation.failed.append(name)
            continue
        if sealed == text:
            rotation.current += 1
            continue
        rotation.rotated += 1
        if not dry_run and storage.exists(name):
            storage.replace(name, sealed.encode("ascii"))
    return rotation


def _value_of(text: bytes) -> Mapping[str, Any]:
    """The value of a stored JSON text. Its long contents of files are not read as JSON: base64 is
    what stands there, up to the next quotation mark.
    """
    pieces, contents = [], dict[str, str]()
    seen, nonce, at = memoryview(text), secrets.token_hex(16), 0
    found = text.find(_CONTENT)
    while found != -1:
        # As it is, the mark is in no string: there its own quotation marks have a backslash.
        start = found + len(_CONTENT)
        end = text.find(b'"', start)
        if end - start > slices.SLICE_BYTES and text.find(b"\\", start, end) == -1:
            mark = f"{nonce}{len(contents)}"
            contents[mark] = str(seen[start:end], "utf-8")
            pieces += [text[at:start], mark.encode()]
            at = end
        # It ends there, or nothing of its rest is such a mark.
        found = text.find(_CONTENT, start if end == -1 else end)

    def fill(value: dict[str, Any]) -> dict[str, Any]:
        mark = value.get(_CONTENT_NAME)
        if isinstance(mark, str) and mark in contents:
            value[_CONTENT_NAME] = contents[mark]
        return value

    rest = b"".join([*pieces, text[at:]])
    return cast("Mapping[str, Any]", json.loads(rest, object_hook=fill))


def _pending() -> EncryptedJSONField:
    return Execution._meta.get_field("pending")


def remove(name: str) -> None:
    """Remove a file by its name, if there is one."""
    try:
        file_store(QUEUE).delete(name)
    except OSError:
        logger.exception("the queued request in %s could not be removed", name)
