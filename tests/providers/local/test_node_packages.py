"""npm packages in the environment of packages: from a lock, without npm and without their code."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from providers.local import node_packages, packages
from providers.self_managed.images.build import FOLDER as IMAGES
from providers.templates.resolve import NPM
from tests.conftest import Caller, require
from tests.support.package_index import PackageIndex, package_index
from tests.support.required import missing
from tests.support.sandboxes import Local

PROGRAM = "console.log(require('greet').hello, require('@scope/part'))"


@pytest.fixture
def folder() -> Iterator[Path]:
    """An environment, where sandboxes have nothing of their own."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    place.chmod(0o755)
    packages.create(place / "packages")
    yield place / "packages"
    shutil.rmtree(place)


@pytest.fixture
def registry() -> Iterator[PackageIndex]:
    with package_index() as served:
        served.add_npm("greet", "1.0.0", {"index.js": "exports.hello = 'hello'\n"})
        served.add_npm("@scope/part", "2.0.0", {"index.js": "module.exports = 2\n"})
        yield served


@pytest.fixture
def lock(registry: PackageIndex, tmp_path: Path) -> Path:
    return write_lock(registry, tmp_path, {"greet": "1.0.0", "@scope/part": "2.0.0"})


def write_lock(registry: PackageIndex, folder: Path, named: dict[str, str]) -> Path:
    """A lock that names files of npm's registry, as the one of the project does."""
    found: dict[str, Any] = {"": {"dependencies": dict.fromkeys(named, "*")}}
    for name, version in named.items():
        dist = registry.npm[name]["versions"][version]["dist"]
        found[f"node_modules/{name}"] = {
            "version": version,
            "resolved": dist["tarball"].replace(registry.url, NPM),
            "integrity": dist["integrity"],
        }
    path = folder / "lock.json"
    path.write_text(json.dumps({"lockfileVersion": 3, "packages": found}))
    return path


def is_empty(folder: Path) -> bool:
    return not any((folder / "node_modules").iterdir()) and not (folder / "node-staging").exists()


@pytest.mark.parametrize("launcher", ["bubblewrap", "gvisor"])
def test_a_running_provider_has_them_once_they_are_installed(
    launcher: str, folder: Path, registry: PackageIndex, lock: Path, settings: Any
) -> None:
    require("node")
    settings.SANDBOX_LOCAL_PYTHON = str(folder / "bin" / "python")
    local = Local(launcher, pool_size=1)
    try:
        assert "Cannot find module" in local.run(PROGRAM, "nodejs").stderr

        node_packages.install(folder, registry.url, lock)

        assert {local.run(PROGRAM, "nodejs").stdout for _ in range(3)} == {"hello 2\n"}
        known = local.provider.get_packages()
        assert known is not None
        assert known.node == {"@scope/part": "2.0.0", "greet": "1.0.0"}
    finally:
        local.close()


def test_the_same_lock_again_asks_no_registry(
    folder: Path, registry: PackageIndex, lock: Path
) -> None:
    node_packages.install(folder, registry.url, lock)
    registry.requests.clear()
    node_packages.install(folder, registry.url, lock)
    assert registry.requests == []


def test_another_lock_is_installed_in_the_place_of_the_former(
    folder: Path, registry: PackageIndex, lock: Path
) -> None:
    node_packages.install(folder, registry.url, lock)
    registry.add_npm("greet", "2.0.0", {"index.js": "exports.hello = 'bye'\n"})
    node_packages.install(
        folder, registry.url, write_lock(registry, lock.parent, {"greet": "2.0.0"})
    )
    assert node_packages.versions(folder) == {"greet": "2.0.0"}
    assert [path.name for path in (folder / "node_modules").iterdir()] == ["greet"]


def exchange(registry: PackageIndex) -> None:
    registry.files["greet-1.0.0.tgz"] += b"!"


def take_away(registry: PackageIndex) -> None:
    del registry.files["greet-1.0.0.tgz"]


@pytest.mark.parametrize(
    ("change", "told"), [(exchange, "another hash than its lock"), (take_away, "404")]
)
def test_a_file_that_is_not_the_locked_one_installs_nothing(
    change: Callable[[PackageIndex], None],
    told: str,
    folder: Path,
    registry: PackageIndex,
    lock: Path,
) -> None:
    change(registry)
    with pytest.raises(packages.InstallationFailed, match=told):
        node_packages.install(folder, registry.url, lock)
    assert is_empty(folder)
    assert node_packages.versions(folder) == {}


def test_a_file_with_a_path_that_leads_out_installs_nothing(
    folder: Path, registry: PackageIndex, tmp_path: Path
) -> None:
    registry.add_npm("evil", "1.0.0", {"../../../../../escaped.js": ""})
    lock = write_lock(registry, tmp_path, {"evil": "1.0.0"})
    with pytest.raises(packages.InstallationFailed, match="escaped"):
        node_packages.install(folder, registry.url, lock)
    assert is_empty(folder)
    assert not list(folder.parent.rglob("escaped.js"))


def test_a_package_without_a_hash_is_refused(folder: Path, lock: Path) -> None:
    lock.write_text(lock.read_text().replace("integrity", "other"))
    with pytest.raises(packages.InstallationFailed, match="SHA"):
        node_packages.install(folder, lock_file=lock)


@pytest.mark.parametrize("registry_url", ["http://127.0.0.1:1", "file:///etc"])
def test_a_registry_that_cannot_be_asked_is_the_reason(
    registry_url: str, folder: Path, lock: Path
) -> None:
    told = "no package registry" if registry_url.startswith("http") else "neither http nor https"
    with pytest.raises(packages.InstallationFailed, match=told):
        node_packages.install(folder, registry_url, lock)
    assert is_empty(folder)


def test_a_machine_without_a_registry_takes_the_files_that_another_has_fetched(
    folder: Path, registry: PackageIndex, lock: Path, tmp_path: Path
) -> None:
    node_packages.fetch_all(tmp_path / "files", registry.url, lock)
    registry.requests.clear()
    node_packages.install(folder, "http://127.0.0.1:1", lock, tmp_path / "files")
    assert node_packages.versions(folder) == {"@scope/part": "2.0.0", "greet": "1.0.0"}
    assert registry.requests == []


def test_the_command_says_what_there_is_and_goes_on_without(
    folder: Path, registry: PackageIndex, lock: Path, settings: Any, capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    require("node")
    settings.PACKAGES_DIR = folder
    settings.NPM_REGISTRY_URL = "http://127.0.0.1:1"
    monkeypatch.setattr(packages, "is_installed", lambda folder: True)
    monkeypatch.setattr(node_packages.install, "__defaults__", ("", lock, None))
    monkeypatch.setattr(node_packages.is_installed, "__defaults__", (lock,))
    call_command("packages")
    said = capsys.readouterr().out
    assert "only the modules of Node.js, because the installation failed: no package" in said
    settings.NPM_REGISTRY_URL = registry.url
    call_command("packages")
    assert "JavaScript programs can require @scope/part, greet" in capsys.readouterr().out
    call_command("packages")
    assert capsys.readouterr().out == ""


def test_the_api_names_them_to_those_who_may_use_javascript(
    local_active: None, alice: Caller, folder: Path, registry: PackageIndex, lock: Path,
    settings: Any,
) -> None:  # fmt: skip
    require("node")
    settings.SANDBOX_LOCAL_PYTHON = str(folder / "bin" / "python")
    node_packages.install(folder, registry.url, lock)
    told = alice.client.get("/api/v1/languages").json()["packages"]["local"]["node"]
    assert told == {"@scope/part": "2.0.0", "greet": "1.0.0"}


def test_the_lock_is_that_of_the_docker_image() -> None:
    """It names no registry, and each file has a hash."""
    locked = json.loads(node_packages.LOCK_FILE.read_text())["packages"]
    asked = json.loads((IMAGES / "nodejs" / "package.json").read_text())["dependencies"]
    assert locked.pop("")["dependencies"] == asked
    for described in locked.values():
        assert "resolved" not in described
        algorithm, digest = described["integrity"].split("-", 1)
        assert len(base64.b64decode(digest)) == hashlib.new(algorithm).digest_size


@pytest.mark.slow
def test_the_packages_of_the_lock_work(folder: Path, settings: Any) -> None:
    require("node")
    settings.SANDBOX_LOCAL_PYTHON = str(folder / "bin" / "python")
    try:
        node_packages.install(folder)
    except packages.InstallationFailed as error:
        missing(f"the packages cannot be installed: {error}")
    local = Local("bubblewrap", pool_size=1)
    try:
        program = "console.log(typeof require('axios').get, require('typescript').version)"
        assert local.run(program, "nodejs").stdout.startswith("function 5.")
    finally:
        local.close()
