"""The comparison of executions with their entries in the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist, SuspiciousOperation
from django.db.models import Exists, OuterRef, Q

from executions.ledger.entry import schema_of, text_hash
from executions.ledger.erasures import Erasures
from executions.ledger.models import LedgerEntry
from executions.runs.models import Artifact, Execution
from executions.runs.results import kinds_in
from executions.runs.sealing import artifact_content, body_hashes, details_hash, record_hash
from executions.tenants.models import ApiKey, Tenant

_DATA_OF = {
    "arguments_hash": "code",
    "on_behalf_of_hash": "code",
    "result_hash": "output",
    "outputs_hash": "output",
    "exception_hash": "output",
    "stdout_hash": "output",
    "stderr_hash": "output",
}
_BYTES_AT_ONCE = 1 << 20
_GONE = "cannot be read: there is no such file"


class Executions:
    """The records that entries of the kind `execution` seal (`ledger.verification`)."""

    def find(self, ids: Sequence[UUID]) -> Mapping[UUID, Execution]:
        rows = (
            Execution.objects.filter(pk__in=ids)
            .defer("pending")
            .select_related("tenant", "api_key")
            .prefetch_related("artifacts")
        )
        return {execution.pk: execution for execution in rows}

    def alteration_of(
        self,
        record: Execution,
        stated: Mapping[str, Any],
        erasures: Erasures,
        *,
        artifact_bytes: bool,
    ) -> str:
        return alteration_of(record, stated, erasures, artifact_bytes=artifact_bytes)

    def unentered(self) -> Iterator[UUID]:
        return unentered()


def alteration_of(
    execution: Execution,
    stated: Mapping[str, Any],
    erasures: Erasures,
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
    # It is found by what `meta` says, which is bound.
    if execution.observed != kinds_in(execution.meta):
        return "a value was changed"
    if details_hash(execution) != stated["details_hash"]:
        return "a value was changed"
    return (
        _compare_bodies(execution, stated, erasures)
        or _compare_relations(execution, stated)
        or _compare_artifacts(execution, artifacts, stated, erasures, artifact_bytes)
    )


def unentered() -> Iterator[UUID]:
    """Executions that ended and are not in the ledger.

    A row that says that it ended in one of its two columns alone counts: pages and answers go by
    the other.
    """
    entered = LedgerEntry.objects.filter(kind="execution", execution_id=OuterRef("pk"))
    has_ended = Q(finished_at__isnull=False) | ~Q(status__in=Execution.OPEN)
    ended = Execution.objects.filter(has_ended).exclude(Exists(entered))
    yield from ended.order_by("pk").values_list("pk", flat=True).iterator()


def _compare_bodies(execution: Execution, stated: Mapping[str, Any], erasures: Erasures) -> str:
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
    erasures: Erasures,
    artifact_bytes: bool,
) -> str:
    if [artifact_content(artifact) for artifact in artifacts] != stated["artifacts"]:
        return "the artifacts were changed"
    for artifact in artifacts:
        if not artifact.file:
            if not erasures.covers_artifacts(execution, stated):
                return f"the bytes of the artifact {artifact.name!r} were removed"
        elif artifact_bytes and (problem := _compare_bytes(artifact)):
            if problem == _GONE and erasures.covers_artifacts(execution, stated):
                # The bytes go before their name does.
                continue
            return f"the bytes of the artifact {artifact.name!r} {problem}"
    return ""


def _compare_bytes(artifact: Artifact) -> str:
    digest = hashlib.sha256()
    try:
        with artifact.file.open("rb") as stream:
            while data := stream.read(_BYTES_AT_ONCE):
                digest.update(data)
    except FileNotFoundError:
        return _GONE
    except OSError as error:
        return f"cannot be read: {error.strerror or type(error).__name__}"
    except (ValueError, SuspiciousOperation):
        return "lie outside the data directory"
    return "" if digest.hexdigest() == artifact.sha256 else "were replaced"
