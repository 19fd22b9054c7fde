"""What a policy would have blocked of what ran, before it is in force."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from uuid import UUID

from django.db.models import QuerySet
from django.utils import timezone

from executions.kernel.text import first_uuid7
from executions.models.policy import Policy
from executions.runs.models import Execution
from executions.services.policies.analysts import look
from executions.services.policies.enforcing import (
    may_be_python,
    own_modules,
    refused_of_request,
    told,
)
from executions.services.policies.in_force import Rules
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
