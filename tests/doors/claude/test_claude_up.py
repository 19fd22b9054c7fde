"""`manage.py up --claude-worker`, as somebody does it who enters one thing after another."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.support.certificates import Authority
from tests.support.claude_queue import ENVIRONMENT, KEY, queue_over_tls
from tests.support.claude_worker import SECONDS, text_of
from tests.support.processes import ROOT, clean_environment, free_port, started
from tests.support.required import require
from tests.support.site import MANAGE, bootstrapped
from tests.support.waiting import wait_until


def test_a_worker_says_what_it_lacks_and_begins_when_it_is_there(tmp_path: Path) -> None:
    require("bwrap")
    authority = Authority()
    (tmp_path / "ca.pem").write_text(authority.pem)
    bootstrapped(tmp_path / "data")
    with queue_over_tls(authority.issue(tmp_path).path) as queue:
        environment = clean_environment(
            tmp_path / "data",
            PORT=str(free_port()),
            POOL_PORT=str(free_port()),
            Q_WORKERS="1",
            SSL_CERT_FILE=str(tmp_path / "ca.pem"),
            PROVIDER_ALLOWED_NETWORKS=f"localhost:{queue.port}",
            SHUTDOWN_GRACE_SECONDS="1",
        )

        def manage(*command: str, given: str = "") -> None:
            subprocess.run(
                [sys.executable, "manage.py", *command],
                env=environment,
                cwd=ROOT,
                input=given.encode(),
                check=True,
            )

        def enter(key: str) -> None:
            options = ("--placement", "claude", "--field", ENVIRONMENT, "--rule", queue.url)
            manage("network_credential", "agents", "--tenant", "demo", *options, given=key)

        command = [*MANAGE, "up", "--claude-worker", "demo/agents --key claude --parallel 1"]
        with started(command, environment, ROOT, tmp_path / "log") as service:
            wait_until(lambda: "It is started again in" in service.output, SECONDS)
            assert "no valid API key 'claude'" in service.output
            scopes = [
                word for name in ("execute", "sessions", "files") for word in ("--scope", name)
            ]
            manage("create_api_key", "demo", "--name", "claude", *scopes)
            wait_until(lambda: "has no environment 'agents'" in service.output, SECONDS)
            enter("another-key-of-somebody")
            wait_until(lambda: "HTTP 401" in service.output, SECONDS)
            enter(KEY)
            queue.add_session("sesn_up")
            assert text_of(queue.result(queue.call("sesn_up", "bash", command="echo on"))) == "on\n"
            os.kill(service.find(lambda line: "claude_worker" in line), signal.SIGKILL)
            wait_until(lambda: service.output.count("It is started again in") == 2, SECONDS)
            queue.take_away(queue.items[0])
            assert text_of(queue.result(queue.call("sesn_up", "bash", command="pwd")))
            service.process.send_signal(signal.SIGTERM)
            assert service.process.wait(SECONDS) == 0, service.output
            assert KEY not in service.output
