"""What a run left in a remote workspace, taken within the limits and a time."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from providers.errors import SandboxError
from providers.remote.deadline import DeadlinePassed, call_within
from providers.values import ArtifactFile, ExecutionResult, RunLimits

_REASON_CHARACTERS = 200


@dataclass
class _Collected:
    files: list[ArtifactFile] = field(default_factory=list)
    skipped: list[list[str]] = field(default_factory=list)


def collect_artifacts(
    result: ExecutionResult,
    find: Callable[[], Iterable[tuple[str, int]]],
    read: Callable[[str, int], bytes | None],
    limits: RunLimits,
    seconds: float,
) -> None:
    """Add the files of `artifacts/`, by name, as many and as much of them as the limits allow.

    `find` tells names relative to that folder and sizes in bytes, as the service claims them;
    `read` is given a name and the most bytes to accept, and returns None for more than that.
    Never raises SandboxError: the code has run, and what came of it is there. What the service does
    not hand over within `seconds` is named in the metadata as `artifacts_skipped`.
    """
    collected = _Collected()
    try:
        call_within(seconds, lambda: _collect(collected, find, read, limits))
    except DeadlinePassed:
        collected.skipped.append(["", f"not handed over within {seconds:g} s"])
    # What a call that is given up still adds comes too late.
    result.artifacts = list(collected.files)
    if collected.skipped:
        result.metadata["artifacts_skipped"] = list(collected.skipped)


def _collect(
    collected: _Collected,
    find: Callable[[], Iterable[tuple[str, int]]],
    read: Callable[[str, int], bytes | None],
    limits: RunLimits,
) -> None:
    try:
        found = sorted(find())
    except SandboxError as error:
        collected.skipped.append(["", _reason(error)])
        return
    left = limits.artifacts_total_bytes
    for name, size in found:
        if len(collected.files) >= limits.artifact_count:
            break
        longest = min(limits.artifact_bytes, left)
        if size > longest or not _is_plain(name):
            continue
        try:
            content = read(name, longest)
        except SandboxError as error:
            collected.skipped.append([name, _reason(error)])
            continue
        if content is None or len(content) > longest:
            continue
        left -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        collected.files.append(ArtifactFile(name, mime_type, content))


def _reason(error: SandboxError) -> str:
    return f"{error.code}: {error.message}"[:_REASON_CHARACTERS]


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)
