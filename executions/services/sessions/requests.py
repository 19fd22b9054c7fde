"""What is asked of sessions. A request that exists is valid."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any

from pydantic import Field

from executions.kernel.declarations import (
    END,
    WHOLE,
    Body,
    ContextId,
    Directory,
    Environment,
    Id,
    LanguageName,
    Rule,
    ShortName,
    Subject,
    at_most,
    check_storable,
    declared,
    one_of,
    storable_members,
)
from executions.kernel.text import is_storable, to_json
from executions.models.session import Session
from providers.sandbox import DEFAULT_CONTEXT

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


def _kept(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
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
    Rule(_kept, storable_members(3)),
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
    template: ShortName = ""
    provider: Annotated[ShortName, Field(description="A configuration on the tenant's route.")] = ""
    idle_seconds: Idle = IDLE_SECONDS
    max_seconds: Age = MAX_SECONDS
    env: Annotated[
        Environment, Field(description="The environment variables of all code and commands in it.")
    ] = field(default_factory=dict)
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
