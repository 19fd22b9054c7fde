"""The service for the local provider's sessions, as `manage.py up` starts it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from providers.pool.service.unix_socket import answers, socket_path
from tests.processes import ROOT, Service, clean_environment, free_port, started

START_SECONDS = 30


@contextmanager
def sessions_service(data_dir: Path, log: Path) -> Iterator[Service]:
    """`manage.py pool --no-port` in this data directory, listening."""
    environment = clean_environment(data_dir, PORT=str(free_port()))
    command = [sys.executable, "manage.py", "pool", "--no-port", "--launcher", "bubblewrap"]
    with started(command, environment, ROOT, log) as service:
        deadline = time.monotonic() + START_SECONDS
        while not answers(socket_path(data_dir)):
            assert service.process.poll() is None, service.output
            assert time.monotonic() < deadline, service.output
            time.sleep(0.02)
        yield service
