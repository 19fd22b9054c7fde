"""Requests to sessions, their commands and files, their errors, and the shapes of answers."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, fields
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import BaseModel, Field

from executions.kernel.bodies import Choices, JsonObject, Time, Uri
from executions.kernel.declarations import (
    END,
    NAMED,
    STORABLE,
    STRICT,
    WHOLE,
    Body,
    ContextId,
    Directory,
    Environment,
    Folder,
    Id,
    LanguageName,
    Members,
    Path,
    PlaceOfPath,
    Query,
    Rule,
    Script,
    ShortName,
    Subject,
    TemplateName,
    Timeout,
    UserName,
    at_most,
    check_storable,
    declared,
    one_of,
    refuse,
    storable_members,
)
from executions.kernel.text import is_storable, to_json
from executions.runs.network import NetworkField
from executions.runs.provider_calls import HostClosed
from executions.runs.requests import (
    Agent,
    Conflict,
    ConversationName,
    Model,
    OnBehalfOf,
    Traceparent,
)
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers.errors import ErrorCode, InvalidConfiguration, SandboxError
from providers.sandbox import DEFAULT_CONTEXT
from providers.values import Command

IDLE_SECONDS = 600
MAX_SECONDS = 1800
METADATA_BYTES = 16 * 1024
_NAME = re.compile(r"[^\x00-\x1f\x7f/]*")
# NUL in a text of JSON, and not a backslash followed by `u0000`.
_NUL = re.compile(r"(?<!\\)(\\\\)*\\u0000")


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("Must hold neither control characters nor a slash.")
    return check_storable(name)


def _check_metadata(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        text = to_json(dict(metadata))
    except ValueError as error:
        raise ValueError(f"Must be JSON: {error}.") from None
    if len(text) > METADATA_BYTES or len(text.encode("utf-8", "replace")) > METADATA_BYTES:
        raise ValueError(f"Must be at most {METADATA_BYTES} bytes.")
    if not is_storable(text) or _NUL.search(text):
        raise ValueError("Must hold neither NUL nor lone surrogates.")
    return metadata


Seconds = Annotated[int, Field(ge=1), at_most("SESSION_MAX_SECONDS"), WHOLE]
Metadata = Annotated[
    Mapping[str, Any],
    # What is deeper is refused all the same.
    Rule(_check_metadata, storable_members(3)),
    Field(description=f"Data of the caller; at most {METADATA_BYTES} bytes of JSON."),
]
SessionName = Annotated[
    str, Field(max_length=128), Rule(_name, {"pattern": f"^{_NAME.pattern}{END}"})
]
Idle = Annotated[
    Seconds, Field(description="The idle time in seconds after which it goes to sleep.")
]
Age = Annotated[Seconds, Field(description="The age in seconds at which it is closed.")]


@declared
class SessionRequest:
    """A sandbox that stays. Times are seconds: unused for `idle_seconds` it goes to sleep,
    `max_seconds` old it is closed. Raises InvalidConfiguration naming the field at fault.

    `provider` is a configuration on the tenant's route, "" whichever that leads to. `conversation`
    is a hash that no other open session of the tenant has. One that is `offline` is opened only
    where the provider promises that it has no network.
    """

    name: Annotated[SessionName, Field(description="Unique among the tenant's open sessions.")] = ""
    language: LanguageName = "python"
    template: Annotated[
        TemplateName,
        Field(description="A template, as `name` or `name@3`, or a named image of the provider."),
    ] = ""
    provider: Annotated[ShortName, Field(description="A configuration on the tenant's route.")] = ""
    idle_seconds: Idle = IDLE_SECONDS
    max_seconds: Age = MAX_SECONDS
    env: Annotated[
        Environment, Field(description="The environment variables of all code and commands in it.")
    ] = field(default_factory=dict)
    network: Annotated[
        NetworkField | None,
        Field(
            description="The hosts that all code and commands in it may reach, within the lists "
            "of the installation and the tenant."
        ),
    ] = None
    metadata: Metadata = field(default_factory=dict)
    saves: Annotated[
        str,
        one_of(Session.Saves.values),
        Field(
            description="When its files are saved to storage: before the answer, after it, or "
            "never. Without saved files, it does not go to sleep but is closed."
        ),
    ] = "background"
    source: Annotated[
        Id | None,
        Field(
            alias="from",
            description="The id of a snapshot, or of an ended session whose files were kept. The "
            "session starts with these files, without variables.",
        ),
    ] = None
    subject: Subject = ""
    conversation: ShortName = ""
    offline: bool = False


@declared
class SessionChanges:
    """What of a session is to be changed; None leaves it as it is."""

    idle_seconds: Idle | None = None
    max_seconds: Age | None = None
    metadata: Metadata | None = None

    @property
    def given(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


@declared
class ContextRequest:
    """Another interpreter of a session."""

    language: LanguageName
    cwd: Annotated[Directory, Field(description="Relative to the workspace, or absolute.")] = ""
    id: Annotated[
        ContextId, Field(description="The default is an id that the sandbox chooses.")
    ] = ""


@declared
class InterruptRequest:
    """Stop what runs in a context."""

    context: ContextId = DEFAULT_CONTEXT


@declared
class ResetRequest:
    """Begin anew."""


OPEN = Body(SessionRequest, "SessionRequest", ours=("subject", "conversation", "offline"))
CHANGE = Body(SessionChanges, "SessionChanges")
CREATE_CONTEXT = Body(ContextRequest, "ContextRequest")
INTERRUPT = Body(InterruptRequest, "Interrupt")
RESET = Body(ResetRequest, "Reset")


MOST_ARGUMENTS = 1000
# Of one of them: Linux takes no longer ones.
MOST_CHARACTERS = 128 * 1024
SIGNALS = (
    *("SIGHUP", "SIGINT", "SIGQUIT", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGTERM", "SIGCONT"),
    *("SIGSTOP", "SIGTSTP", "SIGWINCH"),
)
Cells = Annotated[int, Field(ge=1, le=1000), WHOLE]


class TerminalSize(BaseModel):
    """Columns and rows of a terminal."""

    model_config = STRICT

    cols: Cells
    rows: Cells

    @property
    def pair(self) -> tuple[int, int]:
        return self.cols, self.rows


def _check_program(command: Sequence[str]) -> Sequence[str]:
    if command and not command[0]:
        raise ValueError("Must begin with the name of a program.")
    return command


@declared
class CommandRequest:
    """A process of a session: `command`, its arguments, or `shell` for bash.

    Raises InvalidConfiguration naming the field at fault. `timeout` is seconds; one in the
    `background` has none.
    """

    command: Annotated[
        Sequence[Annotated[str, Field(max_length=MOST_CHARACTERS), STORABLE]],
        Members(MOST_ARGUMENTS),
        Rule(_check_program, {"prefixItems": [NAMED]}),
    ] = ()
    shell: Annotated[Script, Field(description="A script for bash.")] = ""
    cwd: Annotated[Directory, Field(description="Relative to the workspace, or absolute.")] = ""
    env: Environment = field(default_factory=dict)
    user: UserName = ""
    stdin: Annotated[
        bool, Field(description="Keep the input open, so that bytes can be sent to it.")
    ] = False
    pty: Annotated[
        TerminalSize | None,
        Field(description="Run in a terminal of this size instead of with pipes."),
    ] = None
    timeout: Annotated[Timeout | None, Field(description="In seconds.")] = None
    background: bool = False
    agent: Agent = ""
    model: Model = ""
    conversation: ConversationName = ""
    on_behalf_of: OnBehalfOf = ""
    traceparent: Traceparent = ""

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.shell):
            refuse("command", "Give either command, a list of arguments, or shell.")
        if self.background and self.timeout is not None:
            refuse("timeout", "Not supported for a background process.")

    @property
    def text(self) -> str:
        """What is recorded as its code."""
        return self.shell or shlex.join(self.command)

    @property
    def language(self) -> str:
        return "bash" if self.shell else "command"

    def to_command(self, timeout: float | None) -> Command:
        return Command(
            argv=tuple(self.command),
            shell=self.shell,
            cwd=self.cwd,
            environment=dict(self.env),
            user=self.user,
            stdin=self.stdin,
            pty=None if self.pty is None else self.pty.pair,
            timeout=timeout,
        )


@declared
class SignalRequest:
    """A signal for a process and its group."""

    signal: Annotated[str, one_of(SIGNALS)]


@declared
class StdinRequest:
    """Bytes for the input of a process."""

    close: Annotated[bool, Field(description="Close the input after these bytes.")] = False


STDIN = Query(StdinRequest)
_NO_COMMAND = {"command": {"type": ["array", "null"], "maxItems": 0}}
_NO_SHELL = {"shell": {"type": ["string", "null"], "maxLength": 0}}
START = Body(
    CommandRequest,
    "Command",
    ours=("traceparent",),
    says={
        "oneOf": [
            {
                "required": ["command"],
                "properties": {"command": {"type": "array", "minItems": 1}, **_NO_SHELL},
            },
            {
                "required": ["shell"],
                "properties": {"shell": {"type": "string", "minLength": 1}, **_NO_COMMAND},
            },
        ],
        "not": {
            "required": ["background", "timeout"],
            "properties": {"background": {"const": True}, "timeout": {"type": "number"}},
        },
    },
)
SIGNAL = Body(SignalRequest, "Signal")
RESIZE = Body(TerminalSize, "Size")


MOST_DEPTH = 32
_FOLDER = "Relative to the workspace, or absolute; the default is the workspace."


@declared
class FileListing:
    """What is in a folder, to a depth, from the entry behind `after` on, which is given as the text
    that a page said, and is here the path itself."""

    path: Annotated[Folder, Field(description=_FOLDER)] = ""
    depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = 1
    after: Annotated[
        PlaceOfPath, Field(description="The value of `after` in `next` of the previous page.")
    ] = ""


@declared
class FileRequest:
    """A file, or a folder that is not the workspace itself."""

    path: Annotated[Path, Field(description="Relative to the workspace, or absolute.")]


@declared
class FolderRequest:
    """A folder."""

    path: Annotated[Folder, Field(description=_FOLDER)] = ""


@declared
class MoveRequest:
    """Give a file or folder another path."""

    source: Annotated[Path, Field(alias="from")]
    to: Path


LIST = Query(FileListing)
FILE = Query(FileRequest)
FOLDER = Query(FolderRequest)
MOVE = Body(MoveRequest, "Move")
MKDIR = Body(FileRequest, "Mkdir")


class SessionLost(Conflict):
    """Its sandbox is gone, and all that it held."""


class SessionAsleep(Conflict):
    """Its sandbox is gone, or was let go of. What was saved of its files is kept."""


class SessionClosed(Conflict, HostClosed):
    """It was closed, before or while this ran."""


NOT_FOUND = ErrorCode("not_found", "Not found", "Check the id.", 404)


class NoSuchSession(SandboxError):
    """There is none of this id, or it is somebody else's: nobody is told which."""

    entry = NOT_FOUND


@contextmanager
def rename_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors of the sandbox to those that the request has for them."""
    try:
        yield
    except InvalidConfiguration as error:
        if (name := names.get(error.field or "")) is not None:
            if error.message.startswith(prefix := f"{error.field}: "):
                error.message = f"{name}: {error.message.removeprefix(prefix)}"
            error.field = name
        raise


def ensure_not_ended(session: Session) -> None:
    """Raises SessionLost or SessionClosed."""
    if session.state == Session.State.LOST:
        raise SessionLost(f"The session and its content are lost: {session.closed_because}")
    if session.closed_at is not None:
        raise SessionClosed(f"The session was closed: {session.closed_because}")


def tenant_of(session: Session) -> Tenant:
    """Raises Conflict where it is gone."""
    if session.tenant is None:
        raise Conflict("The tenant of the session is gone.")
    return session.tenant


class ContextShape(TypedDict):
    id: str
    language: str
    cwd: Annotated[str, "The working folder, relative to the workspace."]


class SavedFilesShape(TypedDict):
    """The files of a session in storage."""

    count: Annotated[int, "The number of files, folders and links."]
    bytes: int
    saved_at: Time | None
    unsaved_since: Annotated[
        Time | None, "Since when changes are unsaved; null if everything is saved."
    ]
    problem: Annotated[str | None, "Why the changes are not saved."]


class SessionShape(TypedDict):
    id: str
    name: str | None
    state: Annotated[str, Choices.of(Session.State.values)]
    provider: str
    runtime: str
    isolation: str
    sharing: str
    language: str
    template: str | None
    metadata: JsonObject
    idle_seconds: int
    max_seconds: int
    created_at: Time
    used_at: Time
    expires_at: Annotated[Time, "When its idle time or its total time ends, whichever is earlier."]
    closed_at: Time | None
    closed_because: Annotated[str | None, "Why it was closed or lost; null while it is not."]
    contexts: list[ContextShape]
    saves: Annotated[
        str,
        Choices.of(Session.Saves.values),
        "When its files are saved to storage: before the answer, after it, or never.",
    ]
    files: SavedFilesShape
    woken_at: Annotated[
        Time | None,
        "When it was last resumed from storage. Its files were restored, its variables were lost.",
    ]


class InterruptedShape(TypedDict):
    interrupted: Annotated[bool, "False if nothing was running."]


class SnapshotShape(TypedDict):
    """The files of a session at one time, without its variables and processes."""

    id: str
    name: str | None
    session: Annotated[str, "The session that the files are from."]
    files: Annotated[int, "The number of files, folders and links."]
    bytes: int
    created_at: Time


class FileShape(TypedDict):
    path: str
    type: Annotated[str, Choices.of(("file", "directory", "symlink", "other"))]
    size_bytes: int
    mode: int
    modified_at: Time | None
    target: NotRequired[Annotated[str, "The target of a symbolic link."]]


class FilePageShape(TypedDict):
    entries: list[FileShape]
    next: Uri | None


class MadeShape(TypedDict):
    path: str
    created: Annotated[bool, "False if the folder already existed."]


class UnpackedShape(TypedDict):
    entries: int


class ProcessShape(TypedDict):
    pid: int
    execution: str | None
    state: Annotated[str, Choices.of(("running", "exited"))]
    exit_code: int | None


class SignalledShape(TypedDict):
    signalled: Annotated[bool, "False if the command had already ended."]
