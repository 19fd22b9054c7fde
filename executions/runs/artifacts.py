"""Files that executions leave behind, and links to them that expire."""

from __future__ import annotations

import hashlib
import logging
import re
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from django.core import signing
from django.core.files.base import ContentFile

from executions.kernel.text import storable
from executions.runs.models import Artifact, artifact_storage
from providers.runtime.guest.names import MOST_CHARACTERS
from providers.values import ArtifactFile

logger = logging.getLogger(__name__)


class BadLink(Exception):
    """A link that we did not make, or whose time is over."""


def sign_token(salt: str, expires_in: int, subject: Any, *facts: Any) -> str:
    """A token for `subject`, and what else is said of it, for so many seconds."""
    return signing.dumps([subject, int(time.time()) + expires_in, *facts], salt=salt)


def read_token(salt: str, token: str, facts: int = 0) -> list[Any]:
    """The subject of a token that was made with this salt, and so many facts. Raises BadLink."""
    try:
        subject, until, *said = signing.loads(token, salt=salt)
    except (signing.BadSignature, ValueError, TypeError) as error:
        raise BadLink from error
    if time.time() >= until or len(said) != facts:
        raise BadLink
    return [subject, *said]


_MIME_TYPE = re.compile(r"[\w.+-]+/[\w.+-]+", re.ASCII)
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")
# What is longer is cut, so that a number behind it has room.
_CUT = MOST_CHARACTERS - 12
_SALT = "executions.artifact"


def store_files(execution_id: UUID, files: Sequence[ArtifactFile]) -> list[Artifact]:
    """Write the contents and return unsaved rows, so that the caller saves them with its own."""
    storage = artifact_storage()
    artifacts: list[Artifact] = []
    names: set[str] = set()
    try:
        for index, file in enumerate(files):
            path = f"{execution_id.hex[-2:]}/{execution_id.hex}/{index}"
            name = _distinct(_clean_name(file.name), names)
            names.add(name)
            artifacts.append(
                Artifact(
                    execution_id=execution_id,
                    name=name,
                    mime_type=_clean_mime_type(file.mime_type),
                    size_bytes=len(file.content),
                    sha256=hashlib.sha256(file.content).hexdigest(),
                    file=storage.save(path, ContentFile(file.content)),
                )
            )
    except Exception:
        remove_files(artifacts)
        raise
    return artifacts


def remove_files(artifacts: Sequence[Artifact]) -> None:
    """Take back what `store_files` wrote, when its rows cannot be saved."""
    for artifact in artifacts:
        try:
            artifact.file.delete(save=False)
        except OSError:
            logger.warning("artifact file %s could not be removed", artifact.file.name)


def make_token(artifact: Artifact, expires_in: int) -> str:
    """A text that lets whoever holds it read this artifact for `expires_in` seconds."""
    return sign_token(_SALT, expires_in, artifact.pk, artifact.execution_id.hex)


def artifact_for_token(token: str) -> Artifact:
    """The artifact a token stands for. Raises BadLink."""
    artifact_id, execution_id = read_token(_SALT, token, facts=1)
    # A database that was restored gives numbers again, to other tenants' files too.
    artifact = Artifact.objects.filter(pk=artifact_id, execution_id=execution_id).first()
    if artifact is None:
        raise BadLink
    return artifact


def _clean_name(name: str) -> str:
    """The end of a long name says more than its start: it has the file's own name."""
    clean = _CONTROL.sub("\ufffd", storable(name))
    return (clean if len(clean) <= MOST_CHARACTERS else clean[-_CUT:]) or "unnamed"


def _distinct(name: str, taken: set[str]) -> str:
    candidate, number = name, 2
    while candidate in taken:
        candidate, number = f"{name[-_CUT:]} ({number})", number + 1
    return candidate


def _clean_mime_type(mime_type: str) -> str:
    if len(mime_type) <= 127 and _MIME_TYPE.fullmatch(mime_type):
        return mime_type
    return "application/octet-stream"
