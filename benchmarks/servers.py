"""The databases that a benchmark compares: SQLite, and PostgreSQL where `.ci/with-servers` runs."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import psycopg


@dataclass(frozen=True)
class Database:
    """A kind of database. `environment` is what its services need to be on an empty one."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    redis_url: str = ""


@contextmanager
def databases() -> Iterator[list[Database]]:
    """Both, or SQLite alone. The service of every row gets an emptied database."""
    url, redis_url = os.environ.pop("DATABASE_URL", ""), os.environ.get("REDIS_URL", "")
    os.environ.pop("Q_BROKER", None)
    if not url:
        yield [Database("SQLite")]
        return
    name = f"bench{uuid.uuid4().hex[:12]}"
    _run(url, f"CREATE DATABASE {name}")
    own = urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    try:
        yield [
            Database("SQLite", {}, redis_url),
            Database("PostgreSQL", {"DATABASE_URL": own}, redis_url),
        ]
    finally:
        _run(url, f"DROP DATABASE {name} WITH (FORCE)")


def emptied(database: Database) -> Database:
    """The same without any table: each service that is measured begins at nothing."""
    if url := database.environment.get("DATABASE_URL"):
        _run(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return database


def _run(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement)
