"""Comparing the records of executions with what the ledger says of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db.models import Exists, OuterRef

from executions.models import Execution, LedgerEntry
from executions.services.ledger.canonical import moment, text_hash
from executions.services.ledger.sealing import artifact_content, body_hashes, record_hash

ERASURE = "erasure"
_DATA_OF = {
    "arguments_hash": "code",
    "result_hash": "output",
    "outputs_hash": "output",
    "stdout_hash": "output",
    "stderr_hash": "output",
}


@dataclass(frozen=True)
class Erasures:
    """Up to when the ledger itself says that bodies were erased, by tenant and kind of data."""

    until: Mapping[tuple[str, str], str]

    @classmethod
    def entered(cls) -> Erasures:
        until: dict[tuple[str, str], str] = {}
        for entry in LedgerEntry.objects.filter(kind=ERASURE).order_by("sequence"):
            stated = entry.stated
            key = (stated["subject"], stated["data"])
            until[key] = max(until.get(key, ""), stated["created_before"])
        return cls(until)

    def covers(self, execution: Execution, data: str) -> bool:
        created = moment(execution.created_at) or ""
        return created < self.until.get((execution.tenant_slug, data), "")


def compare(execution: Execution, stated: Mapping[str, Any], erasures: Erasures) -> str:
    """What of the record is not as it was entered; "" when all of it is."""
    if record_hash(execution) != stated["record_hash"]:
        return "a value was changed"
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
    artifacts = [artifact_content(artifact) for artifact in execution.artifacts.all()]
    return "" if artifacts == stated["artifacts"] else "the artifacts were changed"


def unentered(since: datetime | None) -> Iterator[UUID]:
    """Executions that ended since the ledger began and are not in it, at most a hundred.

    Before there was a ledger nothing was entered; with no ledger at all, every one is missing.
    """
    entered = LedgerEntry.objects.filter(execution_id=OuterRef("pk"))
    ended = Execution.objects.filter(finished_at__isnull=False).exclude(Exists(entered))
    if since is not None:
        ended = ended.filter(finished_at__gte=since)
    yield from ended.order_by("pk").values_list("pk", flat=True)[:100]
