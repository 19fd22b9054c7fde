"""Installations in tests of backups: their commands and their rows."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, clean_environment, free_port

SCRIPT = """
import os, pathlib
pathlib.Path("artifacts").mkdir(exist_ok=True)
pathlib.Path("artifacts/data.bin").write_bytes(os.urandom(20_000))
print("done")
"""


def manage(data_dir: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    extra.setdefault("PORT", str(free_port()))
    return subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=clean_environment(data_dir, **extra),
        capture_output=True,
        text=True,
        check=False,
    )


def succeeded(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def rows(data_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3")) as database:
        return database.execute(query).fetchall()


def change(data_dir: Path, statement: str) -> None:
    with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3")) as database:
        database.execute(statement)
        database.commit()
