"""`get_sandbox()` with SANDBOX_TYPE=docker: through the service, or with containers of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from executions.runs.models import Execution
from executions.sandbox import get_sandbox
from providers.errors import ProviderUnavailable
from providers.leases import close_all
from providers.models import ProviderConfig
from providers.runtime.launchers.docker_owner import OWNER_LABEL
from tests.support.pool_service import PoolService
from tests.support.processes import NO_DOCKER, ROOT, clean_environment, free_port, started

pytest_plugins = ["tests.support.provider_fixtures"]


@pytest.fixture
def configured(no_provider: None, settings: Any) -> Iterator[int]:
    """The port at which the configured service would listen."""
    settings.SANDBOX_TYPE = "docker"
    port = free_port()
    config = {"endpoint": f"http://127.0.0.1:{port}", "pool_size": 1}
    ProviderConfig.objects.create(provider_id="self_managed", config=config)
    yield port
    close_all()


def test_without_an_engine_it_is_an_error_with_the_remedy(
    configured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)

    with pytest.raises(ProviderUnavailable) as raised:
        get_sandbox().execute("print(1)")

    assert raised.value.code == "SB009"
    assert "Docker engine" in raised.value.message
    assert "DOCKER_HOST" in raised.value.message
    record = Execution.objects.get()
    assert (record.status, record.error_code, record.stdout) == ("error", "SB009", "")


def test_without_a_service_the_containers_are_kept_in_this_process(
    configured: int, engine: docker.DockerClient
) -> None:
    result = get_sandbox().execute("print('contained')")

    assert result.stdout == "contained\n"
    assert result.meta["runtime"] in ("gvisor", "runc")
    assert result.meta["image_digest"]
    close_all()
    label = {"label": "cofferdam.pool=in-process"}
    left = engine.containers.list(all=True, filters=label, ignore_removed=True)
    mine = f"/{os.getpid()}/"
    assert [one for one in left if mine in one.labels[OWNER_LABEL]] == []


@pytest.mark.parametrize("launcher", ["docker", "bubblewrap"])
def test_a_service_is_used_when_it_has_containers(
    configured: int, engine: docker.DockerClient, tmp_path: Path, launcher: str
) -> None:
    environment = clean_environment(
        tmp_path / "data",
        PORT=str(configured),
        DOCKER_HOST=os.environ["DOCKER_HOST"],
        SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1",
    )
    command = [sys.executable, "manage.py", "pool", "--launcher", launcher]
    with started(
        [*command, "--port", str(configured)], environment, ROOT, tmp_path / "log"
    ) as service:
        pool = PoolService(service)
        pool.wait_until_healthy()
        result = get_sandbox().execute("print('contained')")
        handed_out = pool.stats()["handed_out"]

    assert result.stdout == "contained\n"
    assert result.meta["runtime"] in ("gvisor", "runc")
    assert handed_out == (1 if launcher == "docker" else 0)
