"""What is asked of a session's commands. A request that exists is valid."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import field
from typing import Annotated

from pydantic import BaseModel, Field

from executions.kernel.declarations import (
    NAMED,
    STORABLE,
    STRICT,
    WHOLE,
    Body,
    Directory,
    Environment,
    Members,
    Query,
    Rule,
    Script,
    Timeout,
    UserName,
    declared,
    one_of,
    refuse,
)
from executions.runs.requests import Agent, ConversationName, Model, OnBehalfOf, Traceparent
from providers.values import Command

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


def _beginning(command: Sequence[str]) -> Sequence[str]:
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
        Rule(_beginning, {"prefixItems": [NAMED]}),
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
