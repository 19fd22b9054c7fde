"""A database that is away, paused or locked: everybody is told what happened, and nothing is lost."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.faults.away_site import Answer, Site, wait_for
from tests.support.postgres_server import PostgresServer

NO_EXECUTION = "/api/v1/executions/00000000-0000-7000-8000-000000000000"


@pytest.fixture
def on_postgres(postgres: PostgresServer, tmp_path: Path) -> Site:
    return Site(tmp_path, tmp_path / "data", {"DATABASE_URL": postgres.url})


@pytest.fixture
def on_sqlite(tmp_path: Path) -> Site:
    return Site(tmp_path, tmp_path / "data")


@contextmanager
def locked(site: Site) -> Iterator[None]:
    """Another process holds SQLite's write lock, as a backup or a shell that was left open does."""
    file = str(site.data_dir / "cofferdam.sqlite3")
    holder = subprocess.Popen(
        [
            *(sys.executable, "-c"),
            "import sqlite3, sys; c = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)"
            "; c.execute('BEGIN IMMEDIATE'); print('locked', flush=True); sys.stdin.read()",
            file,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    try:
        yield
    finally:
        holder.communicate()


def assert_away(answer: Answer, *, ran: bool | None) -> str | None:
    """SB009 in the API's shape, which says when to come again. The id, where there is one."""
    assert answer.status == 503, answer.text
    error = answer.body["error"]
    assert set(error) == {"code", "message", "field", "ran"}
    assert (error["code"], error["ran"]) == ("SB009", ran), answer.text
    assert int(answer.headers["Retry-After"]) >= 1
    found: str | None = answer.body["id"]
    return found


def assert_every_endpoint_says_so(site: Site) -> None:
    ours = ("/api/v1/executions", NO_EXECUTION, "/api/v1/languages", f"{NO_EXECUTION}/artifacts/a")
    for path in ours:
        assert_away(site.ask(path), ran=False)
    # Its key is looked up before its body is read.
    assert_away(site.run("pass #" + "x" * 100_000), ran=False)
    for path in ("providers", "config"):
        assert_away(site.ask(f"/api/admin/sandbox/{path}"), ran=False)
    other = site.ask("/v1/execute", {"user_id": "u", "code": "pass"})
    assert (other.status, other.body["ran"], other.body["id"]) == (503, False, None)
    assert other.body["error"].startswith("SB009: ")
    for path in ("/admin/", "/admin/executions/execution/"):
        page = site.ask(path, Cookie="sessionid=" + "x" * 32)
        assert (page.status, page.headers["Retry-After"]) == (503, "5"), page.text
        assert "The database cannot be reached." in page.text
        assert "Traceback" not in page.text
    assert site.ask("/healthz").status == 503
    ready = site.ask("/readyz")
    assert (ready.status, ready.body["reasons"]) == (503, ["database"])


def test_what_ran_while_postgresql_was_stopped_is_recorded_when_it_is_back(
    on_postgres: Site, postgres: PostgresServer
) -> None:
    site = on_postgres
    with site.up():
        sync = site.begin("sync", output="'a secret of the caller'")
        queued = site.begin("queued", mode="async").result().body["id"]
        postgres.stop()
        site.let_go("sync")
        site.let_go("queued")

        execution_id = assert_away(sync.result(), ran=True)
        assert execution_id is not None
        wait_for(lambda: len([f for f in site.journal if f.suffix == ".ended"]) == 2)
        for file in site.journal:
            assert file.stat().st_mode & 0o777 == 0o600
            assert b"secret" not in file.read_bytes()
        assert_away(site.run("print('again')", idempotency_key="again"), ran=False)
        assert_every_endpoint_says_so(site)

        postgres.start()
        record = site.ended(execution_id)
        assert (record["status"], record["stdout"]) == ("succeeded", "a secret of the caller\n")
        assert record["receipt"]["subject"] == execution_id
        assert record["late_result"] is None
        assert site.ended(queued)["status"] == "succeeded"
        again = site.run("print('again')", idempotency_key="again")
        assert (again.status, again.body["stdout"]) == (200, "again\n")
        assert (site.times_run("sync"), site.times_run("queued")) == (1, 1)
        site.assert_in_order()


def test_a_postgresql_that_takes_everything_and_answers_nothing_keeps_nobody_waiting(
    on_postgres: Site, postgres: PostgresServer
) -> None:
    site = on_postgres
    with site.up():
        running = site.begin("sync")
        postgres.pause()
        try:
            site.let_go("sync")
            execution_id = assert_away(running.result(), ran=True)
            assert_away(site.run(), ran=False)
            assert_away(site.ask("/api/v1/executions"), ran=False)
            assert site.ask("/healthz").status == 503
        finally:
            postgres.resume()
        assert execution_id is not None
        assert site.ended(execution_id)["stdout"] == "kept\n"
        assert site.times_run("sync") == 1
        site.assert_in_order()


def test_what_ran_while_another_process_held_sqlites_lock_is_recorded_when_it_lets_go(
    on_sqlite: Site,
) -> None:
    site = on_sqlite
    with site.up():
        running = site.begin("sync")
        with locked(site):
            site.let_go("sync")
            execution_id = assert_away(running.result(), ran=True)
            assert execution_id is not None
            refused = site.run("print('again')", idempotency_key="again")
            assert_away(refused, ran=False)
            assert "locked" in refused.body["error"]["message"]
            # What is only read is served.
            assert site.record(execution_id)["status"] == "running"
            assert site.ask("/healthz").status == 200
        assert site.ended(execution_id)["stdout"] == "kept\n"
        assert site.run("print('again')", idempotency_key="again").status == 200
        assert site.times_run("sync") == 1
        site.assert_in_order()


def test_a_later_process_records_what_a_killed_one_left_in_the_journal(on_sqlite: Site) -> None:
    site = on_sqlite
    with site.up() as service:
        running = site.begin("sync")
        with locked(site):
            site.let_go("sync")
            execution_id = assert_away(running.result(), ran=True)
            os.kill(service.find(lambda line: "gunicorn" in line), signal.SIGKILL)
            service.process.send_signal(signal.SIGKILL)
            service.wait_for_end()
    assert execution_id is not None
    assert site.journal
    with site.up():
        record = site.ended(execution_id)
        assert (record["status"], record["stdout"]) == ("succeeded", "kept\n")
        assert site.times_run("sync") == 1
        site.assert_in_order()


def test_a_failure_of_the_program_is_not_taken_for_a_database_that_is_away(on_sqlite: Site) -> None:
    with sqlite3.connect(on_sqlite.data_dir / "cofferdam.sqlite3") as database:
        database.execute("ALTER TABLE executions_artifact RENAME TO elsewhere")
    database.close()
    with on_sqlite.up():
        answer: Any = on_sqlite.ask(f"{NO_EXECUTION}/artifacts/a")
    assert (answer.status, answer.body["error"]["code"]) == (500, "internal_error")
