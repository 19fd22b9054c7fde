"""The comparison of executions and legal holds with the ledger."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist, SuspiciousOperation
from django.db.models import Exists, Max, OuterRef, Q, QuerySet

from executions.kernel.text import time_of
from executions.ledger.bindings import ACCEPTED, ALTERED, DELETED
from executions.ledger.entry_format import moment, parse, schema_of, signed_bytes, text_hash
from executions.ledger.keyring import is_signed_by
from executions.ledger.models import LedgerEntry
from executions.ledger.sealing import artifact_content, body_hashes, details_hash, record_hash
from executions.runs.models import Artifact, Execution
from executions.runs.results import kinds_in
from executions.tenants.models import ApiKey, Tenant

_KIND, _MODEL = "legal_hold", "executions.legalhold"
# By the row of each hold, its tenant and its execution; None is all of the tenant's.
Holds = MutableMapping[str, tuple[str, str | None]]


def of_holds(*, thorough: bool) -> Q:
    """Entries of holds. `thorough` reads all of the ledger, for those whose columns were changed:
    what is erased in spite of a hold is gone before a verification finds such a column.
    """
    by_column = Q(kind=_KIND)
    return by_column | Q(statement__contains=f'"kind":"{_KIND}"') if thorough else by_column


def entries_of_holds(*, thorough: bool) -> QuerySet[LedgerEntry]:
    return LedgerEntry.objects.filter(of_holds(thorough=thorough))


def authentic(entry: LedgerEntry, public_keys: Mapping[str, str]) -> dict[str, Any] | None:
    """What an entry states that one of these keys signed, in its place; None for any other."""
    stated = parse(entry.statement)
    if stated is None or stated.get("sequence") != entry.sequence:
        return None
    public_key = public_keys.get(str(stated.get("key_id")), "")
    is_signed = is_signed_by(public_key, signed_bytes(stated, entry.statement), entry.signature)
    return stated if is_signed else None


def note_hold(holds: Holds, stated: Mapping[str, Any]) -> None:
    """Take in what an authentic entry says of a hold, if it is of one."""
    if (stated.get("kind"), stated.get("model")) != (_KIND, _MODEL):
        return
    is_removal = stated["action"] == ACCEPTED and stated["row_hash"] is None
    if stated["action"] == ALTERED or is_removal:
        # Nobody who may has placed or lifted it: to lift one takes two, and its row.
        return
    if stated["action"] == DELETED:
        holds.pop(stated["row"], None)
    else:
        # What it held first: a row that says something else by now is not as it was entered.
        holds.setdefault(stated["row"], (stated["tenant_slug"], stated["execution"]))


ERASURE = "erasure"
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


@dataclass
class Erasures:
    """Up to when data was erased, by tenant and kind of it; read when it is first asked for.

    Of one tenant and kind there is an erasure a day, so only that is kept of them which differs:
    the last moment for each set of executions that was held then, by what an erasure says itself
    and by the holds that were entered before it. One of a tenant that was held as a whole has
    erased nothing. `thorough` reads the whole ledger for holds: see `held.of_holds`.
    """

    public_keys: Mapping[str, str]
    thorough: bool = False
    _until: dict[tuple[str, str], dict[frozenset[str], str]] = field(default_factory=dict)
    _holds: Holds = field(default_factory=dict)
    _read_to: int = 0

    def read_on(self) -> None:
        """Take in what was entered since."""
        newest = LedgerEntry.objects.aggregate(newest=Max("sequence"))["newest"] or 0
        entries = LedgerEntry.objects.filter(
            Q(kind=ERASURE) | of_holds(thorough=self.thorough),
            sequence__gt=self._read_to,
            sequence__lte=newest,
        )
        for entry in entries.order_by("sequence").iterator():
            if (stated := authentic(entry, self.public_keys)) is not None:
                note_hold(self._holds, stated)
                self._note(stated)
        self._read_to = newest

    def _note(self, stated: Mapping[str, Any]) -> None:
        if stated.get("kind") != ERASURE:
            return
        held = {pk for slug, pk in self._holds.values() if slug == stated["subject"]}
        if None in held:
            return
        kept = frozenset(map(str, held)) | frozenset(stated.get("held", ()))
        found = self._until.setdefault((stated["subject"], stated["data"]), {})
        found[kept] = max(found.get(kept, ""), stated["created_before"])

    def covers(self, execution: Execution, data: str) -> bool:
        """Whether the ledger itself says that this kind of data of an execution was erased."""
        made = max(execution.created_at, execution.run_at or execution.created_at)
        return self._covers(execution.tenant_slug, data, str(execution.pk), moment(made) or "")

    def covers_record(self, stated: Mapping[str, Any]) -> bool:
        """Whether the whole record was erased of which an entry states this."""
        return self._covers(stated["tenant"], "records", stated["subject"], _made(stated))

    def covers_artifacts(self, execution: Execution, stated: Mapping[str, Any]) -> bool:
        """Whether the bytes of its artifacts were erased: by themselves, or with the record of
        which an entry states this, whose bytes go before it does."""
        return self.covers(execution, "artifacts") or self.covers_record(stated)

    def _covers(self, tenant: str, data: str, execution_id: str, created: str) -> bool:
        if not self._read_to:
            self.read_on()
        return any(
            created < until and execution_id not in held
            for held, until in self._until.get((tenant, data), {}).items()
        )


def _made(stated: Mapping[str, Any]) -> str:
    """When the execution of this entry was made, which also of a record that is gone its id has, or
    the later time that it was asked for at."""
    made = moment(time_of(UUID(stated["subject"]))) or ""
    return max(made, stated.get("run_at") or "")


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
