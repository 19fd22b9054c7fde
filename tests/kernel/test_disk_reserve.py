"""A disk that is nearly full refuses new runs, and what runs is recorded all the same."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from executions.ledger.models import LedgerEntry
from executions.runs import admission
from executions.runs.admission import disk_problem, look_again_at_disk
from executions.runs.models import Execution
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support.held import ended, opened
from tests.support.running import run
from tests.support.saved_files import stored

FULL = 100 * 1024 * 1024  # MiB that no disk of ours has


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    look_again_at_disk()
    yield
    look_again_at_disk()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_it_is_said_before_anything_is_recorded(
    mode: str, scripted: Callable[[], list[str]], alice: Caller, settings: Any
) -> None:
    settings.DISK_RESERVE_MIB = FULL
    entries = LedgerEntry.objects.count()

    answer = run(alice, "pass", mode=mode)

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "SB009"
    assert "DATA_DIR is nearly full" in answer.json()["error"]["message"]
    assert str(settings.DATA_DIR) not in answer.content.decode()
    assert int(answer["Retry-After"]) >= 1
    assert (Execution.objects.count(), LedgerEntry.objects.count()) == (0, entries)
    assert scripted() == []


def test_no_file_is_saved_that_would_fill_it(alice: Caller, settings: Any) -> None:
    known = stored(alice.tenant, b"known")
    settings.DISK_RESERVE_MIB = FULL
    look_again_at_disk()
    with pytest.raises(ProviderUnavailable, match="nearly full"):
        stored(alice.tenant, b"new")
    assert stored(alice.tenant, b"known") == known


def test_what_runs_is_recorded_and_what_ran_is_told(
    scripted: object, alice: Caller, settings: Any
) -> None:
    first = run(alice, "pass", idempotency_key="once")
    running = opened(alice)
    settings.DISK_RESERVE_MIB = FULL
    look_again_at_disk()

    assert run(alice, "pass", idempotency_key="once").json() == first.json()
    ended(running, stdout="x" * 100_000)
    assert alice.client.get(f"/api/v1/executions/{running.pk}").json()["status"] == "succeeded"
    assert run(alice, "pass").status_code == 503

    settings.DISK_RESERVE_MIB = 0
    look_again_at_disk()
    assert run(alice, "pass").status_code == 200


def test_the_disk_is_looked_at_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[object] = []
    stat = admission.os.statvfs
    monkeypatch.setattr(admission.os, "statvfs", lambda path: looks.append(path) or stat(path))

    for _ in range(100):
        assert disk_problem() == ""

    assert 1 <= len(looks) <= 4


def test_a_disk_without_room_for_another_file_counts_as_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used_up = namedtuple("used_up", "f_bavail f_frsize f_files f_favail")(1 << 40, 4096, 9999, 3)
    monkeypatch.setattr(admission.os, "statvfs", lambda path: used_up)
    assert "3 more files" in disk_problem()


def test_a_folder_that_is_gone_is_a_problem_too(settings: Any, tmp_path: Any) -> None:
    settings.DATA_DIR = tmp_path / "gone"
    assert "DATA_DIR cannot be read" in disk_problem()
