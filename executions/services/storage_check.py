"""Comparing storage and rows, both ways: bytes that no row names, and rows whose bytes are gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from uuid import UUID

from executions.kernel.storage import ARTIFACTS, WORKSPACES, Entry, kept
from executions.runs import payloads
from executions.runs.models import Artifact, Execution
from executions.sessions.storage.models import Blob, LooseFile

logger = logging.getLogger(__name__)

_BATCH = 500
# A file is written before its row.
ORPHAN_SECONDS = 600
# Differences that are named; more are counted.
MOST_NAMED = 100


@dataclass
class Differences:
    """`number` of them, and the first ones by name."""

    number: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str) -> None:
        self.number += 1
        if self.number <= MOST_NAMED:
            self.names.append(name)


@dataclass
class Comparison:
    """What was compared, and what has no counterpart. Queued requests are named `queue/...`."""

    files: int = 0
    rows: int = 0
    without_row: Differences = field(default_factory=Differences)
    without_bytes: Differences = field(default_factory=Differences)
    removed: int = 0

    @property
    def is_same(self) -> bool:
        return not (self.without_row.number - self.removed or self.without_bytes.number)


def compare_storage(
    *, remove: bool = False, report: Callable[[Comparison], None] = lambda comparison: None
) -> Comparison:
    """Read all names of both, a batch at a time. `remove` deletes the files that no row names.

    Works while the service goes on. `report` is called after each batch. Raises OSError where the
    storage cannot be read.
    """
    found = Comparison()
    oldest = time.time() - ORPHAN_SECONDS
    for entries in _batches(kept(ARTIFACTS).entries()):
        found.files += len(entries)
        for name in _without_row([each.name for each in entries if each.modified < oldest]):
            found.without_row.add(f"{ARTIFACTS}/{name}")
            if remove:
                kept(ARTIFACTS).delete(name)
                found.removed += 1
        report(found)
    for name in payloads.orphans():
        found.without_row.add(f"queue/{name}")
        if remove:
            payloads.remove(name)
            found.removed += 1
    after = 0
    rows = Artifact.objects.exclude(file="").order_by("pk")
    while batch := list(rows.filter(pk__gt=after)[:_BATCH]):
        after = batch[-1].pk
        found.rows += len(batch)
        for artifact in batch:
            if _is_missing(artifact):
                found.without_bytes.add(f"{ARTIFACTS}/{artifact.file.name}")
        report(found)
    for execution_id in payloads.missing():
        found.without_bytes.add(f"queue/{execution_id.hex}")
    _compare_workspaces(found, oldest, remove=remove, report=report)
    return found


def _compare_workspaces(
    found: Comparison, oldest: float, *, remove: bool, report: Callable[[Comparison], None]
) -> None:
    storage = kept(WORKSPACES)
    for entries in _batches(storage.entries()):
        found.files += len(entries)
        names = {each.name for each in entries if each.modified < oldest}
        # As a file lives: between two of these it may become a blob, and a blob that goes is loose.
        for model in (LooseFile, Blob, LooseFile):
            names -= set(model.objects.filter(file__in=names).values_list("file", flat=True))
        for name in sorted(names):
            found.without_row.add(f"{WORKSPACES}/{name}")
            if remove:
                storage.delete(name)
                found.removed += 1
        report(found)
    after = 0
    rows = Blob.objects.order_by("pk")
    while batch := list(rows.filter(pk__gt=after)[:_BATCH]):
        after = batch[-1].pk
        found.rows += len(batch)
        for blob in batch:
            # It may have been removed just now.
            missing = not storage.exists(str(blob.file))
            if missing and Blob.objects.filter(pk=blob.pk, file=str(blob.file)).exists():
                found.without_bytes.add(f"{WORKSPACES}/{blob.file}")
        report(found)


def _batches(entries: Iterator[Entry]) -> Iterator[list[Entry]]:
    while batch := list(islice(entries, _BATCH)):
        yield batch


def _without_row(names: Iterable[str]) -> list[str]:
    """A name begins with its execution's id, by which the rows are found.

    An open one may wait in the journal with what came of it, and get its rows only then.
    """
    of_executions: dict[str, UUID | None] = {}
    for name in names:
        _, _, rest = name.partition("/")
        try:
            of_executions[name] = UUID(hex=rest.partition("/")[0])
        except ValueError:
            of_executions[name] = None
    ids = {execution_id for execution_id in of_executions.values() if execution_id}
    # Asked first: whoever ends one writes its rows with that.
    unended = Execution.objects.filter(pk__in=ids, finished_at=None)
    waiting = set(unended.values_list("pk", flat=True))
    rows = Artifact.objects.filter(execution__in=ids).exclude(file="")
    known = set(rows.values_list("file", flat=True))
    return [name for name, pk in of_executions.items() if name not in known and pk not in waiting]


def _is_missing(artifact: Artifact) -> bool:
    name = str(artifact.file.name)
    # It may have been erased just now.
    return (
        not kept(ARTIFACTS).exists(name)
        and Artifact.objects.filter(pk=artifact.pk).exclude(file="").exists()
    )
