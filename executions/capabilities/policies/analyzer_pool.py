"""Processes that look at hostile text (`analysis`), so that it is not this one that it holds up."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from executions.capabilities.policies import analysis
from executions.capabilities.policies.analysis import LOOKED, MOST, MOST_BYTES, TOO_MUCH, Finding
from executions.kernel.background import Executor
from executions.kernel.process_pool import ProcessPool
from providers.errors import ProviderUnavailable

# The processor time of a look has its own bound; this one is for a machine that has no time.
WALL_SECONDS = 60.0
AT_ONCE = 2
# That are looked at or wait for it: no more than a tenant usually runs at once.
OF_ONE_TENANT = 10
Answer = tuple[str, list[Finding]]
_COMMAND = (sys.executable, "-I", "-S", analysis.__file__)
_MOST_ANSWERED = 1 << 20


def submit_look(code: str, rules: Mapping[str, Any], owner: str) -> Future[Answer]:
    """As `look`, by threads of their own, so that slow code holds up nothing else; `owner` is the
    tenant. Raises RateLimited for one that has too many of them, and where no thread can be had.
    """
    return _lookers.submit(owner, lambda: look(code, rules))


def look(code: str, rules: Mapping[str, Any]) -> Answer:
    """As `analysis.analyse`, in a process of its own; waits. TOO_MUCH where that did not live.

    Raises ProviderUnavailable where no such process can be had.
    """
    if len(code) > MOST_BYTES:
        return TOO_MUCH, []
    try:
        answer = _analysts.ask(json.dumps([code, rules]).encode() + b"\n")
    except OSError as error:
        raise ProviderUnavailable(
            f"The policy requires an analysis of the code, which failed: {error}."
        ) from error
    return (TOO_MUCH, []) if answer is None else _checked(answer)


def _checked(answer: bytes) -> tuple[str, list[Finding]]:
    """The answer as it must be: it comes from a process that has read hostile text."""
    try:
        outcome, found = json.loads(answer)
        if outcome not in (LOOKED, analysis.UNPARSED):
            return TOO_MUCH, []
        return outcome, [
            (int(line), str(kind)[:10], str(name)[:200]) for line, kind, name in found[:MOST]
        ]
    except (ValueError, TypeError):
        return TOO_MUCH, []


_analysts = ProcessPool(
    _COMMAND, at_once=AT_ONCE, wall_seconds=WALL_SECONDS, most_answered=_MOST_ANSWERED
)
_lookers = Executor(
    "policy-look",
    threads=AT_ONCE,
    of_one=AT_ONCE - 1,
    most=OF_ONE_TENANT,
    refusal=(
        f"{OF_ONE_TENANT} programs of the tenant are being analyzed, as its policy requires. "
        "Send it again."
    ),
)
