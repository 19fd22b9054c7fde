"""The pages of threads: a list, and the transcript of one."""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.template.defaultfilters import filesizeformat
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.admin import ModelAdmin

from executions.admin.executions import (
    AgentField,
    ConversationField,
    FromField,
    TenantField,
    UntilField,
)
from executions.admin.frame import VIEW_EXECUTION, status_badge
from executions.admin.tool_calls import ToolCall, tool_call_of
from executions.capabilities.threads.models import Thread
from executions.capabilities.threads.service import (
    HAS_THREAD,
    MOST_COUNTED,
    MOST_FILES,
    UNREAD,
    Page,
    Sum,
    Totals,
    is_exactly,
    is_latest,
    page_before,
    page_from,
    sums_of,
    totals_of,
)
from executions.kernel.presentation import in_time, shown
from executions.runs.models import Approval, Execution
from executions.runs.network import network_of
from providers.admin_lists import Condition, KeysetAdmin, KeysetList, ListField
from providers.admin_pages import ReadOnly
from providers.hidden_characters import visible
from providers.timestamps import shown_moment

VIEW_SESSION, VIEW_APPROVAL = "executions.view_session", "executions.view_approval"
# Of the code of a call, and of its output in bytes; the execution's own page has more.
MOST_CODE, MOST_OUTPUT_BYTES = 500, 2 * 1024
MOST_HOSTS = 20

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Thread]
else:
    _ModelAdmin = ModelAdmin


class Call:
    """One execution as a part of the transcript. All of it is hostile, and made visible text."""

    def __init__(self, execution: Any, *, may_see_approval: bool) -> None:
        self.execution: Execution = execution
        self._may_see_approval = may_see_approval
        self.tool: ToolCall = tool_call_of(execution, execution.begun_code)

    @property
    def badge(self) -> SafeString:
        return status_badge(self.execution)

    @property
    def request_id(self) -> str:
        return visible(self.execution.request_id)

    @property
    def took(self) -> str:
        return "" if self.execution.total_ms is None else in_time(self.execution.total_ms)

    @property
    def code(self) -> str:
        """The beginning of the code; "" where the call says what it was."""
        if self.tool.text:
            return ""
        begun: str = self.execution.begun_code  # type: ignore[attr-defined]
        size: int = self.execution.code_size  # type: ignore[attr-defined]
        if not begun:
            return "Code is not stored. See the code hash."
        text = shown(begun[:MOST_CODE]).text
        return text if size <= MOST_CODE else f"{text}…"

    @property
    def output(self) -> list[tuple[str, str]]:
        """The end of stderr and of stdout, together at most MOST_OUTPUT_BYTES."""
        found, room = [], MOST_OUTPUT_BYTES
        for name, most in (("stderr", MOST_OUTPUT_BYTES // 2), ("stdout", MOST_OUTPUT_BYTES)):
            end = str(getattr(self.execution, f"{name}_end")).encode()
            kept = end[-min(most, room) :].decode("utf-8", "ignore")
            if kept.strip():
                is_cut = getattr(self.execution, f"{name}_size") > len(kept)
                found.append((name, f"{'…' if is_cut else ''}{visible(kept)}"))
                room -= len(kept.encode())
        return found[::-1]

    @property
    def error(self) -> str:
        execution = self.execution
        told = " ".join(filter(None, (execution.error_code, execution.error_message)))
        return shown(told, MOST_CODE).text

    @property
    def files(self) -> list[str]:
        """Files that it left, and the one that a tool wrote."""
        artifacts = self.execution.first_files  # type: ignore[attr-defined]
        named = [f"{each.name} ({filesizeformat(each.size_bytes)})" for each in artifacts]
        if self.tool.kind in ("write", "edit") and self.execution.exit_code == 0:
            named.insert(0, posixpath.normpath(self.tool.text))
        found = [visible(name) for name in named[:MOST_FILES]]
        more = self.execution.artifact_count - len(artifacts)
        return [*found, f"and {more} more"] if more > 0 else found

    @property
    def attempts(self) -> list[tuple[str, str, int]]:
        """Host, outcome and number of its attempts to reach a host, as far as they are listed."""
        network = network_of(self.execution)
        counted: dict[tuple[str, str], int] = {}
        for each in network["attempts"] if network else ():
            key = (visible(f"{each['host']}:{each['port']}"), each["outcome"])
            counted[key] = counted.get(key, 0) + 1
        return [(*key, number) for key, number in counted.items()][:MOST_HOSTS]

    @property
    def approval(self) -> SafeString | str:
        if not self._may_see_approval:
            return ""
        try:
            approval: Approval = self.execution.approval
        except Approval.DoesNotExist:
            return ""
        url = reverse("admin:executions_approval_change", args=[approval.pk])
        if approval.status == Approval.Status.WAITING:
            return format_html('<a href="{}">Pending approval</a>', url)
        return format_html(
            '<a href="{}">{}</a> by {}, {}',
            url,
            approval.get_status_display(),
            visible(approval.decided_by),
            shown_moment(approval.decided_at),
        )


class Transcript:
    """A page of a thread for one reader: links lead only to what may be seen."""

    def __init__(self, one: Execution, page: Page, user: Any) -> None:
        self._may = user.has_perm
        self.page = page
        self.totals: Totals = totals_of(one)
        self.tenant = one.tenant_slug
        self.name = visible(one.conversation or "")

    @property
    def calls(self) -> list[Call]:
        may_see = admin.site.is_registered(Approval) and self._may(VIEW_APPROVAL)
        return [Call(each, may_see_approval=may_see) for each in self.page.calls]

    @property
    def agents(self) -> str:
        return visible(", ".join(self.totals.agents))

    @property
    def models(self) -> str:
        return visible(", ".join(self.totals.models))

    @property
    def sessions(self) -> list[tuple[UUID, str]]:
        may_see = self._may(VIEW_SESSION)
        name = "admin:executions_session_change"
        return [(pk, reverse(name, args=[pk]) if may_see else "") for pk in self.totals.sessions]


class _Sifted(ListField):
    """Its keys are found by its index, and looked through without it: SQLite would take that of
    the column again for each piece of them."""

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(is_exactly(self.column, self.text)) if self.text else queryset


class LastAgentField(_Sifted, AgentField):
    title = "agent (of the last call)"


class ThreadConversationField(_Sifted, ConversationField):
    title = "thread"


class ThreadList(KeysetList):
    """Executions that are the latest of their thread, found among those that name one."""

    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        rows = super().get_queryset(request, exclude_parameters)
        latest = is_latest()
        self.conditions += [Condition(HAS_THREAD, "ordered"), Condition(latest)]
        if self.problems:
            return rows
        rows = self.root_queryset
        for field in cast("list[ListField]", self.filter_specs):
            rows = field.queryset(request, rows)
        return rows.filter(HAS_THREAD, latest).defer(*UNREAD, "meta")

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        sums = sums_of(self.result_list)
        for row in self.result_list:
            row.sum = sums[row.pk]

    @property
    def cut(self) -> str:
        if self.page.last is None:
            return ""
        way = "older" if self._descending else "newer"
        return f"{self.page.looked_at:,} calls searched; {way} ones not yet."


@admin.register(Thread)
class ThreadAdmin(ReadOnly, KeysetAdmin, _ModelAdmin):
    """Threads of agents, for who may see executions. The address of one is any of its calls."""

    list_display = (
        *("shown_thread", "shown_tenant", "shown_agent", "began", "last", "calls", "failed"),
        *("cost_of", "sessions"),
    )
    list_filter = (FromField, UntilField, TenantField, LastAgentField, ThreadConversationField)
    ordering = ("-id",)
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ("executions/record.css", "executions/run.css")}

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return bool(request.user.has_perm(VIEW_EXECUTION))

    def has_module_permission(self, request: HttpRequest) -> bool:
        return self.has_view_permission(request)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetList]:
        return ThreadList

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show a page of the transcript, from a call on, before one, or the last one."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        one = Execution.objects.filter(HAS_THREAD, pk=_id(object_id)).defer(*UNREAD).first()
        if request.method != "GET" or one is None:
            raise Http404
        if "last" in request.GET:
            page = page_before(one)
        elif "before" in request.GET:
            page = page_before(one, _id(request.GET["before"]))
        else:
            page = page_from(one, _id(request.GET["from"]) if "from" in request.GET else None)
        transcript = Transcript(one, page, request.user)
        context: dict[str, Any] = {
            **self.admin_site.each_context(request),
            "title": f"Thread {transcript.name}",
            "opts": self.opts,
            "original": transcript.name,
            "media": self.media,
            "transcript": transcript,
            "most_counted": MOST_COUNTED,
        }
        return TemplateResponse(request, "admin/executions/thread/transcript.html", context)

    @admin.display(description="thread")
    def shown_thread(self, thread: Thread) -> SafeString:
        return format_html('<span class="saved-name">{}</span>', visible(thread.conversation or ""))

    @admin.display(description="tenant")
    def shown_tenant(self, thread: Thread) -> str:
        return thread.tenant_slug

    @admin.display(description="agent")
    def shown_agent(self, thread: Thread) -> str | None:
        return visible(thread.agent) if thread.agent else None

    @admin.display(description="first call")
    def began(self, thread: Thread) -> SafeString | str:
        return shown_moment(_sum(thread).first)

    @admin.display(description="last call")
    def last(self, thread: Thread) -> SafeString | str:
        return shown_moment(thread.created_at)

    @admin.display(description="calls")
    def calls(self, thread: Thread) -> str:
        found = _sum(thread)
        return f"{found.calls:,}" if found.is_whole else f"{found.calls:,}+"

    @admin.display(description="failed")
    def failed(self, thread: Thread) -> str:
        return f"{_sum(thread).failed:,}"

    @admin.display(description="cost")
    def cost_of(self, thread: Thread) -> str | None:
        cost = _sum(thread).cost
        return None if cost is None else f"{cost:.4f}"

    @admin.display(description="sessions")
    def sessions(self, thread: Thread) -> str:
        return f"{_sum(thread).sessions:,}"


def _sum(thread: Thread) -> Sum:
    found: Sum = thread.sum  # type: ignore[attr-defined]
    return found


def _id(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError:
        raise Http404 from None
