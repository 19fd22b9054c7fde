"""Long lists of the admin: paged by key and newest first, whatever they are filtered by.

Each page has a link that stays true, and is found in bounded time. One indexed condition is
answered by its index. Several are answered by looking through the rows of the one that has the
fewest, and never through more than MOST of them or for longer than SECONDS, or than a third of it
once the page is full: what was not looked at is told, and where to go on. Each field that a list
can be filtered by reads its own parameter, and says what is wrong.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast
from urllib.parse import urlencode
from uuid import UUID

from django.contrib import admin
from django.contrib.admin.views.main import ERROR_FLAG, SEARCH_VAR, ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import connection
from django.db.models import Model, Q, QuerySet, UUIDField
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThanOrEqual, LessThan
from django.forms import Media
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.dateparse import parse_datetime
from django.utils.timezone import get_current_timezone, is_naive, localtime, make_aware

MOST = 10_000
SECONDS = 0.06
_FIRST_CHUNK, _LARGEST_CHUNK = 200, 1_000

Rows = QuerySet[Any]


@dataclass(frozen=True)
class Condition:
    """What a list is filtered by.

    `index` is "ordered" where one index has such rows in the order of their keys, "found" where
    one has them in another order, and "" where none has them. Matching rows lie in
    `low <= key < high`.
    """

    q: Q
    index: Literal["", "ordered", "found"] = ""
    low: Any = None
    high: Any = None

    @property
    def is_range(self) -> bool:
        return self.low is not None or self.high is not None


@dataclass(frozen=True)
class Place:
    """Where a page begins and which way it goes. Without a key, at the very end of the list."""

    key: Any = None
    is_inclusive: bool = False
    descending: bool = True

    def ahead(self, rows: Rows) -> Rows:
        """The rows from here on, in order."""
        ordered = rows.order_by("-pk" if self.descending else "pk")
        if self.key is None:
            return ordered
        side = "lt" if self.descending else "gt"
        return ordered.filter(**{f"pk__{side}{'e' if self.is_inclusive else ''}": self.key})


@dataclass(frozen=True)
class Page:
    """At most the asked number of rows in the order of the place, and whether more may follow.

    `count` is of all rows that match where `is_exact`, at most MOST + 1; else there are at least
    so many. `looked_at` is how many rows were looked through, and `last` the last of them where
    the bound has cut: the list goes on behind it.
    """

    rows: list[Any]
    has_more: bool
    count: int
    is_exact: bool
    looked_at: int = 0
    last: Any = None


def find(
    base: Rows, listed: Rows, conditions: Sequence[Condition], place: Place, size: int
) -> Page:
    """A page of `listed`, which is `base` filtered by all of the conditions."""
    selective = [condition for condition in conditions if not condition.is_range]
    bounded = _within(listed, conditions)
    if not selective or (len(selective) == 1 and selective[0].index == "ordered"):
        rows = list(place.ahead(bounded)[: size + 1])
        count = bounded.order_by().values("pk")[: MOST + 1].count()
        return Page(rows[:size], len(rows) > size, count, is_exact=True)
    deadline = time.monotonic() + SECONDS
    keys = _fewest(base, selective)
    if keys is None:
        return _walk(base, bounded, conditions, place, size, deadline)
    return _look_through(keys, bounded, place, size, deadline)


def _within(rows: Rows, conditions: Iterable[Condition]) -> Rows:
    for condition in conditions:
        if condition.low is not None:
            rows = rows.filter(pk__gte=condition.low)
        if condition.high is not None:
            rows = rows.filter(pk__lt=condition.high)
    return rows


def _fewest(base: Rows, conditions: Iterable[Condition]) -> list[Any] | None:
    """The keys of the rows of the indexed condition that has the fewest; None if all have many."""
    best, fewest = None, MOST + 1
    for condition in conditions:
        if condition.index:
            found = base.filter(condition.q).order_by().values("pk")
            if (count := found[: MOST + 1].count()) < fewest:
                best, fewest = condition, count
    if best is None:
        return None
    # One more than were counted just now may have come since; what is left out then is newer.
    found = base.filter(best.q).order_by().values_list("pk", flat=True)
    return sorted(found[: MOST + 1])


def _look_through(keys: list[Any], listed: Rows, place: Place, size: int, deadline: float) -> Page:
    """The page out of these keys, from its place on first, and then how many there are in all."""
    if place.key is None:
        split = len(keys) if place.descending else 0
    elif place.descending == place.is_inclusive:
        split = bisect_right(keys, place.key)
    else:
        split = bisect_left(keys, place.key)
    ahead, behind = keys[:split][::-1], keys[split:]
    if not place.descending:
        ahead, behind = keys[split:], keys[:split]
    matching, looked_at, last = _sift(_chunks(ahead), listed, deadline)
    counted, more, cut = _sift(_chunks(behind), listed, deadline)
    return _page(
        matching,
        listed,
        size,
        count=len(matching) + len(counted),
        is_exact=last is None and cut is None,
        looked_at=looked_at + more,
        last=last,
    )


def _walk(
    base: Rows,
    listed: Rows,
    conditions: Sequence[Condition],
    place: Place,
    size: int,
    deadline: float,
) -> Page:
    """The page out of the next MOST rows of an index that has them in order."""
    ordered = [condition.q for condition in conditions if condition.index == "ordered"]
    rows = _sparsest(
        [place.ahead(_within(base.filter(q), conditions)) for q in ordered or [Q()]],
        place.descending,
    )
    pieces = _pieces(rows, place.descending)
    matching, looked_at, last = _sift(pieces, listed, deadline, enough=size)
    return _page(
        matching,
        listed,
        size,
        count=len(matching),
        is_exact=last is None and place.key is None,
        looked_at=looked_at,
        last=last,
    )


def _sparsest(each: list[Rows], descending: bool) -> Rows:
    """Of several indexes the one whose next rows reach furthest: it has the fewest to look through.

    All of them have every row that matches.
    """
    if len(each) == 1:
        return each[0]
    reached: list[tuple[Any, Rows]] = []
    for rows in each:
        ends = rows.values_list("pk", flat=True)[_FIRST_CHUNK - 1 : _FIRST_CHUNK]
        if (key := next(iter(ends), None)) is None:
            return rows
        reached.append((key, rows))
    furthest = min if descending else max
    return furthest(reached, key=lambda found: found[0])[1]


def _page(matching: list[Any], listed: Rows, size: int, *, count: int, **told: Any) -> Page:
    found = listed.model._default_manager.none() if not matching else listed
    by_key = {row.pk: row for row in found.filter(pk__in=matching[:size])}
    rows = [by_key[key] for key in matching[:size] if key in by_key]
    last = told.pop("last")
    # What is behind a whole page is reached by its own last row.
    return Page(
        rows, len(matching) > size, count, last=None if len(matching) > size else last, **told
    )


def _sift(
    chunks: Iterator[tuple[list[Any], bool]], listed: Rows, deadline: float, enough: int = MOST
) -> tuple[list[Any], int, Any]:
    """The keys that match, how many were looked at, and the last one where time has cut.

    With more than `enough`, which fill a page, it is cut sooner.
    """
    matching: list[Any] = []
    looked_at = 0
    for chunk, is_last in chunks:
        if chunk:
            found = set(listed.filter(pk__in=chunk).order_by().values_list("pk", flat=True))
            matching += [key for key in chunk if key in found]
            looked_at += len(chunk)
        if is_last:
            return matching, looked_at, None
        until = deadline - SECONDS * 2 / 3 if len(matching) > enough else deadline
        if looked_at >= MOST or time.monotonic() > until:
            return matching, looked_at, chunk[-1]
    return matching, looked_at, None


def _chunks(keys: list[Any]) -> Iterator[tuple[list[Any], bool]]:
    start, size = 0, _FIRST_CHUNK
    while start < len(keys):
        chunk = keys[start : start + size]
        start += size
        yield chunk, start >= len(keys)
        size = min(2 * size, _LARGEST_CHUNK)


def _pieces(rows: QuerySet[Model], descending: bool) -> Iterator[tuple[list[Any], bool]]:
    size = _FIRST_CHUNK
    side = "pk__lt" if descending else "pk__gt"
    while True:
        chunk = list(rows.values_list("pk", flat=True)[:size])
        yield chunk, len(chunk) < size
        if len(chunk) < size:
            return
        rows = rows.filter(**{side: chunk[-1]})
        size = min(2 * size, _LARGEST_CHUNK)


LONGEST = 255
# More values than these are typed and not chosen from.
MOST_CHOICES = 200
_INTEGER = 2**31
# How far a row's own time may be from where it stands in the order of the keys.
SLACK = timedelta(minutes=1)
# Keys grow with time, so that the first one of a time is found by halving, in one query. The least
# and the greatest key are asked for apart: for both at once SQLite reads every key there is.
_FIRST_KEY = (
    "WITH RECURSIVE halved(low, high) AS ("
    " SELECT COALESCE((SELECT MIN({key}) FROM {table}), 1),"
    " COALESCE((SELECT MAX({key}) FROM {table}), 0) + 1 UNION ALL"
    " SELECT CASE WHEN {is_before} THEN (low + high) / 2 + 1 ELSE low END,"
    " CASE WHEN {is_before} THEN high ELSE (low + high) / 2 END FROM halved WHERE low < high"
    ") SELECT low FROM halved WHERE low >= high"
).replace(
    "{is_before}",
    "(SELECT {at} FROM {table} WHERE {key} >= (low + high) / 2 ORDER BY {key} LIMIT 1) < %s",
)


class ListField(admin.ListFilter):
    """One input of a list's filters. `error` is what is wrong with what was entered."""

    title = ""
    parameter_name: ClassVar[str]
    column: ClassVar[str] = ""
    index: ClassVar[Literal["", "ordered", "found"]] = ""
    kind: ClassVar[str] = "text"
    hint = ""

    def __init__(
        self, request: HttpRequest, params: dict[str, Any], model: type[Model], model_admin: Any
    ) -> None:
        super().__init__(request, params, model, model_admin)
        self.model = model
        given = params.pop(self.parameter_name, None) or [""]
        self.text = str(given[-1]).strip()
        self.error = ""
        self.conditions: list[Condition] = []
        if not self.text:
            return
        try:
            if len(self.text) > LONGEST or not self.text.isprintable():
                raise ValueError(f"Must be at most {LONGEST} characters, all of them printable.")
            self.conditions = [self.condition(self.text)]
        except ValueError as error:
            self.error = f"{self.title[:1].upper()}{self.title[1:]}: {error}"

    def condition(self, text: str) -> Condition:
        """What is asked for. Raises ValueError that says what the text must be."""
        return Condition(Q(**{self.column: text}), self.index)

    def has_output(self) -> bool:
        return True

    def expected_parameters(self) -> list[str | None]:
        return [self.parameter_name]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(*(condition.q for condition in self.conditions))

    def choices(self, changelist: Any) -> Any:
        return ()

    @property
    def options(self) -> list[tuple[str, str]]:
        """To choose from; none where it is typed."""
        return []

    @property
    def entered(self) -> str:
        """The text as its input takes it."""
        return self.text

    @property
    def said(self) -> str:
        """The filter in words, when it is set."""
        return f"{self.title} {self.text}" if self.text else ""


class ChoiceField(ListField):
    """One of a few values, each `offered` with its label. Another one is still looked for: rows
    outlive what they name.
    """

    kind = "choice"
    offered: ClassVar[Iterable[tuple[Any, Any]]] = ()

    def values(self) -> Iterable[tuple[str, str]]:
        return ((str(value), str(label)) for value, label in self.offered)

    @property
    def options(self) -> list[tuple[str, str]]:
        found = [*self.values()][: MOST_CHOICES + 1]
        if len(found) > MOST_CHOICES:
            return []
        known = {value for value, _ in found}
        return [*found, *([(self.text, self.text)] if self.text and self.text not in known else [])]


class NumberField(ListField):
    kind = "number"

    def condition(self, text: str) -> Condition:
        try:
            number = int(text)
        except ValueError:
            raise ValueError("Must be a whole number.") from None
        if not -_INTEGER <= number < _INTEGER:
            raise ValueError("Must be a number of 32 bits.")
        return Condition(Q(**{self.column: number}), self.index)


class IdField(ListField):
    def condition(self, text: str) -> Condition:
        try:
            return Condition(Q(**{self.column: UUID(text)}), self.index)
        except ValueError:
            raise ValueError("Must be a whole id.") from None


class MomentField(ListField):
    """One end of a range of times. Entered without a zone it is of the one that pages are in."""

    kind = "moment"
    is_end: ClassVar[bool] = False
    moment: datetime | None = None
    local = ""

    def condition(self, text: str) -> Condition:
        try:
            moment = parse_datetime(text.replace(" ", "T", 1) if "T" not in text else text)
            if moment is None:
                moment = parse_datetime(f"{text}T00:00")
            if moment is None:
                raise ValueError
            if is_naive(moment):
                moment = make_aware(moment)
            self.moment = moment.astimezone(UTC)
            self.local = f"{localtime(self.moment):%Y-%m-%dT%H:%M:%S}"
            return self.range(self.moment)
        except (ValueError, OverflowError):
            raise ValueError("Must be a time like 2026-01-31T23:59:59.") from None

    def range(self, moment: datetime) -> Condition:
        """The rows from this time on, or those before it."""
        # Wrapped, so that no index of the times is taken in the place of the keys' own.
        its_time = Coalesce(self.column, self.column)
        if self.is_end:
            key = self.key_at(moment + SLACK)
            return Condition(Q(LessThan(its_time, moment)), high=key)
        return Condition(Q(GreaterThanOrEqual(its_time, moment)), low=self.key_at(moment - SLACK))

    def key_at(self, moment: datetime) -> Any:
        """No row of this time or later has a lesser key."""
        options = self.model._meta
        names = {"table": options.db_table, "key": str(options.pk.column), "at": self.column}
        quoted = {name: connection.ops.quote_name(value) for name, value in names.items()}
        at = connection.ops.adapt_datetimefield_value(moment)
        with connection.cursor() as cursor:
            # Every name is from our own model.
            cursor.execute(_FIRST_KEY.format(**quoted), [at, at])
            (key,) = cursor.fetchone()
        return key

    @property
    def entered(self) -> str:
        return self.local

    @property
    def zone(self) -> str:
        return localtime().tzname() or str(get_current_timezone())


if TYPE_CHECKING:
    from django.contrib import admin

    _Admin = admin.ModelAdmin[Any]
else:
    _Admin = object

NEXT, PREVIOUS, FROM, ORDER = "next", "previous", "from", "order"
OLDEST = "oldest"
_OURS = (NEXT, PREVIOUS, FROM, ORDER)
_IGNORED = (*_OURS, "p", "all", ERROR_FLAG, "_popup", "_to_field", "_facets", "o")
_LONGEST_SEARCH = 1000
_LARGEST = 2**63


class KeysetList(ChangeList):
    """One page. `problems` is what is wrong with the address: then no row is shown."""

    problems: list[str]
    notes: list[str]
    page: Page
    links: dict[str, str]
    _descending: bool

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        """The rows of every page."""
        given = {name: list(values) for name, values in request.GET.lists()}
        for name in _IGNORED:
            given.pop(name, None)
        # Not as the base class has read it, which takes what it cannot read for nothing.
        self.query = "".join(given.pop(SEARCH_VAR, [])[-1:]).strip()
        self.filter_params = {
            name: values
            for name, values in request.GET.lists()
            if name not in _IGNORED and any(values)
        }
        declared = cast("Sequence[type[ListField]]", self.list_filter)
        fields = [field(request, given, self.model, self.model_admin) for field in declared]
        self.filter_specs = [*fields]
        # The theme's own panel of links is not drawn; ours is a form.
        self.has_filters = False
        self.has_active_filters = any(field.text for field in fields)
        self.problems = [field.error for field in fields if field.error]
        self.problems += [f"Unknown filter {name[:60]!r}." for name in sorted(given)]
        self.notes = []
        self.conditions = [each for field in fields for each in field.conditions]
        self._search()
        rows = self.root_queryset.filter(*(condition.q for condition in self.conditions))
        return self.apply_select_related(rows) if not self.problems else rows.none()

    def _search(self) -> None:
        if not self.query:
            return
        if len(self.query) > _LONGEST_SEARCH or "\0" in self.query:
            self.problems.append(f"Search: At most {_LONGEST_SEARCH} characters, without NUL.")
            return
        searched = cast("KeysetAdmin", self.model_admin)
        found = searched.search(self.query)
        if isinstance(found, str):
            self.problems.append(f"Search: {found}")
        else:
            self.conditions.append(found)
            self.notes += searched.search_notes(self.query)

    def get_results(self, request: HttpRequest) -> None:
        self.is_oldest_first = request.GET.get(ORDER) == OLDEST
        is_back = PREVIOUS in request.GET
        place = self._place(request, is_back)
        if self.problems:
            self.page = Page([], has_more=False, count=0, is_exact=True)
        else:
            self.page = find(
                self.root_queryset, self.queryset, self.conditions, place, self.list_per_page
            )
        rows = self.page.rows[::-1] if is_back else self.page.rows
        self.result_list = rows
        self.result_count = self.page.count
        # Equal, so that the theme does not tell a number above that may be cut.
        self.full_result_count = self.result_count
        self.show_full_result_count = False
        self.show_admin_actions = True
        self.can_show_all = self.multi_page = False
        self.paginator = Paginator(rows, self.list_per_page)
        self.links = self._links(rows, is_back, place)

    def _place(self, request: HttpRequest, is_back: bool) -> Place:
        descending = self._descending = self.is_oldest_first == is_back
        given = [name for name in (PREVIOUS, NEXT, FROM) if name in request.GET]
        if not given:
            return Place(descending=descending)
        text = request.GET[given[0]]
        try:
            key = self.opts.pk.to_python(text)
            if not isinstance(self.opts.pk, UUIDField) and not 0 <= key < _LARGEST:
                raise ValidationError("out of range")
        except (ValidationError, ValueError):
            self.problems.append(f"{given[0]}: Must be the key of a row.")
            return Place(descending=descending)
        return Place(key, given[0] == FROM, descending)

    def _links(self, rows: list[Any], is_back: bool, place: Place) -> dict[str, str]:
        """The address of each way from here; none where it leads nowhere."""
        links = {"turned": self._link(**({} if self.is_oldest_first else {ORDER: OLDEST}))}
        if place.key is not None:
            links["first"] = self._link(**self._order())
        if not rows:
            if self.page.last is not None:
                links["further"] = self._at(PREVIOUS if is_back else NEXT, self.page.last)
            return links
        more_ahead, more_behind = self.page.has_more, place.key is not None
        if is_back:
            more_ahead, more_behind = True, self.page.has_more
        if more_ahead:
            links[NEXT] = self._at(NEXT, rows[-1].pk)
        if more_behind:
            links[PREVIOUS] = self._at(PREVIOUS, rows[0].pk)
        if self.page.last is not None:
            links["further"] = self._at(PREVIOUS if is_back else NEXT, self.page.last)
        links["here"] = self._at(FROM, rows[0].pk)
        return links

    def _order(self) -> dict[str, str]:
        return {ORDER: OLDEST} if self.is_oldest_first else {}

    def _at(self, way: str, key: Any) -> str:
        return self._link(**self._order(), **{way: str(key)})

    def _link(self, **ours: str) -> str:
        given: dict[str, Any] = dict(self.filter_params)
        return "?" + urlencode(sorted((given | ours).items()), doseq=True)

    @property
    def count_in_words(self) -> str:
        """How many rows match, as far as they are counted."""
        page = self.page
        if page.count > MOST:
            return f"{MOST:,}+"
        if page.is_exact:
            return f"{page.count:,}"
        return f"at least {page.count:,}"

    @property
    def cut(self) -> str:
        """What was left out, where not everything was looked at."""
        if self.page.last is None:
            return ""
        way = "older" if self._descending else "newer"
        return (
            f"{self.page.looked_at:,} {self.opts.verbose_name_plural} searched; {way} ones not yet."
        )

    @property
    def said(self) -> list[str]:
        """Every filter that is set, in words."""
        fields = cast("list[ListField]", self.filter_specs)
        return [field.said for field in fields if field.said]


class KeysetAdmin(_Admin):
    """Mix it in before an admin class. `list_filter` holds ListFields."""

    change_list_template = "admin/keyset_list.html"
    show_full_result_count = False
    sortable_by = ()
    list_per_page = 50

    @property
    def media(self) -> Media:
        return super().media + Media(css={"all": ("admin_ui/lists.css",)})

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return KeysetList

    def search(self, text: str) -> Condition | str:
        """What such a search asks for, or what the text must be instead."""
        q = Q()
        for name in self.search_fields:
            q |= Q(**{f"{name}__icontains": text})
        return Condition(q)

    def search_notes(self, text: str) -> list[str]:
        """What has to be said beside what was found."""
        return []

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        answer = super().changelist_view(request, extra_context)
        if isinstance(answer, TemplateResponse) and answer.context_data is not None:
            changelist = answer.context_data.get("cl")
            if changelist is not None and changelist.problems:
                answer.status_code = 400
        return answer
