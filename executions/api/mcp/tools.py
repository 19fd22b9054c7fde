"""The tools, in the order in which clients see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.api.mcp import running, sessions
from executions.api.mcp.results import EXECUTION, MOST_CHARACTERS, Tool
from executions.api.scopes import NEEDS
from executions.services.sessions.commands import SIGNALS

TEXT: Mapping[str, Any] = {"type": "string"}
MAYBE_TEXT: Mapping[str, Any] = {"type": ["string", "null"]}
WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": 0}


def _text(description: str) -> dict[str, Any]:
    return {**TEXT, "description": description}


def _object(description: str, **values: Any) -> dict[str, Any]:
    return {"type": "object", "description": description, **values}


SESSION_ID = _text("As session_open gave it.")
PID = {"type": "integer", "description": "As command_start gave it."}
TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "Seconds; left out, the service's usual bound. What runs longer is ended.",
}
CODE = _text("The program, as text. Print what you want to see.")
PATH = _text("Relative to the session's working folder, without '..'.")
CWD = _text("Folder below the working folder.")
ENVIRONMENT = _object("Environment variables.", additionalProperties=TEXT)
COMMAND = _text("What bash is given to run, such as `ls -la | head`.")
SESSION = {
    "properties": {
        "session_id": TEXT,
        "name": MAYBE_TEXT,
        "state": _text("open, asleep (files are kept, the next call wakes it), closed, lost."),
        "language": TEXT,
        "provider": TEXT,
        "isolation": TEXT,
        "created_at": TEXT,
        "expires_at": TEXT,
        "contexts": {"type": "array", "items": TEXT},
    },
    "required": ["session_id", "state", "expires_at"],
}
ENTRY = {
    "properties": {
        "path": TEXT,
        "type": {**TEXT, "enum": ["file", "directory", "symlink", "other"]},
        "size_bytes": WHOLE,
        "modified_at": MAYBE_TEXT,
    },
    "required": ["path", "type", "size_bytes"],
}

_ALL = (
    Tool(
        "run_code",
        "Run code",
        "Run one program in a fresh sandbox, which is gone afterwards: no variable and no file is "
        "kept. Use session_run for steps that build on each other. The network is closed unless "
        "the service opens it. Files that the program writes to artifacts/ come back as resources.",
        {
            "code": CODE,
            "language": _text("Of the code: python where none is named."),
            "arguments": _object(
                "Where given, the code's main(**arguments) is called, and result is its value."
            ),
            "timeout": TIMEOUT,
            "files": _object("Text files for it, by relative path.", additionalProperties=TEXT),
        },
        EXECUTION,
        NEEDS["executions"]["POST"],
        running.run_code,
        requires=("code",),
    ),
    Tool(
        "session_open",
        "Open a session",
        "Open a sandbox that stays: variables, files and processes are kept from call to call, "
        "until it is closed or its time is over. Close it when you are done.",
        {
            "name": _text("Unique among open sessions."),
            "language": _text("Of the cells: python where none is named."),
            "idle_seconds": {
                "type": "integer",
                "description": "Unused for so long it sleeps: 600.",
            },
            "max_seconds": {"type": "integer", "description": "Closed at this age: 1800."},
            "env": ENVIRONMENT,
        },
        SESSION,
        NEEDS["sessions"]["POST"],
        sessions.session_open,
    ),
    Tool(
        "session_list",
        "List sessions",
        "The sessions there are, newest first, 20 at a time.",
        {
            "state": {**TEXT, "enum": ["open", "asleep", "closed", "lost"]},
            "cursor": _text("The next of the page before."),
        },
        {
            "properties": {
                "sessions": {"type": "array", "items": {"type": "object", **SESSION}},
                "next": MAYBE_TEXT,
            },
            "required": ["sessions"],
        },
        NEEDS["sessions"]["GET"],
        sessions.session_list,
        only_reads=True,
    ),
    Tool(
        "session_run",
        "Run a cell",
        "Run code in a session, after what ran there before: variables, imports and files are "
        "still there. The value of the last expression is in outputs. After an error, a timeout or "
        "an interrupt the variables are kept where context_kept is true.",
        {
            "session_id": SESSION_ID,
            "code": CODE,
            "context": _text("Which interpreter of the session; default where none is named."),
            "timeout": TIMEOUT,
        },
        EXECUTION,
        NEEDS["session-executions"]["POST"],
        running.session_run,
        requires=("session_id", "code"),
    ),
    Tool(
        "session_reset",
        "Reset a session",
        "Begin anew in a session: variables and processes are gone, files stay.",
        {"session_id": SESSION_ID},
        SESSION,
        NEEDS["session-reset"]["POST"],
        sessions.session_reset,
        requires=("session_id",),
        destroys=True,
    ),
    Tool(
        "session_close",
        "Close a session",
        "End a session and all that runs in it. To close it again is no error.",
        {"session_id": SESSION_ID},
        {"properties": {"closed": {"type": "boolean"}}, "required": ["closed"]},
        NEEDS["session"]["DELETE"],
        sessions.session_close,
        requires=("session_id",),
        destroys=True,
    ),
    Tool(
        "command_run",
        "Run a command",
        "Run a shell command in a session and wait for its end. It sees the session's files, not "
        "the variables of its cells. For a server or another long program use command_start.",
        {
            "session_id": SESSION_ID,
            "command": COMMAND,
            "cwd": CWD,
            "env": ENVIRONMENT,
            "timeout": TIMEOUT,
        },
        EXECUTION,
        NEEDS["session-processes"]["POST"],
        running.command_run,
        requires=("session_id", "command"),
    ),
    Tool(
        "command_start",
        "Start a command",
        "Start a shell command in the background of a session, and return at once. It runs until "
        "it ends, is signalled, or the session ends. Read it with command_output.",
        {"session_id": SESSION_ID, "command": COMMAND, "cwd": CWD, "env": ENVIRONMENT},
        {
            "properties": {"pid": {"type": "integer"}, "execution_id": TEXT},
            "required": ["pid", "execution_id"],
        },
        NEEDS["session-processes"]["POST"],
        running.command_start,
        requires=("session_id", "command"),
    ),
    Tool(
        "command_output",
        "Read a command's output",
        "What a command in the background has put out since `after`, waiting up to `wait` seconds "
        "for it. Call it again with `after` set to `next` for what came later.",
        {
            "session_id": SESSION_ID,
            "pid": PID,
            "after": {**WHOLE, "description": "The next of the call before; 0 for all."},
            "wait": {**WHOLE, "maximum": running.MOST_WAIT_SECONDS, "description": "Seconds: 1."},
        },
        {
            "properties": {
                "stdout": TEXT,
                "stderr": TEXT,
                "state": {**TEXT, "enum": ["running", "exited"]},
                "exit_code": {"type": ["integer", "null"]},
                "next": WHOLE,
            },
            "required": ["stdout", "stderr", "state", "exit_code", "next"],
        },
        NEEDS["session-process-events"]["GET"],
        running.command_output,
        requires=("session_id", "pid"),
        only_reads=True,
    ),
    Tool(
        "command_signal",
        "Signal a command",
        "Send a signal to a command and all it started. SIGTERM asks it to end, SIGKILL ends it.",
        {"session_id": SESSION_ID, "pid": PID, "signal": {**TEXT, "enum": list(SIGNALS)}},
        {
            "properties": {"signalled": {"type": "boolean", "description": "false: it had ended."}},
            "required": ["signalled"],
        },
        NEEDS["session-process-signal"]["POST"],
        running.command_signal,
        requires=("session_id", "pid", "signal"),
        destroys=True,
    ),
    Tool(
        "file_list",
        "List files",
        "What is in a folder of a session, at most 200 entries at a time.",
        {
            "session_id": SESSION_ID,
            "path": _text("Folder; the working folder where none is given."),
            "depth": {"type": "integer", "minimum": 1, "description": "Levels below it: 1."},
            "after": _text("The next of the page before."),
        },
        {
            "properties": {
                "entries": {"type": "array", "items": {"type": "object", **ENTRY}},
                "next": MAYBE_TEXT,
            },
            "required": ["entries"],
        },
        NEEDS["session-files"]["GET"],
        sessions.file_list,
        requires=("session_id",),
        only_reads=True,
    ),
    Tool(
        "file_read",
        "Read a file",
        "Read 64 KiB of a session's file from `offset` on: as text, or as content_base64 where it "
        "is not UTF-8. For the rest call it again with offset set to next_offset.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "offset": {**WHOLE, "description": "Bytes from its start: 0."},
        },
        {
            "properties": {
                "text": MAYBE_TEXT,
                "content_base64": MAYBE_TEXT,
                "size_bytes": WHOLE,
                "next_offset": {"type": ["integer", "null"]},
            },
            "required": ["text", "content_base64", "size_bytes", "next_offset"],
        },
        NEEDS["session-file-content"]["GET"],
        sessions.file_read,
        requires=("session_id", "path"),
        only_reads=True,
    ),
    Tool(
        "file_write",
        "Write a file",
        "Put a file into a session, in place of the one of that path. Folders above it are made.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "text": _text("Its content."),
            "content_base64": _text("Its content, where it is no text."),
        },
        ENTRY,
        NEEDS["session-file-content"]["PUT"],
        sessions.file_write,
        requires=("session_id", "path"),
        destroys=True,
    ),
    Tool(
        "execution_output",
        "Read the rest of an output",
        f"Read {MOST_CHARACTERS} characters of what a run put out, from `offset` on: for what "
        "was named in cut.",
        {
            "execution_id": TEXT,
            "stream": {**TEXT, "enum": list(running.STREAM_NAMES), "description": "stdout."},
            "offset": {**WHOLE, "description": "Characters from its start: 0."},
        },
        {
            "properties": {
                "status": TEXT,
                "text": TEXT,
                "total": WHOLE,
                "next_offset": {"type": ["integer", "null"]},
            },
            "required": ["status", "text", "total", "next_offset"],
        },
        NEEDS["execution"]["GET"],
        running.execution_output,
        requires=("execution_id",),
        only_reads=True,
    ),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _ALL}
