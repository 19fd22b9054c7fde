"""Views beneath a session's page: its sandbox now, its files, and what is done to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.urls import URLPattern, path

from executions.admin.bases import SessionModelAdmin
from executions.admin.details import told
from executions.admin.entries import link_to, named_in, shown_entry
from executions.doors.native.deferred import answer
from executions.kernel.audit import current_actor
from executions.kernel.coroutines import Waits
from executions.kernel.database import DatabaseAway
from executions.sessions.control import resetting
from executions.sessions.ending import close
from executions.sessions.inspection import inspecting, looking_into
from executions.sessions.lifecycle import extend
from executions.sessions.models import Session
from executions.sessions.queries import living_session_of, session_of
from executions.sessions.requests import NoSuchSession
from providers.errors import SandboxError
from providers.hidden_characters import visible

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

    def _now(self, request: HttpRequest, session: Session) -> Waits[dict[str, Any]]:
        living = living_session_of(None, session.pk)
        found = yield from inspecting(living)
        return {
            "title": "Live state",
            "state": found,
            "contexts": [[visible(text) for text in each] for each in found.contexts],
            "processes": [
                (each.pid, visible(each.command), visible(each.cwd), each.exit_code)
                for each in found.processes
            ],
        }

    def _files(self, request: HttpRequest, session: Session) -> Waits[dict[str, Any]]:
        living = living_session_of(None, session.pk)
        folder, after = named_in(request), request.GET.get("after", "")
        entries, following = yield from looking_into(living, folder, after)
        return {
            "title": "Live files",
            "folder": visible(folder),
            "above": link_to(folder.rpartition("/")[0]) if folder else "",
            "entries": [shown_entry(entry) for entry in entries],
            "following": link_to(folder, following) if following else "",
        }

    def _close(self, request: HttpRequest, session: Session) -> Waits[None]:
        if session.closed_at is None:
            yield from close(session, current_actor())
            self.model_admin.log_change(request, session, "Closed.")

    def _reset(self, request: HttpRequest, session: Session) -> Waits[None]:
        yield from resetting(living_session_of(None, session.pk), current_actor())
        self.model_admin.log_change(request, session, "Reset.")

    def _extend(self, request: HttpRequest, session: Session) -> Waits[None]:
        minutes = request.POST.get("minutes", "")
        seconds = int(minutes) * 60 if minutes.isascii() and minutes.isdigit() else 0
        extend(living_session_of(None, session.pk), seconds, current_actor())
        self.model_admin.log_change(request, session, f"Extended by {seconds} s from now.")
        yield from ()

    def _answer(
        self,
        request: HttpRequest,
        session_id: UUID,
        work: Callable[[HttpRequest, Session], Waits[dict[str, Any] | None]],
    ) -> HttpResponseBase:
        try:
            session = session_of(None, session_id)
        except NoSuchSession:
            raise Http404 from None
        return answer(request, told(request, self._rendered(request, session, work)))

    def _rendered(
        self,
        request: HttpRequest,
        session: Session,
        work: Callable[[HttpRequest, Session], Waits[dict[str, Any] | None]],
    ) -> Waits[HttpResponse]:
        """What the work found, as a page; where it was done, the way back to the session's."""
        context: dict[str, Any] = {
            **self.model_admin.admin_site.each_context(request),
            "opts": self.model_admin.opts,
            "original": session,
            "session": session,
        }
        status = 200
        try:
            found = yield from work(request, session)
        except DatabaseAway:
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
