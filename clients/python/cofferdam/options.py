"""What may be said of code and commands beside themselves. All of it may be left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class Claims(TypedDict, total=False):
    """Who asks, by your own word. It is in the record, and may be searched for."""

    agent: str
    model: str
    conversation: str
    on_behalf_of: str


class CellOptions(Claims, total=False):
    """Of code in a session. `timeout` is seconds; `files` are contents by their paths.

    `idempotency_key` names what is to be done: however often it is sent, it is done once. Without
    one each call is a thing of its own, and its retries have a key that nobody else has. `tools`
    are what the code may call, as the API has them: stream it, and `answer` each `tool_call`.
    """

    arguments: Mapping[str, Any]
    timeout: float
    files: Mapping[str, bytes | str]
    idempotency_key: str
    context: str
    env: Mapping[str, str]
    tools: Sequence[Mapping[str, Any]]


class RunOptions(Claims, total=False):
    """Of code in a sandbox of its own. As for CellOptions; `language` is python unless named."""

    arguments: Mapping[str, Any]
    timeout: float
    files: Mapping[str, bytes | str]
    idempotency_key: str
    language: str
    entrypoint: Literal["auto", "main", "script"]
    priority: Literal["low", "normal", "high"]
    tools: Sequence[Mapping[str, Any]]


class SubmitOptions(RunOptions, total=False):
    """Of code that is run later. `run_at` is ISO 8601 with a zone."""

    webhook: Mapping[str, str]
    run_at: str


class CommandOptions(Claims, total=False):
    """Of a command in a session. `pty` is {"cols": 80, "rows": 24}; with `stdin` it has input."""

    cwd: str
    env: Mapping[str, str]
    user: str
    stdin: bool
    pty: Mapping[str, int]
    timeout: float


class SessionOptions(TypedDict, total=False):
    """Of a session. `snapshot` is the id of the one whose files it begins with."""

    name: str
    language: str
    template: str
    provider: str
    idle_seconds: int
    max_seconds: int
    env: Mapping[str, str]
    metadata: Mapping[str, Any]
    saves: Literal["answer", "background", "never"]
    snapshot: str
