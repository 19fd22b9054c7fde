"""What a run left in a remote workspace, taken within the limits and a time."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from providers.errors import SandboxError
from providers.remote.deadline import DeadlinePassed, call_within
from providers.runtime.guest.names import Omissions, escape, problem, too_large, too_many
from providers.values import (
    ARTIFACTS_SKIPPED,
    ArtifactFile,
    ExecutionResult,
    RunLimits,
    note_omissions,
)

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
