"""The isolation level `auto`: a gVisor kernel for each tenant where there can be one, else fresh
sandboxes, and the reason on the provider's page."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from providers.base import SandboxProvider
from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.local.provider import LocalProvider
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.pool.cgroup import CgroupParent
from providers.runtime.service.launchers import ChosenLevel, choose_level
from providers.self_managed.provider import SelfManagedProvider
from providers.services.health import in_words
from providers.values import Job, SandboxSpec
from tests.conftest import require


def test_what_is_not_gvisor_is_fresh_for_every_run(tmp_path: Path) -> None:
    chosen = asyncio.run(choose_level(BubblewrapLauncher(tmp_path), "auto"))
    assert (chosen.level, chosen.why) == ("execution", chosen.why)
    assert "fast" in chosen.why


def test_a_level_that_is_named_is_had_or_refused(tmp_path: Path) -> None:
    launcher = BubblewrapLauncher(tmp_path)
    assert asyncio.run(choose_level(launcher, "tenant")) == ChosenLevel("tenant")
    with pytest.raises(ProviderUnavailable, match="POOL_LAUNCHER=gvisor"):
        asyncio.run(choose_level(launcher, "tenant-kernel"))


@pytest.mark.parametrize(
    ("provider", "config"),
    [(LocalProvider, {"launcher": "bubblewrap"}), (SelfManagedProvider, {"runtime": "runc"})],
)
def test_the_form_refuses_a_level_that_the_rest_of_it_rules_out(
    provider: type[SandboxProvider], config: dict[str, Any]
) -> None:
    assert provider.check_config(config)["isolation"] == "execution"
    with pytest.raises(InvalidConfiguration, match="tenant-kernel needs gVisor") as raised:
        provider.check_config({**config, "isolation": "tenant-kernel"})
    assert raised.value.field == "isolation"


def test_the_form_refuses_a_level_that_this_machine_cannot_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InvalidConfiguration, match="gVisor is not installed"):
        LocalProvider.check_config({"isolation": "tenant-kernel"})


def test_a_level_that_is_missing_is_named_and_no_other_launcher_is_tried_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    require("runsc")
    monkeypatch.setattr(CgroupParent, "create", classmethod(lambda cls: None))
    config = LocalProvider.check_config({"launcher": "auto", "isolation": "tenant-kernel"})
    with pytest.raises(ProviderUnavailable, match="needs a cgroup") as raised:
        LocalProvider().initialize(config)
    assert raised.value.field == "isolation"
    assert "POOL_LAUNCHER" not in raised.value.message


def test_gvisor_without_a_cgroup_is_fresh_for_every_run_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CgroupParent, "create", lambda *_: None)
    chosen = asyncio.run(choose_level(GvisorLauncher(tmp_path, "ptrace"), "auto"))
    assert chosen.level == "execution"
    assert "cgroup" in chosen.why


def test_gvisor_with_a_cgroup_has_a_kernel_for_each_tenant(settings: Any, tmp_path: Path) -> None:
    require("runsc")
    parent = CgroupParent.create()
    if parent is None:
        pytest.skip("no cgroup can be made here")
    parent.remove()
    settings.DATA_DIR = tmp_path
    provider = LocalProvider()
    config = {"launcher": "gvisor", "gvisor_platform": "ptrace", "pool_size": 1}
    provider.initialize(LocalProvider.check_config({**config, "isolation": "auto"}))
    try:
        sandbox = provider.open(SandboxSpec(), "alice")
        assert (sandbox.metadata["isolation"], sandbox.metadata["sharing"]) == (
            "gvisor",
            "tenant-kernel",
        )
        assert sandbox.run(Job("print(1)")).stdout == "1\n"
        sandbox.close()
        told = in_words(provider.health_check().details["enforced_by"])
        assert told.startswith("isolation level: tenant-kernel")
    finally:
        provider.close()
