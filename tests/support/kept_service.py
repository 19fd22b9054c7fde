"""The service for the local provider's sessions, as `manage.py up` starts it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from executions.kernel.coroutines import run_sync
from executions.sessions.ending import release
from executions.sessions.models import Session
from providers.leases import close_all
from providers.manager import manager
from providers.runtime.service.unix_socket import answers, runs_path, socket_path
from tests.support.processes import ROOT, Service, clean_environment, free_port, started
from tests.support.required import require
from tests.support.running import LOCAL, activate

START_SECONDS = 120


@contextmanager
def sessions_service(data_dir: Path, log: Path, **extra: str) -> Iterator[Service]:
    """`manage.py pool --no-port` in this data directory and environment, listening."""
    environment = clean_environment(data_dir, PORT=str(free_port()), **extra)
    command = [sys.executable, "manage.py", "pool", "--no-port", "--launcher", "bubblewrap"]
    with started(command, environment, ROOT, log) as service:
        deadline = time.monotonic() + START_SECONDS
        while not answers(socket_path(data_dir)):
            assert service.process.poll() is None, service.output
            assert time.monotonic() < deadline, service.output
            time.sleep(0.02)
        yield service


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The data directory of a service that a module's tests use one after the other."""
    require("bwrap")
    folder = tmp_path_factory.mktemp("service")
    with sessions_service(folder, folder / "log"):
        yield folder
        # What it has loaded knows this service.
        manager.close()


@contextmanager
def kept_by(service: Path, data_dir: Path) -> Iterator[None]:
    """The local provider, active, with its sessions in that service and its own `data_dir`."""
    (data_dir / "run").mkdir(mode=0o700, exist_ok=True)
    for path in (socket_path, runs_path):
        path(data_dir).symlink_to(path(service))
    activate("local", LOCAL)
    if not _serves(service):
        manager.close()
    yield
    assert background.wait_for_keyed_work()
    for session in Session.objects.filter(released_at=None):
        run_sync(release(session))
    close_all()


def _serves(service: Path) -> bool:
    """Whether the provider that is loaded has its sessions there, wherever its own files are."""
    with manager.lease() as lease:
        provider: Any = lease.provider
        return bool(provider._sessions._path.resolve() == socket_path(service))
