"""A database that is away, paused or locked: everybody is told what happened, and nothing is lost."""

from __future__ import annotations

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
from tests.support.site import EXECUTIONS

NO_EXECUTION = "/api/v1/executions/00000000-0000-7000-8000-000000000000"


@pytest.fixture(scope="module")
def on_postgres(
    postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A service at work, which each test leaves with its database."""
    folder = tmp_path_factory.mktemp("on-postgres")
    site = Site(folder, folder / "data", {"DATABASE_URL": postgres.url})
    with site.up():
        yield site


@pytest.fixture
def server(postgres: PostgresServer) -> Iterator[PostgresServer]:
    """Runs again when the test has ended, however that ended."""
    yield postgres
    if postgres.process is None:
        postgres.start()


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
    """Asked at once: each waits for as long as the database may take."""
    ours = ("/api/v1/executions", NO_EXECUTION, "/api/v1/languages", f"{NO_EXECUTION}/artifacts/a")
    of_admins = [f"/api/admin/sandbox/{path}" for path in ("providers", "config")]
    pages = ("/admin/", "/admin/executions/execution/")
    cookie = {"Cookie": "sessionid=" + "x" * 32}
    api = [site.threads.submit(site.ask, path) for path in (*ours, *of_admins)]
    # Its key is looked up before its body is read.
    api.append(site.threads.submit(site.run, "pass #" + "x" * 100_000))
    other = site.threads.submit(site.ask, "/v1/execute", {"user_id": "u", "code": "pass"})
    shown = [site.threads.submit(site.ask, path, **cookie) for path in pages]
    for answer in api:
        assert_away(answer.result(), ran=False)
    refused = other.result()
    assert (refused.status, refused.body["ran"], refused.body["id"]) == (503, False, None)
    assert refused.body["error"].startswith("SB009: ")
    for page in (each.result() for each in shown):
        assert (page.status, page.headers["Retry-After"]) == (503, "5"), page.text
        assert "The database cannot be reached." in page.text
        assert "Traceback" not in page.text
    assert site.ask("/healthz").status == 503
    ready = site.ask("/readyz")
    assert (ready.status, ready.body["reasons"]) == (503, ["database"])


def test_what_ran_while_postgresql_was_stopped_is_recorded_when_it_is_back(
    on_postgres: Site, server: PostgresServer
) -> None:
    site = on_postgres
    sync = site.begin("sync", output="'a secret of the caller'")
    queued = site.begin("queued", mode="async").result().body["id"]
    server.stop()
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

    server.start()
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
    on_postgres: Site, server: PostgresServer
) -> None:
    site = on_postgres
    running = site.begin("paused")
    server.pause()
    try:
        site.let_go("paused")
        refused = [site.threads.submit(site.run), site.threads.submit(site.ask, EXECUTIONS)]
        execution_id = assert_away(running.result(), ran=True)
        for answer in refused:
            assert_away(answer.result(), ran=False)
        assert site.ask("/healthz").status == 503
    finally:
        server.resume()
    assert execution_id is not None
    assert site.ended(execution_id)["stdout"] == "kept\n"
    assert site.times_run("paused") == 1
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
            service.kill()
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
