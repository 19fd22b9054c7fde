"""A network list, held against the attempts of the past: what it would have refused."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from django.utils import timezone

from executions.capabilities.network.models import NetworkAttempt, NetworkList
from executions.kernel.text import first_uuid7
from providers.network import Target

DAYS = 30
MOST_DAYS = 366
SECONDS = 20.0
MOST_ROWS = 100_000
_AT_ONCE = 1000


@dataclass
class DryRun:
    """The attempts that were looked at, and those that the list would have refused, by host and
    port. `until` is how far back it came, `cut` why no further, "" for all of it. Attempts that
    were refused then are left out.
    """

    days: int
    attempts: int = 0
    refused: int = 0
    hosts: Counter[str] = field(default_factory=Counter)
    tenants: Counter[str] = field(default_factory=Counter)
    until: datetime | None = None
    cut: str = ""


def dry_run(
    row: NetworkList,
    days: int = DAYS,
    *,
    seconds: float = SECONDS,
    most_rows: int = MOST_ROWS,
) -> DryRun:
    """Hold the list against its tenant's attempts of the last days, the newest first; that of the
    installation against everyone's."""
    deadline = time.monotonic() + seconds
    run, policy = DryRun(days), row.policy
    rows = NetworkAttempt.objects.exclude(outcome=NetworkAttempt.Outcome.REFUSED).filter(
        pk__gte=first_uuid7(timezone.now() - timedelta(days=days))
    )
    if row.tenant_slug:
        rows = rows.filter(tenant_slug=row.tenant_slug)
    last = None
    while True:
        page = rows.order_by("-pk") if last is None else rows.filter(pk__lt=last).order_by("-pk")
        batch = list(page[:_AT_ONCE])
        for each in batch:
            if run.attempts >= most_rows:
                run.cut = f"the limit of {most_rows} attempts was reached"
                return run
            if time.monotonic() > deadline:
                run.cut = f"the limit of {seconds:g} seconds was reached"
                return run
            run.attempts += 1
            last, run.until = each.pk, each.at
            scheme = "https" if _is_tls(each) else "http"
            target = Target(each.host, each.port, scheme, each.method, each.path)
            if not policy.allows(target):
                run.refused += 1
                run.hosts[f"{each.host}:{each.port}"] += 1
                run.tenants[each.tenant_slug] += 1
        if len(batch) < _AT_ONCE:
            return run


def _is_tls(attempt: NetworkAttempt) -> bool:
    """Whether it was TLS, as far as its row says so: of a closed one no method is known."""
    return (
        not attempt.method
        or attempt.port == 443
        or bool(attempt.credential)
        or "https://" in attempt.rule
    )
