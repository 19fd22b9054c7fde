"""The policies in force for a tenant, and their summary in answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.db.models import Max

from executions.capabilities.policies.models import Policy
from executions.runs.models import Execution
from executions.runs.shapes import PolicyShape
from providers.errors import BLOCKED, SandboxError
from providers.guest import advice
from providers.models import ConfigVersion
from providers.services.kept import Kept
from providers.values import SandboxLimits

# The key of a record's metadata under which it says which policy held, and what it warned of.
POLICY = "policy"
_UNBOUNDED = 1 << 62


class BlockedByPolicy(SandboxError):
    """A policy does not allow it. Nothing ran."""

    entry = BLOCKED


@dataclass(frozen=True)
class Rules:
    """A policy as it is held against requests. `version` is 0 where none was kept of it."""

    policy: Policy
    version: int = 0

    @cached_property
    def languages(self) -> frozenset[str]:
        return frozenset(self.policy.languages.split())

    @cached_property
    def providers(self) -> frozenset[str]:
        return frozenset(self.policy.providers.split())

    @cached_property
    def looks(self) -> bool:
        return self.policy.analysis != Policy.Analysis.OFF

    @cached_property
    def blocks(self) -> bool:
        return self.policy.analysis == Policy.Analysis.BLOCK

    @cached_property
    def asks(self) -> bool:
        return self.policy.ask_always or self.policy.analysis == Policy.Analysis.ASK

    @cached_property
    def of_code(self) -> Mapping[str, Any]:
        """What `analysis` takes."""
        return {
            "mode": self.policy.imports_mode,
            "imports": self.policy.imports.split(),
            "except": self.policy.imports_except.split(),
            "calls": self.policy.calls.split(),
        }

    @cached_property
    def limits(self) -> SandboxLimits | None:
        """What a sandbox is asked for, which keeps it or is not had."""
        mib = self.policy.max_memory_mib
        if mib is None:
            return None
        return SandboxLimits(mib * 1024 * 1024, *[_UNBOUNDED] * 4)

    @property
    def stated(self) -> dict[str, int]:
        """What a record says of it; with the version the history has the rest."""
        return {"id": self.policy.pk, "version": self.version}


def rules_for(tenant_slug: str) -> Rules | None:
    """The tenant's own policy, else that of all others, None without either. As of a second ago
    at most."""
    rules = _in_force()
    return (rules.get(tenant_slug) or rules.get("")) if rules else None


def rules_of(execution: Execution) -> Rules | None:
    """Those of its tenant; of what is run again, those of the tenant whose code it is."""
    original = execution.replay_of
    return rules_for(execution.tenant_slug if original is None else original.tenant_slug)


def isolation_of(tenant_slug: str) -> tuple[str, ...]:
    """What its own policy and that of all others demand: one of them strengthens the other."""
    rules = _in_force()
    return tuple(
        rules[slug].policy.minimum_isolation for slug in {tenant_slug, ""} if slug in rules
    )


def _load() -> dict[str, Rules]:
    policies = list(Policy.objects.filter(draft=False))
    if not policies:
        return {}
    subjects = {f"{Policy._meta.label_lower}:{policy.pk}": policy for policy in policies}
    versions = dict(
        ConfigVersion.objects.filter(subject__in=subjects)
        .order_by()
        .values_list("subject")
        .annotate(Max("version"))
    )
    return {
        policy.tenant_slug: Rules(policy, versions.get(subject, 0))
        for subject, policy in subjects.items()
    }


_in_force = Kept(_load, Policy, ConfigVersion)


def policy_of(execution: Execution) -> PolicyShape | None:
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
