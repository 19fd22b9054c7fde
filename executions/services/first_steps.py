"""The first steps of a new installation, each with its page."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib.auth.models import User

from executions.runs.models import Execution
from executions.tenants.models import ApiKey
from executions.tenants.service import AUDITOR
from providers.models import ConfigVersion, ProviderConfig
from providers.services.history import SYSTEM

# Whoever has run as many has found the way.
NEW_BELOW = 50


@dataclass(frozen=True)
class Step:
    title: str
    what: str
    page: str
    permission: str
    is_done: bool


def first_steps(user: User) -> list[Step]:
    """Those that this account may take; none once all are taken, or the installation is not new."""
    if Execution.objects.order_by()[NEW_BELOW - 1 :].exists():
        return []
    steps = [step for step in _steps() if user.has_perm(step.permission)]
    return [] if all(step.is_done for step in steps) else steps


def _steps() -> list[Step]:
    saved_by_somebody = ConfigVersion.objects.filter(
        subject__in=ProviderConfig.objects.values("provider_id")
    ).exclude(author=SYSTEM)
    return [
        Step(
            "Run a program",
            "Use the playground. The run and its result are then in the list of executions.",
            "playground",
            "executions.use_playground",
            Execution.objects.exists(),
        ),
        Step(
            "Choose the isolation",
            "The page of the active provider shows its runtime, and which isolation is available.",
            "admin:providers_providerconfig_changelist",
            "providers.change_providerconfig",
            saved_by_somebody.exists(),
        ),
        Step(
            "Add a provider",
            "E2B, Aliyun or a second pool: for failover, or for single tenants.",
            "admin:providers_providerconfig_add",
            "providers.add_providerconfig",
            ProviderConfig.objects.order_by()[1:].exists(),
        ),
        Step(
            "Create an API key",
            "One for each agent, with the scopes and restrictions it needs.",
            "admin:executions_apikey_add",
            "executions.add_apikey",
            ApiKey.objects.order_by()[1:].exists(),
        ),
        Step(
            "Invite an auditor",
            "An account with the role Auditor can see everything and change nothing.",
            "admin:auth_user_add",
            "auth.add_user",
            User.objects.filter(groups__name=AUDITOR).exists(),
        ),
    ]
