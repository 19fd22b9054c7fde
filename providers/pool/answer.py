"""Reads a guest's answer. All of it is the guest's claim, and is checked before it counts."""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Mapping
from typing import Any

from providers.observations import note
from providers.pool import claims
from providers.pool.cgroup import Evidence
from providers.pool.channel import Frame
from providers.pool.observing import observed
from providers.pool.outputs import read_outputs
from providers.values import ArtifactFile, ExecutionResult, RunLimits


def read_answer(
    frame: Frame, limits: RunLimits, evidence: Evidence, metadata: dict[str, Any]
) -> ExecutionResult:
    """The result that an answer stands for; what exceeds `limits` is left out.

    What `evidence` says of memory goes before what the guest says. `metadata` is completed.
    """
    header, parts = frame
    exit_code = claims.exit_code(header.get("exit_code"))
    timed_out = header.get("timed_out") is True
    out_of_memory = header.get("out_of_memory") is True
    if evidence.out_of_memory and exit_code != 0 and not timed_out:
        out_of_memory = True
    if timed_out or out_of_memory:
        exit_code = None
    claimed_peak = claims.measured(header.get("memory_peak_bytes"))
    metadata["memory_peak_bytes"] = evidence.memory_peak_bytes or claimed_peak
    claimed_time = claims.measured(header.get("cpu_seconds"))
    metadata["cpu_seconds"] = (
        claimed_time if evidence.cpu_seconds is None else round(evidence.cpu_seconds, 6)
    )
    if skipped := claims.skipped_files(header.get("artifacts_skipped")):
        metadata["artifacts_skipped"] = skipped
    if left_out := claims.measured(header.get("outputs_skipped")):
        metadata["outputs_skipped"] = left_out
    if (remarks := claims.remarks(header.get("remarks"))) is not None:
        metadata["advice"] = remarks
    if dropped := claims.measured(header.get("remarks_dropped")):
        metadata["advice_dropped"] = dropped
    bounds = metadata.get("limits") or {}
    note(metadata, observed(header, evidence, bounds.get("processes") or sys.maxsize))
    bound = limits.output_bytes
    stdout, stderr = parts.get("stdout", b""), parts.get("stderr", b"")
    result = ExecutionResult(
        stdout=claims.readable(stdout[:bound]),
        stderr=claims.readable(stderr[:bound]),
        exit_code=exit_code,
        execution_time=float(claims.measured(header.get("seconds")) or 0),
        metadata=metadata,
        stdout_truncated=header.get("stdout_truncated") is True or len(stdout) > bound,
        stderr_truncated=header.get("stderr_truncated") is True or len(stderr) > bound,
        timed_out=timed_out,
        out_of_memory=out_of_memory,
        outputs=read_outputs(parts, limits),
        artifacts=_artifacts(parts, limits),
        output_order=claims.order(header),
        exception=claims.exception(parts.get("exception")) if exit_code else None,
    )
    if "result" in parts and exit_code == 0:
        try:
            if len(parts["result"]) > limits.result_bytes:
                raise ValueError(f"over the limit of {limits.result_bytes} bytes")
            result.result = claims.parse_json(parts["result"])
            result.has_result = True
        except (ValueError, RecursionError) as error:
            result.exit_code = 1
            result.stderr += f"\nthe returned value is not JSON: {error}"
    return result


def _artifacts(parts: Mapping[str, bytes], limits: RunLimits) -> list[ArtifactFile]:
    """The claimed artifacts that keep to the limits. A name is only a name: no path comes of it."""
    found: list[ArtifactFile] = []
    room = limits.artifacts_total_bytes
    for part, content in parts.items():
        name = part.removeprefix("artifact:")
        safe = name.isprintable() and ".." not in name.split("/") and not name.startswith("/")
        if part == name or not safe or not 0 < len(name) <= 500:
            continue
        if len(found) >= limits.artifact_count or len(content) > min(limits.artifact_bytes, room):
            continue
        room -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        found.append(ArtifactFile(name, mime_type, content))
    return found
