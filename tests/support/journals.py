"""The journal in tests, which record it when they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executions.runs import journal


@pytest.fixture(autouse=True)
def _no_journal_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would go on living, and record the journal of another test before that does."""
    monkeypatch.setattr(journal, "start", lambda: None)


@pytest.fixture
def record_kept(settings: Any, tmp_path: Path) -> Callable[[], int]:
    """What records it, in a folder of the test's."""
    settings.DATA_DIR = tmp_path
    return journal.record_waiting
