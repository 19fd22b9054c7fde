"""A journal of the test's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from executions.runs.journal import Ended
from executions.runs.models import Execution

AFTER = timezone.now().replace(microsecond=123_456)


@pytest.fixture(autouse=True)
def own_journal(settings: Any, tmp_path: Path) -> Path:
    """In a folder of the test's."""
    settings.DATA_DIR = tmp_path
    return tmp_path / "journal"


def ended(execution: Execution, **values: Any) -> Ended:
    changes = {
        "provider": "scripted",
        "exit_code": 0,
        "stdout": "kept\n",
        "stderr": "",
        "meta": {},
        "result": "",
        "outputs": "",
        "runtime": "none",
        "start_ms": 1.0,
        "run_ms": 500.0,
        "total_ms": 501.5,
        "finished_at": AFTER,
        **values,
    }
    return Ended(execution.pk, Execution.Status.SUCCEEDED, changes)
