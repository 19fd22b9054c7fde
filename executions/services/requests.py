"""What a caller asks for. A request that exists is valid; nothing refused is ever run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any

from django.conf import settings
from pydantic import Field

from executions.kernel.declarations import (
    END,
    STORABLE,
    Body,
    Code,
    ContextId,
    Environment,
    Id,
    LanguageName,
    Moment,
    ShortName,
    Subject,
    Timeout,
    declared,
    one_of,
    refuse,
)
from executions.kernel.text import to_json
from executions.services.claims import (
    CLAIMS,
    Agent,
    ConversationName,
    Model,
    OnBehalfOf,
    Traceparent,
)
from executions.services.input_files import Files, check_files
from executions.services.tools.declaring import Tools, stored
from executions.services.webhooks.receivers import Webhook
from executions.tenants.models import Tenant
from providers import slices
from providers.languages import normalize_language
from providers.values import Entrypoint, RunLimits

MAX_ARGUMENTS_BYTES = 1024 * 1024

API_ENTRYPOINTS = ("auto", "main", "script")
MODES = ("sync", "async")
PRIORITIES = ("low", "normal", "high")
# The languages of code that calls tools.
_CALLS_TOOLS = ("python", "nodejs")


# Columns of a tenant that bound what is kept of its runs: which limit each is, and in what unit.
LIMIT_COLUMNS: Mapping[str, tuple[str, int]] = {
    "max_output_kb": ("output_bytes", 1000),
    "max_outputs": ("rich_output_count", 1),
    "max_outputs_mib": ("rich_output_bytes", 1024 * 1024),
    "max_artifacts": ("artifact_count", 1),
    "max_artifact_mib": ("artifact_bytes", 1024 * 1024),
    "max_artifacts_mib": ("artifacts_total_bytes", 1024 * 1024),
}


def run_limits(tenant: Tenant | None = None) -> RunLimits:
    """The bounds of a run: the tenant's own where it has some, the installation's otherwise."""
    limits = RunLimits(output_bytes=settings.SANDBOX_MAX_OUTPUT_KB * 1000)
    own = {
        name: value * unit
        for column, (name, unit) in LIMIT_COLUMNS.items()
        if tenant is not None and (value := getattr(tenant, column)) is not None
    }
    return replace(limits, **own)


def default_limit(column: str) -> int:
    """What holds for a tenant whose column is empty, as that column would say it."""
    name, unit = LIMIT_COLUMNS[column]
    limit: int = getattr(run_limits(), name)
    return limit // unit


IdempotencyKey = Annotated[str, Field(min_length=1, max_length=255), STORABLE]


@declared
class ExecutionRequest:
    """Code and how to run it. `timeout` is seconds; None leaves it to the provider that runs it.

    Raises InvalidConfiguration naming the field at fault. `subject` is whom the caller acts for.
    `session`, with the `context` and the environment `env` in it, is where it runs; `background` is
    a command there that nobody waits for. `usual_timeout` is what it takes where `timeout` is None,
    cut to what the provider carries out; its bound is for whoever names it. `provider` is the one
    that somebody signed in has chosen in place of the tenant's route.
    """

    code: Annotated[Code, Field(description="The limit counts the bytes of its UTF-8.")]
    language: Annotated[
        LanguageName,
        Field(
            description="The default is `python`; in a session, the language of the context.",
            json_schema_extra=lambda schema: schema.pop("default", None),
        ),
    ] = ""
    arguments: Annotated[
        Mapping[str, Any] | None,
        Field(description=f"The arguments of `main`: at most {MAX_ARGUMENTS_BYTES} bytes."),
    ] = None
    entrypoint: Entrypoint = "auto"
    timeout: Annotated[
        Timeout | None, Field(description="In seconds. The default is the provider's.")
    ] = None
    files: Files = ()
    mode: Annotated[str, one_of(MODES)] = "sync"
    idempotency_key: IdempotencyKey | None = None
    subject: Subject = ""
    session: Annotated[Id | None, Field(description="An open session to run in.")] = None
    context: Annotated[
        ContextId,
        Field(description="A context of the session; without it, the context `default`."),
    ] = ""
    background: bool = False
    usual_timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    env: Annotated[Environment, Field(description="Only in a session.")] = field(
        default_factory=dict
    )
    agent: Agent = ""
    model: Model = ""
    conversation: ConversationName = ""
    on_behalf_of: OnBehalfOf = ""
    traceparent: Traceparent = ""
    priority: Annotated[
        Annotated[str, one_of(PRIORITIES)],
        Field(
            description="The priority in the queue, among the tenant's executions; only with "
            "mode async."
        ),
    ] = "normal"
    webhook: Annotated[
        Webhook | None,
        Field(description="Gets a request when the execution has ended; only with mode async."),
    ] = None
    run_at: Annotated[
        Moment | None,
        Field(
            description="Start not before this time, which must be in the future; only with "
            "mode async."
        ),
    ] = None
    tools: Annotated[
        Tools,
        Field(description="Functions of the caller that Python and JavaScript code can call."),
    ] = ()
    provider: ShortName = ""
    arguments_json: str = field(init=False, default="")
    asked_mode: str = field(init=False, default="")

    def __post_init__(self) -> None:
        if not self.language and self.session is None:
            object.__setattr__(self, "language", "python")
        for name in ("context", "env"):
            if self.session is None and getattr(self, name):
                refuse(name, "Only supported in a session.")
        if self.session is not None and self.provider:
            refuse("provider", "Not supported in a session: a session keeps its provider.")
        if self.tools and self.language and normalize_language(self.language) not in _CALLS_TOOLS:
            refuse("tools", "Only Python and JavaScript code can call tools.")
        if self.tools and self.entrypoint != "auto":
            refuse("tools", "With tools, the entrypoint must be auto.")
        if self.priority != "normal" and self.mode != "async":
            refuse("priority", "Only supported with mode async.")
        if self.priority != "normal" and self.session is not None:
            refuse(
                "priority",
                "Not supported in a session: its code runs in the order of the requests.",
            )
        if self.webhook is not None and self.mode != "async":
            refuse("webhook", "Only supported with mode async.")
        if self.run_at is not None and self.mode != "async":
            refuse("run_at", "Only supported with mode async.")
        if self.run_at is not None and self.session is not None:
            refuse(
                "run_at", "Not supported in a session: its code runs in the order of the requests."
            )
        check_files(self.files)
        object.__setattr__(self, "arguments_json", _checked_arguments(self.arguments))

    def queued(self) -> ExecutionRequest:
        """The same with mode async, for the idempotency key of the one that was asked for."""
        queued = replace(self, mode="async")
        object.__setattr__(queued, "asked_mode", self.mode)
        return queued

    @property
    def code_hash(self) -> str:
        return "sha256:" + hashlib.sha256(self.code.encode()).hexdigest()

    @property
    def longest(self) -> float:
        """What it takes at most, in seconds, wherever it runs."""
        if self.timeout is not None:
            return self.timeout
        return max(float(settings.SANDBOX_MAX_TIMEOUT_SEC), self.usual_timeout or 0)

    def run_hash(self) -> str:
        """Of all that decides what runs, and as what; a request that was stored has it still."""
        return _hash_of(self._run_parts(self.mode))

    def fingerprint(self) -> str:
        """What two requests with the same idempotency key must share."""
        parts = self._run_parts(self.asked_mode or self.mode)
        # Not the trace: a request that is sent again has another parent in it.
        if claims := {name: said for name in CLAIMS if (said := getattr(self, name))}:
            parts.append(to_json(claims))
        if self.webhook is not None:
            parts.append(self.webhook.url)
        if self.priority != "normal":
            parts.append(self.priority)
        return _hash_of(parts)

    def _run_parts(self, mode: str) -> list[str]:
        parts = [
            self.code_hash,
            self.language,
            self.entrypoint,
            mode,
            self.subject,
            repr(self.timeout),
            self.arguments_json,
        ]
        for file in self.files:
            parts += [file.path, hashlib.sha256(file.content).hexdigest()]
        if self.session is not None:
            parts += [str(self.session), self.context, to_json(dict(self.env))]
        if self.run_at is not None:
            parts.append(f"run_at {self.run_at.isoformat()}")
        if self.tools:
            parts.append(f"tools {to_json(stored(self.tools))}")
        if self.provider:
            parts.append(f"provider {self.provider}")
        return parts

    def to_stored(self) -> dict[str, Any]:
        """What a worker needs to run this later, as JSON."""
        files = [
            {"path": file.path, "content_base64": slices.encoded_text(file.content)}
            for file in self.files
        ]
        return {**self._but_files(), "files": files}

    def stored_in_pieces(self) -> Iterator[bytes]:
        """The same as a text, in pieces: files are large, and encoded a slice at a time."""
        yield json.dumps(self._but_files(), separators=(",", ":")).encode()[:-1] + b',"files":['
        for number, file in enumerate(self.files):
            path = json.dumps(file.path).encode()
            yield b"," * bool(number) + b'{"path":' + path + b',"content_base64":"'
            yield from slices.encoded(slices.slices(file.content))
            yield b'"}'
        yield b"]}"

    def _but_files(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "language": self.language,
            "arguments": None if self.arguments is None else dict(self.arguments),
            "entrypoint": self.entrypoint,
            "timeout": self.timeout,
            "mode": self.mode,
            "subject": self.subject,
            **({} if self.run_at is None else {"run_at": self.run_at.isoformat()}),
            **({"provider": self.provider} if self.provider else {}),
            **({"tools": stored(self.tools)} if self.tools else {}),
            **self._place(),
        }

    def _place(self) -> dict[str, Any]:
        if self.session is None:
            return {}
        return {"session": str(self.session), "context": self.context, "env": dict(self.env)}

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> ExecutionRequest:
        return cls(**stored)


def _hash_of(parts: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode())
    return digest.hexdigest()


_NO_WEBHOOK = {"webhook": {"type": "null"}}


def _only_async(without: Mapping[str, Any]) -> dict[str, Any]:
    """What is left of some fields by a run that somebody waits for."""
    is_async = {"required": ["mode"], "properties": {"mode": {"const": "async"}}}
    return {"anyOf": [is_async, {"properties": without}]}


_ONLY_ASYNC = _only_async(
    _NO_WEBHOOK | {"run_at": {"type": "null"}, "priority": {"pattern": "^normal$"}}
)

TOOLS_IN_THESE = {
    "anyOf": [
        {"properties": {"tools": {"maxItems": 0}}},
        {
            "properties": {
                "entrypoint": {"const": "auto"},
                "language": {"pattern": f"^(python|nodejs|javascript){END}"},
            }
        },
    ]
}

RUN = Body(
    ExecutionRequest,
    "ExecutionRequest",
    ours=("subject", "background", "usual_timeout", "traceparent", "provider"),
    only={"entrypoint": API_ENTRYPOINTS},
    says={
        "anyOf": [
            {
                "required": ["session"],
                "properties": {
                    "session": {"type": "string"},
                    "priority": {"pattern": "^normal$"},
                    "run_at": {"type": "null"},
                },
            },
            {
                "properties": {
                    "session": {"type": "null"},
                    "context": {"maxLength": 0},
                    "env": {"maxProperties": 0},
                }
            },
        ],
        "allOf": [_ONLY_ASYNC, TOOLS_IN_THESE],
    },
)
CELL = Body(
    ExecutionRequest,
    "Cell",
    ours=(
        *("session", "language", "entrypoint", "subject", "background", "usual_timeout"),
        *("traceparent", "priority", "run_at", "provider"),
    ),
    says=_only_async(_NO_WEBHOOK),
)


def _checked_arguments(arguments: Any) -> str:
    if arguments is None:
        return ""
    try:
        text = to_json(dict(arguments))
    except ValueError as error:
        refuse("arguments", f"Must be JSON: {error}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        refuse("arguments", "Must hold no lone surrogates.")
    if size > MAX_ARGUMENTS_BYTES:
        refuse("arguments", f"Must be at most {MAX_ARGUMENTS_BYTES} bytes; send data as files.")
    return text
