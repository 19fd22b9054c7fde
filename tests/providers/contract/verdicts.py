"""What the contract says of one of its checks."""

from __future__ import annotations

import pytest

from providers.base import SandboxProvider
from providers.contract import Check, Verdict, examine


def verdicts_of(provider: SandboxProvider, check: Check) -> list[Verdict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("providers.contract.CHECKS", [check])
        return list(examine(provider))


def is_told_as_not_offered(provider: SandboxProvider, check: Check, language: str) -> bool:
    outcomes = {(each.check, each.language): each.outcome for each in verdicts_of(provider, check)}
    return outcomes[check.name, language] == "not offered"
