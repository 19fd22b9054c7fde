"""Filters and paging that stay fast over hundreds of thousands of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from django.contrib import admin
from django.db import connection
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.functional import cached_property

from executions.admin.bases import ExecutionPaginator
from executions.models import Execution, Tenant
from providers.models import ProviderConfig
from providers.observations import KINDS


class BoundedPaginator(ExecutionPaginator):
    """Counts no further than anybody pages. What is older is found by filters and search."""

    MOST = 10_000

    @cached_property
    def count(self) -> int:
        rows = cast("QuerySet[Execution]", self.object_list)
        return rows.order_by().values("pk")[: self.MOST].count()


class IndexedValuesFilter(admin.SimpleListFilter):
    """Offers the values a column holds, found by hopping through its index in one query."""

    column: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.title = self.column.replace("_", " ")
        self.parameter_name = self.column
        super().__init__(*args, **kwargs)

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        return ((value, value) for value in _values_in_use(self.column) if value)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Execution]) -> QuerySet[Execution]:
        value = self.value()
        return queryset if value is None else queryset.filter(**{self.column: value})


class TenantFilter(IndexedValuesFilter):
    title = "tenant"
    column = "tenant_slug"


class ProviderFilter(IndexedValuesFilter):
    title = "provider"
    column = "provider"


class LanguageFilter(IndexedValuesFilter):
    title = "language"
    column = "language"


class ErrorCodeFilter(IndexedValuesFilter):
    title = "error code"
    column = "error_code"


class ObservedFilter(admin.SimpleListFilter):
    """Executions of which something was seen; those with nothing are in no index of it."""

    title = "observations"
    parameter_name = "observed"
    _ANY = "any"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(self._ANY, "with observations"), *((kind, kind) for kind in KINDS)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Execution]) -> QuerySet[Execution]:
        value = self.value()
        if value is None:
            return queryset
        found = queryset.filter(observed__isnull=False)
        return found if value == self._ANY else found.filter(observed__contains=value)


class SessionTenantFilter(IndexedValuesFilter):
    """Offers the tenants there are: no index of sessions has all of theirs."""

    title = "tenant"
    column = "tenant_slug"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        return (
            (slug, slug) for slug in Tenant.objects.order_by("slug").values_list("slug", flat=True)
        )


class SessionProviderFilter(IndexedValuesFilter):
    title = "provider"
    column = "provider"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterator[tuple[str, str]]:
        names = ProviderConfig.objects.order_by("provider_id").values_list("provider_id", flat=True)
        return ((name, name) for name in names)


def _values_in_use(column: str) -> list[str]:
    """The distinct values of an indexed column, which SELECT DISTINCT would read every row for."""
    quote = connection.ops.quote_name
    name, table = quote(column), quote(Execution._meta.db_table)
    with connection.cursor() as cursor:
        # Every part is a quoted name from our own model.
        cursor.execute(
            f"WITH RECURSIVE used(value) AS ("  # noqa: S608
            f" SELECT MIN({name}) FROM {table} UNION ALL"
            f" SELECT (SELECT MIN({name}) FROM {table} WHERE {name} > used.value)"
            f" FROM used WHERE used.value IS NOT NULL"
            f") SELECT value FROM used WHERE value IS NOT NULL"
        )
        return [value for (value,) in cursor.fetchall()]
