"""What was seen of a run, as its record has it: in `meta`, which the ledger binds, and as words to
be found by in `observed`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.models.execution import Execution
from providers.observations import KINDS, OBSERVATIONS, checked


def kinds_in(meta: Mapping[str, Any]) -> str | None:
    """What goes into `observed`: None where nothing was seen."""
    return " ".join(entry["kind"] for entry in checked(meta.get(OBSERVATIONS))) or None


def observations_of(execution: Execution) -> list[dict[str, Any]]:
    """As the API tells them."""
    return checked(execution.meta.get(OBSERVATIONS))


def in_words(execution: Execution) -> list[str]:
    """A line for each, for whoever reads the page."""
    return [
        f"{entry['kind']}: {entry['count']} {KINDS[entry['kind']]} (seen by the {entry['seen_by']})"
        for entry in observations_of(execution)
    ]
