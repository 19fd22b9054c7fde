"""Reports, and what is wrong with one."""

from __future__ import annotations

import json
from typing import Any

from executions.capabilities.reports.reading import Scope
from executions.capabilities.reports.service import make

WITH_ARTIFACT = (
    "answer = ExecutionResult('', '', 0, 0.1,"
    " artifacts=[ArtifactFile('a.txt', 'text/plain', b'x')])"
)


def report_of(scope: Scope) -> dict[str, Any]:
    pieces: list[bytes] = []
    make("00", scope, "x", pieces.extend, list)
    found: dict[str, Any] = json.loads(b"".join(pieces))["report"]
    return found


def findings_of(report: dict[str, Any]) -> list[tuple[str, int]]:
    return [(each["kind"], each["entry"]) for each in report["verification"]["findings"]]
