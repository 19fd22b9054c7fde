"""What a session's sandbox says of itself now, for somebody who only looks.

To look is no use of the session: it lives no longer for it. What comes back is a claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from executions.kernel.text import storable
from executions.sessions.control import with_sandbox
from executions.sessions.files import listing
from executions.sessions.models import Session
from executions.sessions.requests import FileListing
from providers.errors import ProviderUnavailable
from providers.sandbox import FileEntry, SandboxState

# How long a page waits for a sandbox to say something.
LOOK_SECONDS = 10.0
MOST_SHOWN = 200
_MOST_CHARACTERS = 500
_LARGEST = 2**63


@dataclass(frozen=True)
class Running:
    """A process, as its sandbox tells of it. `exit_code` is None while it runs."""

    pid: int
    command: str
    cwd: str
    exit_code: int | None


@dataclass(frozen=True)
class Inspection:
    """What is not known is None; `more` is how many processes are left out.

    `cpu_seconds` is all processor time since the sandbox was started.
    """

    memory_bytes: int | None
    cpu_seconds: float | None
    disk_bytes: int | None
    disk_total_bytes: int | None
    contexts: list[tuple[str, str, str]]
    processes: list[Running]
    more: int


async def inspecting(session: Session) -> Inspection:
    """Raises SandboxError; SessionLost where the sandbox is gone."""
    return await with_sandbox(
        session, lambda kept: kept.state(), _inspection, LOOK_SECONDS, is_use=False
    )


async def looking_into(session: Session, path: str, after: str) -> tuple[list[FileEntry], str]:
    """A folder, as `files.listing` tells of it. Raises SandboxError."""
    wanted = FileListing(path=path, after=after)
    return await listing(session, wanted, LOOK_SECONDS, is_use=False)


def _inspection(answer: Any) -> Inspection:
    if not isinstance(answer, SandboxState):
        raise ProviderUnavailable("The provider did not return a state.")
    processes = [
        Running(each.pid, _text(" ".join(map(str, each.argv))), _text(each.cwd), each.exit_code)
        for each in _first(answer.processes)
        if type(each.pid) is int and type(each.exit_code) in (int, type(None))
    ]
    used = answer.cpu_seconds
    return Inspection(
        _size(answer.memory_bytes),
        float(used) if isinstance(used, int | float) and 0 <= used < _LARGEST else None,
        _size(answer.disk_bytes),
        _size(answer.disk_total_bytes),
        [(_text(c.id), _text(c.language), _text(c.cwd)) for c in _first(answer.contexts)],
        processes,
        max(0, len(answer.processes) - MOST_SHOWN),
    )


def _size(claimed: Any) -> int | None:
    return claimed if type(claimed) is int and 0 <= claimed < _LARGEST else None


def _first(rows: Iterable[Any]) -> list[Any]:
    if not isinstance(rows, list | tuple):
        raise ProviderUnavailable("The provider did not return a list.")
    return list(rows[:MOST_SHOWN])


def _text(value: Any) -> str:
    return storable(str(value)[:_MOST_CHARACTERS])
