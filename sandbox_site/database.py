"""The DATABASES setting: SQLite in the data directory, or whatever DATABASE_URL names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandbox_site.environment import StrictEnv

_SQLITE = "django.db.backends.sqlite3"

# What is kept of the write-ahead log once it was written into the database.
JOURNAL_BYTES = 16 * 1024 * 1024

_SQLITE_OPTIONS: dict[str, Any] = {
    # A transaction that starts as a reader and then writes fails at once when another has
    # written meanwhile, whatever the timeout. Taking the write lock first makes it wait.
    "transaction_mode": "IMMEDIATE",
    "timeout": 20,
    # auto_vacuum is for a database that is made now, so it comes before anything is written.
    "init_command": "PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL; "
    f"PRAGMA synchronous=NORMAL; PRAGMA journal_size_limit={JOURNAL_BYTES};",
}


def databases(env: StrictEnv, data_dir: Path) -> dict[str, dict[str, Any]]:
    """Connections are kept: opening one costs more than the statements of a short request."""
    if url := env.secret("DATABASE_URL"):
        default: dict[str, Any] = env.db_url_config(url)
    else:
        default = {"ENGINE": _SQLITE, "NAME": str(data_dir / "cofferdam.sqlite3")}
    default.setdefault("CONN_MAX_AGE", None)
    if default["ENGINE"] == _SQLITE:
        default["OPTIONS"] = _SQLITE_OPTIONS | default.get("OPTIONS", {})
    else:
        # A server may close a kept connection; a file cannot.
        default.setdefault("CONN_HEALTH_CHECKS", True)
    return {"default": default}


def files_of(configured: dict[str, dict[str, Any]]) -> list[Path]:
    """The database's files, where it has some: itself and what SQLite keeps beside it."""
    name = str(configured["default"].get("NAME", ""))
    if configured["default"]["ENGINE"] != _SQLITE or name.startswith((":", "file:")):
        return []
    return [Path(name + ending) for ending in ("", "-wal", "-shm", "-journal")]
