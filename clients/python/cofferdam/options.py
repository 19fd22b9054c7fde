"""Options of code, commands and sessions. All of them are optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class Claims(TypedDict, total=False):
    """Claims about the caller, not verified. The record has them, and can be found by them."""

    agent: str
    model: str
    conversation: str
    on_behalf_of: str


class CellOptions(Claims, total=False):
    """Options of code in a session. `timeout` is seconds; `files` maps paths to contents.

    Requests with the same `idempotency_key` run the code once. Without one each call has its own
    unique key, which its retries share. `tools` are the tools that the code may call, in the
    API's format: stream the run, and `answer` each `tool_call` event.
    """

    arguments: Mapping[str, Any]
    timeout: float
    files: Mapping[str, bytes | str]
    idempotency_key: str
    context: str
    env: Mapping[str, str]
    tools: Sequence[Mapping[str, Any]]


class RunOptions(Claims, total=False):
    """Options of code in its own sandbox, like CellOptions. The default `language` is python.

    `network` says which hosts the code may reach, such as {"allow": ["pypi.org"]}. `template` is
    the name of a template.
    """

    arguments: Mapping[str, Any]
    timeout: float
    files: Mapping[str, bytes | str]
    idempotency_key: str
    env: Mapping[str, str]
    network: Mapping[str, Any]
    template: str
    language: str
    entrypoint: Literal["auto", "main", "script"]
    priority: Literal["low", "normal", "high"]
    tools: Sequence[Mapping[str, Any]]


class SubmitOptions(RunOptions, total=False):
    """Options of code that runs later. `run_at` is ISO 8601 with a time zone."""

    webhook: Mapping[str, str]
    run_at: str


class CommandOptions(Claims, total=False):
    """Options of a command in a session.

    `pty` is a terminal's size, such as {"cols": 80, "rows": 24}. With `stdin` the command can
    receive input.
    """

    cwd: str
    env: Mapping[str, str]
    user: str
    stdin: bool
    pty: Mapping[str, int]
    timeout: float


class SessionOptions(TypedDict, total=False):
    """Options of a session. `snapshot` is the id of the snapshot whose files it starts with."""

    name: str
    language: str
    template: str
    provider: str
    idle_seconds: int
    max_seconds: int
    env: Mapping[str, str]
    network: Mapping[str, Any]
    metadata: Mapping[str, Any]
    saves: Literal["answer", "background", "never"]
    snapshot: str
