"""What was seen of a run that somebody may want to look at, and by whom it was seen.

Two can see something. The `host` is the kernel's or the engine's count outside of the sandbox,
which no program in it can change. The `supervisor` is our process in the sandbox: programs cannot
reach it, but a sandbox that was broken says in its stead what it likes. So that is a claim on the
run it speaks of, and on nothing else: no provider and nobody's breaker is judged by it.
"""

from __future__ import annotations

from typing import Any

# The key of a result's metadata that has the list, which is not there where nothing was seen.
OBSERVATIONS = "observations"

SIGSYS, PROCESS_LIMIT, PROCESS_BURST = "sigsys", "process_limit", "process_burst"
# What each means, for those who read records; `count` is of what is counted in it.
KINDS = {
    SIGSYS: "processes ended by SIGSYS, which the system call filter sends",
    PROCESS_LIMIT: "processes refused at the process limit, or present at the end of the run",
    PROCESS_BURST: "processes and threads started, or refused at the limit of a container",
}
HOST, SUPERVISOR = "host", "supervisor"
WITNESSES = (HOST, SUPERVISOR)

# From how many processes and threads on, started in one run, it is a burst.
BURST = 1000
_LARGEST = 2**31


def observation(kind: str, seen_by: str, count: int) -> dict[str, Any]:
    """One entry of the list."""
    return {"kind": kind, "seen_by": seen_by, "count": min(count, _LARGEST)}


def note(metadata: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Into the metadata of a result, where there is something."""
    if found:
        metadata[OBSERVATIONS] = found


def checked(claimed: Any) -> list[dict[str, Any]]:
    """The entries that are what they should be: each kind once, and nothing else said of it."""
    found: dict[str, dict[str, Any]] = {}
    for entry in claimed[:50] if isinstance(claimed, list) else ():
        if not isinstance(entry, dict):
            continue
        kind, seen_by, count = (entry.get(name) for name in ("kind", "seen_by", "count"))
        if not (isinstance(kind, str) and kind in KINDS and seen_by in WITNESSES):
            continue
        if type(count) is int and 0 < count <= _LARGEST:
            found.setdefault(kind, observation(kind, seen_by, count))
    return [found[kind] for kind in KINDS if kind in found]
