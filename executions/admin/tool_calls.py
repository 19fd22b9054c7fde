"""What an execution was to the agent that asked for it: a command, code, or a call of a tool."""

from __future__ import annotations

from typing import NamedTuple

from executions.doors.claude.tools import call_in
from executions.doors.codex.http_requests import request_in
from executions.runs.models import Execution
from providers.hidden_characters import visible

_MOST = 500


class ToolCall(NamedTuple):
    """`text` is what a tool was given, "" where the code itself says it. Both are visible text."""

    kind: str
    text: str = ""


def tool_call_of(execution: Execution, code: str) -> ToolCall:
    """Return what an execution was, by its code, which may be cut."""
    if execution.session_id is None:
        return ToolCall("code")
    if not execution.context:
        if request := request_in(code):
            method, url = request
            return ToolCall("http/request", _shown(f"{method} {url}"))
        return ToolCall("command")
    if found := call_in(code):
        tool, given = found
        words = [str(given[name]) for name in ("pattern", "path", "file_path") if name in given]
        return ToolCall(tool, _shown(" in ".join(words)))
    return ToolCall(f"context {visible(execution.context)}")


def _shown(text: str) -> str:
    return visible(text[:_MOST]) + ("…" if len(text) > _MOST else "")
