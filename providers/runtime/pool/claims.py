"""What a guest claims of a run: its events as they come, and its answer. All of it is checked
before it counts, and made safe to keep. What host and supervisor have seen is noted beside it.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

from providers.errors import ProviderUnavailable
from providers.json_values import check
from providers.runtime.guest.names import Omissions, problem, too_large, too_many
from providers.runtime.guest.paths import MOST_DEPTH, PATH_BYTES
from providers.runtime.guest.protocol import CALL_BYTES, CHUNK_BYTES, MOST_UNSEEN, NAME_BYTES
from providers.runtime.guest.wire import EXCEPTION_BYTES, FrameError
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.protocol import Frame
from providers.sandbox import Context, FileChange, FileEntry, Process, is_internal
from providers.values import (
    ARTIFACTS_SKIPPED,
    BURST,
    HOST,
    OUTPUTS_SKIPPED,
    PROCESS_BURST,
    PROCESS_LIMIT,
    SIGSYS,
    SUPERVISOR,
    ArtifactFile,
    Emit,
    Event,
    ExecutionResult,
    RunLimits,
    ToolCall,
    exception_of,
    note,
    note_omissions,
    observation,
)

# Turns of stdout and stderr that a guest may tell of.
MOST_PIECES = 4096


def readable(output: bytes) -> str:
    """Text that every database can hold: invalid UTF-8 and NUL become U+FFFD."""
    return output.decode("utf-8", "replace").replace("\0", "\ufffd")


def parse_json(text: bytes) -> Any:
    """The value. Raises ValueError or RecursionError for what is not strictly JSON."""
    value = json.loads(text.decode())
    # Writing it again refuses what the parser let through: NaN, 1e999 and lone surrogates.
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    return value


def read_exit_code(claimed: object) -> int | None:
    """As processes have them, None for what is none."""
    return claimed if type(claimed) is int and 0 <= claimed <= 255 else None


def measured(claimed: object) -> int | float | None:
    """A figure that can be one, None for what cannot."""
    if type(claimed) in (int, float) and 0 <= claimed < 2**53:  # type: ignore[operator]
        return claimed  # type: ignore[return-value]
    return None


def read_remarks(claimed: object) -> list[list[int | str]] | None:
    """The [line, name, what it does] of an analysis, as far as they are that; None without one."""
    if not isinstance(claimed, list):
        return None
    return [
        [entry[0], entry[1][:100], entry[2][:100]]
        for entry in claimed[:50]
        if isinstance(entry, list)
        and len(entry) == 3
        and type(entry[0]) is int
        and 0 < entry[0] < 2**31
        and all(isinstance(text, str) and text.isprintable() for text in entry[1:])
    ]


def order(header: Mapping[str, object]) -> list[list[int]] | None:
    """The [1 or 2, bytes] of which stream came when; None for what is none, or not all."""
    claimed = header.get("order")
    if header.get("order_cut") is True or not isinstance(claimed, list):
        return None
    if len(claimed) > MOST_PIECES:
        return None
    is_order = all(
        isinstance(piece, list)
        and len(piece) == 2
        and type(piece[0]) is int
        and type(piece[1]) is int
        and piece[0] in (1, 2)
        and piece[1] > 0
        for piece in claimed
    )
    return claimed if is_order else None


def exception(claimed: bytes | None) -> dict[str, str] | None:
    """The type, message and traceback of what ended a program; None for what is not that."""
    if not claimed or len(claimed) > EXCEPTION_BYTES:
        return None
    try:
        told = parse_json(claimed)
    except (ValueError, RecursionError):
        return None
    return exception_of(told)


# Of those that are read at once: to read so many takes a tenth of a second, in which all wait.
MOST_VALUES = 500_000
# Part names are "output:<number>:<MIME type>".
_PART = re.compile(
    r"output:(\d{1,4}):([a-z]{1,20}/[a-z0-9][a-z0-9.+_-]{0,79}(?:; ?[a-z]+=[a-z0-9]+)?)"
)


def read_outputs(
    parts: Mapping[str, bytes], limits: RunLimits, skipped: Omissions | None = None
) -> list[dict[str, Any]]:
    """The claimed outputs that are well formed and within the limits, in their order. What is JSON
    has MOST_VALUES together; a part with more is left out. `skipped` is told what is left out."""
    bundles: dict[int, dict[str, Any]] = {}
    room, values = limits.rich_output_bytes, MOST_VALUES
    noted = Omissions() if skipped is None else skipped
    for part, content in parts.items():
        if not part.startswith("output:"):
            continue
        match = _PART.fullmatch(part)
        if match is None:
            noted.add(part, "its name is not a MIME type")
            continue
        number, mime = int(match[1]), match[2]
        name = f"output {number + 1}: {mime}"
        if len(content) > room:
            noted.add(name, too_large(limits.rich_output_bytes, "outputs"))
            continue
        if number not in bundles and len(bundles) >= limits.rich_output_count:
            noted.add(name, too_many(limits.rich_output_count, "outputs"))
            continue
        try:
            if _is_json(mime):
                # Before any is made.
                values -= check(content, values, len(content))
            data = _decode(mime, content)
        except (ValueError, RecursionError) as error:
            noted.add(name, f"it cannot be read: {error}")
            continue
        room -= len(content)
        bundles.setdefault(number, {})[mime] = data
    return [bundles[number] for number in sorted(bundles)]


def _is_json(mime: str) -> bool:
    kind = mime.partition(";")[0]
    return kind == "application/json" or kind.endswith("+json")


def _decode(mime: str, content: bytes) -> Any:
    if _is_json(mime):
        return parse_json(content)
    kind = mime.partition(";")[0]
    if kind.startswith("text/") or kind.endswith(("+xml", "/xml", "/javascript")):
        return readable(content)
    return base64.b64encode(content).decode()


def read_answer(
    frame: Frame, limits: RunLimits, evidence: ResourceUsage, metadata: dict[str, Any]
) -> ExecutionResult:
    """The result that an answer stands for; what exceeds `limits` is left out.

    What `evidence` says of memory goes before what the guest says. `metadata` is completed.
    """
    header, parts = frame
    exit_code = read_exit_code(header.get("exit_code"))
    timed_out = header.get("timed_out") is True
    out_of_memory = header.get("out_of_memory") is True
    if evidence.out_of_memory and exit_code != 0 and not timed_out:
        out_of_memory = True
    if timed_out or out_of_memory:
        exit_code = None
    claimed_peak = measured(header.get("memory_peak_bytes"))
    metadata["memory_peak_bytes"] = evidence.memory_peak_bytes or claimed_peak
    claimed_time = measured(header.get("cpu_seconds"))
    metadata["cpu_seconds"] = (
        claimed_time if evidence.cpu_seconds is None else round(evidence.cpu_seconds, 6)
    )
    files_skipped, outputs_skipped = Omissions(), Omissions()
    files_skipped.add_claimed(header.get(ARTIFACTS_SKIPPED))
    outputs_skipped.add_claimed(header.get(OUTPUTS_SKIPPED))
    if (remarks := read_remarks(header.get("remarks"))) is not None:
        metadata["advice"] = remarks
    if dropped := measured(header.get("remarks_dropped")):
        metadata["advice_dropped"] = dropped
    bounds = metadata.get("limits") or {}
    note(metadata, observed(header, evidence, bounds.get("processes") or sys.maxsize))
    bound = limits.output_bytes
    stdout, stderr = parts.get("stdout", b""), parts.get("stderr", b"")
    result = ExecutionResult(
        stdout=readable(stdout[:bound]),
        stderr=readable(stderr[:bound]),
        exit_code=exit_code,
        execution_time=float(measured(header.get("seconds")) or 0),
        metadata=metadata,
        stdout_truncated=header.get("stdout_truncated") is True or len(stdout) > bound,
        stderr_truncated=header.get("stderr_truncated") is True or len(stderr) > bound,
        timed_out=timed_out,
        out_of_memory=out_of_memory,
        outputs=read_outputs(parts, limits, outputs_skipped),
        artifacts=_artifacts(parts, limits, files_skipped),
        output_order=order(header),
        exception=exception(parts.get("exception")) if exit_code else None,
    )
    note_omissions(metadata, ARTIFACTS_SKIPPED, files_skipped)
    note_omissions(metadata, OUTPUTS_SKIPPED, outputs_skipped)
    if "result" in parts and exit_code == 0:
        try:
            if len(parts["result"]) > limits.result_bytes:
                raise ValueError(f"over the limit of {limits.result_bytes} bytes")
            result.result = parse_json(parts["result"])
            result.has_result = True
        except (ValueError, RecursionError) as error:
            result.exit_code = 1
            result.stderr += f"\nthe returned value is not JSON: {error}"
    return result


def _artifacts(
    parts: Mapping[str, bytes], limits: RunLimits, skipped: Omissions
) -> list[ArtifactFile]:
    """The claimed artifacts that keep to the limits. A name is only a name: no path comes of it."""
    found: list[ArtifactFile] = []
    room = limits.artifacts_total_bytes
    for part, content in parts.items():
        name = part.removeprefix("artifact:")
        if part == name:
            continue
        reason = problem(name)
        if not reason and len(found) >= limits.artifact_count:
            reason = too_many(limits.artifact_count)
        if not reason and len(content) > min(limits.artifact_bytes, room):
            reason = too_large(limits.artifact_bytes)
        if reason:
            skipped.add(name, reason)
            continue
        room -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        found.append(ArtifactFile(name, mime_type, content))
    return found


# Of the processes that a sandbox may have, those that our own may take: what is ready for the next
# run, and the supervisor where it has no user of its own.
OURS = 2


def observed(
    header: Mapping[str, object], evidence: ResourceUsage, most_processes: int
) -> list[dict[str, Any]]:
    """`header` is a guest's answer, empty where it gave none. What the host has seen goes first."""
    found = []
    if count := _count(header, "sigsys"):
        found.append(observation(SIGSYS, SUPERVISOR, count))
    left = _count(header, "processes_left")
    if evidence.refused_processes:
        found.append(observation(PROCESS_LIMIT, HOST, evidence.refused_processes))
    elif left >= max(most_processes - OURS, 2):
        found.append(observation(PROCESS_LIMIT, SUPERVISOR, left))
    count = _count(header, "processes_started")
    # Of what the kernel refused in a container it had a number already.
    if count >= BURST and not evidence.refused_processes:
        found.append(observation(PROCESS_BURST, SUPERVISOR, count))
    return found


def _count(header: Mapping[str, object], name: str) -> int:
    claimed = header.get(name)
    return claimed if type(claimed) is int and claimed > 0 else 0


class LiveRun:
    """The events of one run, and what of them is known should the guest not answer.

    A guest that counts wrongly, speaks for another request or puts out more than the run's limits
    allow breaks the protocol.
    """

    def __init__(self, request_id: int, limits: RunLimits, emit: Emit) -> None:
        self.printed = {"stdout": bytearray(), "stderr": bytearray()}
        self.outputs: list[Mapping[str, object]] = []
        self._request_id = request_id
        self._limits = limits
        self._emit = emit
        self._next = 0
        self._shown = 0
        self._room = limits.rich_output_bytes

    @property
    def has_told(self) -> bool:
        return self._next > 0

    def take(self, frame: Frame) -> None:
        """Hand one event on. Raises FrameError."""
        header, parts = frame
        if header.get("id") != self._request_id or header.get("seq") != self._next:
            raise FrameError("an event of another request, or out of order")
        self._next += 1
        kind = header.get("event")
        if kind == "stdout" or kind == "stderr":
            self._print(kind, parts)
        elif kind == "output":
            self._show(parts)
        else:
            raise FrameError("an event of an unknown kind")

    def _print(self, kind: str, parts: Mapping[str, bytes]) -> None:
        data, printed = parts.get("data", b""), self.printed[kind]
        if parts.keys() != {"data"} or not 0 < len(data) <= CHUNK_BYTES:
            raise FrameError(f"an event of {kind} with no data, or too much")
        if len(printed) + len(data) > self._limits.output_bytes:
            raise FrameError(f"more {kind} than the run may have")
        printed += data
        self._emit(Event("stdout" if kind == "stdout" else "stderr", data))

    def _show(self, parts: Mapping[str, bytes]) -> None:
        self._shown += 1
        self._room -= sum(map(len, parts.values()))
        if self._shown > self._limits.rich_output_count or self._room < 0:
            raise FrameError("more outputs than the run may have")
        named = {f"output:0:{mime}": content for mime, content in parts.items()}
        for output in read_outputs(named, self._limits):
            self.outputs.append(output)
            self._emit(Event("output", output=output))


T = TypeVar("T")

# The longest name, path and argument that is taken.
TEXT_LIMIT = 64 * 1024
_MOST_METADATA = 64
_ENTRY_TYPES = ("file", "directory", "symlink", "other")
_CHANGES = ("created", "modified", "deleted", "moved", "attributes")
_ENDED_BY = ("", "timeout", "memory", "closed")


def one(read: Callable[[Any], T | None], claimed: Any) -> T:
    """What was claimed. Raises ProviderUnavailable, `started`, for what is no such thing."""
    value = read(claimed)
    if value is None:
        raise ProviderUnavailable("The sandbox gave an invalid answer.", started=True)
    return value


def several(read: Callable[[Any], T | None], claimed: Any) -> list[T]:
    """Those of what was claimed that are such things."""
    found = [read(each) for each in (claimed if isinstance(claimed, list) else [])]
    return [each for each in found if each is not None]


def context(claimed: Any) -> Context | None:
    if not _has_texts(claimed, "id", "language", "cwd"):
        return None
    return Context(claimed["id"], claimed["language"], claimed["cwd"])


def process(claimed: Any) -> Process | None:
    if not _has_texts(claimed, "cwd") or _whole_number(claimed.get("pid")) is None:
        return None
    argv = claimed.get("argv")
    if not isinstance(argv, list) or not all(map(_is_text, argv)):
        return None
    ended = claimed.get("ended_by_us")
    return Process(
        claimed["pid"],
        argv,
        claimed["cwd"],
        read_exit_code(claimed.get("exit_code")),
        cast("Literal['', 'timeout', 'memory', 'closed']", ended if ended in _ENDED_BY else ""),
    )


def entry(claimed: Any) -> FileEntry | None:
    if not _has_texts(claimed, "path", "target") or claimed.get("type") not in _ENTRY_TYPES:
        return None
    modified, end = claimed.get("modified"), claimed.get("end")
    return FileEntry(
        claimed["path"],
        claimed["type"],
        _whole_number(claimed.get("size")) or 0,
        _whole_number(claimed.get("mode")) or 0,
        # Files may be older than 1970.
        float(modified) if type(modified) in (int, float) and abs(modified) < 2**53 else 0.0,
        claimed["target"],
        _end(claimed["path"], end) if isinstance(end, Mapping) else None,
        _metadata(claimed.get("metadata")),
    )


def _end(path: str, claimed: Mapping[str, Any]) -> FileEntry | None:
    """Where a link leads, which has an absolute path and is no link itself."""
    found = entry({"target": "", "size": 0, "modified": 0, **claimed, "end": None})
    if found is None or found.type == "symlink":
        return None
    return found if path.startswith("/") and found.path.startswith("/") else None


def _metadata(claimed: Any) -> dict[str, str]:
    """As far as each name and value is a short text."""
    if not isinstance(claimed, Mapping):
        return {}
    given = list(claimed.items())[:_MOST_METADATA]
    return {
        name: value
        for name, value in given
        if _is_text(name) and _is_text(value) and max(len(name), len(value)) <= PATH_BYTES
    }


def change(claimed: Any) -> FileChange | None:
    if not _has_texts(claimed, "path") or claimed.get("type") not in _CHANGES:
        return None
    former, found = claimed.get("former"), claimed.get("entry")
    return FileChange(
        claimed["type"],
        claimed["path"],
        former if _is_text(former) else "",
        None if found is None else entry(found),
    )


def workspace_path(claimed: Any) -> str | None:
    """A path that names something in the workspace, and nothing of ours. None for what is none."""
    if not isinstance(claimed, str) or len(claimed) > PATH_BYTES or "\0" in claimed:
        return None
    parts = claimed.split("/")
    if len(parts) > MOST_DEPTH or any(part in ("", ".", "..") for part in parts):
        return None
    try:
        is_short = len(os.fsencode(claimed)) <= PATH_BYTES
    except UnicodeEncodeError:
        # A surrogate that stands for no byte.
        return None
    return claimed if is_short and not is_internal(claimed) else None


def workspace_entry(claimed: Any) -> FileEntry | None:
    """An entry that may be one of the workspace."""
    found = entry(claimed)
    return None if found is None or workspace_path(found.path) is None else found


def unseen(claimed: Any) -> list[str] | None:
    """Folders of the workspace, "" for all of it."""
    if not isinstance(claimed, list) or len(claimed) > MOST_UNSEEN:
        return None
    are_paths = all(path == "" or workspace_path(path) is not None for path in claimed)
    return claimed if are_paths else None


def mark(claimed: Any) -> str | None:
    is_one = isinstance(claimed, str) and 0 < len(claimed) <= 100 and claimed.isprintable()
    return claimed if is_one and claimed.isascii() else None


def count(claimed: Any) -> int | None:
    return _whole_number(claimed)


def output(parts: Mapping[str, bytes]) -> Mapping[str, Any] | None:
    """A rich value, None where nothing of it is well formed."""
    found = read_outputs({f"output:0:{mime}": part for mime, part in parts.items()}, _ANY)
    return found[0] if found else None


def call(parts: Mapping[str, bytes]) -> ToolCall | None:
    """A call of a tool, None where it is none that could be answered."""
    number, name = parts.get("call", b""), parts.get("name", b"")
    is_one = number.isdigit() and len(number) < 20 and 0 < len(name) <= NAME_BYTES
    arguments = parts.get("arguments", b"")
    if not is_one or len(arguments) > CALL_BYTES or not name.isascii():
        return None
    return ToolCall(int(number), name.decode(), arguments)


# The host has measured what it let through.
_ANY = RunLimits(rich_output_count=1, rich_output_bytes=1 << 40)


def _whole_number(claimed: Any) -> int | None:
    return claimed if type(claimed) is int and 0 <= claimed < 2**63 else None


def _is_text(claimed: Any) -> bool:
    return isinstance(claimed, str) and len(claimed) <= TEXT_LIMIT


def _has_texts(claimed: Any, *names: str) -> bool:
    return isinstance(claimed, Mapping) and all(_is_text(claimed.get(name)) for name in names)
