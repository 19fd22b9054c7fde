"""Policies as guarded rows: what is in force takes two persons, a draft does not."""

from __future__ import annotations

from django.db import transaction

from executions.models.policy import Policy
from providers.guarded import Change, Guarded

# What a policy says, whosever it is.
RULES = (
    *("languages", "providers", "minimum_isolation", "max_timeout", "max_memory_mib", "network"),
    *("analysis", "ask_always", "imports_mode", "imports", "imports_except", "calls"),
)


def _is_in_force(change: Change) -> bool:
    """Whether it is of a policy that held before or is to hold after it."""
    return any(values and not values["draft"] for values in (change.before, change.after))


POLICIES = Guarded(Policy, takes_two=_is_in_force)


def put_in_force(draft: Policy) -> Policy:
    """Give its tenant the rules of a draft, which stays. Call it within `carry_out`."""
    with transaction.atomic():
        policy = Policy.objects.filter(tenant_slug=draft.tenant_slug, draft=False).first()
        policy = policy or Policy(tenant_slug=draft.tenant_slug)
        for name in ("name", *RULES):
            setattr(policy, name, getattr(draft, name))
        policy.full_clean()
        policy.save()
    return policy


def draft_of(policy: Policy) -> Policy:
    """A draft with the rules of this one, to go on from."""
    draft = Policy(tenant_slug=policy.tenant_slug, name=policy.name, draft=True)
    for name in RULES:
        setattr(draft, name, getattr(policy, name))
    draft.save()
    return draft
