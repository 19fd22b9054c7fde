"""The API of Agent Sandbox, below /v1, over sessions: a translation, which holds no rule."""

from __future__ import annotations

import math
import mimetypes
import re
from collections.abc import Callable, Mapping, Sequence
from tempfile import TemporaryFile
from typing import IO, Annotated, Any, NotRequired, TypedDict, cast

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_GET
from drf_spectacular.utils import OpenApiResponse
from pydantic import Field
from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.parsers import MultiPartParser
from rest_framework.request import Request

from executions.capabilities import conversations as agent_sandbox
from executions.capabilities.conversations import DEFAULT, Conversation, Saved, path_of
from executions.capabilities.fetching.filenames import clean_name
from executions.doors.native.frame import (
    CLAIMS,
    RunningView,
    claims_of,
    deferred,
    keep_outcome,
    render_error,
    to_database_error,
)
from executions.doors.native.rendering import json_response
from executions.doors.native.schema import endpoint
from executions.kernel.bodies import LARGE, Uri
from executions.kernel.database import DatabaseUnavailable
from executions.kernel.declarations import (
    PATH_PART,
    WHOLE,
    Body,
    Code,
    Members,
    Query,
    Rule,
    check_storable,
    declared,
    refuse,
)
from executions.kernel.storage import MOST_LINK_SECONDS
from executions.kernel.text import MOST_FOLDERS, MOST_PATH_BYTES, storable
from executions.runs.advice import advice_of
from executions.runs.models import Execution
from executions.runs.results import bundles_of
from executions.runs.service import execute
from executions.sessions.control import reset
from executions.sessions.ending import close
from executions.sessions.models import Blob, Session
from executions.sessions.storage.browse import Wanted, links_to
from executions.tenants.models import Tenant
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.guest.display import TEXT_LIMIT
from providers.runtime.guest.names import escape

MAX_URLS, MAX_INPUTS = 200, 1000
_LONGEST_ID, _LONGEST_URL = 4096, 8192

UserId = Annotated[
    str, Field(min_length=1, max_length=_LONGEST_ID, description="The user's id: any text.")
]
SessionId = Annotated[
    str, Field(max_length=_LONGEST_ID, description="The conversation's id: any text.")
]
Seconds = Annotated[
    int,
    Field(ge=1, le=MOST_LINK_SECONDS, description="How long links are valid, in seconds."),
    WHOLE,
]


def _path_rule(pattern: str) -> Rule:
    """A path, which `conversations.path_of` reads and refuses."""
    return Rule(check_storable, {"pattern": pattern})


_PATH = rf"(\./)?{PATH_PART}(/{PATH_PART}){{0,{MOST_FOLDERS - 1}}}"
SavedPath = Annotated[
    str, Field(min_length=1, max_length=MOST_PATH_BYTES), _path_rule(f"^{_PATH}$")
]
# That API's own examples name them from the root, which is their folder.
InputPath = Annotated[
    str, Field(min_length=1, max_length=MOST_PATH_BYTES), _path_rule(f"^/*{_PATH}$")
]
NewPath = Annotated[str, Field(max_length=MOST_PATH_BYTES), _path_rule(f"^({_PATH})?$")]
Folder = Annotated[str, Field(max_length=MOST_PATH_BYTES), _path_rule(f"^({_PATH}/*)?$")]


def seconds_of(expires_in: int | None) -> int:
    """How long a link is to last."""
    return int(settings.PRESIGN_EXPIRES_SECONDS) if expires_in is None else expires_in


class _Named:
    user_id: str
    session_id: str

    @property
    def conversation(self) -> Conversation:
        return Conversation(self.user_id, self.session_id)


@declared
class ConversationRequest(_Named):
    """Something about a whole conversation."""

    user_id: UserId
    session_id: SessionId = DEFAULT


@declared
class ExecuteRequest(_Named):
    """Code to be run, and saved files that it needs."""

    user_id: UserId
    code: Code
    session_id: SessionId = DEFAULT
    inputs: Annotated[
        Sequence[InputPath],
        Members(MAX_INPUTS),
        Field(description="Saved files of the conversation that the code needs."),
    ] = ()
    presign_expires_in: Seconds | None = None


@declared
class FetchRequest(_Named):
    """Files to be fetched by URL into a folder."""

    user_id: UserId
    urls: Annotated[
        Sequence[Annotated[str, Field(min_length=1, max_length=_LONGEST_URL)]],
        Members(MAX_URLS, least=1),
    ]
    session_id: SessionId = DEFAULT
    dest_dir: Folder = ""
    presign_expires_in: Seconds | None = None


@declared
class LinkRequest(_Named):
    """A link to one file."""

    user_id: UserId
    path: SavedPath
    session_id: SessionId = DEFAULT
    expires_in: Seconds | None = None


@declared
class UploadRequest(_Named):
    """Where an uploaded file goes: beside the file itself, in a form."""

    user_id: UserId
    session_id: SessionId = DEFAULT
    path: Annotated[NewPath, Field(description="Default: the file's own name.")] = ""
    presign_expires_in: Seconds | None = None


EXECUTE = Body(ExecuteRequest, "AgentSandboxRequest")
CONVERSATION = Body(ConversationRequest, "AgentSandboxConversation")
FETCH = Body(FetchRequest, "AgentSandboxUrls")
OF_CONVERSATION: Query[Any] = Query(ConversationRequest)
LINK: Query[Any] = Query(LinkRequest)


ContainerId = Annotated[str, "The session's id."]


class DetailShape(TypedDict):
    detail: str


class AgentSandboxArtifactShape(TypedDict):
    path: str
    size_bytes: int
    mime_type: str
    download_url: Uri


class AgentSandboxAnswerShape(TypedDict):
    """Either `output` and `artifacts`, or only `error`."""

    output: NotRequired[str]
    artifacts: NotRequired[list[AgentSandboxArtifactShape]]
    error: NotRequired[str]


class AgentSandboxAwayShape(DetailShape):
    error: str
    ran: bool | None
    id: str | None


class AgentSandboxStatusShape(TypedDict):
    status: Annotated[str, "success or error"]
    output: NotRequired[str]
    container_id: NotRequired[ContainerId]
    message: NotRequired[str]


class AgentSandboxUploadShape(AgentSandboxArtifactShape):
    status: str
    container_id: ContainerId


class AgentSandboxNotFetchedShape(TypedDict):
    source_url: str
    error: str


class AgentSandboxFetchedShape(TypedDict):
    status: Annotated[str, "success, partial_success or error"]
    uploaded: list[str]
    errors: list[AgentSandboxNotFetchedShape]
    error: NotRequired[Annotated[str, "Why no file could be fetched, if the service failed."]]


class AgentSandboxFileShape(TypedDict):
    path: str
    size_bytes: int
    mtime: Annotated[int, "Seconds since 1970, by the sandbox's clock."]


class AgentSandboxFilesShape(TypedDict):
    files: list[AgentSandboxFileShape]


class AgentSandboxLinkShape(TypedDict):
    status: str
    path: str
    expires_in: int
    download_url: Uri


class AgentSandboxView(RunningView):
    """An endpoint of Agent Sandbox."""

    tag = "Agent Sandbox"
    error_shape = DetailShape

    def get_exception_handler(self) -> Callable[..., HttpResponse]:
        return _render_error


def error_answer(
    error: SandboxError, body: AgentSandboxAnswerShape | AgentSandboxFetchedShape
) -> HttpResponse:
    """Answer with the body and the error in it. A failure of the service is a 200 there."""
    body["error"] = f"{error.code}: {error.message}"
    answer = json_response(body)
    if error.retry_after is not None:
        answer["Retry-After"] = str(max(1, math.ceil(error.retry_after)))
    return answer


def file_details(
    request: Request, tenant: Tenant, found: Sequence[Saved], expires_in: int
) -> list[AgentSandboxArtifactShape]:
    """Saved files, each with a link to it for whoever has the link, without what is gone."""
    wanted = [_link_target(saved) for saved in found]
    urls = links_to(tenant, wanted, expires_in=expires_in, absolute=request.build_absolute_uri)
    return [
        {
            "path": escape(saved.path),
            "size_bytes": saved.row.size,
            "mime_type": to.mime_type,
            "download_url": url,
        }
        for saved, to, url in zip(found, wanted, urls, strict=True)
        if url is not None
    ]


def _link_target(saved: Saved) -> Wanted:
    name = saved.path.rpartition("/")[2]
    return Wanted(
        cast("Blob", saved.row.blob),
        escape(name),
        mimetypes.guess_type(name)[0] or "application/octet-stream",
    )


def _render_error(exc: Exception, context: Mapping[str, Any]) -> HttpResponse:
    response = render_error(exc, context)
    exc = to_database_error(exc)
    if isinstance(exc, DatabaseUnavailable):
        return _away(exc, response)
    if isinstance(exc, (AuthenticationFailed, NotAuthenticated)):
        detail = "Invalid API key"
    elif isinstance(exc, SandboxError):
        detail = exc.message
    else:
        detail = str(exc.detail) if isinstance(exc, APIException) else "The request failed."
    answer = json_response(DetailShape(detail=detail), response.status_code)
    for name in ("WWW-Authenticate", "Allow", "Retry-After"):
        if name in response:
            answer[name] = response[name]
    return answer


def _away(away: DatabaseUnavailable, response: HttpResponse) -> HttpResponse:
    """Not a 200 as other failures: a proxy and a client's own retries are to see it."""
    record_id = str(away.record_id) if away.record_id else None
    body: AgentSandboxAwayShape = {
        "detail": away.message,
        "error": f"{away.code}: {away.message}",
        "ran": away.ran,
        "id": record_id,
    }
    answer = json_response(body, response.status_code)
    answer["Retry-After"] = response["Retry-After"]
    if record_id:
        answer["X-Execution-ID"] = record_id
    return answer


class ResetView(AgentSandboxView):
    @endpoint("agent_sandbox_reset", request=CONVERSATION, answers={200: AgentSandboxStatusShape})
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """Reset a conversation: delete its variables, keep its files."""
        conversation = CONVERSATION.read(request.data).conversation
        try:
            session = await agent_sandbox.ensure_session(self.caller(), conversation)
            await reset(session, f"key:{self.api_key.prefix}")
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            message = f"{error.code}: {error.message}"
            return json_response(AgentSandboxStatusShape(status="error", message=message))
        done: AgentSandboxStatusShape = {
            "status": "success",
            "output": "Kernel reset.\n",
            "container_id": str(session.pk),
        }
        return json_response(done)


class StopView(AgentSandboxView):
    @endpoint("agent_sandbox_stop", request=CONVERSATION, answers={200: AgentSandboxStatusShape})
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """End a conversation's sandbox.

        Its files are deleted too, unless DELETE_S3_ON_CLEANUP=0 keeps them for the next sandbox.
        """
        conversation = CONVERSATION.read(request.data).conversation
        session = agent_sandbox.find(self.api_key.tenant, conversation)
        if session is not None:
            await close(session, f"key:{self.api_key.prefix}")
        return json_response(AgentSandboxStatusShape(status="success"))


@require_GET
def health(request: HttpRequest) -> HttpResponse:
    return json_response({"status": "ok"})


_FIGURE = re.compile(r"<Figure size \S+ with \d+ Axes>")


class ExecuteView(AgentSandboxView):
    bounds = LARGE

    @endpoint(
        "agent_sandbox_execute",
        parameters=(CLAIMS,),
        request=EXECUTE,
        answers={
            200: AgentSandboxAnswerShape,
            503: OpenApiResponse(AgentSandboxAwayShape, "Nothing can be recorded now."),
        },
    )
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """Run Python code in a conversation, in the format of Agent Sandbox.

        Variables and files are kept for the next call. The value of the last expression is printed.
        If the service fails, the answer is a 200 with `error`, as Agent Sandbox answers. The header
        `X-Execution-ID` has the id of the execution; `GET /api/v1/executions/{id}` returns its
        receipt.
        """
        wanted: ExecuteRequest = EXECUTE.read(request.data)
        # That API's own examples name them from the root, which is their folder.
        inputs = [path_of("inputs", each.lstrip("/")) for each in wanted.inputs]
        claims = claims_of(request)
        caller = self.caller()
        try:
            session = await agent_sandbox.ensure_session(caller, wanted.conversation)
            if away := agent_sandbox.filter_missing(session, inputs):
                problem = f"inputs: There is no file {storable(away[0])!r}."
                return json_response(AgentSandboxAnswerShape(error=problem))
            cell = agent_sandbox.cell(session, wanted.code, **claims)
            outcome = await execute(cell, caller)
        except DatabaseUnavailable:
            raise
        except SandboxError as error:
            return error_answer(error, {})
        execution = outcome.execution
        with keep_outcome(outcome):
            response = json_response(self._body(request, execution, wanted))
        response["X-Execution-ID"] = str(execution.pk)
        return response

    def _body(
        self, request: Request, execution: Execution, wanted: ExecuteRequest
    ) -> AgentSandboxAnswerShape:
        if execution.status == Execution.Status.ERROR:
            return {"error": f"{execution.error_code}: {execution.error_message}"}
        expires_in = seconds_of(wanted.presign_expires_in)
        return {
            "output": _output(execution),
            "artifacts": file_details(
                request, self.api_key.tenant, agent_sandbox.files_of_run(execution), expires_in
            ),
        }


def _output(execution: Execution) -> str:
    """What was printed, the value of the last expression, and what went wrong, in this order."""
    output = execution.stdout
    values = _values(execution)
    for value in values:
        output = _line(output, value)
    output += execution.stderr
    encoded = output.encode()
    most = settings.AGENT_SANDBOX.output_bytes
    is_cut = (
        execution.stdout_truncated
        or execution.stderr_truncated
        or len(encoded) > most
        or any(len(value) >= TEXT_LIMIT for value in values)
        or bool(execution.meta.get("outputs_skipped"))
    )
    if is_cut:
        output = _line(encoded[:most].decode("utf-8", "ignore"), "[output truncated]")
    if execution.error_code:
        output = _line(output, f"{execution.error_code}: {execution.error_message}")
    for line in advice_of(execution):
        output = _line(output, f"Advice: {line}")
    if execution.files_saved is False:
        output = _line(output, "[files not saved: the session says why]")
    return output


def _values(execution: Execution) -> list[str]:
    """What was shown, as text. A figure is none: there, drawing one prints nothing."""
    outputs = bundles_of(execution)
    texts = [each["text/plain"] for each in outputs if isinstance(each.get("text/plain"), str)]
    return [text for text in texts if not _FIGURE.fullmatch(text)]


def _line(output: str, line: str) -> str:
    separator = "" if not output or output.endswith("\n") else "\n"
    return f"{output}{separator}{line}\n"


# The fields of a form are texts, as those of a query are.
UPLOAD: Query[Any] = Query(UploadRequest)


class _FilesView(AgentSandboxView):
    def detail_of(
        self, request: Request, session: Session | None, path: str, expires_in: int | None
    ) -> AgentSandboxArtifactShape | None:
        """A file of the conversation, if it is saved."""
        saved = agent_sandbox.file(session, path) if session is not None else None
        found = [saved] if saved is not None else []
        details = file_details(request, self.api_key.tenant, found, seconds_of(expires_in))
        return details[0] if details else None


class UploadView(_FilesView):
    parser_classes: Any = (MultiPartParser,)

    @endpoint(
        "agent_sandbox_upload",
        request={
            "multipart/form-data": {
                "type": "object",
                "properties": {
                    **UPLOAD.schema()["properties"],
                    "file": {"type": "string", "format": "binary"},
                },
                "required": ["user_id", "file"],
                "additionalProperties": False,
            }
        },
        answers={200: AgentSandboxUploadShape},
    )
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """Upload a file to a conversation."""
        form: Any = request.data
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        wanted = UPLOAD.read(fields)
        sent = request.FILES.get("file")
        if not isinstance(sent, UploadedFile) or len(request.FILES) != 1:
            refuse("file", "Send one file under this name.")
        path = path_of("path", wanted.path or clean_name(sent.name or ""))
        agent_sandbox.ensure_upload_size(sent.size or 0)
        with _copy(sent) as content:
            session = await agent_sandbox.ensure_session(self.caller(), wanted.conversation)
            await agent_sandbox.put_file(session, path, content)
        detail = self.detail_of(request, session, path, wanted.presign_expires_in)
        if detail is None:
            return json_response(
                DetailShape(
                    detail="The file is in the sandbox, but it could not be saved. Try again."
                ),
                503,
            )
        done: AgentSandboxUploadShape = {
            "status": "success",
            **detail,
            "container_id": str(session.pk),
        }
        return json_response(done)


def _copy(sent: UploadedFile[Any]) -> IO[bytes]:
    """In a file of our own: the server takes its own back when the view has returned."""
    kept: IO[bytes] = TemporaryFile()  # noqa: SIM115
    for piece in sent.chunks():
        kept.write(piece)
    kept.seek(0)
    return kept


class UploadUrlsView(AgentSandboxView):
    bounds = LARGE

    @endpoint("agent_sandbox_upload_urls", request=FETCH, answers={200: AgentSandboxFetchedShape})
    @deferred
    async def post(self, request: Request) -> HttpResponse:
        """Fetch files by URL into a conversation.

        Each file that can be fetched is stored, even if others fail.
        """
        wanted = FETCH.read(request.data)
        folder = path_of("dest_dir", wanted.dest_dir.rstrip("/")) if wanted.dest_dir else ""
        try:
            session = await agent_sandbox.ensure_session(self.caller(), wanted.conversation)
            arrived = await agent_sandbox.fetch_urls(session, wanted.urls, folder)
        except (DatabaseUnavailable, InvalidConfiguration):
            raise
        except SandboxError as error:
            return error_answer(error, {"status": "error", "uploaded": [], "errors": []})
        failures: list[AgentSandboxNotFetchedShape] = [
            {"source_url": storable(url), "error": text} for url, text in arrived.failures
        ]
        status = "partial_success" if failures else "success"
        return json_response(
            AgentSandboxFetchedShape(
                status=status if arrived.paths else "error",
                uploaded=[escape(path) for path in arrived.paths],
                errors=failures,
            )
        )


class ListView(AgentSandboxView):
    @endpoint(
        "agent_sandbox_list_files",
        parameters=(OF_CONVERSATION,),
        answers={200: AgentSandboxFilesShape},
    )
    def get(self, request: Request) -> HttpResponse:
        """List the saved files of a conversation."""
        wanted = OF_CONVERSATION.read(request.query_params.dict())
        session = agent_sandbox.find_files(self.api_key.tenant, wanted.conversation)
        found = agent_sandbox.saved_files(session) if session is not None else ()
        files: list[AgentSandboxFileShape] = [
            {
                "path": escape(each.path),
                "size_bytes": each.row.size,
                "mtime": int(each.row.modified),
            }
            for each in found
        ]
        return json_response(AgentSandboxFilesShape(files=files))


class DownloadUrlView(_FilesView):
    @endpoint(
        "agent_sandbox_download_url",
        parameters=(LINK,),
        answers={200: AgentSandboxLinkShape},
        errors=(404,),
    )
    def get(self, request: Request) -> HttpResponse:
        """Create a link to a saved file."""
        wanted = LINK.read(request.query_params.dict())
        path = path_of("path", wanted.path)
        session = agent_sandbox.find_files(self.api_key.tenant, wanted.conversation)
        detail = self.detail_of(request, session, path, wanted.expires_in)
        if detail is None:
            return json_response(DetailShape(detail="File not found"), 404)
        return json_response(
            AgentSandboxLinkShape(
                status="success",
                path=detail["path"],
                expires_in=seconds_of(wanted.expires_in),
                download_url=detail["download_url"],
            )
        )
