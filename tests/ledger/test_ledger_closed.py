"""While the ledger takes no entry nothing new is run, and what ran meanwhile is kept and recorded."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import pytest

from executions.ledger.append import append
from executions.ledger.entry import ensure_ledger
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.journal import waiting_files
from executions.runs.models import Execution
from executions.runs.queue import claim_next
from tests.conftest import Caller
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.database]

# What another host does, which has the new key already.
ROTATED = """
from django.test import override_settings
from executions.ledger.append import append
with override_settings(LEDGER_KEYS={keys!r}):
    append("tenant", "elsewhere", {{"action": "changed"}})
answer = ExecutionResult("ran", "", 0, 0.0)
"""


def test_a_run_that_ends_under_a_key_that_is_behind_is_kept_and_nothing_follows_it(
    alice: Caller,
    scripted: Callable[[], list[str]],
    settings: Any,
    record_kept: Callable[[], int],
) -> None:
    old = list(settings.LEDGER_KEYS)
    both = [secrets.token_urlsafe(32), *old]
    append("tenant", "here", {"action": "changed"})
    queued = run(alice, "answer = ExecutionResult('late', '', 0, 0.0)", mode="async").json()

    answer = run(alice, ROTATED.format(keys=both))
    told = answer.json()
    assert (answer.status_code, told["error"]["code"], told["error"]["ran"]) == (503, "SB009", True)
    assert [path.stem for path in waiting_files()] == [told["id"].replace("-", "")]

    before = scripted()
    assert run(alice, "answer = ExecutionResult('', '', 0, 0.0)").status_code == 503
    assert claim_next() is None
    assert scripted() == before
    assert Execution.objects.get(pk=queued["id"]).status == "queued"

    settings.LEDGER_KEYS = both
    ensure_ledger()
    assert (record_kept(), waiting_files()) == (1, [])
    recorded = Execution.objects.get(pk=told["id"])
    assert (recorded.status, recorded.stdout) == ("succeeded", "ran")
    assert LedgerEntry.objects.filter(execution_id=recorded.pk).count() == 1
    assert verify().is_intact
    claimed = claim_next()
    assert claimed is not None
    assert str(claimed.pk) == queued["id"]
