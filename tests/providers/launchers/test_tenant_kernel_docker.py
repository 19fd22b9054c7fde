"""A tenant's gVisor kernel in a container of an engine, which knows nothing of the runs in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import docker
import pytest

from providers.errors import ProviderUnavailable
from providers.runtime.launchers import docker_guest
from providers.runtime.launchers.docker import DEFAULT_IMAGES, DockerLauncher, DockerSettings
from providers.runtime.launchers.docker_engine import Started
from providers.runtime.launchers.docker_owner import POOL_LABEL
from providers.runtime.pool.hardening import GVISOR
from providers.runtime.pool.requests import make_template
from providers.runtime.service.launchers import choose_level
from providers.values import SandboxLimits
from tests.conftest import require
from tests.providers.launchers.tenant_kernels import Going, Kernels
from tests.support.docker_engine import Containers, new_pool_id
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def kernels(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kernels]:
    require("runsc")
    launcher = DockerLauncher(DockerSettings(runtime="runsc", pool_id=new_pool_id()))
    kernels = Kernels(tmp_path_factory.mktemp("kernels"), launcher)
    yield kernels
    kernels.close()


def present(kernels: Kernels, engine: docker.DockerClient) -> list[str]:
    label = f"{POOL_LABEL}={kernels.launcher._settings.pool_id}"  # type: ignore[union-attr]
    found = engine.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    return [each.id for each in found]


def test_runs_of_a_tenant_share_a_container_and_no_language_of_another_image_does(
    kernels: Kernels, engine: docker.DockerClient
) -> None:
    before = len(present(kernels, engine))
    result = kernels.run("ada", "print(1)")
    assert (result.stdout, result.metadata["runtime"]) == ("1\n", GVISOR)
    assert result.metadata["image_digest"].startswith("sha256:")
    assert kernels.run("ada", "print(2)").stdout == "2\n"
    assert len(present(kernels, engine)) == before + 1
    assert kernels.run("ada", "console.log(3)", "nodejs").stdout == "3\n"
    images = {engine.images.get(DEFAULT_IMAGES[name]).id for name in ("python", "nodejs")}
    assert len(present(kernels, engine)) == before + len(images)
    kernels.run("ben", "print(4)")
    assert len(present(kernels, engine)) == before + len(images) + 1


def test_what_is_added_for_a_kernel_is_a_right_in_gvisor_alone(
    kernels: Kernels, engine: docker.DockerClient, under_runc: Containers
) -> None:
    kernels.run("carol", "print(1)")
    for each in present(kernels, engine):
        host = engine.api.inspect_container(each)["HostConfig"]
        assert host["Runtime"] == "runsc"
        assert (host["NetworkMode"], host["ReadonlyRootfs"], host["Privileged"]) == (
            *("none", True, False),
        )
        assert host["Memory"] == host["MemorySwap"] > 0
        assert host["PidsLimit"] > 0
    with pytest.raises(ProviderUnavailable, match="runsc"):
        under_runc.launcher.for_owner("alice")
    assert under_runc.loop.call(choose_level(under_runc.launcher, "auto")).level == "execution"
    assert kernels.loop.call(choose_level(kernels.launcher, "auto")).level == "tenant-kernel"


def test_libraries_that_are_loaded_already_work_and_are_not_the_same_twice(
    kernels: Kernels,
) -> None:
    """The image tells them of one processor, so that they have no threads to be told of a fork."""
    code = """
        import numpy, sys, threading
        square = numpy.ones((300, 300)) @ numpy.ones((300, 300))
        print(int(square.sum()), numpy.random.rand(), numpy.random.default_rng().random())
    """
    said = []
    for _ in range(2):
        sandbox = kernels.start("gina", "python", "numpy")
        said.append(Going(kernels, sandbox, code).result().stdout.split())
    assert said[0][0] == said[1][0] == "27000000"
    assert len({*said[0], *said[1]}) == 5


def test_more_runs_than_find_room_get_another_kernel(
    kernels: Kernels, engine: docker.DockerClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(docker_guest, "MOST_AT_ONCE", 1)
    before = len(present(kernels, engine))
    first = kernels.start("dave")
    second = kernels.start("dave")
    assert len(present(kernels, engine)) == before + 2
    for sandbox in (first, second):
        kernels.loop.call(sandbox.destroy())


def test_a_kernel_that_the_engine_ended_is_made_anew(
    kernels: Kernels, engine: docker.DockerClient
) -> None:
    before = set(present(kernels, engine))
    kernels.run("erin", "print(1)")
    [container] = set(present(kernels, engine)) - before
    engine.api.kill(container)
    wait_until(lambda: container not in present(kernels, engine), 60)
    assert kernels.run("erin", "print(2)").stdout == "2\n"


def test_a_kernel_ends_with_the_stream_of_who_made_it(
    kernels: Kernels, engine: docker.DockerClient
) -> None:
    """As when the pool is killed: nobody is there to remove it then, and nothing in it goes on."""
    template = make_template("python", "python", kernels.launcher, SandboxLimits())
    sentry: Any = kernels.launcher._start_kernel(template, 0)
    started: Started = kernels.loop.call(sentry._make())
    inspect = engine.api.inspect_container
    assert inspect(started.id)["State"]["Running"]
    started.stream.close()
    wait_until(lambda: not inspect(started.id)["State"]["Running"], 60)
    kernels.loop.call(sentry._remove())


def test_nothing_is_left_when_the_launcher_closes(
    engine: docker.DockerClient, tmp_path_factory: pytest.TempPathFactory
) -> None:
    launcher = DockerLauncher(DockerSettings(runtime="runsc", pool_id=new_pool_id()))
    kernels = Kernels(tmp_path_factory.mktemp("closing"), launcher)
    kernels.run("alice", "print(1)")
    assert len(present(kernels, engine)) == 1
    kernels.close()
    wait_until(lambda: present(kernels, engine) == [], 60)
