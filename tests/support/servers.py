"""A PostgreSQL and a Redis for tests, whatever database the run itself is on.

`.ci/with-servers` lends its own to a whole run; elsewhere the first test that asks for them has
them started, and they end with the run.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
import pytest
from django.db import connection

from tests.support.processes import ROOT
from tests.support.required import missing

END_SECONDS = 60


@dataclass(frozen=True)
class Servers:
    """Where they listen. `folder` is what `.ci/start-servers` was given."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """DATABASE_URL, REDIS_URL and Q_BROKER as it wrote them."""
        lines = (self.folder / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def pid(self, name: str) -> int:
        """Of "postgres" or of "redis"."""
        return int((self.folder / f"{name}.pid").read_text())

    def database_url(self, name: str) -> str:
        url = urlsplit(self.environment["DATABASE_URL"])
        return urlunsplit(url._replace(path=f"/{name}"))

    def run_sql(self, statement: str) -> None:
        """Outside of any transaction, as the superuser, in no database of a test."""
        with psycopg.connect(self.environment["DATABASE_URL"], autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]


def url_of_the_tests_database() -> str:
    """DATABASE_URL for another process that is to see the rows of a transactional test."""
    configured = connection.settings_dict
    if connection.vendor == "sqlite":
        return f"sqlite:///{configured['NAME']}"
    user = f"{configured['USER']}:{quote(configured['PASSWORD'], safe='')}"
    return f"postgres://{user}@{configured['HOST']}:{configured['PORT']}/{configured['NAME']}"


def start_servers(folder: Path) -> Servers:
    subprocess.run([ROOT / ".ci" / "start-servers", folder], check=True, timeout=300)
    return Servers(folder)


def end_servers(servers: Servers) -> None:
    for name in ("postgres", "redis"):
        with suppress(ProcessLookupError):
            os.kill(servers.pid(name), signal.SIGINT)
    deadline = time.monotonic() + END_SECONDS
    for name in ("postgres", "redis"):
        while Path(f"/proc/{servers.pid(name)}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
    shutil.rmtree(servers.folder, ignore_errors=True)


def missing_servers() -> str:
    """What is not installed, or ""."""
    found = [
        *Path("/usr/lib/postgresql").glob("*/bin/initdb"),
        *filter(None, [shutil.which("initdb")]),
    ]
    if not found:
        return "PostgreSQL is not installed"
    return "" if shutil.which("redis-server") else "Redis is not installed"


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Those that the run was given, or ones of its own."""
    if lent := os.environ.get("TEST_SERVERS"):
        yield Servers(Path(lent))
        return
    yield from _started()


@pytest.fixture
def own_servers() -> Iterator[Servers]:
    """Ones that a test may stop and kill."""
    yield from _started()


def _started() -> Iterator[Servers]:
    if reason := missing_servers():
        missing(reason)
    own = start_servers(Path(tempfile.mkdtemp(prefix="cofferdam-servers.", dir="/var/tmp")))
    try:
        yield own
    finally:
        end_servers(own)


@pytest.fixture
def postgres_url(servers: Servers) -> Iterator[str]:
    """DATABASE_URL of an empty database, which is dropped with the test."""
    name = f"t{uuid.uuid4().hex[:16]}"
    servers.run_sql(f"CREATE DATABASE {name}")
    yield servers.database_url(name)
    servers.run_sql(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def redis_url(servers: Servers) -> str:
    return servers.environment["REDIS_URL"]
