"""The shapes of Agent Sandbox's answers."""

from __future__ import annotations

from typing import Annotated, NotRequired, TypedDict

from executions.kernel.bodies import Uri

SessionId = Annotated[str, "The session's id."]


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
    container_id: NotRequired[SessionId]
    message: NotRequired[str]


class AgentSandboxUploadShape(AgentSandboxArtifactShape):
    status: str
    container_id: SessionId


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
