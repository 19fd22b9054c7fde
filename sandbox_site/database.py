"""The DATABASES setting: SQLite in the data directory, or whatever DATABASE_URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox_site.environment import PROJECT, StrictEnv

_SQLITE = "django.db.backends.sqlite3"
_POSTGRES = ("django.db.backends.postgresql", "django.db.backends.postgresql_psycopg2")
_BOUNDED_POSTGRES = "executions.kernel.postgresql"

# What is kept of the write-ahead log once it was written into the database.
JOURNAL_BYTES = 16 * 1024 * 1024

_SQLITE_OPTIONS: dict[str, Any] = {
    # A transaction that starts as a reader and then writes fails at once when another has
    # written meanwhile, whatever the timeout. Taking the write lock first makes it wait.
    "transaction_mode": "IMMEDIATE",
    "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; "
    f"PRAGMA journal_size_limit={JOURNAL_BYTES};",
}
# For a database that is made now, before anything is written. In one that is there it would be a
# write of each new connection, which waits for other writers and fails on a full disk.
_AT_FIRST = "PRAGMA auto_vacuum=INCREMENTAL;"

# A host that is gone answers nothing, not even a refusal; the kernel would wait for a quarter of an
# hour. Seconds, but for the last, which is in milliseconds.
_POSTGRES_OPTIONS: dict[str, Any] = {
    "keepalives_idle": 15,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}


def databases(env: StrictEnv, data_dir: Path, seconds: int) -> dict[str, dict[str, Any]]:
    """Connections are kept: opening one costs more than the statements of a short request.

    Nobody waits longer than `seconds` for SQLite's write lock or for a connection.
    """
    if url := env.secret("DATABASE_URL"):
        default: dict[str, Any] = env.db_url_config(url)
    else:
        default = {"ENGINE": _SQLITE, "NAME": str(data_dir / "cofferdam.sqlite3")}
    default.setdefault("CONN_MAX_AGE", None)
    if default["ENGINE"] == _SQLITE:
        if not default["NAME"].startswith((":", "file:")):
            default["NAME"] = str(PROJECT / default["NAME"])
        first = "" if _is_there(default["NAME"]) else _AT_FIRST
        default["OPTIONS"] = {
            **_SQLITE_OPTIONS,
            "init_command": first + str(_SQLITE_OPTIONS["init_command"]),
            "timeout": seconds,
            **default.get("OPTIONS", {}),
        }
    else:
        if default["ENGINE"] in _POSTGRES:
            default["ENGINE"] = _BOUNDED_POSTGRES
            default["OPTIONS"] = {
                **_POSTGRES_OPTIONS,
                "connect_timeout": seconds,
                **default.get("OPTIONS", {}),
            }
        # A server may close a kept connection; a file cannot.
        default.setdefault("CONN_HEALTH_CHECKS", True)
    return {"default": default}


def _is_there(name: str) -> bool:
    return Path(name).is_file() and Path(name).stat().st_size > 0


def files_of(configured: dict[str, dict[str, Any]]) -> list[Path]:
    """The database's files, where it has some: itself and what SQLite keeps beside it."""
    name = str(configured["default"].get("NAME", ""))
    if configured["default"]["ENGINE"] != _SQLITE or name.startswith((":", "file:")):
        return []
    return [Path(name + ending) for ending in ("", "-wal", "-shm", "-journal")]
