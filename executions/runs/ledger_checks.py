"""Checks of the ledger: those that the admin asks for, and how executions are compared with it.

Checks are carried out one at a time, in a worker. A row says how far it is and what came of it, so
that whoever looks sees the same, on any host. It names the process that reads; what a process did
not finish that has ended is over too.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.core.exceptions import ObjectDoesNotExist, SuspiciousOperation
from django.db import IntegrityError, transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone
from django_q.tasks import async_task

from executions.kernel.background import run_once_in_background
from executions.ledger import marks
from executions.ledger.checkpoints import newest_line, where
from executions.ledger.entry import LedgerUnavailable, schema_of, text_hash
from executions.ledger.erasures import Erasures
from executions.ledger.models import LedgerCheck, LedgerEntry, Mark, Verification
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify
from executions.runs import heartbeat
from executions.runs.models import Artifact, Execution, Process
from executions.runs.record import artifact_content, body_hashes, details_hash, record_hash
from executions.runs.results import kinds_in
from executions.tenants.models import ApiKey, Tenant
from providers.services.settings_cache import CachedQuery

logger = logging.getLogger(__name__)

TASK = "executions.tasks.check_ledger"
TELL_SECONDS = 1.0
KEPT_FINDINGS = 20
_LONGEST = 300
State = LedgerCheck.State


class _Lost(Exception):
    """Somebody found this process dead and closed its reading."""


def ask(by: str) -> LedgerCheck | None:
    """Have the ledger verified; None where that is under way already."""
    try:
        with transaction.atomic():
            check = LedgerCheck.objects.create(
                active_key=LedgerCheck.ONE, asked_by=by[:150], asked_at=timezone.now()
            )
    except IntegrityError:
        return None
    # Without it the next minute's turn of the schedule begins it.
    transaction.on_commit(partial(_queue, check.pk))
    return check


def _queue(pk: int) -> None:
    try:
        async_task(TASK)
    except Exception:
        # Whatever a broker raises.
        logger.warning("verification %s waits for the schedule", pk, exc_info=True)


def start_waiting() -> None:
    """Have a thread of this process read what waits, and close what was left unfinished."""
    close_abandoned()
    check = under_way()
    if check and (
        check.state == State.WAITING or check.process_id == heartbeat.current_process_id()
    ):
        run_once_in_background("ledger check", _carry_out_alone)


def _carry_out_alone() -> None:
    """Nobody else reads in this process: what it is said to read broke off without being closed,
    as where the database was away just then."""
    left = LedgerCheck.objects.filter(
        state=State.RUNNING, process_id=heartbeat.current_process_id()
    )
    problem = "The result of the verification could not be stored. Run the verification again."
    if _end(left, State.FAILED, problem=problem):
        logger.warning("a verification that this process had left unfinished was closed")
    carry_out()


def close_abandoned() -> int:
    """Close what is read by a process that has ended. How many there were."""
    alive = Process.objects.filter(ended_at=None).values("pk")
    left = LedgerCheck.objects.filter(active_key=LedgerCheck.ONE, state=State.RUNNING)
    return _end(
        left.exclude(process_id__in=alive),
        State.FAILED,
        problem="The process of the verification has ended. Run the verification again.",
    )


def carry_out() -> LedgerCheck | None:
    """Read the ledger for whoever waits for it; None where nobody does, or another reads it."""
    mine = heartbeat.current_process_id()
    check = LedgerCheck.objects.filter(active_key=LedgerCheck.ONE, state=State.WAITING).first()
    if check is None or mine is None:
        return None
    claimed = LedgerCheck.objects.filter(pk=check.pk, state=State.WAITING)
    newest = LedgerEntry.objects.values_list("sequence", flat=True).first()
    if not claimed.update(
        state=State.RUNNING, process_id=mine, started_at=timezone.now(), total=newest or 0
    ):
        return None
    own = LedgerCheck.objects.filter(pk=check.pk, state=State.RUNNING, process_id=mine)
    try:
        # Whoever can write to the database can ask for this one: it leaves no mark.
        found = verify(report=_Telling(own), keeps_mark=False)
    except _Lost:
        logger.warning("%s was closed before it was complete", check)
    except LedgerUnavailable as error:
        _end(own, State.FAILED, problem=error.message[:500])
    except Exception as error:
        # Not its text, which may quote rows.
        _end(own, State.FAILED, problem=f"{type(error).__name__}; see the server's log.")
        raise
    else:
        _end(own, State.INTACT if found.is_intact else State.NOT_INTACT, **_figures(found))
    check.refresh_from_db()
    return check


class _Telling:
    """Writes how far it is, about once a second."""

    def __init__(self, own: Any) -> None:
        self._own = own
        self._told_at = time.monotonic()

    def __call__(self, found: Verification) -> None:
        now = time.monotonic()
        if now - self._told_at < TELL_SECONDS:
            return
        self._told_at = now
        if not self._own.update(**_figures(found)):
            raise _Lost


def _figures(found: Verification) -> dict[str, Any]:
    told = [str(finding)[:_LONGEST] for finding in found.findings[:KEPT_FINDINGS]]
    return {
        "entries": found.entries,
        "executions": found.executions,
        "rows": found.rows,
        "unproven": found.unproven,
        "checkpoints": found.checkpoints,
        "findings": len(found.findings) + found.omitted,
        "first_findings": told,
    }


def _end(chosen: Any, state: LedgerCheck.State, **values: Any) -> int:
    ended: int = chosen.update(state=state, active_key=None, finished_at=timezone.now(), **values)
    return ended


def last_result() -> LedgerCheck | None:
    """Return the newest check that said whether the ledger is intact."""
    return LedgerCheck.objects.filter(state__in=(State.INTACT, State.NOT_INTACT)).first()


def under_way() -> LedgerCheck | None:
    """What waits or is read now."""
    return LedgerCheck.objects.filter(active_key=LedgerCheck.ONE).first()


def ledger_state() -> dict[str, Any]:
    """What is known of the ledger: `last` verification, the one that is `under_way` with its
    `percent`, how many entries there are, and when the newest line of the checkpoints was
    written, or why that is not known (`checkpoint_problem`). `mark` is that of the command's newest
    complete verification."""
    check = under_way()
    newest = LedgerEntry.objects.values_list("sequence", flat=True).first() or 0
    sequence, written, problem = _newest_line()
    return {
        "last": last_result(),
        "broke_off": _broke_off(),
        "under_way": check,
        "percent": min(100, 100 * check.entries // max(1, check.total)) if check else 0,
        "newest": newest,
        "checkpoint": written,
        "checkpoint_behind": newest - sequence,
        "checkpoint_problem": problem,
        "mark": _newest_mark(),
    }


def _broke_off() -> LedgerCheck | None:
    """The newest of all, where it came to no end."""
    newest = LedgerCheck.objects.first()
    return newest if newest is not None and newest.state == State.FAILED else None


def _line() -> tuple[int, datetime | None, str]:
    if not where():
        return 0, None, "Checkpoints are turned off."
    try:
        line = newest_line()
    except LedgerUnavailable as error:
        return 0, None, error.message
    return (*line, "") if line else (0, None, "No checkpoint yet.")


# The file may be far away, and grows for years.
_newest_line = CachedQuery(_line, seconds=30.0)


def _mark() -> Mark | None:
    """What is wrong with a mark is what a verification finds."""
    if not where():
        return None
    try:
        mark = marks.newest(trusted_keys())
        return mark if mark is not None and mark.is_active else None
    except (marks.MarkAltered, LedgerUnavailable):
        return None


_newest_mark = CachedQuery(_mark, seconds=30.0)


def first_without_checkpoint(newest: int) -> datetime | None:
    """Return when the oldest entry after this one was entered; None where there is none."""
    later = LedgerEntry.objects.filter(sequence__gt=newest).order_by("sequence")
    return later.values_list("at", flat=True).first()


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
            # Of the many executions of a tenant and of a key, one row of each is read.
            .prefetch_related("artifacts", "tenant", "api_key")
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

    def missing_entries(self) -> Iterator[UUID]:
        return missing_entries()


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


def missing_entries() -> Iterator[UUID]:
    """Find executions that ended and are not in the ledger.

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
    tenant, key = _related_row(execution, "tenant"), _related_row(execution, "api_key")
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


def _related_row(execution: Execution, name: str) -> Any:
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
