"""Workers of Claude's environments as processes of a running service, and what they left there."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.certificates import Authority
from tests.support.claude_queue import ENVIRONMENT, KEY, Queue
from tests.support.codex_door import manage
from tests.support.processes import ROOT, clean_environment
from tests.support.site import Site
from tests.support.waiting import wait_until

SECONDS = 60.0
_DECIDE = """
from django.contrib.auth.models import User
from executions.runs.models import Approval
from executions.capabilities.policies.approvals import decide
values = {{"is_superuser": True, "is_staff": True}}
person, _ = User.objects.get_or_create(username="judge", defaults=values)
approval = Approval.objects.get(execution__request_id={call!r})
decide(approval, person, approve={approve!r}, request_hash=approval.request_hash)
"""


@dataclass
class Workplace:
    """An environment of a tenant, and how its worker trusts the queue."""

    site: Site
    queue: Queue
    tenant: str
    name: str
    ca_file: Path

    def environment(self, **extra: str) -> dict[str, str]:
        return clean_environment(
            self.site.data_dir,
            SSL_CERT_FILE=str(self.ca_file),
            PROVIDER_ALLOWED_NETWORKS=f"localhost:{self.queue.port}",
            **extra,
        )

    @contextmanager
    def worker(
        self, *options: str, key: str = "worker", grace: int = 1
    ) -> Iterator[subprocess.Popen[bytes]]:
        """A worker. It is told to stop at the end, and has to. `grace` is in seconds."""
        command = [sys.executable, "manage.py", "claude_worker", f"{self.tenant}/{self.name}"]
        with (self.ca_file.parent / "worker.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--key", key, *options],
                env=self.environment(SHUTDOWN_GRACE_SECONDS=str(grace)),
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(SECONDS) == 0, self.log
        finally:
            process.kill()
            process.wait()

    @property
    def log(self) -> str:
        return (self.ca_file.parent / "worker.log").read_text()

    def records(self, call: str) -> list[dict[str, Any]]:
        """The executions of a call."""
        path = self.site.data_dir / "cofferdam.sqlite3"
        with closing(sqlite3.connect(path, timeout=20)) as database:
            database.row_factory = sqlite3.Row
            query = "SELECT * FROM executions_execution WHERE request_id = ?"
            return [dict(each) for each in database.execute(query, [call])]

    def wait_for_status(self, call: str, status: str) -> None:
        wait_until(lambda: [each["status"] for each in self.records(call)] == [status], SECONDS)

    def decide(self, call: str, *, approve: bool) -> None:
        """Approve or reject a call, as somebody signed in."""
        wait_until(lambda: bool(self.records(call)), SECONDS)
        manage(self.site, "shell", "-c", _DECIDE.format(call=call, approve=approve))


def workplace(
    site: Site, queue: Queue, authority: Authority, folder: Path, tenant: str, name: str
) -> Workplace:
    """Enter an environment with its key."""
    ca_file, key_file = folder / "ca.pem", folder / "key"
    ca_file.write_text(authority.pem)
    key_file.write_text(KEY)
    options = ("--placement", "claude", "--field", ENVIRONMENT, "--rule", queue.url)
    manage(
        *(site, "network_credential", name, "--tenant", tenant, *options),
        *("--from-file", str(key_file)),
    )
    return Workplace(site, queue, tenant, name, ca_file)


def text_of(result: dict[str, Any]) -> str:
    return "".join(each["text"] for each in result["content"])
