"""What Agent Sandbox's clients ask for, in its words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from django.conf import settings
from pydantic import Field

from executions.capabilities.conversations import DEFAULT, Conversation
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
)
from executions.kernel.storage import MOST_LINK_SECONDS
from executions.kernel.text import MOST_FOLDERS, MOST_PATH_BYTES

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


def _described(pattern: str) -> Rule:
    """A path, which `conversations.path_of` reads and refuses."""
    return Rule(check_storable, {"pattern": pattern})


_PATH = rf"(\./)?{PATH_PART}(/{PATH_PART}){{0,{MOST_FOLDERS - 1}}}"
SavedPath = Annotated[
    str, Field(min_length=1, max_length=MOST_PATH_BYTES), _described(f"^{_PATH}$")
]
# That API's own examples name them from the root, which is their folder.
InputPath = Annotated[
    str, Field(min_length=1, max_length=MOST_PATH_BYTES), _described(f"^/*{_PATH}$")
]
NewPath = Annotated[str, Field(max_length=MOST_PATH_BYTES), _described(f"^({_PATH})?$")]
Folder = Annotated[str, Field(max_length=MOST_PATH_BYTES), _described(f"^({_PATH}/*)?$")]


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
