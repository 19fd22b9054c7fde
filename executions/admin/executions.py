"""The list of executions, its filters and its search."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, TypeVar, cast
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db import connection
from django.db.models import Q, QuerySet
from django.http import FileResponse, Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString

from executions.admin.display import artifact_image_type
from executions.admin.execution_page import CANCEL, REPLAY, Record
from executions.admin.frame import ExecutionModelAdmin, ExecutionPaginator, status_badge
from executions.capabilities.dashboard.admin import fragment_of
from executions.capabilities.playground.service import (
    Difference,
    differences_of,
    providers_for,
    recorded_request,
    replay,
)
from executions.capabilities.search.admin import PERMISSION as EXPORT
from executions.capabilities.search.admin import export_view
from executions.capabilities.search.export import FORMATS
from executions.capabilities.search.service import (
    MOST_PROGRAMS,
    SHARE,
    SHORTEST,
    filters_for,
    not_taken_in,
    programs_with,
    remove_filter,
    save_filter,
)
from executions.doors.native.deferred import answer
from executions.doors.native.downloads import download_response
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Coroutine
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.presentation import PageTime, in_time
from executions.kernel.storage import INERT
from executions.kernel.text import first_uuid7
from executions.ledger.models import LedgerEntry
from executions.middleware import away_answer
from executions.runs.models import Artifact, Execution
from executions.runs.requests import CLAIMS
from executions.runs.results import rich_outputs
from executions.runs.service import HasEnded, cancel
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers.admin_lists import (
    MOST,
    MOST_CHOICES,
    ChoiceField,
    Condition,
    IdField,
    KeysetAdmin,
    KeysetList,
    ListField,
    MomentField,
    NumberField,
)
from providers.admin_pages import ReadOnly
from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.hidden_characters import visible
from providers.models import ProviderConfig
from providers.timestamps import in_words, shown_moment
from providers.values import KINDS

# Of each of two outcomes' aspects side by side; whole, each can be downloaded.
_MOST_ROWS = 400
TEXTS = ("code", "arguments", "result", "outputs", "stdout", "stderr")

Response = TypeVar("Response", bound=HttpResponseBase)


class Details:
    """The views of one admin class. Each asks for the right to view, replaying for its own."""

    def __init__(self, model_admin: ExecutionModelAdmin) -> None:
        self.model_admin = model_admin

    @property
    def urls(self) -> list[URLPattern]:
        wrap = self.model_admin.admin_site.admin_view
        one = "<uuid:execution_id>"
        return [
            path("export/", wrap(self.export), name="executions_export"),
            path("filters/", wrap(self.save_filter), name="executions_save_filter"),
            path(
                "filters/<int:filter_id>/remove",
                wrap(self.remove_filter),
                name="executions_remove_filter",
            ),
            path(f"{one}/text/<str:name>", wrap(self.text), name="executions_text"),
            path(f"{one}/receipt", wrap(self.receipt), name="executions_receipt"),
            path(f"{one}/cancel", wrap(self.cancel), name="executions_cancel"),
            path(f"{one}/replay", wrap(self.replay), name="executions_replay"),
            path(
                f"{one}/artifacts/<int:artifact_id>",
                wrap(self.artifact),
                name="executions_artifact",
            ),
            path(
                f"{one}/artifacts/<int:artifact_id>/image",
                wrap(self.image),
                name="executions_artifact_image",
            ),
            path(
                f"{one}/outputs/<int:number>/image",
                wrap(self.output_image),
                name="executions_output_image",
            ),
        ]

    def export(self, request: HttpRequest) -> HttpResponseBase:
        return export_view(self.model_admin, request)

    def save_filter(self, request: HttpRequest) -> HttpResponse:
        """Keep the list's query under a name, and return to that list."""
        self._only_viewers_post(request)
        query = request.POST.get("query", "")
        try:
            saved = save_filter(
                request.user,
                request.POST.get("name", ""),
                query,
                shared=request.POST.get("shared") == "1",
            )
        except InvalidConfiguration as error:
            messages.error(request, error.message)
        else:
            messages.success(request, f"The filter {saved.name!r} was saved.")
            query = saved.query
        return redirect(f"{reverse('admin:executions_execution_changelist')}?{query.lstrip('?')}")

    def remove_filter(self, request: HttpRequest, filter_id: int) -> HttpResponse:
        self._only_viewers_post(request)
        if not remove_filter(request.user, filter_id):
            raise Http404
        return redirect("admin:executions_execution_changelist")

    def _only_viewers_post(self, request: HttpRequest) -> None:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404

    def text(self, request: HttpRequest, execution_id: UUID, name: str) -> HttpResponse:
        """A text of the record as it is stored, for saving."""
        if name not in TEXTS:
            raise Http404
        execution = self._execution(request, execution_id)
        response = HttpResponse(getattr(execution, name), content_type="text/plain; charset=utf-8")
        return _for_saving(response, f"{execution_id}-{name}.txt")

    def receipt(self, request: HttpRequest, execution_id: UUID) -> HttpResponse:
        self._execution(request, execution_id)
        entry = LedgerEntry.objects.filter(execution_id=execution_id).first()
        if entry is None:
            raise Http404
        text = json.dumps(entry.receipt, indent=2)
        response = HttpResponse(text, content_type="application/json")
        return _for_saving(response, f"{execution_id}-receipt.json")

    def artifact(
        self, request: HttpRequest, execution_id: UUID, artifact_id: int
    ) -> HttpResponseBase:
        try:
            return download_response(self._artifact(request, execution_id, artifact_id))
        except ProviderUnavailable as error:
            return HttpResponse(error.message, status=503, content_type="text/plain")

    def image(self, request: HttpRequest, execution_id: UUID, artifact_id: int) -> HttpResponseBase:
        """A raster image for the page; its content decides whether it is one, not its name."""
        artifact = self._artifact(request, execution_id, artifact_id)
        mime_type = artifact_image_type(artifact) if artifact.file else ""
        if not mime_type:
            raise Http404
        try:
            return _inert(FileResponse(artifact.file.open("rb"), content_type=mime_type))
        except OSError:
            raise Http404 from None

    def output_image(
        self, request: HttpRequest, execution_id: UUID, number: int
    ) -> HttpResponseBase:
        """A plot that the program showed; its content decides whether it is one."""
        outputs = rich_outputs(self._execution(request, execution_id))
        if number >= len(outputs) or not outputs[number].image:
            raise Http404
        output = outputs[number]
        return _inert(HttpResponse(output.image, content_type=output.mime_type))

    def cancel(self, request: HttpRequest, execution_id: UUID) -> HttpResponseBase:
        """Ends one that is queued or runs, and returns to its page."""
        if not request.user.has_perm(CANCEL):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404
        execution = self._execution(request, execution_id)
        return answer(request, translate_errors(request, self._cancel(request, execution)))

    async def _cancel(self, request: HttpRequest, execution: Execution) -> HttpResponse:
        try:
            await cancel(execution, current_actor())
        except HasEnded as error:
            messages.error(request, error.message)
        return redirect("admin:executions_execution_change", execution.pk)

    def replay(self, request: HttpRequest, execution_id: UUID) -> HttpResponseBase:
        """Asks on which provider, runs it there, and shows both outcomes side by side."""
        if not request.user.has_perm(REPLAY):
            raise PermissionDenied
        execution = self._execution(request, execution_id)
        if request.method == "POST":
            return answer(request, translate_errors(request, self._replay(request, execution)))
        return self._comparison(request, execution)

    async def _replay(self, request: HttpRequest, execution: Execution) -> HttpResponse:
        try:
            outcome = await replay(execution, request.POST.get("provider", ""))
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            # Refused: it comes before anything is waited for, so that the message is still stored.
            messages.error(request, f"{error.code}: {error.message}")
            return redirect("admin:executions_replay", execution.pk)
        if isinstance(outcome.error, DatabaseUnavailable):
            raise outcome.error
        return redirect(f"{request.path}?with={outcome.execution.pk}")

    def _comparison(self, request: HttpRequest, execution: Execution) -> HttpResponseBase:
        replays = list(execution.replays.defer("pending", "code", "arguments").order_by("-id")[:20])
        chosen = request.GET.get("with", "")
        other = next((one for one in replays if str(one.pk) == chosen), None)
        try:
            recorded_request(execution)
            refused = ""
        except SandboxError as error:
            refused = error.message
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "title": "Replay",
            "opts": self.model_admin.opts,
            "execution": execution,
            "providers": providers_for(execution),
            "refused": refused,
            "replays": replays,
            "other": other,
            "differences": _shown(execution, other) if other else [],
        }
        return TemplateResponse(request, "admin/executions/execution/replay.html", context)

    def _execution(self, request: HttpRequest, execution_id: UUID) -> Execution:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        execution = self.model_admin.get_queryset(request).filter(pk=execution_id).first()
        if execution is None:
            raise Http404
        return execution

    def _artifact(self, request: HttpRequest, execution_id: UUID, artifact_id: int) -> Artifact:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        artifact = Artifact.objects.filter(pk=artifact_id, execution=execution_id).first()
        if artifact is None:
            raise Http404
        return artifact


async def translate_errors(request: HttpRequest, work: Coroutine[HttpResponse]) -> HttpResponse:
    """Await the work, and answer a failure of the database with a page, also when it comes
    later."""
    try:
        return await work
    except Exception as error:
        if (away := away_answer(request, error)) is None:
            raise
        return away


def _shown(before: Execution, after: Execution) -> list[dict[str, Any]]:
    page = PageTime()
    return [_shown_difference(each, page) for each in differences_of(before, after)]


def _shown_difference(difference: Difference, page: PageTime) -> dict[str, Any]:
    lines = difference.lines(page)
    return {
        "name": difference.name,
        "is_same": difference.is_same,
        "matters": difference.matters,
        "lines": [
            {
                "kind": line.kind,
                "before": None if line.before is None else visible(line.before[:500]),
                "after": None if line.after is None else visible(line.after[:500]),
            }
            for line in lines[:_MOST_ROWS]
        ],
        "is_cut": difference.is_cut or len(lines) > _MOST_ROWS,
    }


def _for_saving(response: HttpResponse, name: str) -> HttpResponse:
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return _inert(response)


def _inert(response: Response) -> Response:
    for name, value in INERT.items():
        response[name] = value
    return response


HELP = (
    "Full execution id, full SHA-256 of the code, or part of the code (at least three characters; "
    "indexed one minute after the end). By caller: agent:NAME, model:, conversation:, "
    "on_behalf_of:, trace_id:. By schedule: schedule:ID."
)
_CLAIM = re.compile(rf"({'|'.join((*CLAIMS, 'trace_id'))}):(.+)", re.DOTALL)
_SCHEDULE = "schedule:"
_HASH = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


def searched(term: str) -> Condition:
    """The executions that such a term finds."""
    if found := _HASH.fullmatch(term.lower()):
        return Condition(Q(code_hash=f"sha256:{found[1]}"), "found")
    if found := _CLAIM.fullmatch(term):
        return Condition(Q(**{found[1]: found[2].strip()}), "found")
    if (schedule := _id(term.removeprefix(_SCHEDULE))) and term.startswith(_SCHEDULE):
        return Condition(Q(schedule_id=schedule), "found")
    if pk := _id(term):
        return Condition(Q(pk=pk), "found")
    programs = programs_with(term)
    if len(programs) >= MOST_PROGRAMS:
        # It is near wherever one looks: the newest executions are looked through themselves.
        return Condition(Q(code__icontains=term))
    return Condition(Q(code_hash__in=programs) & ~Q(code=""), "found")


def is_code(term: str) -> bool:
    """Whether the term is looked for in the code."""
    if _HASH.fullmatch(term.lower()) or _CLAIM.fullmatch(term):
        return False
    return _id(term.removeprefix(_SCHEDULE)) is None


def notes(term: str) -> list[str]:
    """What is to be known of a search of code beside what it found."""
    if not is_code(term):
        return []
    if len(term) < SHORTEST:
        return ["Code search needs at least three characters."]
    waiting, since = not_taken_in()
    if since is None:
        return []
    number = f"{MOST:,}+" if waiting > MOST else f"{waiting:,}"
    return [
        f"The code index does not include executions requested since {in_words(since)} yet: "
        f"{number} executions."
    ]


def _id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


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


_LARGE = (
    *("code", "arguments", "result", "outputs", "exception", "stdout", "stderr"),
    *("meta", "hops", "error_message"),
)


class ExecutionList(KeysetList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer(*_LARGE)


@admin.register(Execution)
class ExecutionAdmin(ReadOnly, KeysetAdmin, ExecutionModelAdmin):
    """The record, for reading: nobody adds to it, changes it or takes from it here."""

    list_display = (
        *("short_id", "shown_created", "shown_tenant", "shown_status", "shown_exit", "language"),
        *("where", "shown_took"),
    )
    list_filter = (
        *(FromField, UntilField, TenantField, KeyField, StatusField, ExitCodeField),
        *(ErrorCodeField, LanguageField, ProviderField, RuntimeField, AgentField),
        *(ConversationField, ReplayField, ReplayOfField, ObservedField),
    )
    ordering = ("-id",)
    search_fields = ("id",)
    search_help_text = HELP
    show_facets = admin.ShowFacets.NEVER
    change_list_template = "admin/executions/execution/change_list.html"
    # The page is drawn by `Record`, and no form.
    fields = ("id",)

    class Media:
        css = {"all": ("executions/record.css", "executions/run.css")}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Execution]:
        return super().get_queryset(request).defer("pending")

    def search(self, text: str) -> Condition:
        return searched(text)

    def search_notes(self, text: str) -> list[str]:
        return notes(text)

    def get_urls(self) -> list[URLPattern]:
        return [*Details(self).urls, *super().get_urls()]

    def get_object(
        self, request: HttpRequest, object_id: str, from_field: str | None = None
    ) -> Execution | None:
        execution = super().get_object(request, object_id, from_field)
        if execution is not None:
            execution.ledger_entry = LedgerEntry.objects.filter(execution_id=execution.pk).first()
        return execution

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetList]:
        return ExecutionList

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        formats = list(FORMATS) if request.user.has_perm(EXPORT) else []
        context = {
            "export_formats": formats,
            "saved_filters": filters_for(request.user),
            "may_share": request.user.has_perm(SHARE),
        }
        page = super().changelist_view(request, {**(extra_context or {}), **context})
        return fragment_of(request, page, "admin/executions/execution/rows.html")

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        if (execution := context["original"]) is not None:
            context["record"] = Record(execution, request.user)
        return super().render_change_form(request, context, *args, **kwargs)

    @admin.display(description="id")
    def short_id(self, execution: Execution) -> SafeString:
        return format_html('<span class="one-line">{}</span>', execution.pk)

    @admin.display(description="created")
    def shown_created(self, execution: Execution) -> SafeString | str:
        return shown_moment(execution.created_at)

    @admin.display(description="tenant")
    def shown_tenant(self, execution: Execution) -> str:
        return execution.tenant_slug

    @admin.display(description="status")
    def shown_status(self, execution: Execution) -> SafeString:
        """With what is to be said of it: the code of its error, and what was seen of it."""
        remarks = filter(None, (execution.error_code, execution.observed))
        said = format_html_join(
            "", ' <span class="remark">{}</span>', ((visible(each),) for each in remarks)
        )
        return format_html("{}{}", status_badge(execution), said)

    @admin.display(description="exit code")
    def shown_exit(self, execution: Execution) -> int | None:
        return execution.exit_code

    @admin.display(description="provider")
    def where(self, execution: Execution) -> SafeString | None:
        if not execution.provider:
            return None
        return format_html(
            '{} <span class="quiet">{}</span>', execution.provider, execution.isolation
        )

    @admin.display(description="duration")
    def shown_took(self, execution: Execution) -> str | None:
        return None if execution.total_ms is None else in_time(execution.total_ms)
