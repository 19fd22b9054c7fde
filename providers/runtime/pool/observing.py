"""What is to be noted of a run in a sandbox of ours, from what host and supervisor have seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from providers.observations import (
    BURST,
    HOST,
    PROCESS_BURST,
    PROCESS_LIMIT,
    SIGSYS,
    SUPERVISOR,
    observation,
)
from providers.runtime.pool.cgroup import Evidence

# Of the processes that a sandbox may have, those that our own may take: what is ready for the next
# run, and the supervisor where it has no user of its own.
OURS = 2


def observed(
    header: Mapping[str, object], evidence: Evidence, most_processes: int
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
