"""The pool service over a real Docker engine: what a killed one leaves, and what the next does."""

from __future__ import annotations

import threading
from pathlib import Path

import docker
import pytest

from providers.errors import ProviderUnavailable
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Job, SandboxSpec
from tests.support.pool_service import over_docker
from tests.support.processes import free_port

RUN_MARK = "import time\nprint('begun', flush=True)\ntime.sleep(60)"


# An engine on a busy machine may take longer to remove a container than a service has for its end.
SERVE = "providers.runtime.service.serve"
UNHURRIED = {f"{SERVE}.CLOSE_SECONDS": 30.0, f"{SERVE}.EXIT_SECONDS": 50.0}


def containers(engine: docker.DockerClient, port: int) -> set[str]:
    label = {"label": f"cofferdam.pool=port-{port}"}
    return {one.id for one in engine.containers.list(all=True, filters=label, ignore_removed=True)}


def test_kill_9_during_a_run(engine: docker.DockerClient, tmp_path: Path) -> None:
    port = free_port()
    provider = SelfManagedProvider()
    with over_docker(port, tmp_path / "first") as first:
        config = {"endpoint": first.url, "pool_size": 1, "max_sandboxes": 2}
        provider.initialize(SelfManagedProvider.check_config(config))
        sandbox = provider.open(SandboxSpec("python"), "alice")
        begun = threading.Event()
        running_code = sandbox.submit_run(Job(RUN_MARK, timeout=30), lambda event: begun.set())
        assert begun.wait(60)
        before = containers(engine, port)
        first.service.process.kill()
        with pytest.raises(ProviderUnavailable) as raised:
            running_code.result(60)
    assert (raised.value.code, raised.value.started) == ("SB009", True)
    assert before

    with over_docker(port, tmp_path / "second", UNHURRIED) as second:
        assert not before & containers(engine, port)
        again = provider.create_instance("python", owner="alice")
        result = provider.execute_code(again.instance_id, "print('again')", "python", 10)
        assert result.stdout == "again\n"
        assert result.metadata["image_digest"]
        code, seconds = second.terminate()
        assert (code, seconds < 60) == (0, True), second.service.output
    assert containers(engine, port) == set()
    provider.close()
