"""The page of the playground."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

from django.contrib.admin import AdminSite
from django.core.exceptions import PermissionDenied
from django.core.files.uploadedfile import UploadedFile
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import redirect
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse

from executions.admin.execution_page import CANCEL
from executions.admin.executions import translate_errors
from executions.admin.sessions import OPERATE, transcript_of
from executions.capabilities.playground.service import (
    KEY,
    open_manual_session,
    run_in_playground,
    snippets_of,
)
from executions.doors.native.deferred import answer
from executions.kernel.coroutines import Coroutine
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.declarations import refuse
from executions.kernel.text import from_json
from executions.runs.models import Approval, Execution
from executions.runs.requests import API_ENTRYPOINTS, CELL, MAX_FILES_BYTES, RUN, ExecutionRequest
from executions.sessions.models import Session
from executions.sessions.queries import session_of
from executions.sessions.requests import OPEN, NoSuchSession, SessionRequest
from executions.tenants.models import ApiKey, Scope, Tenant
from executions.tenants.service import DEMO, INTERNAL
from providers.errors import SandboxError
from providers.hidden_characters import visible
from providers.languages import TABLE
from providers.models import ProviderConfig
from providers.values import InputFile

FIELDS = ("code", "tenant", "provider", "language", "context", "arguments", "entrypoint", "timeout")


@dataclass
class Typed:
    """The fields as texts, `session` the one to run in, and the files that came along."""

    code: str = ""
    tenant: str = INTERNAL
    provider: str = ""
    language: str = "python"
    context: str = ""
    arguments: str = ""
    entrypoint: str = "auto"
    timeout: str = ""
    session: UUID | None = None
    files: Sequence[UploadedFile[Any]] = ()

    @classmethod
    def from_form(cls, request: HttpRequest) -> Typed:
        """What a form brought."""
        texts = {name: request.POST.get(name, "") for name in FIELDS}
        for name in ("code", "arguments"):
            # Every form sends its lines with CRLF, whatever they ended with when they were typed.
            texts[name] = texts[name].replace("\r\n", "\n")
        return cls(
            **texts,
            session=id_in(request.POST.get("session", "")),
            files=request.FILES.getlist("files"),
        )

    @classmethod
    def again(cls, execution: Execution) -> Typed:
        """What a run was asked with, as far as its record has it."""
        return cls(
            code=execution.code,
            tenant=execution.tenant_slug,
            language=execution.language,
            arguments=execution.arguments,
            entrypoint=execution.entrypoint,
        )

    def request(self, **ours: Any) -> ExecutionRequest:
        """`ours` are fields that no form has. Raises InvalidConfiguration, which names the field
        at fault."""
        body: dict[str, Any] = {"code": self.code}
        if self.arguments.strip():
            body["arguments"] = _json(self.arguments)
        if self.timeout.strip():
            body["timeout"] = _number(self.timeout)
        files = self._files()
        if self.session is not None:
            body["context"] = self.context
            return CELL.read(body, session=self.session, files=files, **ours)
        body |= {"language": self.language, "entrypoint": self.entrypoint or "auto"}
        return RUN.read(body, provider=self.provider, files=files, **ours)

    def session_request(self, **ours: Any) -> SessionRequest:
        """A session to type cells for. Raises as `request`."""
        return OPEN.read({"language": self.language, "provider": self.provider}, **ours)

    def _files(self) -> list[InputFile]:
        if sum(file.size or 0 for file in self.files) > MAX_FILES_BYTES:
            # Before any of it is read into memory.
            refuse("files", f"Must be at most {MAX_FILES_BYTES} bytes together.")
        return [InputFile(path=file.name or "", content=file.read()) for file in self.files]


def id_in(text: str) -> UUID | None:
    """The id that a text is, None where it is none."""
    try:
        return UUID(text)
    except ValueError:
        return None


def _json(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        refuse("arguments", f"Must be JSON: {error}.")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        refuse("timeout", "Must be a number.")


USE = "executions.use_playground"
VIEW = "executions.view_execution"
VIEW_SESSION = "executions.view_session"
# What the page begins with: it runs as it stands, and shows an output and a result.
FIRST_PROGRAM = """\
def main():
    print("Hello from the sandbox")
    return [number**2 for number in range(1, 6)]
"""
# So many are offered; of more, one is typed.
MOST_TENANTS = 200

Work = Callable[[HttpRequest, Typed], Coroutine[HttpResponse]]


def may_use(user: Any) -> bool:
    """Who runs code also reads what becomes of it."""
    return bool(user.has_perm(USE) and user.has_perm(VIEW))


def may_use_sessions(user: Any) -> bool:
    """What runs in a session changes it for whoever else uses it."""
    return bool(may_use(user) and user.has_perm(OPERATE) and user.has_perm(VIEW_SESSION))


class Playground:
    """Its views. They read what was typed; services decide about it."""

    def __init__(self, site: AdminSite) -> None:
        self.site = site

    @property
    def urls(self) -> list[URLPattern]:
        views: dict[str, Callable[..., HttpResponseBase]] = {
            "run": self.run,
            "session": self.open_session,
            "snippets": self.snippets,
        }
        return [
            path("", self.site.admin_view(self.page), name="playground"),
            *(
                path(name, self.site.admin_view(view), name=f"playground-{name}")
                for name, view in views.items()
            ),
        ]

    def page(self, request: HttpRequest) -> HttpResponse:
        """With a first program, with the code of an execution, or for cells of a session."""
        _require_use(request)
        if request.method != "GET":
            raise Http404
        typed, note = Typed(code=FIRST_PROGRAM, tenant=request.GET.get("tenant", "")), ""
        if "execution" in request.GET:
            execution = _execution(request)
            typed, note = Typed.again(execution), _missing_parts(execution)
        if "session" in request.GET:
            typed.session = id_in(request.GET["session"])
            if typed.session is None:
                raise Http404
            typed.code = ""
        return self._render(request, typed, note=note)

    def run(self, request: HttpRequest) -> HttpResponseBase:
        """Queues it, and tells where it is followed."""
        return self._handle(request, self._run)

    def open_session(self, request: HttpRequest) -> HttpResponseBase:
        """Opens a session of the tenant, and returns to the playground in it."""
        return self._handle(request, self._open)

    def snippets(self, request: HttpRequest) -> HttpResponseBase:
        """The request that is typed, as a program that makes it."""
        return self._handle(request, self._snippets)

    async def _run(self, request: HttpRequest, typed: Typed) -> HttpResponse:
        execution = await run_in_playground(
            typed.request, typed.tenant, request.user, **_by(request)
        )
        page = reverse("admin:executions_execution_change", args=[execution.pk])
        if not _wants_json(request):
            return redirect(page)
        waits = Approval.objects.filter(execution=execution, status=Approval.Status.WAITING)
        cancel = reverse("admin:executions_cancel", args=[execution.pk])
        return JsonResponse(
            {
                "id": str(execution.pk),
                "page": page,
                "events": reverse("execution-events", args=[execution.pk]),
                "cancel": cancel if request.user.has_perm(CANCEL) else None,
                "waits_for_approval": waits.exists(),
            },
            status=202,
        )

    async def _open(self, request: HttpRequest, typed: Typed) -> HttpResponse:
        if not may_use_sessions(request.user):
            raise PermissionDenied
        session = await open_manual_session(
            typed.session_request, typed.tenant, request.user, **_by(request)
        )
        return redirect(f"{reverse('playground')}?session={session.pk}")

    async def _snippets(self, request: HttpRequest, typed: Typed) -> HttpResponse:
        wanted = typed.request()
        if wanted.session is None:
            address = reverse("executions")
        else:
            address = reverse("session-executions", args=[wanted.session])
        made = snippets_of(wanted, request.build_absolute_uri(address))
        if _wants_json(request):
            return JsonResponse({"snippets": made})
        return self._render(request, typed, snippets=made)

    def _handle(self, request: HttpRequest, work: Work) -> HttpResponseBase:
        _require_use(request)
        if request.method != "POST":
            raise Http404
        typed = Typed.from_form(request)
        if typed.session is None and request.POST.get("session"):
            # What is no session must not run outside of one.
            raise Http404
        if typed.session is not None and not may_use_sessions(request.user):
            raise PermissionDenied
        return answer(request, translate_errors(request, self._show_refusal(request, typed, work)))

    async def _show_refusal(self, request: HttpRequest, typed: Typed, work: Work) -> HttpResponse:
        """What is refused is told beside what was typed."""
        try:
            return await work(request, typed)
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            status, message = error.http_status, visible(error.message)
            field = (error.field or "").partition("[")[0]
            field = field if field in (*FIELDS, "files") else "form"
            if _wants_json(request):
                said = {"code": error.code, "message": message, "field": field}
                return JsonResponse({"error": said}, status=status)
            return self._render(
                request, typed, error=message, error_field=field, code=error.code, status=status
            )

    def _render(
        self, request: HttpRequest, typed: Typed, *, status: int = 200, **said: Any
    ) -> HttpResponse:
        session = _session(request, typed)
        active = Tenant.objects.filter(is_active=True).order_by("slug")
        slugs = list(active.values_list("slug", flat=True)[:MOST_TENANTS])
        if request.method == "GET" and not typed.tenant:
            typed.tenant = DEMO if DEMO in slugs else INTERNAL
        providers = ProviderConfig.objects.order_by("provider_id")
        context: dict[str, Any] = {
            **self.site.each_context(request),
            "title": "Playground",
            "typed": typed,
            "session": session,
            "session_name": visible(session.name) if session else "",
            "contexts": _contexts(session) if session else [],
            "transcript": transcript_of(str(session.pk), request.GET.get("page", ""))
            if session
            else None,
            "tenants": sorted({INTERNAL, *slugs}),
            "providers": list(providers.values_list("provider_id", flat=True)),
            "languages": [each.name for each in TABLE],
            "entrypoints": API_ENTRYPOINTS,
            "may_use_sessions": may_use_sessions(request.user),
            "transcript_at": f"{reverse('playground')}?session={typed.session}&",
            "key": KEY,
            **said,
        }
        page = render_to_string("admin/executions/playground.html", context, request=request)
        return HttpResponse(page, status=status, headers={"Cache-Control": "private, no-store"})


def _execution(request: HttpRequest) -> Execution:
    pk = id_in(request.GET["execution"])
    found = Execution.objects.defer("pending").filter(pk=pk).first() if pk else None
    if found is None:
        raise Http404
    return found


def _require_use(request: HttpRequest) -> None:
    if not may_use(request.user):
        raise PermissionDenied


def _session(request: HttpRequest, typed: Typed) -> Session | None:
    if typed.session is None:
        return None
    if not may_use_sessions(request.user):
        raise PermissionDenied
    try:
        return session_of(None, typed.session)
    except NoSuchSession:
        raise Http404 from None


def _contexts(session: Session) -> list[tuple[str, str, str]]:
    """Id, language, and both to be read, of each."""
    return [
        (each["id"], each["language"], visible(f"{each['id']} ({each['language']})"))
        for each in session.contexts
    ]


def _missing_parts(execution: Execution) -> str:
    missing = []
    if not execution.code:
        missing.append("its code")
    if execution.input_files:
        missing.append("its files")
    return f"Not stored for that run: {' and '.join(missing)}." if missing else ""


def _wants_json(request: HttpRequest) -> bool:
    return request.headers.get("Accept", "") == "application/json"


def _by(request: HttpRequest) -> dict[str, str]:
    address = request.META.get("REMOTE_ADDR", "")[:64]
    return {"address": address, "request_id": uuid4().hex}


def example_call(request: HttpRequest, api_key: ApiKey, key_text: str) -> str:
    """What this key may do: run a program, or else look; "" for one that opens nothing.

    To the host that this page was asked of, whose name Django has checked.
    """
    path, body = _example_request(api_key)
    if not path:
        return ""
    words = ["curl", "-sS", request.build_absolute_uri(path), "-H", f"X-API-Key: {key_text}"]
    if body:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    return shlex.join(words)


def _example_request(api_key: ApiKey) -> tuple[str, dict[str, str]]:
    """The path, and the body of what is to be run."""
    programs = {known.name: known.probe for known in TABLE if known.probe}
    language = next((name for name in programs if api_key.allows("languages", name)), "")
    if api_key.has_scope(Scope.EXECUTE) and language:
        return reverse("executions"), {"language": language, "code": programs[language]}
    if api_key.has_scope(Scope.READ):
        return reverse("executions"), {}
    if api_key.has_scope(Scope.ADMIN):
        return reverse("admin-providers"), {}
    return (reverse("languages") if api_key.scopes else ""), {}
