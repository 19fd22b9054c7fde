"""The tools, in the order in which clients see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.api.mcp import running, sessions
from executions.api.mcp.results import EXECUTION, MOST_CHARACTERS, Tool
from executions.api.scopes import NEEDS
from executions.sessions.requests import SIGNALS

TEXT: Mapping[str, Any] = {"type": "string"}
MAYBE_TEXT: Mapping[str, Any] = {"type": ["string", "null"]}
WHOLE: Mapping[str, Any] = {"type": "integer", "minimum": 0}


def _text(description: str) -> dict[str, Any]:
    return {**TEXT, "description": description}


def _object(description: str, **values: Any) -> dict[str, Any]:
    return {"type": "object", "description": description, **values}


SESSION_ID = _text("The id that session_open returned.")
PID = {"type": "integer", "description": "The pid that command_start returned."}
TIMEOUT = {
    "type": "number",
    "exclusiveMinimum": 0,
    "description": "In seconds; the default is the service's. Code that runs longer is ended.",
}
CODE = _text("The program, as text. Print what you want to see.")
PATH = _text("Relative to the session's working folder, without '..'.")
CWD = _text("Folder below the working folder.")
ENVIRONMENT = _object("Environment variables.", additionalProperties=TEXT)
COMMAND = _text("A bash command, such as `ls -la | head`.")
SESSION = {
    "properties": {
        "session_id": TEXT,
        "name": MAYBE_TEXT,
        "state": _text("open, asleep (files are kept, the next call resumes it), closed, lost."),
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
        "Run one program in a new sandbox, which is deleted afterwards: no variables and no files "
        "are kept. Use session_run for steps that build on each other. There is no network access "
        "unless the service allows it. Files that the program writes to artifacts/ are returned "
        "as resources.",
        {
            "code": CODE,
            "language": _text("The language of the code; the default is python."),
            "arguments": _object(
                "If given, main(**arguments) of the code is called, and result is its return value."
            ),
            "timeout": TIMEOUT,
            "files": _object(
                "Text files for the program: the text of each file by its relative path.",
                additionalProperties=TEXT,
            ),
        },
        EXECUTION,
        NEEDS["executions"]["POST"],
        running.run_code,
        requires=("code",),
    ),
    Tool(
        "session_open",
        "Open a session",
        "Open a persistent sandbox: it keeps variables, files and processes between calls, until "
        "it is closed or its time is over. Close it when you are done.",
        {
            "name": _text("Unique among open sessions."),
            "language": _text("The language of the cells; the default is python."),
            "idle_seconds": {
                "type": "integer",
                "description": "The idle time after which it sleeps; the default is 600.",
            },
            "max_seconds": {
                "type": "integer",
                "description": "The age at which it is closed; the default is 1800.",
            },
            "env": ENVIRONMENT,
        },
        SESSION,
        NEEDS["sessions"]["POST"],
        sessions.session_open,
    ),
    Tool(
        "session_list",
        "List sessions",
        "List the sessions, newest first, 20 at a time.",
        {
            "state": {**TEXT, "enum": ["open", "asleep", "closed", "lost"]},
            "cursor": _text("The value of next in the previous page."),
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
        "Run code in a session, after the code that ran there before: variables, imports and "
        "files are kept. The value of the last expression is in outputs. After an error, a "
        "timeout or an interrupt the variables are kept if context_kept is true.",
        {
            "session_id": SESSION_ID,
            "code": CODE,
            "context": _text("The interpreter of the session; without it, the one named default."),
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
        "Reset a session: variables and processes are deleted, files are kept.",
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
        "End a session and everything that runs in it. It is no error to close a session twice.",
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
        "Run a shell command in a session and wait for its end. The command can use the session's "
        "files, but not the variables of its cells. For a server or another long program use "
        "command_start.",
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
        "it ends, gets a signal, or the session ends. Read its output with command_output.",
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
        "Read the output of a background command since `after`, and wait up to `wait` seconds for "
        "new output. For later output call it again with `after` set to `next`.",
        {
            "session_id": SESSION_ID,
            "pid": PID,
            "after": {
                **WHOLE,
                "description": "The value of next in the previous call; 0 for all output.",
            },
            "wait": {
                **WHOLE,
                "maximum": running.MOST_WAIT_SECONDS,
                "description": "In seconds; the default is 1.",
            },
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
        "Send a signal to a command and all processes that it started. SIGTERM asks it to end, "
        "SIGKILL ends it.",
        {"session_id": SESSION_ID, "pid": PID, "signal": {**TEXT, "enum": list(SIGNALS)}},
        {
            "properties": {
                "signalled": {
                    "type": "boolean",
                    "description": "false if the command had already ended.",
                }
            },
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
        "List a folder of a session, at most 200 entries at a time.",
        {
            "session_id": SESSION_ID,
            "path": _text("The folder; the default is the working folder."),
            "depth": {
                "type": "integer",
                "minimum": 1,
                "description": "The number of levels; the default is 1.",
            },
            "after": _text("The value of next in the previous page."),
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
        "Read up to 64 KiB of a file in a session, from `offset`: as text, or as content_base64 "
        "if it is not UTF-8. For the rest call it again with offset set to next_offset.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "offset": {**WHOLE, "description": "In bytes from the start; the default is 0."},
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
        "Write a file in a session. An existing file is replaced, missing parent folders are "
        "created.",
        {
            "session_id": SESSION_ID,
            "path": PATH,
            "text": _text("The content as text."),
            "content_base64": _text("The content in base64, if it is not text."),
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
        f"Read up to {MOST_CHARACTERS} characters of an output of a run, from `offset`. Use it for "
        "the fields that are named in cut.",
        {
            "execution_id": TEXT,
            "stream": {
                **TEXT,
                "enum": list(running.STREAM_NAMES),
                "description": "The default is stdout.",
            },
            "offset": {**WHOLE, "description": "In characters from the start; the default is 0."},
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
