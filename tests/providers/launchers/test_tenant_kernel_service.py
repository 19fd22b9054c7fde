"""The level `tenant-kernel` of the pool service, as the self_managed provider asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from providers.errors import CreationFailed, ProviderUnavailable, RateLimited
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.pool.launcher import Starter
from providers.runtime.pool.pool import PoolSettings
from providers.runtime.pool.shelf import Shelves
from providers.runtime.pool.template import Template
from providers.self_managed.provider import SelfManagedProvider
from providers.services import breaker
from providers.values import Job, SandboxSpec
from tests.conftest import require
from tests.support.pool_service import PoolService, provider_of, running
from tests.support.warm_pools import WarmPool

LEVEL = {"isolation": "tenant-kernel", "queue_timeout": 60, "pool_size": 1}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolService]:
    require("runsc")
    log = tmp_path_factory.mktemp("pool") / "log"
    with running(log, "--launcher", "gvisor", POOL_GVISOR_PLATFORM="ptrace") as service:
        yield service


@pytest.fixture(scope="module")
def provider(pool: PoolService) -> Iterator[SelfManagedProvider]:
    with provider_of(pool.url, **LEVEL) as opened:
        yield opened


def test_every_record_says_whose_kernel_it_was(provider: SelfManagedProvider) -> None:
    def run(owner: str) -> tuple[str, str, str, str]:
        sandbox = provider.open(SandboxSpec(), owner)
        told = sandbox.metadata
        try:
            result = sandbox.run(Job("print(1)"))
        finally:
            sandbox.close()
        return told["runtime"], told["isolation"], told["sharing"], result.stdout

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(run, ["alice", "bob", "alice", "alice"]))
    assert answers == [("gvisor", "gvisor", "tenant-kernel", "1\n")] * 4
    # Who names no tenant, as RAGFlow, shares with nobody.
    assert run("") == ("gvisor", "gvisor", "execution", "1\n")


def test_figures_name_no_owner(pool: PoolService, provider: SelfManagedProvider) -> None:
    provider.open(SandboxSpec(), "of-a-secret-name").close()
    stats = pool.stats()
    assert stats["isolation"] == "tenant-kernel"
    assert "python" in stats["templates"]
    assert "of-a-secret-name" not in str(stats)


def test_a_kept_sandbox_is_in_no_shared_kernel(provider: SelfManagedProvider) -> None:
    kept = provider.open(SandboxSpec(kept=True), "alice")
    try:
        assert kept.metadata["sharing"] == "session"
        code = "print(len(open('/proc/self/mounts').read().split('/dev/shm')))"
        assert kept.run(Job(code)).stdout == "2\n"
    finally:
        kept.close()


def test_it_is_refused_where_no_kernel_can_be_had(tmp_path: Path) -> None:
    """With what to do instead, and what is in force stays so."""
    with running(tmp_path / "log") as service:
        with pytest.raises(ProviderUnavailable, match="POOL_LAUNCHER=gvisor"):
            provider_of(service.url, **LEVEL).__enter__()
        assert service.stats()["isolation"] == "execution"
        assert service.run(service.create()).body["stdout"] == "ran\n"


def test_a_pool_over_another_launcher_lends_nothing(settings: object) -> None:
    settings_of_pool = PoolSettings(size=1, isolation="tenant-kernel")
    with (
        WarmPool(settings_of_pool) as pool,
        pytest.raises(ProviderUnavailable, match="tenant-kernel"),
    ):
        pool.acquire("alice")


def test_without_a_cgroup_around_it_there_is_no_kernel(tmp_path: Path) -> None:
    launcher = GvisorLauncher(tmp_path, "ptrace")
    with pytest.raises(ProviderUnavailable, match="cgroup"):
        launcher.for_owner("alice")


def test_what_a_tenant_does_to_its_kernel_says_nothing_of_the_provider() -> None:
    """Starts that fail beside code of the tenant's are not failures to be judged by."""
    languages = ("python", "bash")
    shelves = Shelves(
        _Kernels(Path(), "ptrace"), {name: Template(name, name) for name in languages}
    )
    fresh = shelves.find("python", "alice")
    fresh.start_failed(CreationFailed("runsc: no such file"))
    assert isinstance(fresh.failure(), CreationFailed)
    shelves.handed_out(fresh)
    for template in languages:
        shelf = shelves.find(template, "alice")
        shelf.start_failed(CreationFailed("the tenant's kernel has ended"))
        failure = shelf.failure()
        assert isinstance(failure, RateLimited)
        assert failure.entry not in breaker.ILL
        assert failure.retry_after
    stranger = shelves.find("python", "bob")
    stranger.start_failed(CreationFailed("runsc: no such file"))
    assert isinstance(stranger.failure(), CreationFailed)


class _Kernels(GvisorLauncher):
    def for_owner(self, owner: str) -> Starter:
        return self
