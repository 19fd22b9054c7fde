"""Checking the health of what has not changed leaves nothing in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from providers.models import ProviderHealth
from providers.runtime.service import launchers
from providers.services import save_config
from providers.services.health import check_all
from tests.conftest import require

pytestmark = pytest.mark.django_db


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with bubblewrap and no gVisor."""
    (tmp_path / "bwrap").symlink_to(require("bwrap"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(launchers, "_complaints", {})
    # In this process gVisor may have worked before, and would not be left for a weaker one.
    monkeypatch.setattr(launchers, "_proven", set())
    return tmp_path


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the next check logs of launchers, and whatever else it has to say."""
    caplog.clear()
    assert check_all() == 1, list(ProviderHealth.objects.values_list("code", "message"))
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]


def test_a_launcher_that_is_not_usable_is_told_when_that_is_news(
    tools: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save_config("local", {"launcher": "auto", "pool_size": 1})
    assert "runtime unavailable" in lines(caplog)
    assert lines(caplog) == []
    assert lines(caplog) == []

    broken = tools / "runsc"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert lines(caplog) == ["runtime unavailable"]
    assert lines(caplog) == []
