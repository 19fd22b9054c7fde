"""The messages of Codex's exec-server protocol, as JSON-RPC has them, and its errors."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, unquote_to_bytes

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from executions.doors.native.frame import to_database_error
from executions.kernel.declarations import MAX_ENVIRONMENT, Members
from executions.kernel.text import is_storable
from executions.sessions.requests import MOST_ARGUMENTS
from providers.errors import InvalidConfiguration, SandboxError
from providers.runtime.pool.template import WORKSPACE
from providers.sandbox import below_workspace

INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS, INTERNAL = -32600, -32601, -32602, -32603
NOT_FOUND, ALREADY_ATTACHED = -32004, -32010
# Who answers what has no id.
NOBODY = -1
MOST_PATH = 4096

T = TypeVar("T", bound=BaseModel)
# As large as clients can have it: one of thousands of digits is no seconds, and cannot be sent.
Amount = Annotated[int, Field(ge=0, lt=2**64)]
Variables = Annotated[dict[str, str], Members(MAX_ENVIRONMENT)]


class Failure(Exception):
    """An error of the protocol."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Params(BaseModel):
    """The parameters of a method. What a newer client sends beside them is ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", strict=True
    )


class Initialize(Params):
    client_name: str = ""
    resume_session_id: str | None = None


class EnvPolicy(Params):
    # What the process gets in any case. The rest is about what it inherits, and there is nothing
    # of ours to be inherited in a sandbox.
    set: Variables = Field(default_factory=dict)


class Metadata(Params):
    thread_id: str | None = None
    tool_call_id: str | None = None


class Start(Params):
    process_id: str = Field(min_length=1, max_length=256)
    argv: Annotated[list[str], Members(MOST_ARGUMENTS)]
    cwd: str
    env: Variables = Field(default_factory=dict)
    env_policy: EnvPolicy | None = None
    tty: bool = False
    pipe_stdin: bool = False
    arg0: str | None = None
    enforce_managed_network: bool = False
    network_proxy: Any = None
    metadata: Metadata | None = None


class Read(Params):
    process_id: str
    after_seq: Amount | None = None
    max_bytes: Amount | None = None
    wait_ms: Amount | None = None


class Write(Params):
    process_id: str
    chunk: str
    write_id: str = Field(default="", max_length=256)


class Signal(Params):
    process_id: str
    signal: str


class Terminate(Params):
    process_id: str


class OnePath(Params):
    path: str
    follow_symlinks: bool | None = None


class WriteFile(OnePath):
    data_base64: str


class Open(OnePath):
    handle_id: str = Field(min_length=1, max_length=32)


class ReadBlock(Params):
    handle_id: str
    offset: int = Field(ge=0, lt=2**53)
    len: Amount


class Close(Params):
    handle_id: str


class Create(OnePath):
    recursive: bool | None = None


class Remove(OnePath):
    recursive: bool | None = None
    force: bool | None = None


class Copy(Params):
    source_path: str
    destination_path: str
    recursive: bool = False


class WalkOptions(Params):
    max_depth: Amount
    max_directories: Amount
    max_entries: Amount


class Walk(OnePath):
    options: WalkOptions


def read_params(model: type[T], given: Any) -> T:
    """Read the parameters of a method. Raises Failure."""
    try:
        return model.model_validate({} if given is None else given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(map(str, first["loc"])) or "params"
        raise Failure(INVALID_PARAMS, f"{name}: {first['msg']}.") from None


def failure_of(error: Exception) -> Failure | None:
    """Return the protocol's error for what went wrong; None for what is a fault of ours."""
    if isinstance(error, Failure):
        return error
    error = to_database_error(error)
    if isinstance(error, InvalidConfiguration):
        return Failure(INVALID_PARAMS, error.message)
    if isinstance(error, SandboxError):
        code = INVALID_REQUEST if 400 <= error.http_status < 429 else INTERNAL
        return Failure(code, error.message)
    return None


@dataclass(frozen=True)
class Paths:
    """The paths of the sandbox, as file: URIs of one client.

    A client that has the user's own folder for its working directory names it: what is below it is
    the workspace then.
    """

    folder: str = WORKSPACE

    def to_path(self, uri: str, field: str = "path") -> str:
        """Return the absolute path in the sandbox that a file: URI names. Raises Failure."""
        if not uri.startswith("file:///") or not is_storable(uri):
            raise Failure(INVALID_PARAMS, f"{field}: Must be a URI such as file://{WORKSPACE}.")
        text = unquote_to_bytes(uri.removeprefix("file://")).decode("utf-8", "surrogateescape")
        if "?" in uri or "#" in uri or "\0" in text or len(text) > MOST_PATH:
            raise Failure(INVALID_PARAMS, f"{field}: Must name a path of the sandbox.")
        whole = normal_path(text)
        below = below_workspace(whole, (self.folder,))
        below = below_workspace(whole) if below is None else below
        return whole if below is None else f"{WORKSPACE}/{below}".rstrip("/")

    def to_uri(self, path: str) -> str:
        """Return the file: URI of a path in the sandbox."""
        below = below_workspace(path)
        whole = path if below is None else f"{self.folder}/{below}".rstrip("/")
        return f"file://{quote(whole.encode('utf-8', 'surrogateescape'))}"

    @property
    def environment(self) -> dict[str, Any]:
        """What a client is told of its environment."""
        return {
            "shell": {"name": "bash", "path": "/bin/bash"},
            "executorVersion": "0.0.0",
            "cwd": self.to_uri(WORKSPACE),
            "userHomeDir": self.to_uri(WORKSPACE),
            "platformOs": "linux",
            "temporaryDirectories": [],
            "tempDir": "file:///tmp",
            # None of the newer ones: clients ask for them only where they are told of.
            "capabilities": {},
        }


def normal_path(text: str) -> str:
    """Return an absolute path without dots and empty parts."""
    return f"/{posixpath.normpath(text).lstrip('/')}"


def plain(text: str | None, most: int) -> str:
    """Return a text of the client as it may be recorded; "" for one that may not."""
    if text is None or len(text) > most or not is_storable(text) or not text.isprintable():
        return ""
    return text
