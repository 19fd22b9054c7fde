"""Output of a remote run: bounded while it comes, followed by several, its errors read, its
artifacts collected within limits, and made into an ExecutionResult.
"""

from __future__ import annotations

import json
import mimetypes
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from providers.errors import SandboxError
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.programs import Program
from providers.runtime.guest.names import Omissions, escape, problem, too_large, too_many
from providers.runtime.guest.wire import EXCEPTION_BYTES
from providers.values import (
    ARTIFACTS_SKIPPED,
    OUTPUTS_SKIPPED,
    ArtifactFile,
    Emit,
    Event,
    ExecutionResult,
    RunLimits,
    Stream,
    exception_of,
    note_omissions,
)

_ENVELOPE_BYTES = 1024


class Output:
    """Collects stdout and stderr up to `limits.output_bytes` each, and the value between marks.

    What is beyond the limit is dropped and flagged. `emit` gets what is kept, as it comes.
    """

    def __init__(self, mark: str, limits: RunLimits, emit: Emit | None = None) -> None:
        self.mark = mark
        self._limits = limits
        self._emit = emit
        self.outputs: list[dict[str, Any]] = []
        self.skipped = Omissions()
        self._shown = 0
        self.exception: dict[str, str] | None = None
        self._rich_left = limits.rich_output_bytes
        self._kept: dict[Stream, list[str]] = {"stdout": [], "stderr": []}
        self._left: dict[Stream, int] = {
            "stdout": limits.output_bytes,
            "stderr": limits.output_bytes,
        }
        self.truncated: dict[Stream, bool] = {"stdout": False, "stderr": False}
        self._held = ""
        self._value: str | None = None
        self._value_ended = False
        self._closed = False

    def close(self) -> None:
        """Take no more: the caller has been told what there is."""
        self._closed = True

    def stdout(self, text: str) -> None:
        if not self.mark or self._value_ended:
            self._keep("stdout", text)
            return
        text = self._held + text
        self._held = ""
        if self._value is None:
            before, mark, after = text.partition(self.mark)
            if not mark:
                visible = len(before) - _overlap(before, self.mark)
                self._held = before[visible:]
                before = before[:visible]
            self._keep("stdout", before)
            if not mark:
                return
            self._value, text = "", after
        value, mark, after = (self._value + text).partition(self.mark)
        self._value = value[: self._limits.result_bytes + EXCEPTION_BYTES]
        if mark:
            self._value_ended = True
            self._keep("stdout", after.removeprefix("\n"))

    def stderr(self, text: str) -> None:
        self._keep("stderr", text)

    def fail(self, name: str, value: str, traceback: str) -> None:
        """What the service says of the exception that ended the cell."""
        self.exception = exception_of({"type": name, "message": value, "traceback": traceback})

    def show(self, bundle: dict[str, Any]) -> None:
        """A rich output, a map from MIME type to value. One too many or too large is dropped."""
        if self._closed or not bundle:
            return
        self._shown += 1
        name = f"output {self._shown}"
        if len(self.outputs) >= self._limits.rich_output_count:
            self.skipped.add(name, too_many(self._limits.rich_output_count, "outputs"))
            return
        size = sum(len(str(value).encode("utf-8", "replace")) for value in bundle.values())
        if size > self._rich_left:
            self.skipped.add(name, too_large(self._limits.rich_output_bytes, "outputs"))
            return
        self._rich_left -= size
        self.outputs.append(bundle)
        if self._emit is not None:
            self._emit(Event("output", output=bundle))

    def close_held(self) -> None:
        """Nothing more comes: what might have been the beginning of a mark was none."""
        held, self._held = self._held, ""
        self._keep("stdout", held)

    def text(self, stream: Stream) -> str:
        return "".join(self._kept[stream])

    def ended(self) -> dict[str, Any] | None:
        """What the program said at its end: `exit_code`, `result` where `main()` returned, and the
        `exception` that ended it.

        None when it said nothing, as when it was killed or ended itself.
        """
        if not self._value_ended or self._value is None:
            return None
        try:
            said = json.loads(self._value)
        except (ValueError, RecursionError):
            said = None
        is_long = len(self._value.encode()) > self._limits.result_bytes + _ENVELOPE_BYTES // 2
        if is_long and not (isinstance(said, dict) and "exception" in said):
            self.stderr(f"main() returned more than {self._limits.result_bytes} bytes of JSON\n")
            return {"exit_code": 1}
        if not isinstance(said, dict) or not isinstance(said.get("exit_code"), int):
            self.stderr("The sandbox returned a value that is not JSON.\n")
            return {"exit_code": 1}
        return said

    def _keep(self, stream: Stream, text: str) -> None:
        if not text or self._closed:
            return
        data = text.encode("utf-8", "replace")
        if len(data) > self._left[stream]:
            self.truncated[stream] = True
            text = data[: self._left[stream]].decode("utf-8", "ignore")
            self._left[stream] = 0
        else:
            self._left[stream] -= len(data)
        if text:
            self._kept[stream].append(text)
            if self._emit is not None:
                self._emit(Event(stream, text.encode("utf-8", "replace")))


def _overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def without_colours(text: str) -> str:
    """A traceback without the escape sequences that colour it."""
    return _COLOURS.sub("", text)


def exit_code_of(name: str, value: str) -> int:
    """The exit code an interpreter would have ended with, which such a service does not tell.

    `name` and `value` are the uncaught exception's class and text.
    """
    if name != "SystemExit":
        return 1
    if value in ("", "None"):
        return 0
    try:
        return int(value) & 0xFF
    except ValueError:
        return 1


KEPT_BYTES = 1024 * 1024


class KeptOutput:
    """Keeps the last KEPT_BYTES of both streams, in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # Each piece with the number of bytes that came before it.
        self._pieces: deque[tuple[int, Event]] = deque()
        self._taken = 0
        self._kept = 0
        self._closed = False

    def take(self, stream: Literal["stdout", "stderr"], data: bytes) -> None:
        with self._changed:
            self._pieces.append((self._taken, Event(stream, data)))
            self._taken += len(data)
            self._kept += len(data)
            while self._kept > KEPT_BYTES:
                _, dropped = self._pieces.popleft()
                self._kept -= len(dropped.data)
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def hand_over(self, emit: Emit, after: int) -> None:
        """All from the byte `after` on that is still kept, as it comes, until the end."""
        while True:
            with self._changed:
                while self._taken <= after and not self._closed:
                    self._changed.wait()
                ready = [(at, one) for at, one in self._pieces if at + len(one.data) > after]
                came, after = after, max(after, self._taken)
                closed = self._closed
            for at, event in ready:
                emit(Event(event.type, event.data[max(0, came - at) :]))
            if closed:
                return


# The size of what is no file, such as a link.
NOT_REGULAR = -1


@dataclass
class _Collected:
    files: list[ArtifactFile] = field(default_factory=list)
    skipped: Omissions = field(default_factory=Omissions)


def collect_artifacts(
    result: ExecutionResult,
    find: Callable[[], Iterable[tuple[str, int]]],
    read: Callable[[str, int], bytes | None],
    limits: RunLimits,
    seconds: float,
) -> None:
    """Add the files of `artifacts/`, by name, as many and as much of them as the limits allow.

    `find` tells names relative to that folder and sizes in bytes, as the service claims them, or
    NOT_REGULAR; they are kept under the text that `names.escape` makes of them.
    `read` is given a name and the most bytes to accept, and returns None for more than that.
    Never raises SandboxError: the code has run, and what came of it is there. What is beyond the
    limits, and what the service does not hand over within `seconds`, is named in the metadata as
    `artifacts_skipped`.
    """
    collected = _Collected()
    try:
        call_within(seconds, lambda: _collect(collected, find, read, limits))
    except DeadlinePassed:
        collected.skipped.add("", f"not received within {seconds:g} s")
    # What a call that is given up still adds comes too late.
    result.artifacts = list(collected.files)
    note_omissions(result.metadata, ARTIFACTS_SKIPPED, collected.skipped)


def _collect(
    collected: _Collected,
    find: Callable[[], Iterable[tuple[str, int]]],
    read: Callable[[str, int], bytes | None],
    limits: RunLimits,
) -> None:
    try:
        found = sorted(find())
    except SandboxError as error:
        collected.skipped.add("", _reason(error))
        return
    left = limits.artifacts_total_bytes
    for name, size in found:
        longest = min(limits.artifact_bytes, left)
        text = escape(name)
        reason = "not a regular file" if size == NOT_REGULAR else problem(text)
        if not reason and len(collected.files) >= limits.artifact_count:
            reason = too_many(limits.artifact_count)
        if not reason and size > longest:
            reason = _too_large(size, limits)
        if reason:
            collected.skipped.add(text, reason)
            continue
        try:
            content = read(name, longest)
        except SandboxError as error:
            collected.skipped.add(text, _reason(error))
            continue
        if content is None or len(content) > longest:
            collected.skipped.add(text, _too_large(longest + 1, limits))
            continue
        left -= len(content)
        mime_type = mimetypes.guess_type(text)[0] or "application/octet-stream"
        collected.files.append(ArtifactFile(text, mime_type, content))


def _reason(error: SandboxError) -> str:
    return f"{error.code}: {error.message}"


def _too_large(size: int, limits: RunLimits) -> str:
    if size > limits.artifact_bytes:
        return too_large(limits.artifact_bytes)
    return too_large(limits.artifacts_total_bytes, "files")


def result_of(
    output: Output,
    program: Program,
    exit_code: int | None,
    seconds: float,
    metadata: dict[str, Any],
) -> ExecutionResult:
    """`exit_code` is what the service's answer comes to; None for a run our deadline ended."""
    ended = output.ended() if exit_code is not None else None
    has_result = False
    if ended is not None:
        exit_code = exit_code or int(ended["exit_code"])
        has_result = exit_code == 0 and "result" in ended
    elif program.mark and exit_code == 0:
        exit_code = 1
        output.stderr("The interpreter ended before main() returned.\n")
    output.close_held()
    result = ExecutionResult(
        stdout=output.text("stdout"),
        stderr=output.text("stderr"),
        exit_code=exit_code,
        execution_time=seconds,
        metadata=metadata,
        stdout_truncated=output.truncated["stdout"],
        stderr_truncated=output.truncated["stderr"],
        timed_out=exit_code is None,
        has_result=has_result,
        result=ended["result"] if ended is not None and has_result else None,
        outputs=list(output.outputs),
        exception=_exception(output, ended) if exit_code else None,
    )
    note_omissions(result.metadata, OUTPUTS_SKIPPED, output.skipped)
    output.close()
    return result


def _exception(output: Output, ended: dict[str, Any] | None) -> dict[str, str] | None:
    """What ended the program: it says so where we have run it, else its service does."""
    return exception_of((ended or {}).get("exception")) or output.exception
