"""The request of a caller: code, files, attribution and time. A request that exists is valid."""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Annotated, Any
from uuid import UUID

import httpx
from django.conf import settings
from django.utils import timezone
from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

from executions.kernel.declarations import (
    END,
    STORABLE,
    STRICT,
    Body,
    Code,
    ContextId,
    Environment,
    Id,
    LanguageName,
    Members,
    Moment,
    Rule,
    ShortName,
    Subject,
    TemplateName,
    Timeout,
    check_storable,
    declared,
    one_of,
    refuse,
)
from executions.kernel.http import Destinations, FetchError, Reason, read_url
from executions.kernel.text import is_storable, to_json
from executions.runs.models import Execution
from executions.runs.network import NetworkField
from executions.runs.tool_schemas import Tools, to_stored
from executions.tenants.models import ApiKey, Tenant
from providers import slices
from providers.addresses import Allowed
from providers.errors import ErrorCode, SandboxError
from providers.json_reading import Base64
from providers.languages import normalize_language
from providers.runtime.guest.names import problem
from providers.values import Entrypoint, InputFile, RunLimits

MAX_FILES = 100
# Of a run with `run_at`.
MAX_DAYS_AHEAD = 30
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_FILES_BYTES = 40 * 1024 * 1024
MAX_PATH_PARTS = 10
MAX_PATH_BYTES = 512

_PART = r"(?!\.{1,2}(/|$))[^/\u0000-\u001f\u007f-\u009f]{1,255}"
PATH_PATTERN = rf"^{_PART}(/{_PART}){{0,{MAX_PATH_PARTS - 1}}}{END}"
# Line breaks do not count.
_SIGN = r"[A-Za-z0-9+/][\r\n]*"
_BASE64 = (
    rf"^[\r\n]*(({_SIGN}){{4}})*"
    rf"(({_SIGN}){{2}}=[\r\n]*=[\r\n]*|({_SIGN}){{3}}=[\r\n]*)?$"
)


def decode_base64(text: Any) -> bytes:
    """Decode a text of base64, or one that was read apart. Raises ValueError."""
    if isinstance(text, Base64):
        if text.content is None:
            raise ValueError(text.problem)
        return text.content
    if not isinstance(text, str):
        raise ValueError("Must be a string.")
    return slices.decoded(text)


class _SentFile(BaseModel):
    """An input file as JSON."""

    model_config = STRICT

    path: Annotated[
        str,
        WithJsonSchema({"type": "string", "maxLength": MAX_PATH_BYTES, "pattern": PATH_PATTERN}),
        Field(description="Relative to the workspace, without '..'."),
    ]
    content_base64: Annotated[
        bytes,
        BeforeValidator(decode_base64),
        WithJsonSchema({"type": "string", "pattern": _BASE64}),
        Field(description=f"At most {MAX_FILE_BYTES} bytes, and {MAX_FILES_BYTES} for all files."),
    ]


@dataclass(frozen=True)
class _AsSent:
    """An input file, or the JSON that describes one."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_wrap_validator_function(self._read, handler.generate_schema(_SentFile))

    @staticmethod
    def _read(file: Any, read: Callable[[Any], _SentFile]) -> InputFile:
        if isinstance(file, InputFile):
            return file
        sent = read(file)
        return InputFile(path=sent.path, content=sent.content_base64)


Files = Annotated[Sequence[Annotated[InputFile, _AsSent()]], Members(MAX_FILES), Rule(tuple)]


def check_files(files: Sequence[InputFile]) -> None:
    """Raises InvalidConfiguration for files that no workspace can have together."""
    if sum(len(file.content) for file in files) > MAX_FILES_BYTES:
        refuse("files", f"Must be at most {MAX_FILES_BYTES} bytes together.")
    taken: set[tuple[str, ...]] = set()
    folders: set[tuple[str, ...]] = set()
    for index, file in enumerate(files):
        name = f"files[{index}].path"
        if len(file.content) > MAX_FILE_BYTES:
            refuse(f"files[{index}]", f"Must be at most {MAX_FILE_BYTES} bytes.")
        parts = _path_parts(name, file.path)
        parents = {parts[:end] for end in range(1, len(parts))}
        if parts in taken or parts in folders or parents & taken:
            refuse(name, "Another file has this path, or is a folder of it.")
        taken.add(parts)
        folders |= parents


def _path_parts(name: str, path: str) -> tuple[str, ...]:
    if not path or not is_storable(path):
        refuse(name, "Must not be empty and hold neither NUL nor lone surrogates.")
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") for part in parts):
        refuse(name, "Must be relative, without empty parts, '.' or '..'.")
    if len(parts) > MAX_PATH_PARTS:
        refuse(name, f"Must be at most {MAX_PATH_PARTS} levels deep.")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > 255 for part in parts):
        refuse(name, f"Must be at most {MAX_PATH_BYTES} bytes, and each part at most 255.")
    if problem(path):
        refuse(name, "Must hold no control characters.")
    return parts


MOST_CHARACTERS = 255
CLAIMS = ("agent", "model", "conversation", "on_behalf_of")

_TRACEPARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<parent>[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?",
    re.ASCII | re.DOTALL,
)
_SAMPLED = 1


def _plain(text: str) -> str:
    check_storable(text)
    if any(unicodedata.category(each) == "Cc" for each in text):
        raise ValueError("Must be plain text, without control characters.")
    return text


def read_traceparent(text: str) -> str:
    """The W3C trace context that a `traceparent` gives, as version 00 has it; "" for none.

    One that is not valid is ignored, as the specification has it, and never refused: a broken
    tracer in between is no reason to run nothing. Of a later version only what 00 has is taken.
    """
    found = _TRACEPARENT.fullmatch(text.strip(" \t"))
    if found is None or found["version"] == "ff":
        return ""
    if not found["trace"].strip("0") or not found["parent"].strip("0"):
        return ""
    if found["version"] == "00":
        return "" if found["more"] is not None else found[0]
    flags = int(found["flags"], 16) & _SAMPLED
    return f"00-{found['trace']}-{found['parent']}-{flags:02x}"


def trace_id_of(traceparent: str) -> str:
    """The trace that a valid `traceparent` names."""
    return traceparent[3:35]


Claim = Annotated[
    str,
    Field(max_length=MOST_CHARACTERS),
    Rule(_plain, {"pattern": rf"^[^\u0000-\u001f\u007f-\u009f]*{END}"}),
]
Agent = Annotated[Claim, Field(description="The agent, as claimed by the caller.")]
Model = Annotated[
    Claim, Field(description="The model that wrote the code, as claimed by the caller.")
]
ConversationName = Annotated[
    Claim, Field(description="The conversation, as claimed by the caller.")
]
OnBehalfOf = Annotated[
    Claim,
    Field(description="The person, as claimed by the caller. It is erased together with the code."),
]
Traceparent = Annotated[
    str, Rule(read_traceparent), Field(description="W3C trace context. An invalid one is ignored.")
]


WEBHOOK_CHARACTERS = 2048


def webhook_destinations() -> Destinations:
    """Those of the deployment."""
    allowed = tuple(map(Allowed.parse, settings.WEBHOOK_ALLOWED_NETWORKS))
    return Destinations(allowed, (), "WEBHOOK_ALLOWED_NETWORKS")


def read_receiver(text: str) -> httpx.URL:
    """The URL that a webhook is sent to. Raises FetchError; names are not resolved."""
    url = read_url(text, webhook_destinations())
    if url.scheme != "https" and not settings.WEBHOOK_PLAIN_HTTP:
        raise FetchError(Reason.URL, "Plain http is not allowed here.")
    return url


def origin_of(url: httpx.URL) -> str:
    """What may be shown of it: path and query may be a secret."""
    return str(url.copy_with(path="/", query=None, fragment=None)).rstrip("/")


def _check_receiver(text: str) -> str:
    try:
        read_receiver(text)
    except FetchError:
        schemes = "http or https" if settings.WEBHOOK_PLAIN_HTTP else "https"
        raise ValueError(
            f"Its url must be {schemes}, without user and password, and lead to the internet."
        ) from None
    return text


def _receiver_schema() -> dict[str, str]:
    """What JSON Schema can say of such a URL."""
    scheme = "[Hh][Tt][Tt][Pp]" + ("[Ss]?" if settings.WEBHOOK_PLAIN_HTTP else "[Ss]")
    plain = r"\\\u0000-\u001f\u007f-\u009f"
    rest = rf"[^/?#@\s{plain}]+([/?#][^{plain}]*)?"
    return {"format": "uri", "pattern": rf"^\s*{scheme}://{rest}$"}


class Webhook(BaseModel):
    """The receiver of the webhook."""

    model_config = STRICT

    url: Annotated[
        str,
        Field(min_length=1, max_length=WEBHOOK_CHARACTERS),
        Rule(_check_receiver, _receiver_schema),
    ]


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
    `session`, with the `context` in it, is where it runs; `background` is a command there that
    nobody waits for. `env` may hold secrets. `usual_timeout` is what it takes where `timeout` is
    None, cut to what the provider carries out; its bound is for whoever names it. `provider` is the
    one that somebody signed in has chosen in place of the tenant's route.
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
    env: Annotated[
        Environment, Field(description="The environment variables of this code alone.")
    ] = field(default_factory=dict, repr=False)
    network: Annotated[
        NetworkField | None,
        Field(
            description="The hosts that the code may reach, within the lists of the installation "
            "and the tenant; not in a session, which has its own. Without it: what they give to "
            "runs that name none, mostly nothing."
        ),
    ] = None
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
    template: Annotated[
        TemplateName,
        Field(
            description="The template that gives the sandbox its packages, as `name` or `name@3`; "
            "not in a session, which has its own."
        ),
    ] = ""
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
        if self.session is None and self.context:
            refuse("context", "Only supported in a session.")
        if self.session is not None and self.provider:
            refuse("provider", "Not supported in a session: a session keeps its provider.")
        if self.session is not None and self.network is not None:
            refuse(
                "network",
                "Not supported in a session, whose network it uses. Set that with "
                "PUT /api/v1/sessions/{id}/network.",
            )
        if self.session is not None and self.template:
            refuse("template", "Not supported in a session: a session keeps its template.")
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
        object.__setattr__(self, "arguments_json", _check_arguments(self.arguments))

    def as_queued(self) -> ExecutionRequest:
        """Return the same with mode async, for the idempotency key of the one that was asked
        for."""
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
        elif self.env:
            parts.append(f"env {to_json(dict(self.env))}")
        if self.network is not None:
            parts.append(f"network {to_json(self.network.policy.to_json())}")
        if self.run_at is not None:
            parts.append(f"run_at {self.run_at.isoformat()}")
        if self.tools:
            parts.append(f"tools {to_json(to_stored(self.tools))}")
        if self.provider:
            parts.append(f"provider {self.provider}")
        if self.template:
            parts.append(f"template {self.template}")
        return parts

    def to_stored(self) -> dict[str, Any]:
        """What a worker needs to run this later, as JSON."""
        files = [
            {"path": file.path, "content_base64": slices.encoded_text(file.content)}
            for file in self.files
        ]
        return {**self._but_files(), "files": files}

    def to_stored_pieces(self) -> Iterator[bytes]:
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
            **({"tools": to_stored(self.tools)} if self.tools else {}),
            **({"template": self.template} if self.template else {}),
            **self._place(),
        }

    def _place(self) -> dict[str, Any]:
        env = {"env": dict(self.env)} if self.env else {}
        if self.session is None:
            network = self.network
            return env if network is None else {**env, "network": network.model_dump()}
        return {"session": str(self.session), "context": self.context, **env}

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
                    "network": {"type": "null"},
                    "template": {"maxLength": 0},
                    "priority": {"pattern": "^normal$"},
                    "run_at": {"type": "null"},
                },
            },
            {
                "properties": {
                    "session": {"type": "null"},
                    "context": {"maxLength": 0},
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
        *("traceparent", "priority", "run_at", "provider", "network", "template"),
    ),
    says=_only_async(_NO_WEBHOOK),
)


def _check_arguments(arguments: Any) -> str:
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


def ensure_run_at(run_at: datetime, api_key: ApiKey | None) -> None:
    """Raise InvalidConfiguration for a time that has passed, is too far ahead, or at which the key
    is not valid any more.
    """
    now = timezone.now()
    if run_at <= now:
        refuse("run_at", "Must be in the future. Leave it out to run now.")
    if run_at > now + timedelta(days=MAX_DAYS_AHEAD):
        refuse("run_at", f"Must be at most {MAX_DAYS_AHEAD} days ahead.")
    if api_key is not None and not api_key.is_valid(run_at):
        refuse("run_at", "The key will have expired by then. Use one that is valid for longer.")


@dataclass(frozen=True)
class Caller:
    """Who asks. Code run from within this process has a tenant and no key."""

    tenant: Tenant
    api_key: ApiKey | None = None
    request_id: str = ""
    client_address: str = ""
    replay_of: Execution | None = None
    schedule_id: UUID | None = None
    # When the headers of the request were read, by `perf_counter` of this process.
    received: float | None = None

    @classmethod
    def of_key(
        cls,
        api_key: ApiKey,
        *,
        request_id: str = "",
        client_address: str = "",
        received: float | None = None,
    ) -> Caller:
        return cls(api_key.tenant, api_key, request_id, client_address, received=received)


CONFLICT = ErrorCode("conflict", "Conflict", "Check the session: it has ended, or it is busy.", 409)


class Conflict(SandboxError):
    """What was asked for does not go together with the state that the session is in."""

    entry = CONFLICT
