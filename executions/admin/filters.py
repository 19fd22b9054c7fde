"""What executions, sessions and the ledger are filtered by, fast over a million rows."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, cast
from uuid import UUID

from django.contrib import admin
from django.db import connection
from django.db.models import Q, QuerySet
from django.http import HttpRequest

from executions.admin.bases import ExecutionPaginator
from executions.kernel.text import first_uuid7
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers.admin.list_fields import (
    MOST_CHOICES,
    ChoiceField,
    IdField,
    ListField,
    MomentField,
    NumberField,
)
from providers.admin.sifting import Condition
from providers.models import ProviderConfig
from providers.observations import KINDS

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)


class BoundedPaginator(ExecutionPaginator):
    """Counts no further than anybody pages. What is older is found by filters and search."""

    MOST = 10_000

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Execution]", self.object_list)
        return rows.order_by().values("pk")[: self.MOST].count()


class IndexedValuesField(ChoiceField):
    """Offers the values a column holds, found by hopping through its index in one query."""

    index = "ordered"

    def values(self) -> Iterator[tuple[str, str]]:
        return ((value, value) for value in _values_in_use(self.column) if value)


class TenantField(IndexedValuesField):
    title = "tenant"
    parameter_name = column = "tenant_slug"


class ProviderField(IndexedValuesField):
    title = "provider"
    parameter_name = column = "provider"


class LanguageField(IndexedValuesField):
    title = "language"
    parameter_name = column = "language"


class ErrorCodeField(IndexedValuesField):
    title = "error code"
    parameter_name = column = "error_code"


class StatusField(ChoiceField):
    title = "status"
    parameter_name = "status__exact"
    column = "status"
    index = "ordered"
    offered = Execution.Status.choices


class ObservedField(ChoiceField):
    """Executions of which something was seen; those with nothing are in no index of it."""

    title = "security events"
    parameter_name = "observed"
    _ANY = "any"
    offered = ((_ANY, "some"), *zip(KINDS, KINDS, strict=True))

    def condition(self, text: str) -> Condition:
        some = Q(observed__isnull=False)
        if text == self._ANY:
            return Condition(some, "ordered")
        return Condition(some & Q(observed__contains=text))


class KeyField(ListField):
    """By the prefix, which the record keeps when the key is gone."""

    title = "key (prefix)"
    parameter_name = column = "api_key_prefix"
    index = "ordered"


class RuntimeField(ListField):
    title = "runtime"
    parameter_name = column = "runtime"


class ExitCodeField(NumberField):
    title = "exit code"
    parameter_name = column = "exit_code"
    index = "ordered"


class ReplayField(ChoiceField):
    title = "replays"
    parameter_name = "replay"
    offered = (("yes", "replays only"),)

    def condition(self, text: str) -> Condition:
        if text != "yes":
            raise ValueError("Must be yes or empty.")
        return Condition(Q(replay_of__isnull=False), "ordered")


class ReplayOfField(IdField):
    title = "replay of (id)"
    parameter_name = column = "replay_of"
    index = "found"


class AgentField(ListField):
    """As the caller says. Its index is by tenant first."""

    title = "agent"
    parameter_name = column = "agent"
    index = "found"


class ConversationField(ListField):
    title = "conversation"
    parameter_name = column = "conversation"
    index = "found"


class _ById(MomentField):
    """Ids hold the time they were made, so that a range of times is one of ids."""

    column = "created_at"

    def key_at(self, moment: datetime) -> UUID:
        return first_uuid7(min(max(moment, _FIRST), _LAST))


class FromField(_ById):
    title = "from"
    parameter_name = "created_at__gte"


class UntilField(_ById):
    title = "before"
    parameter_name = "created_at__lt"
    is_end = True


class SessionStateField(ChoiceField):
    title = "state"
    parameter_name = "state__exact"
    column = "state"
    offered = Session.State.choices


class SessionTenantField(ChoiceField):
    """Offers the tenants there are: no index of sessions has all of theirs."""

    title = "tenant"
    parameter_name = column = "tenant_slug"

    def values(self) -> Iterator[tuple[str, str]]:
        return ((slug, slug) for slug in _tenants())


class SessionProviderField(ChoiceField):
    title = "provider"
    parameter_name = column = "provider"

    def values(self) -> Iterator[tuple[str, str]]:
        names = ProviderConfig.objects.order_by("provider_id").values_list("provider_id", flat=True)
        return ((name, name) for name in names)


class SessionKeyField(ListField):
    title = "key (prefix)"
    parameter_name = column = "api_key_prefix"


class SessionConversationField(ListField):
    title = "conversation"
    # Found like several: its index begins with the tenant.
    parameter_name = column = "conversation"


class SessionTenantFilter(admin.SimpleListFilter):
    """For the theme's panel of links."""

    title = "tenant"
    parameter_name = "tenant_slug"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        return ((slug, slug) for slug in _tenants())

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        value = self.value()
        return queryset if value is None else queryset.filter(tenant_slug=value)


def _tenants() -> QuerySet[Tenant, str]:
    return Tenant.objects.order_by("slug").values_list("slug", flat=True)


def _values_in_use(column: str) -> list[str]:
    """The distinct values of an indexed column, which SELECT DISTINCT would read every row for.

    One more than are chosen from at most.
    """
    quote = connection.ops.quote_name
    name, table = quote(column), quote(Execution._meta.db_table)
    with connection.cursor() as cursor:
        # Every part is a quoted name from our own model.
        cursor.execute(
            f"WITH RECURSIVE used(value) AS ("  # noqa: S608
            f" SELECT MIN({name}) FROM {table} UNION ALL"
            f" SELECT (SELECT MIN({name}) FROM {table} WHERE {name} > used.value)"
            f" FROM used WHERE used.value IS NOT NULL"
            f") SELECT value FROM used WHERE value IS NOT NULL LIMIT {MOST_CHOICES + 2}"
        )
        return [value for (value,) in cursor.fetchall()]
