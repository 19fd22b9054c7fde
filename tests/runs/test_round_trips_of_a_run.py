"""How often one recorded run waits for PostgreSQL. The number may only become smaller."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
from django.db import OperationalError, connection

from executions.kernel.postgresql import DeferredStatement
from executions.runs import record
from executions.runs.models import Execution
from providers.manager import manager
from tests.conftest import Caller
from tests.support.held import opened
from tests.support.round_trips import round_trips
from tests.support.running import run

pytestmark = [
    pytest.mark.only_on("postgresql"),
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("no_lookup_grows_old"),
]

# Key; request count; BEGIN with lock and count, row, COMMIT; BEGIN with the row's end, lock with
# the newest entry, entry with statistics and COMMIT.
ROUND_TRIPS_OF_A_RUN = 8


@pytest.fixture
def trips() -> Iterator[list[str]]:
    """Those of a connection that is opened when it is first used, as in a web process."""
    connection.close()
    with round_trips() as found:
        yield found
    connection.close()


def test_a_run_makes_no_more_round_trips_than_its_budget(
    local_active: None, alice: Caller, trips: list[str]
) -> None:
    connection.ensure_connection()
    connection.health_check_enabled = True  # type: ignore[attr-defined]
    numbers = []
    with patch.object(manager, "_check_seconds", 3600):
        for _ in range(3):
            assert run(alice, "print(2)").json()["stdout"] == "2\n"
            trips.clear()
            connection.close_if_unusable_or_obsolete()
            assert run(alice, "print(2)").json()["stdout"] == "2\n"
            numbers.append(len(trips))
    assert min(numbers) <= ROUND_TRIPS_OF_A_RUN, trips


def test_a_record_that_the_server_refuses_with_the_commit_is_in_no_doubt(
    alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take_too_long(increments: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute("SET LOCAL statement_timeout = 1")
            cursor.execute(DeferredStatement("SELECT pg_sleep(60)"))

    monkeypatch.setattr(record, "add", take_too_long)
    with pytest.raises(OperationalError):
        opened(alice, "async")
    assert not Execution.objects.exists()
