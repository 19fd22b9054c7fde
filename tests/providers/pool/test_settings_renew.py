"""Each setting says whether a changed value needs other sandboxes: pools and sessions follow it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from providers.local.provider import LocalProvider, _pool_of
from providers.runtime.launchers.unisolated import UnisolatedLauncher
from providers.runtime.pool import sandbox
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.settings import PoolField
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import PoolManager
from providers.runtime.service.registry import PoolSpec
from providers.runtime.service.settings import FIELDS, ServiceSettings
from providers.schema import ConfigField, validate

BASE = {"pool_size": 1, "max_sandboxes": 8}

# A value for each field that none has by default.
OTHER: Mapping[str, Any] = {
    "pool_size": 2,
    "pool_minimum": 1,
    "pool_burst": 1,
    "max_sandboxes": 9,
    "max_kept": 3,
    "max_memory": "512m",
    "timeout": 31,
    "queue_timeout": 11,
    "queue_size": 201,
    "runtime": "runsc",
    "require_gvisor": True,
    "isolation": "tenant-kernel",
    "preload": "json",
    "enable_seccomp": False,
    "enable_ast_analysis": True,
    "base_python_image": "another/python",
    "base_nodejs_image": "another/node",
    "base_bash_image": "another/bash",
    "templates": "science:python=another/science",
    "kubernetes_pull_secret": "another",
    "kubernetes_registry": "registry.example/another",
    "kubernetes_registry_credential": "another:one",
    "kubernetes_claims": "another",
    "max_lifetime": 301,
}

RENEWING = [name for name, declared in FIELDS.items() if declared.renews != "nothing"]
STAYING = [name for name, declared in FIELDS.items() if declared.renews == "nothing"]


def settings(**changed: object) -> ServiceSettings:
    return ServiceSettings.from_config({**BASE, **changed})


def test_a_field_has_to_say_what_it_renews() -> None:
    with pytest.raises(TypeError, match="renews"):
        PoolField("string", "Forgotten")  # type: ignore[call-arg]


def test_every_setting_is_a_field_that_says_so_and_has_another_value_here() -> None:
    assert set(OTHER) == set(FIELDS)
    assert all(isinstance(declared, PoolField) for declared in FIELDS.values())
    for name, value in OTHER.items():
        assert getattr(settings(), name) != getattr(settings(**{name: value}), name)


@pytest.mark.parametrize("name", RENEWING)
def test_a_value_that_sandboxes_differ_by_gives_another_key(name: str) -> None:
    before, after = settings(), settings(**{name: OTHER[name]})
    assert before.sandbox_key != after.sandbox_key
    has_other_launcher = FIELDS[name].renews == "launcher"
    assert (before.launcher_key != after.launcher_key) is has_other_launcher


@pytest.mark.parametrize("name", STAYING)
def test_idle_sandboxes_stay_where_they_do_not_differ(name: str, tmp_path: Path) -> None:
    assert asyncio.run(_is_kept(tmp_path, **{name: OTHER[name]}))


@pytest.mark.parametrize("name", ["max_memory", "preload", "enable_seccomp"])
def test_idle_sandboxes_are_not_handed_out_where_they_differ(name: str, tmp_path: Path) -> None:
    assert not asyncio.run(_is_kept(tmp_path, **{name: OTHER[name]}))


def test_the_sandboxes_of_runs_and_of_tenants_are_the_same() -> None:
    run, tenant = settings(isolation="execution"), settings(isolation="tenant")
    assert run.sandbox_key == tenant.sandbox_key


def test_a_template_s_image_and_its_language_count() -> None:
    texts = ("a:python=x", "a:python=y", "a:nodejs=x", "b:python=x")
    keys = [settings(templates=text).sandbox_key for text in texts]
    assert all(one != other for at, one in enumerate(keys) for other in keys[:at])
    assert settings(templates="a:python=x,b:bash=y").sandbox_key == (
        settings(templates="b:bash=y, a:python=x").sandbox_key
    )


# What changes the sandboxes of the provider `local`. With all else that is changed its pool stays.
LOCAL_RENEWING = {"launcher", "gvisor_platform", "max_memory", "isolation", "preload"}


@pytest.mark.parametrize("name", LocalProvider.config_fields)
def test_a_changed_local_setting_has_another_pool_where_it_needs_other_sandboxes(name: str) -> None:
    declared = LocalProvider.config_fields[name]
    given = {"max_sandboxes": 40, "max_memory": "256m", "timeout": 30}
    config = validate(LocalProvider.config_fields, given)
    changed = {**config, name: _another(declared, config[name])}
    is_another = _pool_key(config) != _pool_key(changed)
    assert is_another == (name in LOCAL_RENEWING)


def _another(declared: ConfigField, value: object) -> object:
    if declared.options:
        return next(each for each in reversed(declared.options) if each != value)
    return value + 1 if isinstance(value, int) else "json"


def _pool_key(config: Mapping[str, Any]) -> object:
    return PoolSpec.from_json(_pool_of(config)).key


class _Unisolated(LauncherChoice):
    def make(self, kind: str, settings: ServiceSettings) -> Launcher:
        return UnisolatedLauncher(self.data_dir)


async def _is_kept(folder: Path, **changed: object) -> bool:
    """Whether a sandbox that was idle before the change is what the next caller is given."""
    choice = _Unisolated("bubblewrap", folder, "renew", minimum_isolation="none")
    manager = PoolManager(choice, settings())
    try:
        async with asyncio.timeout(60):
            await manager.apply(settings())
            # Whoever is given one has its pool fill up again.
            manager.destroy((await manager.create("python")).instance_id)
            while not manager.stats()["templates"]["python"]["idle"]:
                await asyncio.sleep(0.01)
            mark = next(sandbox._numbers)
            former = await manager.current()
            await manager.apply(settings(**changed))
            instance = await manager.create("python")
        return instance.revision is former and instance.sandbox.number < mark
    finally:
        await manager.close()
