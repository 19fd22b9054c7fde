"""Comparing the records of executions with what the ledger says of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist, SuspiciousOperation
from django.db.models import Exists, OuterRef, QuerySet

from executions.models import ApiKey, Artifact, Execution, LedgerEntry, Tenant
from executions.services.ledger.canonical import moment, text_hash
from executions.services.ledger.formats import parse, signed_bytes
from executions.services.ledger.keyring import is_signed_by
from executions.services.ledger.schemas import schema_of
from executions.services.ledger.sealing import (
    artifact_content,
    body_hashes,
    details_hash,
    record_hash,
)

ERASURE = "erasure"
_DATA_OF = {
    "arguments_hash": "code",
    "result_hash": "output",
    "outputs_hash": "output",
    "stdout_hash": "output",
    "stderr_hash": "output",
}
_BYTES_AT_ONCE = 1 << 20


class Covering(Protocol):
    def covers(self, execution: Execution, data: str) -> bool:
        """Whether the ledger itself says that this kind of data of an execution was erased."""


@dataclass(frozen=True)
class Erasures:
    """Up to when bodies were erased, by tenant and kind of data: to read many executions."""

    until: Mapping[tuple[str, str], str]

    @classmethod
    def entered(cls, public_keys: Mapping[str, str]) -> Erasures:
        until: dict[tuple[str, str], str] = {}
        for stated in _erasures(LedgerEntry.objects.order_by("sequence"), public_keys):
            key = (stated["subject"], stated["data"])
            until[key] = max(until.get(key, ""), stated["created_before"])
        return cls(until)

    def covers(self, execution: Execution, data: str) -> bool:
        created = moment(execution.created_at) or ""
        return created < self.until.get((execution.tenant_slug, data), "")


@dataclass(frozen=True)
class ErasuresOfOne:
    """The same for a single execution: looked up where something is gone, the newest first."""

    public_keys: Mapping[str, str]

    def covers(self, execution: Execution, data: str) -> bool:
        created = moment(execution.created_at) or ""
        named = f'"subject":{json.dumps(execution.tenant_slug)}'
        newest = LedgerEntry.objects.filter(statement__contains=named).order_by("-sequence")
        return any(
            (stated["subject"], stated["data"]) == (execution.tenant_slug, data)
            and created < stated["created_before"]
            for stated in _erasures(newest, self.public_keys)
        )


def _erasures(
    entries: QuerySet[LedgerEntry], public_keys: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """What erasures state that one of these keys signed: anybody can write a row."""
    for entry in entries.filter(kind=ERASURE).iterator():
        stated = parse(entry.statement)
        if stated is None or stated.get("kind") != ERASURE:
            continue
        public_key = public_keys.get(str(stated.get("key_id")), "")
        if is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature):
            yield stated


def compare(
    execution: Execution,
    stated: Mapping[str, Any],
    erasures: Covering,
    *,
    artifact_bytes: bool = True,
) -> str:
    """What of the record is not as it was entered; "" when all of it is.

    `execution` comes with its tenant, key, replayed execution and artifacts.
    """
    schema = schema_of(stated)
    if schema is None:
        return f"this version does not know the schema {stated['schema']!r} it was sealed with"
    artifacts = list(execution.artifacts.all())
    if record_hash(execution, schema, artifacts) != stated["record_hash"]:
        return "a value was changed"
    if "details_hash" in stated and details_hash(execution) != stated["details_hash"]:
        return "a value was changed"
    return (
        _compare_bodies(execution, stated, erasures)
        or _compare_relations(execution, stated)
        or _compare_artifacts(execution, artifacts, stated, erasures, artifact_bytes)
    )


def unentered(since: datetime | None) -> Iterator[UUID]:
    """Executions that ended, or ended since then, and are not in the ledger.

    What ended before a ledger began is entered once, when it takes stock (`adoption`).
    """
    entered = LedgerEntry.objects.filter(execution_id=OuterRef("pk"))
    ended = Execution.objects.filter(finished_at__isnull=False).exclude(Exists(entered))
    if since is not None:
        ended = ended.filter(finished_at__gte=since)
    yield from ended.order_by("pk").values_list("pk", flat=True).iterator()


def _compare_bodies(execution: Execution, stated: Mapping[str, Any], erasures: Covering) -> str:
    if execution.code:
        if text_hash(execution.code) != stated["code_hash"]:
            return "the code was changed"
    elif stated["code_kept"] and not erasures.covers(execution, "code"):
        return "the code was removed"
    for name, found in body_hashes(execution).items():
        if found == stated[name] or (found is None and erasures.covers(execution, _DATA_OF[name])):
            continue
        column = name.removesuffix("_hash")
        return f"the {column} was {'removed' if found is None else 'changed'}"
    return ""


def _compare_relations(execution: Execution, stated: Mapping[str, Any]) -> str:
    """Whose it is, by which key and what it repeats, which become null when those are deleted.

    That a tenant or a key was removed behind our back is found at its own row.
    """
    slug, prefix = execution.tenant_slug, execution.api_key_prefix
    tenant, key = _related(execution, "tenant"), _related(execution, "api_key")
    before = {"created_at__lte": execution.created_at}
    if tenant is not None and tenant.slug != slug:
        return f"it was moved to the tenant {tenant.slug}"
    if tenant is None and Tenant.objects.filter(slug=slug, **before).exists():
        return "it was taken from its tenant"
    if key is not None and (key.prefix != prefix or key.tenant_id != execution.tenant_id):
        return f"it was moved to the key {key.prefix}"
    if key is None and prefix:
        keys = ApiKey.objects.filter(prefix=prefix, tenant__slug=slug, **before)
        if keys.exists():
            return "it was taken from its key"
    if "replay_of" not in stated:
        return ""
    said, found = stated["replay_of"], execution.replay_of_id
    if found is None and said is not None:
        gone = not Execution.objects.filter(pk=said).exists()
        return "" if gone else "what it replays was removed"
    return "" if said == (str(found) if found else None) else "what it replays was changed"


def _related(execution: Execution, name: str) -> Any:
    """The row at the other end; None also where there is none of that number."""
    try:
        return getattr(execution, name)
    except ObjectDoesNotExist:
        return None


def _compare_artifacts(
    execution: Execution,
    artifacts: list[Artifact],
    stated: Mapping[str, Any],
    erasures: Covering,
    artifact_bytes: bool,
) -> str:
    if [artifact_content(artifact) for artifact in artifacts] != stated["artifacts"]:
        return "the artifacts were changed"
    for artifact in artifacts:
        if not artifact.file:
            if not erasures.covers(execution, "artifacts"):
                return f"the bytes of the artifact {artifact.name!r} were removed"
        elif artifact_bytes and (problem := _compare_bytes(artifact)):
            return f"the bytes of the artifact {artifact.name!r} {problem}"
    return ""


def _compare_bytes(artifact: Artifact) -> str:
    digest = hashlib.sha256()
    try:
        with artifact.file.open("rb") as stream:
            while data := stream.read(_BYTES_AT_ONCE):
                digest.update(data)
    except OSError as error:
        return f"cannot be read: {error.strerror or type(error).__name__}"
    except (ValueError, SuspiciousOperation):
        return "lie outside the data directory"
    return "" if digest.hexdigest() == artifact.sha256 else "were replaced"
