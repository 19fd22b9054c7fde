"""The shapes of sessions, their files and processes, and of snapshots, as answers have them."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from executions.kernel.bodies import Choices, JsonObject, Time, Uri
from executions.sessions.models import Session


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
