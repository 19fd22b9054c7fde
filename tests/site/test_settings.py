"""How settings are read: strictly, and with keys of its own in production."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import secrets
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import connection
from django.db.utils import ConnectionHandler
from django.test import Client

from sandbox_site import keys, logs
from sandbox_site.database import databases
from sandbox_site.environment import StrictEnv
from tests.support.processes import ROOT, clean_environment

OWN_KEYS = {"SECRET_KEY": "s" * 50, "FERNET_KEYS": "first,second", "LEDGER_KEYS": "seed"}


def python(data_dir: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a fresh Python with nothing of this project in its environment but what is given."""
    return subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(data_dir, **environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def load(data_dir: Path, name: str, **environment: str) -> Any:
    """The value of one setting in a fresh process. Raises AssertionError with what it printed."""
    code = f"import json; from sandbox_site import settings; print(json.dumps(settings.{name}))"
    done = python(data_dir, "-c", code, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DEBUG", "ture"),
        ("HTTPS_ONLY", "2"),
        ("SANDBOX_LOCAL_UNISOLATED", "maybe"),
        ("PORT", "http"),
        ("PORT", "70000"),
        # More than a guest remembers: every save of so many would be refused.
        ("SESSION_STORAGE_FILES", "50001"),
        ("SANDBOX_TIMEOUT_SEC", "30s"),
        ("SANDBOX_TIMEOUT_SEC", "301"),
        ("SANDBOX_MAX_OUTPUT_KB", "0"),
        ("SANDBOX_STORE_CODE", "sometimes"),
        ("SANDBOX_TYPE", "Podman"),
        ("LOG_LEVEL", "loud"),
        ("LOG_FORMAT", "yaml"),
        ("Q_BROKER", "rabbit"),
        ("ALLOW_PRIVATE_URLS", "private"),
        ("COMPONENT_EXEC_TIMEOUT", "10m"),
        ("SANDBOX_HOST", "http://ragflow"),
        ("URL_ALLOWED_NETWORKS", "10.0.0.0/99"),
    ],
)
def test_a_value_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, variable: str, value: str
) -> None:
    with pytest.raises(AssertionError, match=rf"ImproperlyConfigured: {variable}: .*{value}"):
        load(tmp_path, "DEBUG", **{variable: value})


@pytest.mark.parametrize(("value", "meant"), [("true", True), ("Off", False), ("1", True)])
def test_plain_booleans_are_understood(tmp_path: Path, value: str, meant: bool) -> None:
    assert load(tmp_path, "SANDBOX_LOCAL_UNISOLATED", SANDBOX_LOCAL_UNISOLATED=value) is meant


def test_records_are_kept_for_six_months_in_whichever_month_they_begin(tmp_path: Path) -> None:
    months = [date(2027 + month // 12, month % 12 + 1, 1) for month in range(24)]
    longest = max((end - begin).days for begin, end in zip(months, months[6:], strict=False))
    assert load(tmp_path, "SANDBOX_RECORDS_FLOOR_DAYS") >= longest == 184


@pytest.mark.parametrize(
    "name",
    ["PROVIDER_MAX_INFLIGHT", "LOGIN_LOCKOUT_MINUTES", "SANDBOX_MIN_RECORD_RETENTION_DAYS"],
)
def test_a_number_out_of_its_bounds_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=rf"{name}: 0 is not between 1 and"):
        load(tmp_path, "PORT", **{name: "0"})


def test_an_empty_variable_counts_as_unset(tmp_path: Path) -> None:
    assert load(tmp_path, "PORT", PORT="") == 8000


def test_the_default_timeout_follows_a_lower_maximum(tmp_path: Path) -> None:
    assert load(tmp_path, "SANDBOX_TIMEOUT_SEC", SANDBOX_MAX_TIMEOUT_SEC="10") == 10
    assert load(tmp_path, "COMPONENT_EXEC_TIMEOUT", SANDBOX_MAX_TIMEOUT_SEC="10") == 10


def test_without_debug_nothing_is_shown_and_generated_keys_are_used(tmp_path: Path) -> None:
    keys.create(tmp_path)
    generated = keys.read(tmp_path)
    assert load(tmp_path, "DEBUG") is False
    assert load(tmp_path, "SECRET_KEY") == generated["SECRET_KEY"]
    assert load(tmp_path, "FERNET_KEYS") == [generated["FERNET_KEYS"]]


def test_reading_the_settings_creates_nothing(tmp_path: Path) -> None:
    assert load(tmp_path / "new", "SECRET_KEY") == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "given",
    [{}, {"SECRET_KEY": "s" * 50}, {"FERNET_KEYS": "f" * 50}, {**OWN_KEYS, "LEDGER_KEYS": ""}],
)
def test_production_refuses_to_start_without_keys_of_its_own(
    tmp_path: Path, given: dict[str, str]
) -> None:
    keys.create(tmp_path)
    with pytest.raises(AssertionError, match=r"SECRET_KEY_FILE.*FERNET_KEYS_FILE"):
        load(tmp_path, "DEBUG", DEBUG="false", **given)


def test_production_uses_its_own_keys_and_not_the_generated_ones(tmp_path: Path) -> None:
    keys.create(tmp_path)
    assert load(tmp_path, "SECRET_KEY", DEBUG="false", **OWN_KEYS) == OWN_KEYS["SECRET_KEY"]
    assert load(tmp_path, "FERNET_KEYS", DEBUG="false", **OWN_KEYS) == ["first", "second"]


def test_secrets_may_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("$from-a-file\n")
    (tmp_path / "fernet").write_text("new,\nold\n")
    (tmp_path / "ledger").write_text("signing, before\n")
    files = {
        "SECRET_KEY_FILE": str(tmp_path / "secret"),
        "FERNET_KEYS_FILE": str(tmp_path / "fernet"),
        "LEDGER_KEYS_FILE": str(tmp_path / "ledger"),
    }
    assert load(tmp_path, "SECRET_KEY", DEBUG="false", **files) == "$from-a-file"
    assert load(tmp_path, "FERNET_KEYS", DEBUG="false", **files) == ["new", "old"]
    assert load(tmp_path, "LEDGER_KEYS", DEBUG="false", **files) == ["signing", "before"]


def test_a_secret_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="SECRET_KEY or SECRET_KEY_FILE, not both"):
        load(tmp_path, "DEBUG", SECRET_KEY_FILE="/dev/null", **OWN_KEYS)


@pytest.mark.parametrize("file", ["missing", "empty"])
def test_a_secret_file_that_holds_none_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(AssertionError, match=rf"SECRET_KEY_FILE: .*{file}"):
        load(tmp_path, "DEBUG", SECRET_KEY_FILE=str(tmp_path / file))


def test_https_only_turns_on_what_needs_https(tmp_path: Path) -> None:
    for name in ("SESSION_COOKIE_SECURE", "CSRF_COOKIE_SECURE", "SECURE_SSL_REDIRECT"):
        assert load(tmp_path, name) is False
        assert load(tmp_path, name, HTTPS_ONLY="true") is True
    assert load(tmp_path, "SECURE_HSTS_SECONDS", HTTPS_ONLY="true") > 0


def test_the_database_may_be_moved_out(tmp_path: Path) -> None:
    url = "postgres://user:p%40ss@db.example:5433/records"
    moved = load(tmp_path, "DATABASES", DATABASE_URL=url)["default"]
    assert moved["ENGINE"] == "executions.kernel.postgresql"
    assert (moved["HOST"], moved["PORT"], moved["PASSWORD"]) == ("db.example", 5433, "p@ss")
    assert "init_command" not in moved["OPTIONS"]
    assert (moved["OPTIONS"]["connect_timeout"], moved["OPTIONS"]["tcp_user_timeout"]) == (
        10,
        30_000,
    )
    own = load(tmp_path, "DATABASES", DATABASE_URL=f"{url}?connect_timeout=2")["default"]
    assert (own["OPTIONS"]["connect_timeout"], own["OPTIONS"]["tcp_user_timeout"]) == (2, 30_000)


def test_the_redis_broker_needs_its_address(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Q_BROKER=redis needs REDIS_URL"):
        load(tmp_path, "DEBUG", Q_BROKER="redis")
    cluster = load(tmp_path, "Q_CLUSTER", Q_BROKER="redis", REDIS_URL="redis://cache/1")
    assert cluster["redis"] == "redis://cache/1"
    assert "orm" not in cluster
    assert cluster["broker_class"] == "sandbox_site.brokers.PatientRedis"


def test_a_task_is_not_redelivered_while_it_may_still_run(tmp_path: Path) -> None:
    cluster = load(tmp_path, "Q_CLUSTER", SANDBOX_MAX_TIMEOUT_SEC="3600")
    assert cluster["timeout"] > 3600
    assert cluster["retry"] > cluster["timeout"] * 2


def test_a_relative_data_directory_does_not_depend_on_where_one_stands(tmp_path: Path) -> None:
    assert load(Path("elsewhere"), "DATA_DIR.as_posix()") == f"{ROOT.as_posix()}/elsewhere"


@pytest.mark.django_db(transaction=True)
def test_sqlite_lets_readers_and_a_writer_work_at_once() -> None:
    if connection.vendor != "sqlite":
        assert connection.vendor == "postgresql"
        return
    with connection.cursor() as cursor:
        values = {
            name: cursor.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert values == {
        "journal_mode": "wal",
        "synchronous": 1,
        "foreign_keys": 1,
        "busy_timeout": 10_000,
    }


def test_a_new_connection_to_sqlite_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, django_db_blocker: Any
) -> None:
    """Otherwise it would wait for other writers, and nothing could be read on a full disk."""
    monkeypatch.delenv("DATABASE_URL", raising=False)

    def connected() -> Any:
        return ConnectionHandler(databases(StrictEnv(), tmp_path, 0))["default"]

    with django_db_blocker.unblock():
        first = connected()
        with first.cursor() as cursor:
            cursor.execute("CREATE TABLE kept (value)")
            cursor.execute("BEGIN IMMEDIATE")
            second = connected()
            with second.cursor() as reading:
                assert reading.execute("SELECT * FROM kept").fetchall() == []
                assert reading.execute("PRAGMA auto_vacuum").fetchone() == (2,)
            second.close()
        first.close()


def test_the_checks_refuse_a_start_without_keys(tmp_path: Path) -> None:
    done = python(tmp_path, "manage.py", "check")
    assert done.returncode == 1
    assert "SECRET_KEY is not set" in done.stderr
    assert "FERNET_KEYS is not set" in done.stderr


def test_the_checks_refuse_to_encrypt_with_the_secret_key(db: None, settings: Any) -> None:
    settings.FERNET_KEYS = ["another key", settings.SECRET_KEY]
    assert "sandbox_site.E002" in {problem.id for problem in run_checks()}


def test_the_documented_production_environment_passes_the_checks_of_a_deployment(
    tmp_path: Path,
) -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    block = page.split("A production environment", 1)[1].split("```")[1]
    environment = dict(line.split("=", 1) for line in block.strip().splitlines())
    for name in [name for name in environment if name.endswith("_FILE")]:
        path = tmp_path / name
        path.write_text(secrets.token_urlsafe(50 if name.startswith("SECRET") else 32))
        environment[name] = str(path)
    environment.pop("DATA_DIR")

    done = python(
        tmp_path / "data",
        *("manage.py", "check", "--deploy", "--fail-level", "WARNING"),
        **environment,
    )

    assert done.returncode == 0, done.stderr
    assert "no issues" in done.stdout


def test_the_command_line_says_why_it_refuses_in_one_line(tmp_path: Path) -> None:
    done = python(tmp_path, "manage.py", "up", DEBUG="false")
    assert done.returncode == 1
    assert done.stderr.startswith("Configuration: DEBUG=false needs keys of its own.")
    assert done.stderr.count("\n") == 1


@pytest.mark.django_db
def test_health_is_told_without_a_key(client: Client) -> None:
    answer = client.get("/healthz")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert client.post("/healthz").status_code == 405


def test_health_is_refused_while_the_database_is_away(tmp_path: Path) -> None:
    code = (
        "import django; django.setup()\n"
        "from django.test import Client\n"
        "answer = Client(headers={'host': 'localhost'}).get('/healthz')\n"
        "print(answer.status_code, answer.json()['status'])"
    )
    done = python(
        tmp_path,
        *("-c", code),
        DJANGO_SETTINGS_MODULE="sandbox_site.settings",
        DATABASE_URL="postgres://nobody:hidden@127.0.0.1:1/none",
        **OWN_KEYS,
    )
    assert done.stdout.split() == ["503", "unavailable"], done.stderr
    assert "hidden" not in done.stdout + done.stderr


def test_the_start_page_leads_to_the_admin(client: Client) -> None:
    answer = client.get("/")
    assert (answer.status_code, answer.headers["Location"]) == (302, "/admin/")


@pytest.mark.django_db
def test_the_api_documentation_needs_nothing_from_elsewhere(client: Client) -> None:
    page = client.get("/api/docs").content.decode()
    assert 'src="/static/drf_spectacular_sidecar/' in page
    assert "https://" not in page
    assert client.get("/api/schema").status_code == 200


def test_an_unknown_page_tells_nothing_of_the_project(client: Client) -> None:
    answer = client.get("/no-such-page")
    assert answer.status_code == 404
    assert b"urlconf" not in answer.content.lower()


def test_a_log_record_is_one_line_of_json_without_what_is_no_plain_value() -> None:
    record = logging.LogRecord("a.logger", logging.WARNING, "", 0, "two\nlines", None, None)
    record.tenant, record.request = "demo", object()
    text = logs.JsonLines().format(record)
    line = json.loads(text)
    assert "\n" not in text
    assert (line["level"], line["logger"]) == ("warning", "a.logger")
    assert (line["message"], line["tenant"]) == ("two\nlines", "demo")
    assert "request" not in line


def test_a_log_record_on_a_terminal_is_short_and_moves_no_cursor() -> None:
    record = logging.LogRecord("a.logger", logging.ERROR, "", 0, "key.made\x1b[2J", None, None)
    record.tenant_id, record.region, record.subject = "demo", None, "bell\a\u202e"
    record.ledger_digest = "f" * 64
    try:
        raise ValueError("line\x1b]0;title")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = logs.TerminalLines().format(record)
    first, *traceback = text.splitlines()
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d ERROR "key\.made\\u001b\[2J" tenant_id=demo subject="bell\\u0007\\u202e"',
        first,
    )
    assert text.replace("\n", "").isprintable()
    assert any("ValueError: line\\u001b]0;title" in line for line in traceback)


def test_a_run_is_one_short_line_on_a_terminal() -> None:
    record = logging.LogRecord(
        "executions.audit", logging.INFO, "", 0, "execute_code failed", (), None
    )
    facts = {
        "operation": "execute_code", "status": "failed", "execution_status": "failed",
        "timestamp": "2026-01-02T03:04:05+00:00", "tenant_id": "demo", "provider": "local",
        "instance_id": "demo:0198f1de:local-1-2", "language": "python", "code_hash": "sha256:" + "f" * 64,
        "duration_ms": 1234, "queue_ms": 1, "start_ms": 2, "run_ms": 3, "exit_code": 1,
        "memory_used_mb": 10.7, "request_id": "f" * 32, "api_key": "cfd_abcdef", "runtime": "bubblewrap",
        "execution_id": "0198f1de-1234-7abc-8def-0123456789ab", "ledger_sequence": 7, "config_version": 1,
    }  # fmt: skip
    vars(record).update(facts)
    line = logs.TerminalLines().format(record)
    shown = "failed 1234 ms python demo 0198f1de-1234-7abc-8def-0123456789ab"
    assert re.fullmatch(rf"\d\d:\d\d:\d\d {shown}", line)
    assert len(line) <= 80
    # A log that a program reads has all of it.
    assert facts.items() <= json.loads(logs.JsonLines().format(record)).items()


def test_logs_are_text_only_where_somebody_looks_on(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logs.format_for("text") == "text"
    leader, follower = os.openpty()
    with os.fdopen(leader), os.fdopen(follower, "w") as terminal, io.StringIO() as file:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert (logs.format_for("auto"), logs.format_for("json")) == ("text", "json")
        monkeypatch.setattr(sys, "stderr", file)
        assert logs.format_for("auto") == "json"
