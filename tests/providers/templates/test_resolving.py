"""Resolving a declaration in a sandbox: what the index may say, and what comes to the lock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration
from providers.network import Layer, Network, NetworkPolicy
from providers.templates.base import OWN, Base
from providers.templates.declaration import Declaration
from providers.templates.lock import Lock, LockedPackage
from providers.templates.resolve import NPM_LOCK, PYTHON_LOCK, ResolveJob, job_for
from providers.templates.source import job_of
from providers.templates.yanked import YANKED, read
from providers.values import ExecutionResult, Job, SandboxSpec
from tests.conftest import require
from tests.support.package_index import PackageIndex, make_sdist, make_wheel, package_index
from tests.support.sandboxes import Local
from tests.support.uv_environment import uv_environment


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    """A provider whose sandboxes have uv."""
    require("bwrap")
    with uv_environment() as python:
        chosen = {
            "SANDBOX_LOCAL_PYTHON": str(python),
            "DATA_DIR": python.parents[2],
            "NETWORK_ALLOWED_ADDRESSES": ["127.0.0.0/8"],
        }
        with override_settings(**chosen):
            opened = Local("bubblewrap", pool_size=1)
            try:
                yield opened
            finally:
                opened.close()


def resolve(
    local: Local, index: PackageIndex, wanted: Declaration, base: Base = OWN
) -> ExecutionResult:
    return run_job(local, job_for(wanted, index.simple, index.url, base))


def run_job(local: Local, job: ResolveJob) -> ExecutionResult:
    policy = NetworkPolicy.parse("allowlist", job.rules)
    spec = SandboxSpec("python", network=Network((Layer("tenant", policy),)))
    sandbox = local.provider.open(spec, "alice")
    try:
        return sandbox.run(Job(job.code, "python", 60, files=job.files))
    finally:
        sandbox.close()


def lock_of(result: ExecutionResult) -> Lock:
    found = {each.name: each.content.decode() for each in result.artifacts}
    yanked = read(found.get(YANKED, "{}"))
    return Lock.parse(found.get(PYTHON_LOCK, ""), found.get(NPM_LOCK, ""), yanked=yanked)


def test_requirements_come_to_files_with_hashes(local: Local, index: PackageIndex) -> None:
    index.add("alpha", requires=("beta>=2",))
    index.add("beta", "1.0")
    index.add("beta", "2.0")
    result = resolve(local, index, Declaration(python=("alpha",)))
    assert result.exit_code == 0, result.stderr
    assert [(each.name, each.version) for each in lock_of(result).packages] == [
        ("alpha", "1.0"),
        ("beta", "2.0"),
    ]
    for package in lock_of(result).packages:
        assert package.hash == index.hashes[package.file_name]
        assert package.url == f"{index.url}/files/{package.file_name}"


def test_another_python_or_libc_has_other_files(local: Local, index: PackageIndex) -> None:
    for tag in ("cp312-cp312-manylinux_2_17_x86_64", "cp312-cp312-musllinux_1_2_x86_64"):
        index.add_file(f"native-1.0-{tag}.whl", make_wheel("native"))
    index.add_file("native-0.9-py3-none-any.whl", make_wheel("native", "0.9"))
    wanted = Declaration(python=("native",))

    def chosen(base: Base) -> str:
        result = resolve(local, index, wanted, base)
        assert result.exit_code == 0, result.stderr
        (package,) = lock_of(result).packages
        return package.file_name

    digest = f"sha256:{'a' * 64}"
    glibc = Base("image:x", digest, "3.12", "/usr/bin/python3", "glibc 2.36", "x86_64")
    assert chosen(OWN) == "native-0.9-py3-none-any.whl"
    assert "cp312-manylinux" in chosen(Base("python3.12"))
    assert "cp312-manylinux" in chosen(glibc)
    assert "cp312-musllinux" in chosen(replace(glibc, libc="musl 1.2"))
    assert "py3-none-any" in chosen(replace(glibc, python="3.13"))


def test_a_source_distribution_is_never_looked_into(local: Local, index: PackageIndex) -> None:
    index.add_file("evil-1.0.tar.gz", b"code that would run")
    result = resolve(local, index, Declaration(python=("evil",)))
    assert result.exit_code != 0
    assert result.artifacts == []
    assert not any(path.endswith("evil-1.0.tar.gz") for path in index.requests)


def locked_source(local: Local, index: PackageIndex, name: str, **said: str) -> LockedPackage:
    """The lock of a source distribution that was just put into the index."""
    index.add_file(f"{name}-1.0.tar.gz", make_sdist(name, **said))
    wanted = Declaration(python=(name,), build=(name,))
    result = resolve(local, index, wanted)
    assert result.exit_code == 0, result.stderr
    found = {each.name: each.content.decode() for each in result.artifacts}
    (package,) = Lock.parse(found[PYTHON_LOCK], build=wanted.build).packages
    assert package.hash == index.hashes[f"{name}-1.0.tar.gz"]
    return package


def built(local: Local, index: PackageIndex, package: LockedPackage) -> ExecutionResult:
    return run_job(local, job_of(package, index.simple))


def test_a_source_that_may_be_built_comes_to_a_wheel(local: Local, index: PackageIndex) -> None:
    package = locked_source(local, index, "sourced")
    assert package.is_source
    result = built(local, index, package)
    assert result.exit_code == 0, result.stderr
    (wheel,) = (each for each in result.artifacts if each.name.endswith(".whl"))
    assert wheel.name == "sourced-1.0-py3-none-any.whl"
    # A wheel of another package is none the less refused.
    index.add_file("unnamed-1.0.tar.gz", make_sdist("unnamed"))
    refused = resolve(local, index, Declaration(python=("sourced", "unnamed"), build=("sourced",)))
    assert refused.exit_code != 0


def test_a_source_that_was_changed_after_the_lock_is_not_built(
    local: Local, index: PackageIndex
) -> None:
    package = locked_source(local, index, "swapped")
    index.files["swapped-1.0.tar.gz"] = make_sdist("swapped", extra="print('it' + ' ran')")
    result = built(local, index, package)
    assert "another hash than its lock" in result.stderr
    assert result.artifacts == []
    assert "it ran" not in result.stdout + result.stderr


def test_a_build_reaches_no_other_host_than_the_index(local: Local, index: PackageIndex) -> None:
    with package_index() as other:
        reach = f"import urllib.request; urllib.request.urlopen({other.url!r})"
        package = locked_source(local, index, "curious", extra=reach)
        assert built(local, index, package).exit_code != 0
        assert other.requests == []


def test_an_unknown_package_fails_with_its_name(local: Local, index: PackageIndex) -> None:
    result = resolve(local, index, Declaration(python=("no-such-package",)))
    assert result.exit_code != 0
    assert "no-such-package" in result.stderr


@pytest.mark.parametrize("speaks_json", [False, True])
@pytest.mark.parametrize("reason", ['it leaks <keys> & "more"', ""])
def test_a_file_that_the_index_has_yanked_is_known_in_the_lock(
    speaks_json: bool, reason: str, local: Local, index: PackageIndex
) -> None:
    index.add("withdrawn", "1.0", requires=("kept",))
    index.add("withdrawn", "0.9")
    index.add("kept")
    index.yanked["withdrawn-1.0-py3-none-any.whl"] = reason
    index.speaks_json = speaks_json
    try:
        pinned = resolve(local, index, Declaration(python=("withdrawn==1.0",)))
        free = resolve(local, index, Declaration(python=("withdrawn",)))
    finally:
        index.speaks_json = False
        index.yanked.clear()
    assert pinned.exit_code == 0, pinned.stderr
    assert [(each.name, each.version, each.yanked) for each in lock_of(pinned).packages] == [
        ("kept", "1.0", None),
        ("withdrawn", "1.0", reason),
    ]
    assert [(each.version, each.yanked) for each in lock_of(free).packages] == [("0.9", None)]


def test_npm_packages_come_to_files_with_hashes(local: Local, index: PackageIndex) -> None:
    require("npm")
    index.add_npm("gamma", "1.2.0", {"index.js": "module.exports = 1;\n"})
    result = resolve(local, index, Declaration(npm=("gamma@^1",)))
    assert result.exit_code == 0, result.stderr
    ((package),) = lock_of(result).packages
    assert (package.name, package.version, package.place) == (
        "gamma",
        "1.2.0",
        "node_modules/gamma",
    )
    assert package.algorithm == "sha512"


def test_it_reaches_no_other_host_than_the_index(local: Local, index: PackageIndex) -> None:
    with package_index() as other:
        address = other.add("zeta")
        index.add("alpha", "3.0", requires=(f"zeta @ {address}",))
        result = resolve(local, index, Declaration(python=("alpha==3.0",)))
        assert result.exit_code != 0
        assert other.requests == []


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"python": ["alpha @ https://evil.example/alpha.whl"]}, "python"),
        ({"python": ["--index-url=https://evil.example"]}, "python"),
        ({"python": ["-r /etc/passwd"]}, "python"),
        ({"python": ["./folder"]}, "python"),
        ({"npm": ["git+https://evil.example/x"]}, "npm"),
        ({"npm": ["alpha@https://evil.example/x.tgz"]}, "npm"),
        ({"npm": ["alpha@file:../x"]}, "npm"),
        ({"npm": ["--registry"]}, "npm"),
        ({"environment": {"LD_PRELOAD": "x"}}, "environment"),
        ({"environment": {"A B": "x"}}, "environment"),
        ({"files": {"../evil": "x"}}, "files"),
        ({"files": {"/etc/passwd": "x"}}, "files"),
        ({"ready": "true"}, "ready"),
        ({"python": ["a"], "build": ["--no-index"]}, "build"),
        ({"python": ["a"], "build": ["a==1"]}, "build"),
        ({"python": ["a"], "build": [":all:"]}, "build"),
        ({"build": ["a"]}, "python"),
        ({"python": ["a"], "limits": {"timeout": "5"}}, "limits"),
        ({"python": ["a"], "limits": {"timeout": True}}, "limits"),
        ({"python": ["a"], "limits": {"timeout": 10**400}}, "limits"),
        ({"python": ["a"], "limits": {"timeout": float("nan")}}, "limits"),
        ({"python": ["a"], "limits": {"max_timeout": float("inf")}}, "limits"),
        ({"python": ["a"], "limits": {"processes": 1}}, "limits"),
        ({"network": {"mode": "allowlist", "rules": ["not a rule"]}}, "network"),
        ({"apt": ["curl"]}, "apt"),
        ({}, "python"),
        ({"python": "pandas"}, "python"),
    ],
)
def test_a_declaration_names_what_is_refused(document: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidConfiguration) as caught:
        Declaration.parse(document)
    assert caught.value.field == field


def test_a_declaration_is_read_as_it_was_written() -> None:
    document = {
        "python": ["pandas>=2", "NumPy"],
        "npm": ["@scope/name@^1", "dayjs"],
        "environment": {"MODE": "x"},
        "files": {"lib/a.py": "A = 1\n"},
        "start": "python -m http.server",
        "ready": "true",
        "limits": {"timeout": 5, "max_timeout": 9.5},
        "build": ["Py_Source"],
        "network": {"mode": "allowlist", "rules": ["GET https://api.example.com/v1"]},
    }
    read = Declaration.parse(document)
    assert Declaration.parse(read.to_json()) == read
    assert Declaration.parse({**document, "python": ["NumPy", "pandas>=2"]}).digest == read.digest
