"""Operations of kept sandboxes as service and client write them down. Both sides use this module.

A request's body is frames of `providers.runtime.guest.wire`: first the operation, with its parts,
then what it is given to write: frames with a part `data`. The answer is frames with an `event`:
what the guest's operation sends (see `providers.runtime.guest.protocol`), and last one of

    done      what the operation answers; of a run the part `result` is the result as JSON
    error     the part `error` is the error as JSON

A single run whose client accepts MEDIA_TYPE is answered in the same way.

`alive` comes when nothing else has for a while.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Any, cast, get_args

from providers.errors import InvalidConfiguration, ProviderUnavailable, SandboxError
from providers.runtime.guest import wire
from providers.runtime.guest.protocol import CHOSEN_BYTES, NAME_BYTES
from providers.runtime.pool.protocol import Frame, Parts
from providers.runtime.pool.requests import pack_job
from providers.runtime.service import messages
from providers.values import Entrypoint, Event, InputFile, Job, RunLimits, SandboxLimits

MEDIA_TYPE = "application/octet-stream"
# How often something is said of an operation of which nothing else is to be said.
ALIVE_SECONDS = 5.0

# The operations that are handed on as they come, and which of their fields.
FIELDS: Mapping[str, frozenset[str]] = {
    name: frozenset(names.split())
    for name, names in {
        "context.create": "language cwd context",
        "context.destroy": "context",
        "context.restart": "context",
        "context.list": "",
        "spawn": "argv shell cwd environment user stdin pty timeout",
        "follow": "pid after",
        "process.list": "",
        "signal": "pid signal",
        "resize": "pid columns rows",
        "file.list": "path depth",
        "file.stat": "path",
        "file.mkdir": "path",
        "file.move": "path target",
        "file.remove": "path",
        "file.read": "path offset length",
        "file.write": "path mode metadata",
        "file.watch": "path",
        "file.changes": "mark thorough",
        "file.pack": "path",
        "file.unpack": "path",
        "reset": "",
    }.items()
}
# Bytes of the parts that an operation has which is handed on, where it has any.
PARTS: Mapping[str, Mapping[str, int]] = {"file.pack": {"only": CHOSEN_BYTES}}
_LARGEST_LIMIT = 1 << 40


def fields_of(header: Mapping[str, object]) -> dict[str, object]:
    """Those of an operation that is handed on. Raises InvalidConfiguration."""
    name = header.get("op")
    known = FIELDS.get(name) if isinstance(name, str) else None
    if known is None:
        raise InvalidConfiguration("op: Unknown operation.", field="op")
    given = {key: value for key, value in header.items() if key not in ("op", "parts")}
    for key in given:
        if key not in known:
            raise InvalidConfiguration(f"{key}: Unknown field of {name}.", field=key)
    return given


def parts_of(received: Frame) -> list[tuple[str, bytes]]:
    """Those of an operation that is handed on. Raises InvalidConfiguration."""
    header, parts = received
    known = PARTS.get(str(header.get("op")), {})
    for name, content in parts.items():
        if len(content) > known.get(name, -1):
            raise InvalidConfiguration(f"{name}: Unknown, or too large.", field=name)
    return list(parts.items())


def run_to_frame(job: Job, **how: object) -> bytes:
    """A run, as the first frame of a request; `how` are fields beside the job's.

    Raises InvalidConfiguration naming the field at fault.
    """
    header = {
        "op": "run",
        "context": job.context,
        "run": job.run,
        "timeout": job.timeout,
        "entrypoint": job.entrypoint,
        "environment": dict(job.environment),
        "limits": asdict(job.limits),
        **how,
        # What knows of no tools refuses a run with some, and no other.
        **({"tools": list(job.tools)} if job.tools else {}),
    }
    return pack_job(header, job)


def run_from_frame(received: Frame) -> Job:
    """Raises InvalidConfiguration naming the field at fault."""
    header, parts = received
    for name in header:
        if name not in _RUN_FIELDS:
            raise InvalidConfiguration(f"{name}: Unknown field of run.", field=name)
    timeout = header.get("timeout")
    if type(timeout) not in (int, float) or not 0 < cast(float, timeout) <= (
        messages.LONGEST_TIMEOUT
    ):
        raise InvalidConfiguration(
            f"timeout: Must be seconds, at most {messages.LONGEST_TIMEOUT:g}.", field="timeout"
        )
    context, entrypoint = header.get("context", ""), header.get("entrypoint", "auto")
    run = header.get("run", "")
    language = header.get("language", "python")
    if not all(isinstance(each, str) for each in (context, run, language)):
        raise InvalidConfiguration("context, run and language must be strings.", field="context")
    if entrypoint not in get_args(Entrypoint):
        raise InvalidConfiguration("entrypoint: Unknown entrypoint.", field="entrypoint")
    return Job(
        code=_text(parts, "code"),
        language=cast(str, language),
        timeout=float(cast(float, timeout)),
        arguments=_arguments(parts),
        entrypoint=cast("Entrypoint", entrypoint),
        files=[
            InputFile(name.removeprefix("file:"), content)
            for name, content in parts.items()
            if name.startswith("file:")
        ],
        limits=replace(RunLimits(), **_numbers(header.get("limits", {}), _RUN_LIMITS)),
        context=cast(str, context),
        run=cast(str, run),
        environment=messages.environment(header.get("environment", {})),
        tools=_tools(header.get("tools", [])),
    )


def _tools(given: object) -> list[str]:
    if not isinstance(given, list) or not all(
        isinstance(name, str)
        and name.isascii()
        and name.isidentifier()
        and len(name.encode()) <= NAME_BYTES
        for name in given
    ):
        raise InvalidConfiguration("tools: Must be a list of names.", field="tools")
    return given


def frame(header: Mapping[str, object], parts: Parts = ()) -> bytes:
    """Raises InvalidConfiguration where its header is larger than any may be."""
    packed = wire.pack(dict(header), list(parts))
    if int.from_bytes(packed[:4], "big") > wire.HEADER_LIMIT:
        raise InvalidConfiguration("The operation's fields are too large in total.")
    return packed


_RUN_FIELDS = frozenset(
    ("op", "parts", "context", "run", "timeout", "entrypoint", "environment", "limits", "detach")
) | {"tools", "language", "stream"}
_RUN_LIMITS = frozenset(each.name for each in fields(RunLimits))
_SANDBOX_LIMITS = frozenset(each.name for each in fields(SandboxLimits))


def _text(parts: Mapping[str, bytes], name: str) -> str:
    try:
        return parts[name].decode()
    except KeyError:
        raise InvalidConfiguration(f"{name}: This field is required.", field=name) from None
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"{name}: Not UTF-8.", field=name) from None


def _arguments(parts: Mapping[str, bytes]) -> Any:
    if "arguments" not in parts:
        return None
    arguments = messages.loads(parts["arguments"])
    if not isinstance(arguments, dict):
        raise InvalidConfiguration("arguments: Must be an object.", field="arguments")
    return arguments


def sandbox_limits(given: object) -> SandboxLimits | None:
    """None asks for no other than there are. Raises InvalidConfiguration."""
    if given is None:
        return None
    return replace(SandboxLimits(), **_numbers(given, _SANDBOX_LIMITS))


def _numbers(given: object, known: frozenset[str]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidConfiguration("limits: Must be an object.", field="limits")
    for name, value in given.items():
        if name not in known or type(value) is not int or not 0 <= value <= _LARGEST_LIMIT:
            raise InvalidConfiguration(
                f"limits: {str(name)[:100]} is unknown, or not a whole number up to "
                f"{_LARGEST_LIMIT}.",
                field="limits",
            )
    return given


def frame_of_event(event: Event) -> Frame:
    """What a single run tells while it runs. A rich output is one part, as JSON."""
    if event.type == "output":
        return {"event": "output"}, {"output": messages.dumps(dict(event.output or {}))}
    if event.type == "network":
        return {"event": "network"}, {"attempt": messages.dumps(dict(event.attempt or {}))}
    return {"event": event.type}, {"data": event.data}


def event_of_frame(frame: Frame) -> Event | None:
    """None for what is no such event. Raises SandboxError for what is not JSON."""
    header, parts = frame
    kind = header.get("event")
    if kind == "stdout" or kind == "stderr":
        return Event("stdout" if kind == "stdout" else "stderr", parts.get("data", b""))
    if kind == "network":
        return attempt_event(parts)
    output = messages.loads(parts.get("output", b"null")) if kind == "output" else None
    return Event("output", output=output) if isinstance(output, dict) else None


def attempt_event(parts: Mapping[str, bytes]) -> Event | None:
    """The event of an attempt to reach a host. Raises SandboxError for what is not JSON."""
    attempt = messages.loads(parts.get("attempt", b"null"))
    return Event("network", attempt=attempt) if isinstance(attempt, dict) else None


def checked(frames: Iterator[Frame], *, also_alive: bool = False) -> Iterator[Frame]:
    """What is of the operation, and `alive` where it is wanted; an error is raised."""
    for header, parts in frames:
        event = header.get("event")
        if event in ("done", "error"):
            # The end of the answer is read too, so that the connection can be used again.
            for _ in frames:
                continue
        if event == "error":
            raise error_of(parts)
        if event != "alive" or also_alive:
            yield header, parts
        if event == "done":
            return
    raise unfinished()


def error_of(parts: Mapping[str, bytes]) -> SandboxError:
    """The error that a frame tells of."""
    error = messages.error_from_json(messages.loads(parts.get("error", b"")))
    if error is None:
        return ProviderUnavailable("The pool service gave no reason.", started=True)
    error.answered = "proof"
    error.nothing_ran = not error.started
    return error


def unfinished() -> ProviderUnavailable:
    return ProviderUnavailable("The pool service ended in the middle of an answer.", started=True)
