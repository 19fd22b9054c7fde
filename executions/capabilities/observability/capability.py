"""Observability as a capability: counters of ends, and traces over OTLP.

`traces` is None where OTEL_EXPORTER_OTLP_ENDPOINT is not set, which is all that a run then pays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from django.conf import settings

from executions.capabilities.observability import counters
from executions.runs.extensions import Extension
from executions.runs.models import Execution
from executions.runs.statistics import Increment

if TYPE_CHECKING:
    from executions.capabilities.observability.otlp import Traces

traces: Traces | None = None


def start() -> None:
    """Have this process send what it runs, if that is configured."""
    global traces
    if settings.TELEMETRY is not None and traces is None:
        from executions.capabilities.observability.otlp import Traces

        traces = Traces(settings.TELEMETRY)


class Statistics(Extension):
    tasks = {"executions.tasks.export_ledger": 1, "executions.tasks.export_metrics": 1}

    def after_insert(self, execution: Execution, began: float) -> None:
        if traces is not None:
            traces.admitted(execution, began)

    def statistics(self, ended: Execution) -> Iterable[Increment]:
        return counters.statistics(ended)

    def after_end(self, execution: Execution) -> None:
        if traces is not None:
            traces.ended(execution)


CAPABILITY = Statistics()
