"""`manage.py restore`: what it refuses, and what becomes of records that were not at their end."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

from tests.support.backups import change, manage, rows, succeeded

pytest_plugins = ["tests.site.backup_fixtures"]


def test_a_place_that_is_not_empty_is_refused(archive: Path, data_dir: Path) -> None:
    before = (data_dir / "cofferdam.sqlite3").read_bytes()
    refused = manage(data_dir, "restore", str(archive))
    assert refused.returncode == 2
    assert "is not empty: artifacts, cofferdam.sqlite3" in refused.stderr
    assert (data_dir / "cofferdam.sqlite3").read_bytes() == before


def test_a_running_service_is_refused(archive: Path, tmp_path: Path) -> None:
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        port = service.getsockname()[1]
        refused = manage(tmp_path / "restored", "restore", str(archive), PORT=str(port))
    assert refused.returncode == 2
    assert f"A process listens on 127.0.0.1 port {port}" in refused.stderr
    assert not (tmp_path / "restored").exists()


def test_a_backup_of_a_newer_version_is_refused(data_dir: Path, tmp_path: Path) -> None:
    statement = (
        "INSERT INTO django_migrations (app, name, applied) VALUES ('executions', '9999_x', 0)"
    )
    change(data_dir, statement)
    succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    refused = manage(tmp_path / "restored", "restore", str(tmp_path / "backup.tar"))
    assert refused.returncode == 2
    assert "does not know executions.9999_x" in refused.stderr


def test_what_waited_is_ended_and_does_not_run_again(data_dir: Path, tmp_path: Path) -> None:
    columns = ", ".join(
        row[1] for row in rows(data_dir, "PRAGMA table_info(executions_execution)")
        if row[1] not in ("id", "status", "finished_at", "ledger_sequence")
    )  # fmt: skip
    change(
        data_dir,
        f"INSERT INTO executions_execution (id, status, finished_at, {columns}) SELECT "
        f"'{'0' * 32}', 'queued', NULL, {columns} FROM executions_execution LIMIT 1",
    )
    succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    target = tmp_path / "restored"
    told = succeeded(manage(target, "restore", str(tmp_path / "backup.tar")))

    assert "1 executions that were queued or running at the time of the backup were ended" in told
    [found] = rows(
        target,
        "SELECT status, error_code, retryable, error_message FROM executions_execution "
        f"WHERE id = '{'0' * 32}'",
    )
    assert found[:3] == ("error", "SB009", 0)
    assert "restored from a backup of 20" in found[3]
    succeeded(manage(target, "verify_ledger"))


IN_THE_JOURNAL = """
from executions.models import Execution, Tenant
from executions.runs import journal
from executions.runs.record import Caller, open_record
from executions.runs.requests import ExecutionRequest
from django.utils import timezone
execution, _ = open_record(ExecutionRequest(code="print(1)"), Caller(Tenant.objects.get(slug="demo")))
values = {"exit_code": 0, "stdout": "kept", "runtime": "none", "finished_at": timezone.now()}
journal.write(journal.Ended(execution.pk, Execution.Status.SUCCEEDED, values))
"""


def test_a_result_that_waited_for_the_database_is_recorded(data_dir: Path, tmp_path: Path) -> None:
    succeeded(manage(data_dir, "shell", "--command", IN_THE_JOURNAL))
    succeeded(manage(data_dir, "backup", str(tmp_path / "backup.tar")))
    target = tmp_path / "restored"
    restored = manage(target, "restore", str(tmp_path / "backup.tar"), "--json")
    outcome = json.loads(succeeded(restored).splitlines()[-1])
    assert (outcome["recorded"], outcome["ended"]) == (1, 0)
    found = rows(target, "SELECT status FROM executions_execution WHERE stdout = 'kept'")
    assert found == [("succeeded",)]
    succeeded(manage(target, "verify_ledger"))


def test_checkpoints_kept_elsewhere_say_what_the_backup_has_not(
    data_dir: Path, tmp_path: Path
) -> None:
    elsewhere = str(Path(shutil.move(data_dir / "ledger", tmp_path / "ledger")))
    made = succeeded(
        manage(data_dir, "backup", str(tmp_path / "b.tar"), "--json", LEDGER_CHECKPOINTS=elsewhere)
    )
    (tmp_path / "script.py").write_text("print(1)")
    lost = json.loads(
        succeeded(
            manage(
                data_dir, "execute", str(tmp_path / "script.py"), "--language", "python", "--json",
                LEDGER_CHECKPOINTS=elsewhere,
            )
        )
    )  # fmt: skip
    (tmp_path / "answer.json").write_text(json.dumps(lost))
    target = tmp_path / "restored"
    restored = manage(target, "restore", str(tmp_path / "b.tar"), LEDGER_CHECKPOINTS=elsewhere)

    assert restored.returncode == 1
    assert "THE LEDGER IS NOT INTACT" in restored.stdout
    assert "truncated" in restored.stdout
    assert "they were kept" in restored.stdout
    receipt = ("verify_ledger", "--receipt", str(tmp_path / "answer.json"))
    told = manage(target, *receipt, LEDGER_CHECKPOINTS=elsewhere)
    assert f"missing at entry {json.loads(made)['sequence'] + 1}" in told.stdout or (
        "a receipt was given out for it" in told.stdout
    )
    reason = ("checkpoint_ledger", "--reset", "restored after a lost disk")
    succeeded(manage(target, *reason, LEDGER_CHECKPOINTS=elsewhere))
    succeeded(manage(target, "verify_ledger", LEDGER_CHECKPOINTS=elsewhere))
    # The ledger has grown past it meanwhile, and still tells.
    told = manage(target, *receipt, LEDGER_CHECKPOINTS=elsewhere)
    assert told.returncode == 1
    assert "replaced" in told.stdout


def test_a_restore_that_was_interrupted_does_not_start(data_dir: Path) -> None:
    # The keys are put into place last.
    (data_dir / "secrets.env").unlink()
    refused = manage(data_dir, "bootstrap")
    assert refused.returncode != 0
    assert "secrets.env is missing but its database is there" in refused.stderr


INTERRUPTED = """
from unittest.mock import patch
from sandbox_site.backups.restoring import restore
with patch("sandbox_site.backups.restoring.verify", side_effect=KeyboardInterrupt):
    with open({archive!r}, "rb") as stream:
        restore(stream, print)
"""


def test_a_restore_that_was_interrupted_while_it_verified_starts_nothing(
    archive: Path, tmp_path: Path
) -> None:
    """Everything is in place by then, and what was open has not been ended."""
    target = tmp_path / "restored"
    script = INTERRUPTED.format(archive=str(archive))
    assert manage(target, "shell", "--command", script).returncode != 0
    assert (target / "secrets.env").exists()
    # Whatever starts asks the same: test_installation.py has each of them.
    for start in ("bootstrap", "qcluster"):
        refused = manage(target, start)
        assert refused.returncode != 0
        assert "restore the backup again" in refused.stderr, start
    shutil.rmtree(target)
    succeeded(manage(target, "restore", str(archive)))
    succeeded(manage(target, "bootstrap"))
