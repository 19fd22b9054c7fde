"""The keys of an installation that was given none: made once, kept in its data directory.

They serve the start without any setting. Production brings its own (`NAMES`), so that a lost
disk or a stray copy of one decides neither what can be read nor by whom.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import closing
from pathlib import Path

FILE_NAME = "secrets.env"
# Each installation has a row in one of them from its first `bootstrap` on.
_SIGNED_OR_ENCRYPTED = (
    "sandbox_site_installationmark",
    "executions_ledgerentry",
    "providers_providerconfig",
    "auth_user",
)
NAMES = ("SECRET_KEY", "FERNET_KEYS", "LEDGER_KEYS")


class KeysLost(Exception):
    """There is a database but not the keys that its secrets were encrypted with."""


def read(data_dir: Path) -> dict[str, str]:
    """The generated keys by name, empty when none were generated yet."""
    try:
        text = (data_dir / FILE_NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def split(fernet_keys: str) -> list[str]:
    """The keys of a comma separated list; the first one encrypts, all of them decrypt."""
    return [key.strip() for key in fernet_keys.split(",") if key.strip()]


def create(data_dir: Path) -> None:
    """Generate the keys unless they exist. Of two processes that start at once, one wins.

    Raises KeysLost rather than give an existing database keys that cannot read it.
    """
    target = data_dir / FILE_NAME
    if target.exists():
        return
    if _has_content(data_dir / "cofferdam.sqlite3"):
        raise KeysLost(
            f"{target} is missing but its database is there. Restore the file, "
            "or set SECRET_KEY and FERNET_KEYS to what they were."
        )
    lines = "".join(map(_line, NAMES))
    draft = data_dir / f".{FILE_NAME}.{os.getpid()}"
    write_private(draft, lines)
    try:
        os.link(draft, target)
    except FileExistsError:
        return
    finally:
        draft.unlink()


def _has_content(database: Path) -> bool:
    """Whether anything in the database is signed or encrypted. A command that found no keys leaves
    nothing that is; what cannot be read, or was cut to nothing, may have been."""
    if not database.exists():
        return False
    if not database.stat().st_size:
        return True
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            has_tables = connection.execute("SELECT name FROM sqlite_master").fetchone()
            return bool(has_tables) and any(
                connection.execute(f"SELECT 1 FROM {table}").fetchone()  # noqa: S608  our names
                for table in _SIGNED_OR_ENCRYPTED
            )
    except sqlite3.Error:
        return True


def _line(name: str) -> str:
    return f"{name}={secrets.token_urlsafe(50 if name == 'SECRET_KEY' else 32)}\n"


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text)
