"""What came of a request, as the program on the other side of the bridge reads it.

The four keys of RAGFlow's bridge come first, with its types: `returned` is text, the JSON of what
`main` returned and "" where it returned nothing, for its `SandboxResponse.Returned` is a string.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from executions.doors.native.rendering import execution_detail
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.text import from_json
from executions.runs.models import Artifact, Execution
from executions.runs.record import Outcome
from executions.runs.routing import FORBIDDEN
from providers.errors import INVALID_CONFIGURATION, SandboxError

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 * 1024
# Told in keys of their own.
_TOLD = ("stdout", "stderr", "artifacts", "error", "result", "has_result")

REFUSED = 2
NOT_RUN = 125


def answer_of(outcome: Outcome, folder: Path | None = None) -> dict[str, Any]:
    """The answer about a recorded run. Files of more than LARGE_BYTES are put into `folder`."""
    execution, error = outcome.execution, outcome.error
    if isinstance(error, DatabaseUnavailable):
        # What the record says is not what happened.
        return unrun(error, record=execution)
    detail = execution_detail(execution)
    told = detail["error"]
    if told is None and error is not None:
        told = {"code": error.code, "message": error.message}
    metadata = {name: value for name, value in detail.items() if name not in _TOLD}
    metadata |= {
        "timeout": execution.timeout,
        "result_present": execution.has_result,
        "result_value": from_json(execution.result) if execution.result else None,
        "result_type": "json",
    }
    return {
        "stdout": execution.stdout,
        "stderr": _with_note(execution.stderr, told),
        "returned": execution.result if execution.has_result else "",
        "artifacts": _artifacts(outcome, folder),
        "error": None if told is None else {**told, "field": execution.error_field or None},
        "metadata": metadata,
    }


def unrun(error: SandboxError, *, record: Execution | None = None) -> dict[str, Any]:
    """The answer to a request that was refused or could not be carried out."""
    told: dict[str, Any] = {"code": error.code, "message": error.message, "field": error.field}
    if isinstance(error, DatabaseUnavailable):
        told["ran"] = error.ran
    if error.retry_after is not None:
        told["retry_after"] = error.retry_after
    return {
        "stdout": "",
        "stderr": _with_note("", told),
        "returned": "",
        "artifacts": [],
        "error": told,
        "metadata": {"id": str(record.pk) if record else None, "status": "error"},
    }


def exit_code_of(answer: Mapping[str, Any]) -> int:
    """0 where the answer says what came of the code, whatever that was."""
    if answer["metadata"]["status"] != Execution.Status.ERROR:
        return 0
    refused = (INVALID_CONFIGURATION.code, FORBIDDEN.code)
    return REFUSED if answer["error"]["code"] in refused else NOT_RUN


def _with_note(stderr: str, error: Mapping[str, Any] | None) -> str:
    """For who reads the four keys alone: a run that was ended would look to him like a success."""
    if error is None:
        return stderr
    note = f"{error['code']}: {error['message']}"
    return f"{stderr.rstrip()}\n{note}" if stderr.strip() else note


def _artifacts(outcome: Outcome, folder: Path | None) -> list[dict[str, Any]]:
    execution = outcome.execution
    if not execution.artifact_count:
        return []
    at_hand = {}
    if outcome.result is not None:
        files = outcome.result.artifacts
        at_hand = {hashlib.sha256(file.content).hexdigest(): file.content for file in files}
    return [
        _artifact(number, artifact, _content(artifact, at_hand), folder)
        for number, artifact in enumerate(execution.artifacts.all())
    ]


def _content(artifact: Artifact, at_hand: Mapping[str, bytes]) -> bytes:
    if (content := at_hand.get(artifact.sha256)) is not None:
        return content
    with artifact.file.open() as stream:
        stored: bytes = stream.read()
    return stored


def _artifact(
    number: int, artifact: Artifact, content: bytes, folder: Path | None
) -> dict[str, Any]:
    told: dict[str, Any] = {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size": artifact.size_bytes,
        "sha256": artifact.sha256,
    }
    if folder is not None and len(content) > LARGE_BYTES:
        try:
            return {**told, "path": str(_put(folder / str(artifact.execution_id), number, content))}
        except OSError as error:
            logger.error(
                "an artifact is sent in the answer, because it cannot be written to %s: %s",
                folder,
                error.strerror,
            )
    return {**told, "content_b64": base64.b64encode(content).decode()}


def _put(folder: Path, number: int, content: bytes) -> Path:
    """A new file of this run's own folder. Its name is ours: the program has chosen the other."""
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / str(number)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return path
