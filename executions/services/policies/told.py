"""What an answer says of the policy that held for a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executions.runs.models import Execution
from executions.services.policies.in_force import POLICY
from providers.guest import advice


def policy_of(execution: Execution) -> dict[str, Any] | None:
    """Which one held, what was found in the code, and who had to approve it and did.

    Where no policy looked, the remarks count that the sandbox made because its provider is
    configured with `enable_ast_analysis`: that is `warn`.
    """
    stated = execution.meta.get(POLICY)
    remarks, _ = advice.checked(execution.meta.get("advice") or [])
    warnings: list[Any] = [
        {"line": line, "kind": "remark", "name": f"{name}: {what}"} for line, name, what in remarks
    ]
    if isinstance(stated, Mapping):
        return {
            "id": stated.get("id"),
            "version": stated.get("version"),
            "warnings": stated.get("warnings") or warnings,
            "approved": stated.get("approved"),
        }
    if not warnings:
        return None
    return {"id": None, "version": None, "warnings": warnings, "approved": None}
