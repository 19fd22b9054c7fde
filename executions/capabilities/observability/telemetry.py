"""Traces over OTLP, where OTEL_EXPORTER_OTLP_ENDPOINT says so; metrics.py sends the metrics.

`traces` is None where it does not, which is all that a run then pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.conf import settings

if TYPE_CHECKING:
    from executions.capabilities.observability.otlp import Traces

traces: Traces | None = None


def start() -> None:
    """Have this process send what it runs, if that is configured."""
    global traces
    if settings.TELEMETRY is not None and traces is None:
        from executions.capabilities.observability.otlp import Traces

        traces = Traces(settings.TELEMETRY)
