"""Policies as rows with versions, presets of them, and their trial against former runs."""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from executions.capabilities.policies.capability import (
    Rules,
    look,
    may_be_python,
    own_modules,
    refused_of_request,
    told,
)
from executions.capabilities.policies.models import Policy
from executions.kernel.declarations import refuse
from executions.kernel.text import first_uuid7
from executions.runs.models import Execution
from providers.guarded import Change, Guarded
from providers.isolation import meets

DAYS = 30
MOST_DAYS = 366
# A page waits for no more; the command may be given more.
SECONDS = 20.0
MOST_ROWS = 20_000
MOST_LISTED = 200
_AT_ONCE = 50
_COLUMNS = (
    *("id", "tenant_slug", "created_at", "language", "code", "code_hash", "timeout", "provider"),
    *("isolation", "input_files", "started_at"),
)


@dataclass(frozen=True)
class Hit:
    """One thing that one execution would have been blocked for, or warned of."""

    execution_id: UUID
    tenant_slug: str
    created_at: datetime
    rule: str
    line: int
    name: str


@dataclass
class DryRun:
    """What came of it. `until` is how far back it came, `cut` why no further, "" for all of it.

    `blocked`, `asked` (somebody would have had to approve) and `warned` count executions, `rules`
    what was found by rule, `hits` lists the first of them. Of `unknown` ones the code is not kept,
    so that only the rest was looked at.
    """

    days: int
    executions: int = 0
    blocked: int = 0
    asked: int = 0
    warned: int = 0
    unknown: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    hits: list[Hit] = field(default_factory=list)
    until: datetime | None = None
    cut: str = ""


def dry_run(
    policy: Policy,
    days: int = DAYS,
    *,
    seconds: float = SECONDS,
    most_rows: int = MOST_ROWS,
    most_listed: int = MOST_LISTED,
) -> DryRun:
    """Hold the policy against its tenant's executions of the last days, the newest first.

    One of all others is held against those of every tenant without a policy of its own.
    """
    deadline = time.monotonic() + seconds
    run, rules = DryRun(days), Rules(policy)
    # The same code is looked at once: what runs often is often the same.
    looked: dict[tuple[str, str], list[tuple[str, int, str]]] = {}
    rows = _executions(policy, timezone.now() - timedelta(days=days))
    last: UUID | None = None
    while True:
        batch = list((rows if last is None else rows.filter(pk__lt=last))[:_AT_ONCE])
        for execution in batch:
            if run.executions >= most_rows:
                run.cut = f"the limit of {most_rows} executions was reached"
                return run
            if time.monotonic() > deadline:
                run.cut = f"the limit of {seconds:g} seconds was reached"
                return run
            _judge(run, rules, execution, looked, most_listed)
            last, run.until = execution.pk, execution.created_at
        if len(batch) < _AT_ONCE:
            return run


def _executions(policy: Policy, since: datetime) -> QuerySet[Execution]:
    rows = Execution.objects.filter(pk__gte=first_uuid7(since), replay_of=None)
    if policy.tenant_slug:
        rows = rows.filter(tenant_slug=policy.tenant_slug)
    else:
        own = Policy.objects.filter(draft=False).exclude(tenant_slug="")
        rows = rows.exclude(tenant_slug__in=list(own.values_list("tenant_slug", flat=True)))
    return rows.only(*_COLUMNS).order_by("-pk")


def _judge(
    run: DryRun,
    rules: Rules,
    execution: Execution,
    looked: dict[tuple[str, str], list[tuple[str, int, str]]],
    most_listed: int,
) -> None:
    run.executions += 1
    found = _of_record(rules, execution)
    # A run that named no time has what is allowed: whether it did is not recorded.
    is_blocked = any(rule != "timeout" for rule, _, _ in found)
    of_code: list[tuple[str, int, str]] = []
    if rules.looks and may_be_python(execution.language):
        if not execution.code:
            run.unknown += 1
        else:
            own = own_modules([each["path"] for each in execution.input_files])
            key = (execution.code_hash, " ".join(own))
            if key not in looked:
                seen = told(*look(execution.code, {**rules.of_code, "own": own}))
                looked[key] = [
                    (each["kind"], each["line"], each["name"])
                    for each in seen
                    if each["kind"] != "note"
                ]
            of_code = looked[key]
            found = found + of_code
            is_blocked = is_blocked or (rules.blocks and bool(of_code))
    is_asked = not is_blocked and (rules.policy.ask_always or (rules.asks and bool(of_code)))
    run.blocked += is_blocked
    run.asked += is_asked
    run.warned += bool(found) and not (is_blocked or is_asked)
    for rule, line, name in found:
        run.rules[f"{rule}: {name}" if line else rule] += 1
        if len(run.hits) < most_listed:
            place = (execution.pk, execution.tenant_slug, execution.created_at)
            run.hits.append(Hit(*place, rule, line, name))


def _of_record(rules: Rules, execution: Execution) -> list[tuple[str, int, str]]:
    """What of the record is against it. The network is not known of what ran."""
    found = []
    if refused := refused_of_request(rules, execution.language, None):
        found.append((refused[0], 0, refused[1]))
    if execution.provider and rules.providers and execution.provider not in rules.providers:
        found.append(("provider", 0, f"It ran on {execution.provider}."))
    longest = rules.policy.max_timeout
    if longest is not None and execution.timeout > longest:
        found.append(
            ("timeout", 0, f"Its timeout was {execution.timeout:g} s, requested or by default.")
        )
    demanded = rules.policy.minimum_isolation
    if execution.isolation and not meets(execution.isolation, demanded):
        found.append(("isolation", 0, f"Its isolation was {execution.isolation}."))
    return found


_FILE = Path(__file__).with_name("presets.toml")


@cache
def presets() -> Mapping[str, Mapping[str, str]]:
    """By name: a `title`, and columns of a policy."""
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


def policy_from(name: str, tenant_slug: str = "") -> Policy:
    """An unsaved draft. Raises InvalidConfiguration for a preset that there is not."""
    if name not in presets():
        refuse("preset", f"Must be one of {', '.join(presets())}.")
    rules = {column: value for column, value in presets()[name].items() if column != "title"}
    return Policy(tenant_slug=tenant_slug, draft=True, name=name, **rules)


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
