"""The search in code, and saved filters."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import connection, transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.db.models.functions import Length
from django.http import QueryDict
from django.utils import timezone

from executions.capabilities.search.models import CodeSearchProgress, CodeText, SavedFilter
from executions.kernel.database import let_others_write
from executions.kernel.declarations import refuse
from executions.kernel.text import first_uuid7, time_of
from executions.runs.models import Execution

SHORTEST = 3
# Programs a search looks through the executions of, the newest ones first.
MOST_PROGRAMS = 5_000
COUNTED = 10_000
_NEWEST_PROGRAMS = (
    "SELECT code_hash FROM (SELECT rowid AS found FROM executions_codetext_fts"
    " WHERE executions_codetext_fts MATCH %s ORDER BY rowid DESC LIMIT %s)"
    " JOIN executions_codetext ON id = found"
)
# Of each program.
_CHARACTERS = 100_000
# Executions that are looked at in one step, and steps of one call.
_BATCH = 500
_STEPS = 2_000
# Of one transaction, or a single program. 20,000 characters took 8 ms of processor time at most,
# in an index of 10,000 programs.
_WRITTEN_CHARACTERS = 20_000
# Pages of the index that are merged in one transaction.
_MERGED_PAGES = 64
# A row may be committed a little after its id was made.
_SETTLED = timedelta(seconds=10)
_NIL = UUID(int=0)


def search_code(executions: QuerySet[Execution], text: str) -> QuerySet[Execution]:
    """Those whose kept code contains `text`, at least three characters."""
    return executions.filter(code_hash__in=programs_with(text)).exclude(code="")


def programs_with(text: str) -> list[str]:
    """The hashes of the newest MOST programs that contain `text`, at least three characters."""
    if len(text) < SHORTEST or "\0" in text:
        return []
    if connection.vendor != "sqlite":
        # Written as UPPER(code) LIKE UPPER(...), which is what the index is over.
        found = CodeText.objects.filter(code__icontains=text).order_by("-pk")
        return list(found.values_list("code_hash", flat=True)[:MOST_PROGRAMS])
    phrase = '"' + text.replace('"', '""') + '"'
    with connection.cursor() as cursor:
        # The index gives them in this order itself: of a text that all programs contain it reads
        # no more than are taken.
        cursor.execute(_NEWEST_PROGRAMS, [phrase, MOST_PROGRAMS])
        return [code_hash for (code_hash,) in cursor.fetchall()]


def not_taken_in() -> tuple[int, datetime | None]:
    """How many executions the index has not looked at yet, and since when: None if there are none.

    Counted as far as one more than `COUNTED`. Those of the last minute are among them.
    """
    progress = CodeSearchProgress.objects.filter(pk=1).first()
    rows = Execution.objects.filter(pk__gte=progress.before if progress else _NIL)
    first = rows.order_by("pk").values_list("pk", flat=True).first()
    if first is None:
        return 0, None
    return rows.order_by().values("pk")[: COUNTED + 1].count(), time_of(first)


def index_new_code() -> int:
    """Take in the programs that were run since the last time. How many were new.

    It stops before the oldest execution that has not ended: whether its code is kept shows then.
    One that was asked for at a later time, or runs in the background for as long as its session,
    keeps nobody's waiting: it is taken in as it is.
    """
    CodeSearchProgress.objects.get_or_create(pk=1, defaults={"before": _NIL})
    until = first_uuid7(timezone.now() - _SETTLED)
    # Not one by one in the order of their ids, for which every row there is would be read.
    still_open = Execution.objects.filter(finished_at=None).order_by("tenant_slug", "status")
    still_open = still_open.filter(run_at=None, background=False)
    until = min((until, *still_open.values_list("pk", flat=True)))
    added = 0
    for _ in range(_STEPS):
        step = _next_step(CodeSearchProgress.objects.get(pk=1).before, until)
        if step is None:
            break
        added += _take(step)
        let_others_write()
    _merge_index()
    return added


def forget_code(code_hashes: Collection[str], *, but_of: Collection[UUID] = ()) -> None:
    """Remove the programs whose code no execution keeps any more, those of `but_of` left aside."""
    kept = Execution.objects.filter(code_hash=OuterRef("code_hash")).exclude(code="")
    with transaction.atomic():
        # What is being taken in is taken in before or after this, and after it finds no code.
        CodeSearchProgress.objects.select_for_update().filter(pk=1).first()
        texts = CodeText.objects.filter(code_hash__in=code_hashes)
        texts.exclude(Exists(kept.exclude(pk__in=but_of))).delete()


class _Step(NamedTuple):
    """The programs of these executions are new, and nothing else is in `[after, until)`."""

    after: UUID
    until: UUID
    programs: list[UUID]


def _next_step(after: UUID, end: UUID) -> _Step | None:
    """What one transaction takes in next; None when all was looked at."""
    rows = Execution.objects.filter(pk__gte=after, pk__lt=end).order_by("pk")
    found = list(rows.values_list("pk", "code_hash")[:_BATCH])
    if not found:
        return _Step(after, end, []) if after < end else None
    until = UUID(int=found[-1][0].int + 1)
    hashes = {code_hash for _, code_hash in found}
    hashes -= {*CodeText.objects.filter(code_hash__in=hashes).values_list("code_hash", flat=True)}
    kept = rows.filter(pk__lt=until, code_hash__in=hashes).exclude(code="")
    programs: dict[str, UUID] = {}
    characters = 0
    for pk, code_hash, length in kept.values_list("pk", "code_hash", Length("code")):
        if code_hash in programs:
            continue
        characters += min(length, _CHARACTERS)
        if programs and characters > _WRITTEN_CHARACTERS:
            return _Step(after, pk, list(programs.values()))
        programs[code_hash] = pk
    return _Step(after, until, list(programs.values()))


def _take(step: _Step) -> int:
    """Write what of it is still kept; nothing when another worker was faster. How many programs."""
    with transaction.atomic():
        progress = CodeSearchProgress.objects.filter(pk=1, before=step.after)
        if not progress.update(before=step.until) or not step.programs:
            return 0
        kept = Execution.objects.filter(pk__in=step.programs).exclude(code="")
        texts = [
            CodeText(code_hash=code_hash, code=code[:_CHARACTERS])
            for code_hash, code in kept.values_list("code_hash", "code")
        ]
        CodeText.objects.bulk_create(texts, ignore_conflicts=True)
        return len(texts)


def _merge_index() -> None:
    """SQLite: merge what was added, a little in each transaction, for it does not do so itself."""
    if connection.vendor != "sqlite":
        return
    table = "executions_codetext_fts"
    with connection.cursor() as cursor:
        while True:
            cursor.execute("SELECT total_changes()")
            (before,) = cursor.fetchone()
            cursor.execute(
                f"INSERT INTO {table} ({table}, rank) VALUES ('merge', %s)",  # noqa: S608
                [_MERGED_PAGES],
            )
            cursor.execute("SELECT total_changes()")
            # As SQLite documents it: a difference below two is nothing left to merge.
            if cursor.fetchone()[0] - before < 2:
                return
            let_others_write()


MOST_FILTERS = 50
SHARE = "executions.share_savedfilter"
# Where in the list one was, and what belongs to no list.
_NOT_KEPT = ("p", "e", "_popup", "_to_field", "next", "previous", "from")


def filters_for(user: Any) -> QuerySet[SavedFilter]:
    """The user's own and those that others share."""
    visible = SavedFilter.objects.filter(Q(owner=user) | Q(is_shared=True))
    return visible.select_related("owner").order_by("name", "pk")[: 2 * MOST_FILTERS]


def save_filter(user: Any, name: str, query: str, *, shared: bool = False) -> SavedFilter:
    """Keep a list's query under a name; one of the same name is replaced.

    It is its owner's alone unless it is shared, which takes a permission. Raises
    InvalidConfiguration for a name or a query that cannot be kept, or shared.
    """
    if shared and not user.has_perm(SHARE):
        refuse("shared", "You may not share filters. Save it for yourself.")
    name = name.strip()
    if not name or len(name) > 100 or not name.isprintable():
        refuse("name", "Must be 1 to 100 printable characters.")
    parameters = QueryDict(query.lstrip("?"), mutable=True)
    for parameter in _NOT_KEPT:
        parameters.pop(parameter, None)
    for parameter in [name for name, values in parameters.lists() if not any(values)]:
        del parameters[parameter]
    kept = parameters.urlencode()
    if len(kept) > 1000:
        refuse("query", "Is too long to be stored.")
    if SavedFilter.objects.filter(owner=user).exclude(name=name).count() >= MOST_FILTERS:
        refuse("name", f"At most {MOST_FILTERS} filters can be kept. Remove one first.")
    saved, _ = SavedFilter.objects.update_or_create(
        owner=user, name=name, defaults={"query": kept, "is_shared": shared}
    )
    return saved


def remove_filter(user: Any, pk: int) -> bool:
    """True when it was there and the user's own."""
    return bool(SavedFilter.objects.filter(owner=user, pk=pk).delete()[0])
