"""What is done with a restored dump before anything is started, as its page says."""

from __future__ import annotations

import re

import pytest

from executions.capabilities.schedules.service import RESTORED
from executions.ledger.verification import verify
from executions.runs.journal import waiting_files, write
from executions.runs.models import Execution
from tests.conftest import Caller
from tests.support.held import opened
from tests.support.later_runs import later
from tests.support.own_journal import ended, own_journal
from tests.support.processes import ROOT
from tests.support.schedules import due, made

__all__ = ["own_journal"]

pytestmark = [pytest.mark.django_db, pytest.mark.database]


def test_nothing_of_a_restored_dump_runs_again_once_the_line_of_its_page_was_run(
    scripted: object, alice: Caller
) -> None:
    queued, kept, schedule = later(alice), opened(alice), made(alice)
    due(schedule)
    write(ended(kept))
    page = (ROOT / "docs/deployment/backup.md").read_text()
    [line] = re.findall(r"cofferdam shell --command '(.+)'", page)
    exec(line)
    queued, kept = (Execution.objects.get(pk=each.pk) for each in (queued, kept))
    assert (queued.status, queued.error_code, queued.retryable) == ("error", "SB009", False)
    assert (kept.status, kept.stdout, waiting_files()) == ("succeeded", "kept\n", [])
    schedule.refresh_from_db()
    assert (schedule.next_at, schedule.paused_because) == (None, RESTORED)
    assert verify().is_intact
