"""The network lists in force: what they give to a run or session, and what they refuse at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from django.db import transaction
from django.db.models import Max

from executions.capabilities.network.credentials import (
    bound_by,
    credentials_in_force,
    ensure_there,
    within,
)
from executions.capabilities.network.models import NetworkList
from executions.kernel.declarations import refuse
from providers.guarded import Change, Guarded
from providers.models import ConfigVersion
from providers.network import Budget, Layer, Network, NetworkPolicy, Rule
from providers.services.settings_cache import CachedQuery

INSTALLATION, TENANT = "installation", "tenant"
# What a list says, whosever it is.
COLUMNS = (
    *("mode", "rules", "log_only", "by_default"),
    *("connections", "connections_per_minute", "mib"),
)
# Of the request's own list, in its record.
MOST_RECORDED = 50


@dataclass(frozen=True)
class ListInForce:
    """A row as attempts are held against it. `version` is 0 where none was kept of it."""

    row: NetworkList
    version: int = 0

    @cached_property
    def policy(self) -> NetworkPolicy:
        return self.row.policy


def _load() -> dict[str, ListInForce]:
    rows = list(NetworkList.objects.filter(draft=False))
    if not rows:
        return {}
    subjects = {f"{NetworkList._meta.label_lower}:{row.pk}": row for row in rows}
    versions = dict(
        ConfigVersion.objects.filter(subject__in=subjects)
        .order_by()
        .values_list("subject")
        .annotate(Max("version"))
    )
    return {
        row.tenant_slug: ListInForce(row, versions.get(subject, 0))
        for subject, row in subjects.items()
    }


_in_force = CachedQuery(_load, NetworkList, ConfigVersion)


def outer_lists(tenant_slug: str) -> list[tuple[str, ListInForce | None]]:
    """The lists around whatever the tenant asks for, from the outermost. As of a second ago at
    most. The installation's is None where there is no row: it allows nothing."""
    lists = _in_force()
    found: list[tuple[str, ListInForce | None]] = [(INSTALLATION, lists.get(""))]
    if own := lists.get(tenant_slug):
        found.append((TENANT, own))
    return found


def outer_layers(tenant_slug: str) -> tuple[Layer, ...]:
    return tuple(
        Layer(name, each.policy if each else NetworkPolicy())
        for name, each in outer_lists(tenant_slug)
    )


def is_by_default(tenant_slug: str) -> bool:
    """Whether the tenant's runs that name no network have one."""
    lists = _in_force()
    found = lists.get(tenant_slug) or lists.get("")
    return found is not None and found.row.by_default


def network_for(tenant_slug: str, *inner: Layer) -> Network | None:
    """The lists around these, and these, with the credentials for their hosts; None where nothing
    can be reached."""
    budgets = [each.row.budget for _, each in outer_lists(tenant_slug) if each]
    budget = Budget(
        min((each.connections for each in budgets), default=0),
        min((each.connections_per_minute for each in budgets), default=0),
        min((each.bytes for each in budgets), default=0),
    )
    network = Network((*outer_layers(tenant_slug), *inner), budget)
    if network.is_closed:
        return None
    own = (header for layer in inner for header in layer.policy.headers)
    found = (*bound_by(own, tenant_slug), *credentials_in_force(tenant_slug))
    return replace(network, credentials=within(found, network.layers))


def ensure_within(tenant_slug: str, asked: NetworkPolicy) -> None:
    """Raise InvalidConfiguration for a list of which something cannot be allowed around it."""
    if asked.mode == "none":
        return
    ensure_there(asked.headers, tenant_slug)
    for name, each in outer_lists(tenant_slug):
        if each is None:
            refuse(
                "network",
                "This installation allows no network. An administrator can add a list for the "
                "installation under Network lists in the admin.",
            )
        policy = each.policy
        if policy.log_only or policy.mode == "open":
            continue
        whose = "installation" if name == INSTALLATION else f"tenant {tenant_slug}"
        if policy.mode == "none" or not policy.rules:
            refuse("network", f"The network list of the {whose} allows no host.")
        for rule in asked.rules:
            if not _is_covered(rule, policy.rules):
                refuse(
                    "network",
                    f"{rule.host}: The network list of the {whose} does not allow this host. Ask "
                    "an administrator to add it, or leave it out.",
                )


def _is_covered(rule: Rule, around: Sequence[Rule]) -> bool:
    """Whether each host of a rule is one of the rules around it."""
    if rule.host.startswith("*."):
        suffix = rule.host[1:]
        return any(
            outer.host.startswith("*.") and suffix.endswith(outer.host[1:]) for outer in around
        )
    return any(outer.covers_host(rule.host) for outer in around)


def stated(tenant_slug: str, inner: Layer | None) -> list[dict[str, Any]]:
    """What a record says of the lists that hold."""
    found: list[dict[str, Any]] = [
        {
            "name": name,
            "version": each.version if each else None,
            "mode": each.policy.mode if each else "none",
            "allow": [],
        }
        for name, each in outer_lists(tenant_slug)
    ]
    if inner is not None:
        rules = [str(rule)[:300] for rule in inner.policy.rules[:MOST_RECORDED]]
        found.append(
            {"name": inner.name, "version": None, "mode": inner.policy.mode, "allow": rules}
        )
    return found


def _is_in_force(change: Change) -> bool:
    """Whether it is of a list that held before or is to hold after it."""
    return any(values and not values["draft"] for values in (change.before, change.after))


LISTS = Guarded(NetworkList, takes_two=_is_in_force)


def put_in_force(draft: NetworkList) -> NetworkList:
    """Give its scope the content of a draft, which stays. Call it within `carry_out`."""
    with transaction.atomic():
        row = NetworkList.objects.filter(tenant_slug=draft.tenant_slug, draft=False).first()
        row = row or NetworkList(tenant_slug=draft.tenant_slug)
        for name in ("name", *COLUMNS):
            setattr(row, name, getattr(draft, name))
        row.full_clean()
        row.save()
    return row


def draft_of(row: NetworkList) -> NetworkList:
    """A draft with the content of this one, to go on from."""
    draft = NetworkList(tenant_slug=row.tenant_slug, name=row.name, draft=True)
    for name in COLUMNS:
        setattr(draft, name, getattr(row, name))
    draft.save()
    return draft
