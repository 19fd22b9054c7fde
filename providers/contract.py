"""What every provider promises, made sure of.

Which checks apply follows from the provider's own capabilities and languages. The tests run them
against every provider, and `manage.py check_provider` against a real account. That code runs once
whatever fails cannot be had from a real account: tests/runs/test_runs_once.py makes everything
fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from providers.base import SandboxProvider
from providers.conformance import PROMISES, Check, CheckFailed, Probe
from providers.errors import SandboxError
from providers.session_conformance import KEPT_CHECKS, LIMIT_CHECKS

__all__ = ("CHECKS", "Check", "CheckFailed", "Probe", "Verdict", "examine", "is_offered")


CHECKS = [*PROMISES, *LIMIT_CHECKS, *KEPT_CHECKS]


@dataclass(frozen=True)
class Verdict:
    """What came of a check: `outcome` is ok, failed or not offered."""

    check: str
    language: str
    outcome: str
    message: str = ""
    seconds: float = 0.0


def examine(provider: SandboxProvider) -> Iterator[Verdict]:
    """Make every check in every language it has code for, one after the other."""
    offered = provider.get_supported_languages()
    for check in CHECKS:
        for language in check.codes:
            if language not in offered or not _has(provider, check):
                yield Verdict(check.name, language, "not offered")
                continue
            began = time.monotonic()
            try:
                check.verify(Probe(provider, language), check.codes[language])
            except CheckFailed as broken:
                outcome, message = "failed", str(broken)
            except SandboxError as error:
                outcome, message = "failed", f"{error.code}: {error.message}"
            else:
                outcome, message = "ok", ""
            seconds = round(time.monotonic() - began, 3)
            yield Verdict(check.name, language, outcome, message, seconds)


def is_offered(provider: SandboxProvider, check: Check, language: str) -> bool:
    """Whether a check applies to the provider in a language."""
    return language in provider.get_supported_languages() and _has(provider, check)


def _has(provider: SandboxProvider, check: Check) -> bool:
    return not check.capability or check.capability in provider.capabilities
