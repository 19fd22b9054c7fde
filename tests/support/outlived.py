"""A pool over Docker whose process is ended and started again, with what it keeps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import docker

from providers.errors import KeptSandboxLost
from providers.runtime.launchers.docker_owner import POOL_LABEL
from providers.runtime.pool.state_store import StateStore
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import SandboxSpec
from tests.support.pool_service import PoolService, over_docker, provider_of
from tests.support.processes import free_port
from tests.support.waiting import wait_until


class Place:
    """One pool's port and data directory, and the processes that serve it in turn."""

    def __init__(self, folder: Path, runtime: str, engine: docker.DockerClient) -> None:
        self.folder, self.runtime, self.engine = folder, runtime, engine
        self.port = free_port()
        self.pool_id = f"port-{self.port}"
        self.held = ExitStack()
        self.kept: list[KeptSandbox] = []
        self.pool: PoolService
        self.provider: SelfManagedProvider
        self._starts = 0
        self.start()
        self.provider = self.held.enter_context(self.another_client())

    @property
    def memory(self) -> StateStore:
        return StateStore(self.folder / "data", self.pool_id)

    def another_client(self, **config: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}"
        config = {"pool_size": 1, "max_sandboxes": 10, "runtime": self.runtime, **config}
        return provider_of(url, **config)

    def start(self, **constants: object) -> None:
        """`constants` of the module that finds what is kept are set to other values."""
        self._starts += 1
        log = self.folder / f"log{self._starts}"
        named = {
            f"providers.runtime.service.registry.{name}": constants[name] for name in constants
        }
        # What was lent and is not used is not waited for.
        starting = over_docker(self.port, log, named or None, SHUTDOWN_GRACE_SECONDS="0")
        self.pool = self.held.enter_context(starting)

    def stop(self, number: signal.Signals) -> None:
        process = self.pool.service.process
        process.send_signal(number)
        process.wait(60)

    def restart(self, number: signal.Signals) -> None:
        self.stop(number)
        self.start()

    def keep(self, owner: str = "alice", **spec: Any) -> KeptSandbox:
        sandbox = self.provider.open(SandboxSpec(kept=True, **spec), owner)
        assert isinstance(sandbox, KeptSandbox)
        self.kept.append(sandbox)
        return sandbox

    def clear(self) -> None:
        """As it was opened: a pool that runs, and nothing kept."""
        if self.pool.service.process.poll() is not None:
            self.start()
        while self.kept:
            with suppress(KeptSandboxLost):
                self.kept.pop().close()
        wait_until(lambda: not self.kept_containers() and not self.memory.all(), seconds=60)

    def described(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.pool.ask("GET", "/v1/sandboxes").body["sandboxes"]
        return found

    def containers(self) -> list[Any]:
        label = {"label": f"{POOL_LABEL}={self.pool_id}"}
        found: list[Any] = self.engine.containers.list(all=True, filters=label, ignore_removed=True)
        return found

    def kept_containers(self) -> list[Any]:
        return [one for one in self.containers() if one.name.startswith("cofferdam-kept-")]

    def close(self) -> None:
        self.held.close()
        for container in self.containers():
            with suppress(docker.errors.APIError):  # the engine was at it already
                container.remove(force=True)


@contextmanager
def opened_place(folder: Path, runtime: str, engine: docker.DockerClient) -> Iterator[Place]:
    place = Place(folder, runtime, engine)
    try:
        yield place
    finally:
        place.close()
