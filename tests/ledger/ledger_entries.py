"""A ledger of eight entries in tests, what is done to it, and what is found then."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from django.db import connection

from executions.ledger import verification
from executions.ledger.models import LedgerEntry
from tests.support.running import run

TABLE = "executions_ledgerentry"


def sql(statement: str, *values: Any) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)


@pytest.fixture
def kept(settings: Any, tmp_path: Path) -> Path:
    """The folder of the checkpoints, which are on."""
    settings.LEDGER_CHECKPOINTS = str(tmp_path / "ledger")
    return tmp_path / "ledger"


@pytest.fixture
def entries(scripted: object, request: pytest.FixtureRequest) -> list[LedgerEntry]:
    """Eight entries: the key, the tenant, its key, then five executions."""
    LedgerEntry.objects.all().delete()
    request.getfixturevalue("kept")
    alice = request.getfixturevalue("alice")
    for number in range(5):
        code = f"answer = ExecutionResult('out {number}', 'err', 0, 0.0, has_result=True, result=1)"
        assert run(alice, code, arguments={"a": number}).status_code == 200
    rows = list(LedgerEntry.objects.order_by("sequence"))
    assert [row.kind for row in rows] == ["ledger_key", "tenant", "api_key", *["execution"] * 5]
    return rows


def verify(**options: Any) -> verification.Verification:
    """Verify with this process alone, and in chunks of two entries as with others: both must find
    the same.

    Nothing is forked, as threads of earlier tests may be within SQLite. `test_verify_processes`
    has a process of its own, which forks.
    """
    found = verification.verify(**options)
    with (
        patch.object(verification, "CHUNK", 2),
        patch.object(verification, "map_in_order", _map_pickled),
    ):
        again = verification.verify(**options)
    assert again == found
    return found


def _map_pickled(
    work: Callable[[Any], Any], questions: Iterable[Any], processes: int
) -> Iterator[Any]:
    """What `map_in_order` yields, with questions and answers as they reach another process."""
    for question in questions:
        answer = work(pickle.loads(pickle.dumps(question)))
        yield pickle.loads(pickle.dumps(answer))


def first() -> tuple[str, int]:
    """What is wrong at the first entry where something is."""
    found = verify()
    assert not found.is_intact
    return found.findings[0].kind, found.findings[0].sequence
