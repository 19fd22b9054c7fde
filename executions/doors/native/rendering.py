"""Records as JSON, in the shapes that clients are written against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypedDict, TypeVar
from uuid import uuid4

from django.http import HttpResponse
from django.urls import reverse
from rest_framework.request import Request

from executions.kernel.bodies import Choices, JsonObject, PageShape, Time
from executions.kernel.text import from_json
from executions.runs.advice import advice_of
from executions.runs.models import Artifact, Execution
from executions.runs.network import NETWORK_KEYS, network_of
from executions.runs.record import late_result_of, receipt_of
from executions.runs.results import (
    error_of,
    may_have_missed,
    observations_of,
    omissions_of,
    place_of,
    policy_of,
    template_of,
    timings_of,
)
from executions.runs.shapes import ArtifactShape, ExecutionShape, LateResultShape
from executions.sessions.models import Session
from executions.sessions.queries import expires_at
from executions.sessions.requests import SessionShape
from executions.sessions.storage.wake import are_files_saved, files_of, is_restored
from executions.tenants.models import ApiKey, Scope
from executions.tenants.quotas import Quota
from providers import slices
from providers.values import ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED


class ErrorBodyShape(TypedDict):
    code: Annotated[
        str,
        "SB001 to SB009, or a name such as `not_found`. SB002 is the code of an invalid request.",
    ]
    message: str
    field: str | None
    ran: NotRequired[
        Annotated[
            bool | None,
            "Only if the database cannot be used: whether any code ran; null if unknown.",
        ]
    ]


class ErrorShape(TypedDict):
    error: ErrorBodyShape
    id: Annotated[str | None, "The id of the execution, if one was recorded."]
    receipt: NotRequired[Annotated[JsonObject, "The receipt of the failed execution."]]


class PackagesShape(TypedDict):
    state: Annotated[str, Choices.of(("ready", "preparing", "failed"))]
    reason: Annotated[str, "Why the packages could not be installed; else empty."]
    versions: Annotated[dict[str, str], "The version of each Python package, by name."]
    node: Annotated[dict[str, str], "The same of npm packages for JavaScript."]


class LanguagesShape(TypedDict):
    languages: list[str]
    packages: Annotated[
        dict[str, PackagesShape],
        "The packages that code can import, by provider id. Providers that "
        "do not know theirs are missing.",
    ]


class LedgerKeyShape(TypedDict):
    key_id: str
    algorithm: str
    public_key: Annotated[str, "The key: 32 bytes in base64."]


class LedgerKeysShape(TypedDict):
    domain: Annotated[str, "The signed text starts with this domain and a line feed."]
    keys: list[LedgerKeyShape]


class QuotaShape(TypedDict):
    limit: Annotated[float | None, "Null if no budget is set."]
    used: Annotated[float, "Includes the amounts that are reserved for work that has not ended."]
    resets_at: Annotated[
        Time | None, "Null if the use decreases by itself, for example when executions end."
    ]


if TYPE_CHECKING:
    QuotasShape = dict[str, QuotaShape]
else:
    QuotasShape = TypedDict("QuotasShape", {quota.value: QuotaShape for quota in Quota})


class UsageShape(TypedDict):
    tenant: str
    quotas: QuotasShape


T = TypeVar("T")


@dataclass(frozen=True)
class Written:
    """A value as the JSON text that is recorded of it. A program may have made millions of values:
    to read and write them anew would hold up everybody, as often as somebody asks."""

    text: str


def render_json(body: Any) -> str:
    """Render the body as JSON, in which Written values stand as they are."""
    nonce, written = uuid4().hex, list[str]()

    def named(value: Any) -> str:
        if not isinstance(value, Written):
            raise TypeError(f"{type(value).__name__} is not JSON")
        written.append(value.text)
        return f"{nonce}.{len(written) - 1}"

    text = slices.json_text(body, default=named)
    for number, value in enumerate(written):
        text = text.replace(f'"{nonce}.{number}"', slices.escape_line_ends(value), 1)
    return text


def json_response(body: Any, status: int = 200) -> HttpResponse:
    content = render_json(body).encode(errors="replace")
    return HttpResponse(content, status=status, content_type="application/json")


def execution_detail(
    execution: Execution,
    absolute: Callable[[str], str] = lambda path: path,
    *,
    value_of: Callable[[str], Any] = from_json,
) -> ExecutionShape:
    """One execution in full. `absolute` makes a path on this service into a URL, and `value_of` the
    JSON text of its program into a value; `Written` reads nothing."""
    artifacts = execution.artifacts.all() if execution.artifact_count else ()
    omissions = omissions_of(execution)
    return {
        **place_of(execution),
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "result": value_of(execution.result) if execution.result else None,
        "has_result": execution.has_result,
        "stdout": execution.stdout,
        "stderr": execution.stderr,
        "stdout_truncated": execution.stdout_truncated,
        "stderr_truncated": execution.stderr_truncated,
        "exit_code": execution.exit_code,
        "outputs": value_of(execution.outputs) if execution.outputs else [],
        "artifacts": [_artifact(execution, artifact, absolute) for artifact in artifacts],
        "artifacts_skipped": omissions[ARTIFACTS_SKIPPED],
        "outputs_skipped": omissions[OUTPUTS_SKIPPED],
        "advice": advice_of(execution) if may_have_missed(execution) else [],
        "error": error_of(execution),
        "exception": value_of(execution.exception) if execution.exception else None,
        "hops": execution.hops,
        "cost": None if execution.cost is None else str(execution.cost),
        "timings": timings_of(execution),
        "created_at": execution.created_at.isoformat(),
        "run_at": execution.run_at.isoformat() if execution.run_at else None,
        "schedule": str(execution.schedule_id) if execution.schedule_id else None,
        "receipt": receipt_of(execution),
        "late_result": _late_result(execution, value_of),
        "files_saved": are_files_saved(execution),
        "restored": is_restored(execution),
        "policy": policy_of(execution),
        "observations": observations_of(execution),
        "network": network_of(execution) if NETWORK_KEYS & execution.meta.keys() else None,
        "template": template_of(execution),
    }


def execution_in_full(
    execution: Execution, absolute: Callable[[str], str], fields: Collection[str] = ()
) -> dict[str, Any]:
    """As `execution_detail`, for `json_response` alone. With `fields`, these and no others."""
    detail = execution_detail(execution, absolute, value_of=Written)
    return {name: value for name, value in detail.items() if not fields or name in fields}


# What code has put out, or its caller has written, as a key is told of it that may not read it.
# What is cut off is said to be so.
_UNREAD_EXECUTION: Mapping[str, Any] = {
    "result": None,
    "has_result": False,
    "stdout": "",
    "stderr": "",
    "stdout_truncated": True,
    "stderr_truncated": True,
    "exit_code": None,
    "outputs": [],
    "artifacts": [],
    "artifacts_skipped": [],
    "outputs_skipped": [],
    "advice": [],
    "error": None,
    "exception": None,
    "hops": [],
    "cost": None,
    "receipt": None,
    "late_result": None,
    "policy": None,
    "observations": [],
    "network": None,
}


def may_read(key: ApiKey | None, row: Execution | Session) -> bool:
    """Whether a key may be told of all that a row has: by its scope, or because it made it."""
    return key is None or key.has_scope(Scope.READ) or row.api_key_id == key.pk


def execution_for(
    key: ApiKey, execution: Execution, absolute: Callable[[str], str]
) -> dict[str, Any]:
    """As `execution_detail`, without what the key may not read: which execution it is and how far
    it has come."""
    detail = execution_in_full(execution, absolute)
    return detail if may_read(key, execution) else {**detail, **_UNREAD_EXECUTION}


def session_for(key: ApiKey | None, session: Session) -> SessionShape:
    """As `session_detail`, without what the key may not read."""
    detail = session_detail(session)
    if may_read(key, session):
        return detail
    return {
        **detail,
        "name": None,
        "template": None,
        "metadata": {},
        "closed_because": None,
        "contexts": [],
        "files": {**detail["files"], "count": 0, "bytes": 0, "problem": None},
    }


def session_detail(session: Session) -> SessionShape:
    """A session. Neither its environment nor what opens its sandbox is ever shown."""
    return {
        "id": str(session.pk),
        "name": session.name or None,
        "state": session.state,
        "provider": session.provider,
        "runtime": session.runtime,
        "isolation": session.isolation,
        "sharing": session.sharing,
        "language": session.language,
        "template": session.template or None,
        "metadata": session.metadata,
        "idle_seconds": session.idle_seconds,
        "max_seconds": session.max_seconds,
        "created_at": session.created_at.isoformat(),
        "used_at": session.used_at.isoformat(),
        "expires_at": expires_at(session).isoformat(),
        "closed_at": session.closed_at.isoformat() if session.closed_at else None,
        "closed_because": session.closed_because or None,
        "contexts": session.contexts,
        "saves": session.saves,
        "files": files_of(session),
        "woken_at": session.woken_at.isoformat() if session.woken_at else None,
    }


def _late_result(execution: Execution, value_of: Callable[[str], Any]) -> LateResultShape | None:
    late = late_result_of(execution)
    if late is None:
        return None
    return {
        "status": late.status,
        "result": value_of(late.result) if late.result else None,
        "has_result": late.has_result,
        "stdout": late.stdout,
        "stderr": late.stderr,
        "stdout_truncated": late.stdout_truncated,
        "stderr_truncated": late.stderr_truncated,
        "exit_code": late.exit_code,
        "outputs": value_of(late.outputs) if late.outputs else [],
        "artifacts": late.artifacts,
        "error": error_of(late),
        "finished_at": late.finished_at.isoformat(),
    }


def _artifact(
    execution: Execution, artifact: Artifact, absolute: Callable[[str], str]
) -> ArtifactShape:
    path = reverse("execution-artifact", args=[execution.pk, artifact.name])
    return {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size_bytes": artifact.size_bytes,
        "url": absolute(path),
    }


def page_of(request: Request, results: list[T], cursor: str) -> PageShape[T]:
    """A page of rows, and where the next one begins: after `cursor`, which is empty on the last."""
    return {"results": results, "next": next_page(request, cursor=cursor)}


def next_page(request: Request, **place: str) -> str | None:
    """Where a page goes on: the same request from `place` on; None where that is empty."""
    ((name, value),) = place.items()
    if not value:
        return None
    again = request.query_params.copy()
    again[name] = value
    return request.build_absolute_uri(f"{request.path}?{again.urlencode()}")
