"""The journal in tests that record it when they say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from executions.services import journal


@pytest.fixture
def record_kept(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], int]:
    """What records it, in a folder of the test's. No thread does, not even one of another test."""
    settings.DATA_DIR = tmp_path
    record = journal.record_kept
    monkeypatch.setattr(journal, "start", lambda: None)
    monkeypatch.setattr(journal, "record_kept", lambda: 0)
    return record
