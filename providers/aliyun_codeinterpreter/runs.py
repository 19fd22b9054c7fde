"""One run in an Aliyun sandbox, and what its answer says.

The shape of the answer, `{"contextId", "results": [{"type", "text"}, ...]}`, is the one RAGFlow's
provider reads; the SDK hands it over untyped.
"""

from __future__ import annotations

import math
import re
from typing import Any

from providers.aliyun_codeinterpreter.client import Account
from providers.errors import ConnectionFailed
from providers.remote.output import Output
from providers.remote.programs import Program
from providers.remote.text import exit_code_of, without_colours

GRACE_SECONDS = 5.0

_LAST_LINE = re.compile(r"^(\w+(?:\.\w+)*)(?::\s*(.*))?$")


class Ended:
    """How a run ended: its exit code, and the rich outputs it displayed."""

    def __init__(self) -> None:
        self.exit_code = 0
        self.outputs: list[dict[str, Any]] = []


def run_cell(
    account: Account,
    instance_id: str,
    program: Program,
    output: Output,
    seconds: float,
    *,
    language: str | None = None,
    context: str | None = None,
) -> Ended:
    """Run a program by language, or in a context. Raises SandboxError."""
    with account.translated(running=True):
        answer = account.data(instance_id, seconds + GRACE_SECONDS).execute_code(
            program.text, context, language=language, timeout=math.ceil(seconds)
        )
    results = answer.get("results") if isinstance(answer, dict) else None
    if not isinstance(results, list):
        raise ConnectionFailed("Aliyun's answer has no results.", started=True)
    ended = Ended()
    for result in results:
        if isinstance(result, dict):
            _take(result, output, ended)
    return ended


def _take(result: dict[str, Any], output: Output, ended: Ended) -> None:
    kind, text = result.get("type"), str(result.get("text") or "")
    if kind == "stdout":
        output.stdout(text)
    elif kind == "stderr":
        output.stderr(text)
    elif kind == "result":
        ended.outputs.append({"text/plain": text})
    elif kind == "error":
        text = without_colours(text)
        lines = text.strip().splitlines() or [""]
        found = _LAST_LINE.match(lines[-1])
        name, value = (found[1], found[2] or "") if found else ("", "")
        ended.exit_code = exit_code_of(name, value)
        if name != "SystemExit" or ended.exit_code == 1:
            output.stderr(text if text.endswith("\n") else f"{text}\n")
