"""Output as it comes from a remote interpreter: bounded, and without what `main()` returned."""

from __future__ import annotations

import json
from typing import Any

from providers.runtime.guest.names import Omissions, too_large, too_many
from providers.runtime.guest.wire import EXCEPTION_BYTES
from providers.values import Emit, Event, RunLimits, Stream, exception_of

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
