"""What a run left in a remote workspace, taken within the limits."""

from __future__ import annotations

import mimetypes
from collections.abc import Callable, Iterable

from providers.base import ArtifactFile, Limits


def collect_artifacts(
    found: Iterable[tuple[str, int]], read: Callable[[str, int], bytes | None], limits: Limits
) -> list[ArtifactFile]:
    """The files of `artifacts/`, by name, as many and as much of them as the limits allow.

    `found` has names relative to that folder and sizes in bytes, as the service claims them;
    `read` is given a name and the most bytes to accept, and returns None for more than that.
    """
    artifacts: list[ArtifactFile] = []
    left = limits.artifacts_total_bytes
    for name, size in sorted(found):
        if len(artifacts) >= limits.artifact_count:
            break
        longest = min(limits.artifact_bytes, left)
        if size > longest or not _is_plain(name):
            continue
        content = read(name, longest)
        if content is None or len(content) > longest:
            continue
        left -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        artifacts.append(ArtifactFile(name, mime_type, content))
    return artifacts


def _is_plain(name: str) -> bool:
    parts = name.split("/")
    return "\0" not in name and not any(part in ("", ".", "..") for part in parts)
