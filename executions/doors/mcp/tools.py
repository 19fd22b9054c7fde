"""The table of the tools: what each is called, takes and answers, and who may call it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from executions.doors.mcp.results import EXECUTION, MOST_CHARACTERS, Tool
from executions.doors.mcp.tool_calls import (
    MOST_WAIT_SECONDS,
    STREAM_NAMES,
    command_output,
    command_run,
    command_signal,
    command_start,
    execution_output,
    file_list,
    file_read,
    file_write,
    run_code,
    session_close,
    session_list,
    session_open,
    session_reset,
    session_run,
)
from executions.doors.native.authentication import NEEDS
from executions.sessions.requests import SIGNALS
from providers.network import PRESETS, Mode

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
NETWORK = _object(
    "The hosts that the code may reach, within what the service allows; without it mostly none.",
    properties={
        "mode": {**TEXT, "enum": list(get_args(Mode))},
        "allow": {
            "type": "array",
            "items": TEXT,
            "description": "Rules, such as pypi.org or *.example.com:443.",
        },
        "preset": {
            **TEXT,
            "enum": list(PRESETS),
            "description": "packages adds the package registries.",
        },
    },
)
TEMPLATE = _text(
    "The name of a template, whose packages and files the sandbox has; without it the usual ones."
)
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
        "but to hosts that network names and the service allows. Files that the program writes to "
        "artifacts/ are returned as resources.",
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
            "env": ENVIRONMENT,
            "network": NETWORK,
            "template": TEMPLATE,
        },
        EXECUTION,
        NEEDS["executions"]["POST"],
        run_code,
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
            "network": NETWORK,
            "template": TEMPLATE,
        },
        SESSION,
        NEEDS["sessions"]["POST"],
        session_open,
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
        session_list,
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
        session_run,
        requires=("session_id", "code"),
    ),
    Tool(
        "session_reset",
        "Reset a session",
        "Reset a session: variables and processes are deleted, files are kept.",
        {"session_id": SESSION_ID},
        SESSION,
        NEEDS["session-reset"]["POST"],
        session_reset,
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
        session_close,
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
        command_run,
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
        command_start,
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
                "maximum": MOST_WAIT_SECONDS,
                "description": "In seconds; the default is 1.",
            },
        },
        {
            "properties": {
                "stdout": TEXT,
                "stderr": TEXT,
                "state": {**TEXT, "enum": ["running", "exited"]},
                "exit_code": {"type": ["integer", "null"]},
                "advice": {"type": "array", "items": TEXT},
                "next": WHOLE,
            },
            "required": ["stdout", "stderr", "state", "exit_code", "next"],
        },
        NEEDS["session-process-events"]["GET"],
        command_output,
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
        command_signal,
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
        file_list,
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
        file_read,
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
        file_write,
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
                "enum": list(STREAM_NAMES),
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
        execution_output,
        requires=("execution_id",),
        only_reads=True,
    ),
)
TOOLS: Mapping[str, Tool] = {tool.name: tool for tool in _ALL}
