"""Reads a guest's answer, which is a claim and is checked before it counts, and notes what host and
supervisor have seen of the run.
"""

from __future__ import annotations

import mimetypes
import sys
from collections.abc import Mapping
from typing import Any

from providers.runtime.guest.names import Omissions, problem, too_large, too_many
from providers.runtime.pool import claims
from providers.runtime.pool.cgroup import ResourceUsage
from providers.runtime.pool.channel import Frame
from providers.runtime.pool.claims import read_outputs
from providers.values import (
    ARTIFACTS_SKIPPED,
    BURST,
    HOST,
    OUTPUTS_SKIPPED,
    PROCESS_BURST,
    PROCESS_LIMIT,
    SIGSYS,
    SUPERVISOR,
    ArtifactFile,
    ExecutionResult,
    RunLimits,
    note,
    note_omissions,
    observation,
)


def read_answer(
    frame: Frame, limits: RunLimits, evidence: ResourceUsage, metadata: dict[str, Any]
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
    files_skipped, outputs_skipped = Omissions(), Omissions()
    files_skipped.add_claimed(header.get(ARTIFACTS_SKIPPED))
    outputs_skipped.add_claimed(header.get(OUTPUTS_SKIPPED))
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
        outputs=read_outputs(parts, limits, outputs_skipped),
        artifacts=_artifacts(parts, limits, files_skipped),
        output_order=claims.order(header),
        exception=claims.exception(parts.get("exception")) if exit_code else None,
    )
    note_omissions(metadata, ARTIFACTS_SKIPPED, files_skipped)
    note_omissions(metadata, OUTPUTS_SKIPPED, outputs_skipped)
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


def _artifacts(
    parts: Mapping[str, bytes], limits: RunLimits, skipped: Omissions
) -> list[ArtifactFile]:
    """The claimed artifacts that keep to the limits. A name is only a name: no path comes of it."""
    found: list[ArtifactFile] = []
    room = limits.artifacts_total_bytes
    for part, content in parts.items():
        name = part.removeprefix("artifact:")
        if part == name:
            continue
        reason = problem(name)
        if not reason and len(found) >= limits.artifact_count:
            reason = too_many(limits.artifact_count)
        if not reason and len(content) > min(limits.artifact_bytes, room):
            reason = too_large(limits.artifact_bytes)
        if reason:
            skipped.add(name, reason)
            continue
        room -= len(content)
        mime_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
        found.append(ArtifactFile(name, mime_type, content))
    return found


# Of the processes that a sandbox may have, those that our own may take: what is ready for the next
# run, and the supervisor where it has no user of its own.
OURS = 2


def observed(
    header: Mapping[str, object], evidence: ResourceUsage, most_processes: int
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
