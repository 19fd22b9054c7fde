"""Packages that are known to be bad: advisories are loaded of a file, and locks compared with them.

What is known is looked up when it is asked for, so that a new file counts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO
from uuid import UUID, uuid4

from django.conf import settings
from django.db import transaction
from django.db.models import Q

from executions.capabilities.templates.models import PackageAdvisory, TemplateVersion
from executions.ledger.append import append
from providers.templates import advisories
from providers.templates.advisories import Advisory
from providers.templates.files import BuildFailed
from providers.templates.lock import Lock

_AT_ONCE = 500
# In the place of an advisory's id: the index had yanked the file when it was resolved.
YANKED = "yanked"
_NO_REASON = "The index gives no reason."
_MOST_TOLD = 3


@dataclass(frozen=True)
class Finding:
    """An advisory that affects a package of a lock. `fixed` is a version without it, where one is
    known."""

    advisory: str
    kind: str
    name: str
    version: str
    summary: str
    fixed: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}: {self.advisory} {self.summary}".rstrip()


def load(file: IO[bytes]) -> Mapping[str, int]:
    """Load the advisories of a file in place of those there were of its kinds. Return how many
    there are now of each kind.

    Until the end both count. Raises ValueError for a file that cannot be read; those that there
    were stay then.
    """
    this, kinds = uuid4(), Counter[str]()
    for batch in _batches(advisories.read(file)):
        rows = {(each.kind, each.name, each.id): _row(each, this) for each in batch}
        PackageAdvisory.objects.bulk_create(
            rows.values(),
            update_conflicts=True,
            unique_fields=("kind", "name", "advisory_id"),
            update_fields=("data", "load"),
        )
        kinds.update(kind for kind, _, _ in rows)
    if not kinds:
        raise ValueError("it has no advisory on packages of PyPI or npm")
    with transaction.atomic():
        append("advisories", "templates", {"action": "loaded", "load": str(this), **kinds})
        PackageAdvisory.objects.filter(kind__in=list(kinds)).exclude(load=this).delete()
    return kinds


def findings_of(lock: Lock) -> list[Finding]:
    """Return what is known of the packages of a lock, by package and then by advisory, and last
    those that their index had yanked."""
    names: dict[str, set[str]] = {}
    for package in lock.packages:
        names.setdefault(package.kind, set()).add(package.name)
    if not names:
        return []
    wanted = Q(pk=None)
    for kind, some in names.items():
        wanted |= Q(kind=kind, name__in=some)
    known: dict[tuple[str, str], list[Advisory]] = {}
    for row in PackageAdvisory.objects.filter(wanted).order_by("advisory_id"):
        advisory = Advisory.of_json(row.advisory_id, row.kind, row.name, row.data)  # type: ignore[arg-type]
        known.setdefault((row.kind, row.name), []).append(advisory)
    found = [
        Finding(
            each.id,
            package.kind,
            package.name,
            package.version,
            each.summary,
            each.fixed_for(package.version),
        )
        for package in lock.packages
        for each in known.get((package.kind, package.name), ())
        if each.affects(package.version)
    ]
    found += [
        Finding(YANKED, each.kind, each.name, each.version, each.yanked or _NO_REASON, "")
        for each in lock.packages
        if each.yanked is not None
    ]
    # A package of npm may be there several times.
    return list(dict.fromkeys(found))


def check(lock: Lock) -> list[Finding]:
    """Return what is known of the packages. Raises BuildFailed where that is refused here."""
    found = findings_of(lock)
    if found and settings.TEMPLATE_ADVISORIES != "show":
        raise BuildFailed(_problem(found))
    return found


def affected_versions() -> Iterator[tuple[TemplateVersion, list[Finding]]]:
    """Yield the versions that are ready and have packages of which something is known."""
    ready = TemplateVersion.objects.filter(state=TemplateVersion.State.READY)
    rows = ready.filter(template__removed_at=None).select_related("template__tenant")
    for version in rows.defer("log", "declaration", "licences").order_by("pk").iterator():
        if found := findings_of(version.locked):
            yield version, found


def _batches(found: Iterator[Advisory]) -> Iterator[Sequence[Advisory]]:
    batch: list[Advisory] = []
    for each in found:
        batch.append(each)
        if len(batch) == _AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def _row(advisory: Advisory, load: UUID) -> PackageAdvisory:
    return PackageAdvisory(
        advisory_id=advisory.id,
        kind=advisory.kind,
        name=advisory.name,
        data=advisory.to_json(),
        load=load,
    )


def _problem(found: Sequence[Finding]) -> str:
    """The first of them, and what can be done."""
    told = "; ".join(str(each)[:110] for each in found[:_MOST_TOLD])
    more = f" and {len(found) - _MOST_TOLD} more" if len(found) > _MOST_TOLD else ""
    fixes = {each.name: each.fixed for each in found if each.fixed}
    remedy = ", ".join(f"{name}>={version}" for name, version in list(fixes.items())[:_MOST_TOLD])
    ask = f"Ask for {remedy[:100]}" if remedy else "Ask for other versions or packages"
    return f"Known to be bad: {told}{more}. {ask}, or have TEMPLATE_ADVISORIES=show."
