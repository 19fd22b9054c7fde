"""What a process of a session puts out, as far as it is kept."""

from __future__ import annotations

from typing import Any

from executions.runs.event_log import STREAMS, EventLog
from executions.runs.requests import run_limits
from providers.values import Event


class Output:
    """Both streams as they came, as far as they are kept."""

    def __init__(self) -> None:
        limits = run_limits()
        self.log = EventLog(limits)
        self._most = limits.output_bytes
        self._seen = dict.fromkeys(STREAMS, 0)

    def take(self, event: Event) -> None:
        if event.type in self._seen:
            self._seen[event.type] += len(event.data)
            self.log.emit(event)

    @property
    def position(self) -> int:
        """How many bytes of both streams were seen."""
        return sum(self._seen.values())

    def facts(self) -> dict[str, Any]:
        return {
            **{name: self.log.printed(name) for name in STREAMS},
            **{f"{name}_truncated": seen > self._most for name, seen in self._seen.items()},
            "output_order": self.log.order(),
        }
