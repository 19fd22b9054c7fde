"""What the answer says of the network whose program missed a package, or was refused a host."""

from __future__ import annotations

from collections.abc import Sequence

from django.conf import settings

from executions.capabilities.network import lists
from executions.runs.advice import Installer, missed_by
from executions.runs.models import Execution
from executions.runs.network import NETWORK_LISTS, network_remarks
from providers.network import NetworkPolicy, Rule
from providers.templates.resolve import hosts_of


def advice_of(execution: Execution) -> Sequence[str]:
    """Return who refused which host, and which rules would let the installer of a missing package
    through, as of now."""
    refused = network_remarks(execution)
    missed = missed_by(execution)
    if missed is None:
        return refused
    if any(host in line for line in refused for host in registries_of(missed.installer)):
        # That says already which rule is missing.
        return refused
    return [*refused, about_registries(execution, missed.installer)]


def registries_of(installer: Installer) -> list[str]:
    """Return the hosts without which an installer has nothing to install from."""
    is_pip = installer == "pip"
    return hosts_of(settings.PACKAGE_INDEX_URL if is_pip else settings.NPM_REGISTRY_URL)


def about_registries(execution: Execution, installer: Installer) -> str:
    """Say whether an installer reaches its registry, and if not, who can change that."""
    hosts = registries_of(installer)
    rules = " and ".join(hosts)
    for name, each in lists.outer_lists(execution.tenant_slug):
        if each is None:
            return (
                f"{installer} reaches no registry: this installation allows no network. An "
                f"administrator can add a network list with the rules {rules}."
            )
        if not each.policy.log_only and not _allows(each.policy, hosts):
            return (
                f"{installer} reaches no registry: the {name}'s network list lacks the rules "
                f"{rules}. Ask an administrator to add them."
            )
    own = _own_list(execution)
    if own is not None and _allows(own, hosts):
        return f"`{installer} install` can add packages: its network reaches {rules}."
    field = "PUT /api/v1/sessions/{id}/network" if execution.session_id else "the field network"
    return (
        f"{installer} reaches no registry: this {'session' if execution.session_id else 'run'} has "
        f"no network for it. Allow {rules} with {field}."
    )


def _own_list(execution: Execution) -> NetworkPolicy | None:
    """The list within the others; None for an execution without a network."""
    if execution.session is not None:
        return execution.session.network_policy
    stated = execution.meta.get(NETWORK_LISTS)
    if not isinstance(stated, list):
        return None
    inner = next((each for each in stated if each["name"] == "run"), None)
    if inner is None:
        return NetworkPolicy("open")
    return NetworkPolicy.parse(inner["mode"], inner["allow"])


def _allows(policy: NetworkPolicy, hosts: Sequence[str]) -> bool:
    rules = map(Rule.parse, hosts)
    return all(any(policy.may_allow(rule.host, port) for port in rule.ports) for rule in rules)
