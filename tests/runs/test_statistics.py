"""Statistics of ends: sums that every extension may add to, and that are never negative."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from django.db import IntegrityError, transaction
from django.utils import timezone

from executions.runs import extensions
from executions.runs.models import Execution
from executions.runs.statistics import ALL_TIME, STORED, Increment, Statistic, add, tenant_use
from tests.conftest import Caller
from tests.support.ended_runs import ended

pytestmark = [pytest.mark.django_db, pytest.mark.database]


class Words(extensions.Extension):
    def statistics(self, ended: Execution) -> Iterable[Increment]:
        for _ in ended.stdout.split():
            yield Increment("words", ended.tenant_slug, ALL_TIME, "all", 1, 0.5)


def test_what_an_extension_counts_is_added_with_the_end(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_installed", [*extensions.installed(), Words()])
    ended(alice, stdout="one two three")
    with pytest.raises(Exception, match="constraint"), transaction.atomic():
        ended(alice, "timed_out", stdout="not recorded")
    row = Statistic.objects.get(kind="words")
    assert (row.name, row.label, row.count, row.amount) == ("wonderland", "all", 3, 1.5)


def test_bytes_of_a_day_are_exact_and_never_less_than_none(alice: Caller) -> None:
    now = timezone.now()
    for _ in range(2):
        add(tenant_use("wonderland", now, stored_bytes=2**53 + 1))
    row = Statistic.objects.get(kind=STORED)
    assert row.count == 2**54 + 2
    for change in (lambda: add([Increment(STORED, "x", now, number=-1)]), row.save):
        row.count = -1
        with pytest.raises(IntegrityError), transaction.atomic():
            change()
