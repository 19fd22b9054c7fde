"""A service whose database or disk is taken away, and code that tells outside that it ran.

Nothing isolates the code here: it appends to a file of the test's, and ends when the test says so.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.site import bootstrapped, credentials

# Nobody is kept waiting for longer, whatever the database does: three waits, and a busy machine.
BOUND_SECONDS = 60.0
# Longer than a slow disk holds up one process of the service that writes.
WAIT_SECONDS = 4


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def body(self) -> Any:
        return json.loads(self.text)


@dataclass
class Site:
    """An installation below `folder`, and how it is asked."""

    folder: Path
    data_dir: Path
    extra: dict[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(8))

    def __post_init__(self) -> None:
        (self.folder / "programs").mkdir(exist_ok=True)
        url = self.extra.get("DATABASE_URL", "")
        if url.startswith("postgres"):
            self.manage("bootstrap")
        else:
            bootstrapped(self.data_dir)
            if url:
                shutil.move(self.data_dir / "cofferdam.sqlite3", url.removeprefix("sqlite:///"))

    @property
    def environment(self) -> dict[str, str]:
        return clean_environment(self.data_dir, PORT=str(self.port)) | {
            # Without a tool that isolates, and with the developer's opt-out.
            "PATH": str(self.folder / "programs"),
            "SANDBOX_LOCAL_UNISOLATED": "true",
            "MINIMUM_ISOLATION": "none",
            "DATABASE_WAIT_SECONDS": str(WAIT_SECONDS),
            "Q_WORKERS": "1",
            "DISK_RESERVE_MIB": "0",
            **self.extra,
        }

    def manage(self, *arguments: str, check: bool = True) -> str:
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            env=self.environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def up(self) -> Iterator[Service]:
        command = [sys.executable, "manage.py", "up"]
        with started(command, self.environment, ROOT, self.folder / "log") as service:
            service.wait_until_ready(BOUND_SECONDS)
            yield service

    @property
    def key(self) -> str:
        return credentials(self.data_dir)["API_KEY"]

    def ask(self, path: str, body: Any = None, **headers: str) -> Answer:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-API-Key": self.key, "Content-Type": "application/json", **headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=BOUND_SECONDS) as answer:
                return Answer(answer.status, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, error.read().decode())

    def run(self, code: str = "print(1)", **body: Any) -> Answer:
        return self.ask("/api/v1/executions", {"code": code, **body})

    def begin(self, name: str, output: str = "'kept'", **body: Any) -> Future[Answer]:
        """A run that has begun, and goes on until `let_go`."""
        code = f"""
import os, time
with open({str(self.folder / name)!r}, "a") as outside:
    outside.write("ran\\n")
until = time.monotonic() + 100
while not os.path.exists({str(self.folder / name)!r} + ".go") and time.monotonic() < until:
    time.sleep(0.02)
print({output})
"""
        answer = self.threads.submit(self.run, code, timeout=120, **body)
        wait_for(lambda: answer.done() or self.times_run(name) > 0)
        if body.get("mode") != "async":
            assert not answer.done(), answer.result().text
        wait_for(lambda: self.times_run(name) > 0)
        return answer

    def let_go(self, name: str) -> None:
        (self.folder / f"{name}.go").touch()

    def times_run(self, name: str) -> int:
        file = self.folder / name
        return len(file.read_text().splitlines()) if file.exists() else 0

    def record(self, execution_id: str) -> Any:
        return self.ask(f"/api/v1/executions/{execution_id}").body

    def ended(self, execution_id: str) -> Any:
        """The record, once it has ended."""
        found: Any = {}

        def look() -> bool:
            nonlocal found
            answer = self.ask(f"/api/v1/executions/{execution_id}")
            found = answer.body
            return answer.status == 200 and found["status"] not in ("queued", "running")

        wait_for(look)
        return found

    @property
    def journal(self) -> list[Path]:
        folder = self.data_dir / "journal"
        return sorted(folder.iterdir()) if folder.exists() else []

    def assert_in_order(self) -> None:
        """Nothing waits any more, and the ledger says what the records say."""
        wait_for(lambda: not self.journal)
        said = self.manage("verify_ledger")
        assert "Intact" in said, said


def wait_for(condition: Callable[[], bool], seconds: float = BOUND_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.05)
