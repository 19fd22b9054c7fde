"""What a queued request leaves on the disk: nothing, once it is run or given up."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings as project
from django.core.management import CommandError, call_command
from django.db import connection

from executions.kernel.storage import QUEUE
from executions.kernel.storage import file_store as kept_at
from executions.runs import payloads
from executions.runs.models import Execution
from executions.runs.orphaned_runs import end_stale_executions
from executions.runs.queue import claim, claim_next, mark_dispatched
from executions.runs.record import reject
from providers.errors import ProviderUnavailable, RateLimited
from providers.values import InputFile
from tests.conftest import Caller
from tests.support.held import bounded, opened
from tests.support.running import run_queued

pytestmark = pytest.mark.database

FILES = (InputFile("data", os.urandom(1_000_000)),)
READ = "answer = ExecutionResult('ran', '', 0, 0.0)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, settings: Any) -> Path:
    settings.DATA_DIR = tmp_path
    return tmp_path / "queue"


def kept(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.exists() else []


def test_a_large_request_is_kept_encrypted_beside_its_row_and_gone_when_it_runs(
    scripted: Callable[[], list[str]], alice: Caller, folder: Path
) -> None:
    execution = opened(alice, "async", code=READ, files=FILES)

    (file,) = kept(folder)
    assert file.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert READ.encode() not in file.read_bytes()
    assert raw_pending_size(execution) < 1000

    outcome = run_queued()

    assert outcome is not None
    assert (outcome.execution.status, outcome.execution.stdout) == ("succeeded", "ran")
    assert kept(folder) == []


def test_files_arrive_as_they_were_sent(alice: Caller) -> None:
    opened(alice, "async", files=FILES, arguments={"a": 1})
    execution = claim_next()
    assert execution is not None

    from executions.runs.requests import ExecutionRequest

    request = ExecutionRequest.from_stored(payloads.read(execution))
    assert (request.files, request.arguments) == (FILES, {"a": 1})


def test_a_small_request_needs_no_file_and_leaves_its_row_when_it_is_handed_over(
    alice: Caller, folder: Path
) -> None:
    execution = opened(alice, "async")
    assert kept(folder) == []
    assert raw_pending_size(execution) > 0

    claimed = claim(execution.pk)

    assert claimed is not None
    assert payloads.read(claimed)["code"] == "pass"
    mark_dispatched(claimed)
    assert raw_pending_size(execution) == 0


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("way", ["gone", "given up", "refused", "repeated"])
def test_no_file_is_left_however_it_ends(way: str, alice: Caller, folder: Path) -> None:
    if way == "refused":
        bounded(alice, max_queued=0)
        with pytest.raises(RateLimited):
            opened(alice, "async", files=FILES)
    elif way == "repeated":
        first = opened(alice, "async", files=FILES, idempotency_key="once")
        assert opened(alice, "async", files=FILES, idempotency_key="once").pk == first.pk
        assert [file.name for file in kept(folder)] == [first.pk.hex]
        reject(first, ProviderUnavailable("no"))
    elif way == "given up":
        reject(opened(alice, "async", files=FILES), ProviderUnavailable("no"))
    else:
        execution = opened(alice, "async", files=FILES)
        Execution.objects.update(deadline=execution.created_at.replace(year=2020))
        assert end_stale_executions() == 1

    assert kept(folder) == []


def test_what_a_crash_leaves_is_swept_and_what_waits_is_not(alice: Caller, folder: Path) -> None:
    waiting = opened(alice, "async", files=FILES)
    orphan, draft, foreign = (folder / name for name in ("0" * 32, "1" * 32 + ".draft", "x"))
    for file in (orphan, draft, foreign):
        file.write_bytes(b"left")
    assert payloads.remove_orphans() == 0  # it may be about to have its row

    for file in folder.iterdir():
        os.utime(file, (0, 0))
    end_stale_executions()

    assert [file.name for file in kept(folder)] == [waiting.pk.hex]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("loss", ["missing", "altered"])
def test_a_lost_request_ends_and_may_be_sent_again(
    loss: str, scripted: Callable[[], list[str]], alice: Caller, folder: Path
) -> None:
    execution = opened(alice, "async", files=FILES)
    (file,) = kept(folder)
    if loss == "missing":
        file.unlink()
    else:
        file.write_text(file.read_text()[:-40])

    run_queued()

    execution.refresh_from_db()
    assert (execution.status, execution.error_code) == ("error", "SB009")
    assert execution.retryable
    assert scripted() == []
    assert kept(folder) == []


def test_a_folder_that_cannot_be_written_refuses_before_anything_is_recorded(
    alice: Caller, folder: Path
) -> None:
    folder.write_text("in the way")

    with pytest.raises(ProviderUnavailable, match="DATA_DIR cannot be written"):
        opened(alice, "async", files=FILES)
    assert Execution.objects.count() == 0


@pytest.mark.only_on("sqlite")
@pytest.mark.django_db(transaction=True)
def test_large_requests_do_not_make_the_database_grow(alice: Caller, folder: Path) -> None:
    before = database_bytes()
    for _ in range(4):
        opened(alice, "async", files=(InputFile("data", bytes(4_000_000)),))
    assert sum(file.stat().st_size for file in kept(folder)) > 16_000_000
    assert database_bytes() - before < 1_000_000
    while execution := claim_next():
        mark_dispatched(execution)
    assert kept(folder) == []


def raw_pending_size(execution: Execution) -> int:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pending FROM executions_execution WHERE id = %s",
            [execution.pk if connection.vendor == "postgresql" else execution.pk.hex],
        )
        value = cursor.fetchone()[0]
    return len(value) if value is not None else 0


def database_bytes() -> int:
    name = connection.settings_dict["NAME"]
    return sum(os.path.getsize(f"{name}{end}") for end in ("", "-wal"))


def test_the_folder_is_in_the_data_directory() -> None:
    assert Path(kept_at(QUEUE).path("x")) == project.DATA_DIR / "queue" / "x"


def test_rotating_the_keys_reaches_what_waits_in_files(
    scripted: Callable[[], list[str]], alice: Caller, settings: Any
) -> None:
    opened(alice, "async", code=READ, files=FILES)
    settings.FERNET_KEYS = ["the new key", *settings.FERNET_KEYS]
    out = StringIO()
    call_command("rotate_keys", "--json", stdout=out, stderr=StringIO())
    assert next(
        entry
        for entry in json.loads(out.getvalue())["columns"]
        if entry["column"] == "pending, in files"
    ) == {
        "model": "executions.Execution",
        "column": "pending, in files",
        "rotated": 1,
        "current": 0,
        "failed": [],
    }
    settings.FERNET_KEYS = ["the new key"]
    outcome = run_queued()
    assert outcome is not None
    assert outcome.execution.status == "succeeded"


def test_a_file_that_no_key_opens_is_named_and_stays(
    alice: Caller, folder: Path, settings: Any
) -> None:
    opened(alice, "async", code=READ, files=FILES)
    (file,) = kept(folder)
    sealed = file.read_bytes()
    settings.FERNET_KEYS = ["another key"]
    with pytest.raises(CommandError, match=file.name):
        call_command("rotate_keys", stdout=StringIO(), stderr=StringIO())
    assert file.read_bytes() == sealed
