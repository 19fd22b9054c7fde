"""Of several processes one works on a row, and whoever lost its claim changes nothing."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from django.db import connection, connections
from django.db.models import F, QuerySet
from django.db.models.functions import Now

from executions.capabilities.observability.models import AuditExport
from executions.kernel.claims import by_claim, claim, end
from tests.support.sessions import in_thread

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.database]

MINUTE = timedelta(minutes=1)


def row() -> AuditExport:
    return AuditExport.objects.create(destination="syslog h:1")


def claimed() -> AuditExport | None:
    return claim(AuditExport.objects.all(), MINUTE, tries=F("tries") + 1)


def end_lease() -> None:
    AuditExport.objects.update(claimed_until=Now() - MINUTE)


def test_of_many_claimants_one_wins() -> None:
    row()
    begin = threading.Barrier(8)
    won: list[AuditExport] = []

    def run() -> None:
        try:
            connection.ensure_connection()
            begin.wait(60)
            if (found := claimed()) is not None:
                won.append(found)
        finally:
            connections.close_all()

    for thread in [in_thread(run) for _ in range(8)]:
        thread.join()
    assert [(each.tries, each.claims) for each in won] == [(1, 1)]


def test_a_claim_that_was_lost_cannot_be_renewed_or_finished() -> None:
    row()
    first = claimed()
    assert first is not None
    end_lease()
    # Late, and still the latest.
    assert by_claim(first).update(claimed_until=Now() + MINUTE) == 1
    end_lease()
    second = claimed()
    assert second is not None
    assert second.tries == 2
    assert by_claim(first).update(claimed_until=Now() + MINUTE) == 0
    assert by_claim(first).update(claimed_until=None, problem="of the first") == 0
    assert end(second)
    assert AuditExport.objects.get().problem == ""


def test_one_that_is_finished_while_another_reads_it_is_not_claimed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its state may be another now, which the other has not seen."""
    row()
    late = claimed()
    assert late is not None
    end_lease()
    first = QuerySet.first

    def finished_meanwhile(rows: QuerySet[AuditExport]) -> AuditExport | None:
        found = first(rows)
        end(late, sequence=7)
        return found

    monkeypatch.setattr(QuerySet, "first", finished_meanwhile)
    assert claim(AuditExport.objects.filter(sequence=0), MINUTE) is None
    assert AuditExport.objects.values_list("sequence", "claims").get() == (7, 2)


def test_a_row_is_left_alone_until_its_next_attempt() -> None:
    row()
    first = claimed()
    assert first is not None
    assert by_claim(first).update(claimed_until=Now() + MINUTE, problem="away")
    assert claimed() is None
    end_lease()
    second = claimed()
    assert second is not None
    assert (second.tries, second.problem) == (2, "away")


def test_one_that_is_begun_anew_is_nobodys_although_its_columns_are_as_before() -> None:
    row()
    first = claimed()
    assert first is not None
    AuditExport.objects.update(claimed_until=None, claims=F("claims") + 1, tries=0)
    assert by_claim(first).update(problem="of the first") == 0
    second = claimed()
    assert second is not None
    # The same number of tries, and the same time.
    AuditExport.objects.update(claimed_until=first.claimed_until)
    assert (second.tries, first.tries) == (1, 1)
    assert by_claim(first).update(problem="of the first") == 0
    assert by_claim(second).update(problem="of the second") == 1
