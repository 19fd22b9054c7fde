"""What a list can be filtered by: each field reads its own parameter, and says what is wrong."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Literal
from uuid import UUID

from django.contrib import admin
from django.db import connection
from django.db.models import Model, Q, QuerySet
from django.db.models.functions import Coalesce
from django.db.models.lookups import GreaterThanOrEqual, LessThan
from django.http import HttpRequest
from django.utils.dateparse import parse_datetime
from django.utils.timezone import get_current_timezone, is_naive, localtime, make_aware

from providers.admin.sifting import Condition

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
