"""The pages of sessions, and the transcript of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.core.paginator import Page, Paginator
from django.db.models import Case, F, QuerySet, TextField, Value, When
from django.db.models.functions import Length
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timesince import timesince

from executions.admin.display import code_block, outputs_block, text_block
from executions.admin.executions import (
    FromField,
    SessionConversationField,
    SessionKeyField,
    SessionProviderField,
    SessionStateField,
    SessionTenantField,
    UntilField,
    translate_errors,
)
from executions.admin.files import SavedFiles
from executions.admin.frame import (
    VIEW_EXECUTION,
    SessionModelAdmin,
    link_to,
    named_in,
    shown_entry,
)
from executions.admin.tool_calls import tool_call_of
from executions.capabilities.threads.service import threads_of_session
from executions.doors.native.deferred import answer
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Coroutine
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.presentation import PageTime, shown
from executions.kernel.text import to_json
from executions.runs.models import Execution
from executions.runs.results import MOST_VALUES, values_in
from executions.sessions.control import extend, reset
from executions.sessions.ending import close
from executions.sessions.files import inspect, inspect_folder
from executions.sessions.models import Session, Workspace
from executions.sessions.queries import expires_at, living_session_of, session_of
from executions.sessions.requests import NoSuchSession
from providers.admin_lists import KeysetAdmin, KeysetList
from providers.admin_pages import ReadOnly
from providers.errors import SandboxError
from providers.hidden_characters import visible
from providers.timestamps import shown_moment

OPERATE = "executions.operate_session"


class SessionViews:
    """The views of one admin class. To look takes the right to view, to act its own."""

    def __init__(self, model_admin: SessionModelAdmin) -> None:
        self.model_admin = model_admin

    @property
    def urls(self) -> list[URLPattern]:
        wrap = self.model_admin.admin_site.admin_view
        views: dict[str, Callable[..., HttpResponseBase]] = {
            "now": self.now,
            "files": self.files,
            "close": self.close,
            "reset": self.reset,
            "extend": self.extend,
        }
        return [
            path(f"<uuid:session_id>/{name}", wrap(view), name=f"executions_session_{name}")
            for name, view in views.items()
        ]

    def now(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """What its sandbox says of itself, which it is asked for this page."""
        self._may_view(request)
        return self._answer(request, session_id, self._now)

    def files(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """What is in one of its folders, which its sandbox is asked for this page."""
        self._may_view(request)
        return self._answer(request, session_id, self._files)

    def close(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """Ends it, and all that runs in it."""
        self._may_operate(request)
        return self._answer(request, session_id, self._close)

    def reset(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """Ends its processes and contexts. Files stay."""
        self._may_operate(request)
        return self._answer(request, session_id, self._reset)

    def extend(self, request: HttpRequest, session_id: UUID) -> HttpResponseBase:
        """Has it live for so many minutes from now."""
        self._may_operate(request)
        return self._answer(request, session_id, self._extend)

    async def _now(self, request: HttpRequest, session: Session) -> dict[str, Any]:
        living = living_session_of(None, session.pk)
        found = await inspect(living)
        return {
            "title": "Live state",
            "state": found,
            "contexts": [[visible(text) for text in each] for each in found.contexts],
            "processes": [
                (each.pid, visible(each.command), visible(each.cwd), each.exit_code)
                for each in found.processes
            ],
        }

    async def _files(self, request: HttpRequest, session: Session) -> dict[str, Any]:
        living = living_session_of(None, session.pk)
        folder, after = named_in(request), request.GET.get("after", "")
        entries, following = await inspect_folder(living, folder, after)
        return {
            "title": "Live files",
            "folder": visible(folder),
            "above": link_to(folder.rpartition("/")[0]) if folder else "",
            "entries": [shown_entry(entry) for entry in entries],
            "following": link_to(folder, following) if following else "",
        }

    async def _close(self, request: HttpRequest, session: Session) -> None:
        if session.closed_at is None:
            await close(session, current_actor())
            self.model_admin.log_change(request, session, "Closed.")

    async def _reset(self, request: HttpRequest, session: Session) -> None:
        await reset(living_session_of(None, session.pk), current_actor())
        self.model_admin.log_change(request, session, "Reset.")

    async def _extend(self, request: HttpRequest, session: Session) -> None:
        minutes = request.POST.get("minutes", "")
        seconds = int(minutes) * 60 if minutes.isascii() and minutes.isdigit() else 0
        extend(living_session_of(None, session.pk), seconds, current_actor())
        self.model_admin.log_change(request, session, f"Extended by {seconds} s from now.")

    def _answer(
        self,
        request: HttpRequest,
        session_id: UUID,
        work: Callable[[HttpRequest, Session], Coroutine[dict[str, Any] | None]],
    ) -> HttpResponseBase:
        try:
            session = session_of(None, session_id)
        except NoSuchSession:
            raise Http404 from None
        return answer(request, translate_errors(request, self._rendered(request, session, work)))

    async def _rendered(
        self,
        request: HttpRequest,
        session: Session,
        work: Callable[[HttpRequest, Session], Coroutine[dict[str, Any] | None]],
    ) -> HttpResponse:
        """What the work found, as a page; where it was done, the way back to the session's."""
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "opts": self.model_admin.opts,
            "original": session,
            "session": session,
        }
        status = 200
        try:
            found = await work(request, session)
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            # Not a message: one that comes after waiting comes too late to be stored.
            status = error.http_status
            found = {"title": "Request failed", "error": f"{error.code}: {visible(error.message)}"}
        if found is None:
            return redirect("admin:executions_session_change", session.pk)
        page = render_to_string(
            "admin/executions/session/now.html", {**context, **found}, request=request
        )
        return HttpResponse(page, status=status, headers={"Cache-Control": "private, no-store"})

    def _may_view(self, request: HttpRequest) -> None:
        if not self.model_admin.has_view_permission(request):
            raise PermissionDenied
        if request.method != "GET":
            raise Http404

    def _may_operate(self, request: HttpRequest) -> None:
        if not (request.user.has_perm(OPERATE) and self.model_admin.has_view_permission(request)):
            raise PermissionDenied
        if request.method != "POST":
            raise Http404


CELLS_PER_PAGE = 20
# Of each text of a cell; the execution's own page shows more.
MOST_CHARACTERS = 8_000
# Plots are kept within their execution, and decoded to be shown.
MOST_OUTPUT_CHARACTERS = 2_000_000

_UNSHOWN = ("pending", "arguments", "result", "meta", "hops", "input_files", "output_order")


@dataclass(frozen=True)
class Transcript:
    page: Page[Any]
    pages: list[int | str]

    def cells(self) -> Iterator[Cell]:
        time, left = PageTime(), MOST_VALUES
        for execution in self.page:
            values = values_in(execution.small_outputs)
            yield Cell(execution, time, has_room=values <= left)
            left -= values if values <= left else 0


class Cell:
    """One execution as a part of the page. All of it is hostile, and drawn by `display`."""

    def __init__(self, execution: Any, page: PageTime, *, has_room: bool) -> None:
        self._page = page
        self.execution: Execution = execution
        is_large = execution.outputs_size > MOST_OUTPUT_CHARACTERS
        self.has_large_outputs: bool = is_large or not has_room
        execution.outputs = execution.small_outputs if has_room else ""

    @property
    def kind(self) -> str:
        """What it was, with what a tool was given."""
        execution = self.execution
        tool = tool_call_of(execution, execution.code)
        if tool.text:
            return f"{tool.kind} {tool.text}"
        if execution.context:
            return visible(execution.context)
        return "background command" if execution.background else "command"

    @property
    def badge(self) -> str:
        if self.execution.status == Execution.Status.SUCCEEDED:
            return "good"
        return "warn" if self.execution.is_open else "bad"

    @property
    def code(self) -> SafeString | str:
        return code_block(self.execution, self._page, MOST_CHARACTERS)

    @property
    def stdout(self) -> SafeString | str:
        return self._text("stdout", self.execution.stdout_truncated)

    @property
    def stderr(self) -> SafeString | str:
        return self._text("stderr", self.execution.stderr_truncated)

    @property
    def outputs(self) -> SafeString | str:
        return outputs_block(self.execution, MOST_CHARACTERS)

    @property
    def error(self) -> str:
        execution = self.execution
        return visible(" ".join(filter(None, (execution.error_code, execution.error_message))))

    def _text(self, name: str, truncated: bool) -> SafeString | str:
        return text_block(self.execution, name, truncated=truncated, most=MOST_CHARACTERS)


def transcript_of(session_id: str, number: str) -> Transcript | None:
    """A page of it, the last one unless a `number` is given; None for what is no session's id."""
    if (pk := _id(session_id)) is None:
        return None
    rows = (
        Execution.objects.filter(session=pk)
        .defer(*_UNSHOWN, "outputs")
        .annotate(outputs_size=Length("outputs"))
        .annotate(
            small_outputs=Case(
                When(outputs_size__lte=MOST_OUTPUT_CHARACTERS, then=F("outputs")),
                default=Value(""),
                output_field=TextField(),
            )
        )
        .order_by("turn", "id")
    )
    paginator = Paginator(rows, CELLS_PER_PAGE)
    page = paginator.get_page(number or paginator.num_pages)
    return Transcript(page, list(paginator.get_elided_page_range(page.number)))


def _id(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None


_BADGES = {Session.State.OPEN: "good", Session.State.ASLEEP: "warn", Session.State.LOST: "bad"}


class SessionList(KeysetList):
    def get_queryset(
        self, request: HttpRequest, exclude_parameters: list[str | None] | None = None
    ) -> QuerySet[Any]:
        return super().get_queryset(request, exclude_parameters).defer("metadata", "contexts")


@admin.register(Session)
class SessionAdmin(ReadOnly, KeysetAdmin, SessionModelAdmin):
    """Sandboxes that stay, and what was done in them. They are acted on through services alone."""

    list_display = (
        *("short_id", "shown_created", "shown_state", "shown_tenant", "where", "last_use"),
        "owner",
    )
    list_filter = (
        *(FromField, UntilField, SessionStateField, SessionTenantField, SessionProviderField),
        *(SessionKeyField, SessionConversationField),
    )
    ordering = ("-id",)
    show_facets = admin.ShowFacets.NEVER
    fieldsets = (
        (
            None,
            {
                "fields": (
                    *("id", "shown_name", "shown_state", "shown_end", "age", "last_use"),
                    *("shown_expiry", "idle_seconds", "max_seconds", "turns", "shown_contexts"),
                )
            },
        ),
        ("Owner", {"fields": ("shown_tenant", "owner", "shown_metadata")}),
        (
            "Sandbox",
            {
                "fields": (
                    *("provider", "config_version", "runtime", "isolation", "sharing"),
                    *("language", "template", "created_at", "used_at", "closed_at", "released_at"),
                )
            },
        ),
    )

    class Media:
        css = {"all": ("executions/record.css",)}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Session]:
        return super().get_queryset(request).defer("env", "ref")

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[KeysetList]:
        return SessionList

    def get_urls(self) -> list[URLPattern]:
        saved = SavedFiles(self, lambda pk: Workspace.objects.filter(session=pk).first())
        return [*SessionViews(self).urls, *saved.urls, *super().get_urls()]

    def change_view(
        self,
        request: HttpRequest,
        object_id: str,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        context: dict[str, Any] = {"may_operate": request.user.has_perm(OPERATE)}
        if self.has_view_permission(request):
            if request.user.has_perm(VIEW_EXECUTION) and (pk := _id(object_id)):
                context["threads"] = [(visible(n), at) for n, at in threads_of_session(pk)]
            context["transcript"] = transcript_of(object_id, request.GET.get("page", ""))
        return super().change_view(
            request, object_id, form_url, {**(extra_context or {}), **context}
        )

    @admin.display(description="id")
    def short_id(self, session: Session) -> SafeString:
        """With the name that it was given, if any."""
        name = format_html(' <span class="remark">{}</span>', visible(session.name))
        return format_html(
            '<span class="one-line">{}</span>{}', session.pk, name if session.name else ""
        )

    @admin.display(description="status")
    def shown_state(self, session: Session) -> SafeString:
        kind = _BADGES.get(Session.State(session.state), "quiet")
        return format_html(
            '<span class="badge badge-{}">{}</span>', kind, session.get_state_display()
        )

    @admin.display(description="name")
    def shown_name(self, session: Session) -> str:
        return visible(session.name)

    @admin.display(description="provider")
    def where(self, session: Session) -> str:
        return " ".join(filter(None, (session.provider, visible(session.runtime))))

    @admin.display(description="age")
    def age(self, session: Session) -> str:
        return timesince(session.created_at, session.closed_at or timezone.now(), depth=1)

    @admin.display(description="last use")
    def last_use(self, session: Session) -> SafeString | str:
        return shown_moment(session.used_at)

    @admin.display(description="tenant")
    def shown_tenant(self, session: Session) -> str:
        return session.tenant_slug

    @admin.display(description="created")
    def shown_created(self, session: Session) -> SafeString | str:
        return shown_moment(session.created_at)

    @admin.display(description="owner")
    def owner(self, session: Session) -> str:
        key = " ".join(filter(None, (session.api_key_name, session.api_key_prefix)))
        for_whom = f"for {session.subject}" if session.subject else ""
        return visible(" ".join(filter(None, (key, for_whom))))

    @admin.display(description="ends")
    def shown_expiry(self, session: Session) -> SafeString | str:
        if session.closed_at is not None:
            return "Ended."
        return format_html("{} (if not used)", shown_moment(expires_at(session)))

    @admin.display(description="end reason")
    def shown_end(self, session: Session) -> str:
        return visible(session.closed_because)

    @admin.display(description="contexts")
    def shown_contexts(self, session: Session) -> SafeString | str:
        return (
            format_html_join(
                "",
                "<div>{}: {}{}</div>",
                (
                    (
                        visible(c["id"]),
                        visible(c["language"]),
                        visible(c["cwd"] and f" in {c['cwd']}"),
                    )
                    for c in session.contexts
                ),
            )
            or "-"
        )

    @admin.display(description="metadata")
    def shown_metadata(self, session: Session) -> SafeString | str:
        if not session.metadata:
            return "-"
        return format_html('<pre class="record">{}</pre>', shown(to_json(session.metadata)).text)
