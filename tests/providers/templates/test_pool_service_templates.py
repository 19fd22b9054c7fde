"""Templates in a pool service with a store of its own: it is brought the files, by their digest."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import pytest
from django.test import override_settings

from providers.errors import InvalidConfiguration
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.templates.declaration import Declaration
from providers.templates.files import pack
from providers.templates.lock import Lock
from providers.templates.store import TemplateStore
from providers.values import ExecutionResult, Job, SandboxSpec
from tests.conftest import require
from tests.support.package_index import PackageIndex, make_wheel, package_index
from tests.support.pool_service import PoolService, over_docker, provider_of, running
from tests.support.processes import free_port


class Service:
    """A pool service, and a provider of it whose templates are in another store."""

    def __init__(self, pool: PoolService, provider: SelfManagedProvider, own: Path) -> None:
        self.pool, self.provider = pool, provider
        self.store = TemplateStore(own)

    def run(self, code: str, digest: str = "", language: str = "python") -> ExecutionResult:
        sandbox = self.provider.open(SandboxSpec(language, digest=digest), "alice")
        try:
            return sandbox.run(Job(code, language, 60))
        finally:
            sandbox.close()


@pytest.fixture(scope="module")
def index() -> Iterator[PackageIndex]:
    with package_index() as served:
        yield served


@pytest.fixture(scope="module", params=["bubblewrap", "runc", "docker"])
def service(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, outside: Path
) -> Iterator[Service]:
    launcher = request.param
    own = tmp_path_factory.mktemp("own")
    log = own / "log"
    theirs = outside / launcher
    theirs.mkdir()
    with ExitStack() as stack:
        if launcher == "docker":
            request.getfixturevalue("engine")
            pool = stack.enter_context(over_docker(free_port(), log, DATA_DIR=str(theirs)))
        else:
            require({"bubblewrap": "bwrap"}.get(launcher, launcher))
            pool = stack.enter_context(running(log, "--launcher", launcher, DATA_DIR=str(theirs)))
        stack.enter_context(override_settings(DATA_DIR=own))
        provider = stack.enter_context(provider_of(pool.url, pool_size=1, timeout=60))
        assert provider.holds_templates
        yield Service(pool, provider, own)


def build(service: Service, index: PackageIndex, name: str, value: str = "42") -> str:
    files = {
        f"{name}.py": f"VALUE = {value}\ndef main():\n    print('program', VALUE)\n",
        f"{name}-1.0.dist-info/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    file_name = f"{name}-1.0-py3-none-any.whl"
    index.add_file(file_name, make_wheel(name, files=files))
    index.add_npm(f"{name}-js", "1.0.0", {"index.js": f"module.exports = {value};\n"})
    ((_, found),) = index.npm[f"{name}-js"]["versions"].items()
    npm = (
        f'{{"packages": {{"": {{}}, "node_modules/{name}-js": {{"version": "1.0.0", '
        f'"resolved": "{found["dist"]["tarball"]}", '
        f'"integrity": "{found["dist"]["integrity"]}"}}}}}}'
    )
    lock = Lock.parse(index.pylock(file_name), npm)
    declared = Declaration(python=(name,), npm=(f"{name}-js",))

    def fetch(url: str, most_bytes: int) -> Iterator[bytes]:
        yield httpx.get(url).content

    return service.store.build(declared, lock, fetch, lambda line: None).digest


def test_a_run_imports_its_packages_and_so_do_its_programs(
    service: Service, index: PackageIndex
) -> None:
    digest = build(service, index, "alpha")
    code = (
        "import subprocess, alpha; print(alpha.VALUE, flush=True); subprocess.run(['alpha']); "
        "subprocess.run(['python3', '-c', 'import alpha; print(alpha.VALUE)'])"
    )
    result = service.run(code, digest)
    assert result.stdout == "42\nprogram 42\n42\n", result.stderr
    result = service.run("console.log(require('alpha-js'))", digest, "nodejs")
    assert result.stdout == "42\n", result.stderr
    assert "No module named 'alpha'" in service.run("import alpha").stderr


def test_a_session_has_it(service: Service, index: PackageIndex) -> None:
    digest = build(service, index, "beta")
    kept = service.provider.open(SandboxSpec(kept=True, digest=digest, seconds=300), "alice")
    assert isinstance(kept, KeptSandbox)
    with closing(kept):
        assert kept.run(Job("import beta; print(beta.VALUE)", timeout=60)).stdout == "42\n"


def test_what_comes_first_is_the_package_of_the_template(
    service: Service, index: PackageIndex
) -> None:
    digest = build(service, index, "numpy", "'of the template'")
    assert service.run("import numpy; print(numpy.VALUE)", digest).stdout == "of the template\n"


def test_files_that_are_not_those_of_the_digest_are_refused(
    service: Service, index: PackageIndex
) -> None:
    digest = build(service, index, "gamma")
    other = b"".join(pack(service.store.path(build(service, index, "delta"))))
    link = io.BytesIO()
    with tarfile.open(fileobj=link, mode="w") as archive:
        entry = tarfile.TarInfo("lib/evil")
        entry.type, entry.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(entry)
        archive.addfile(tarfile.TarInfo("lib/evil/passwd"), io.BytesIO())
    outside = io.BytesIO()
    with tarfile.open(fileobj=outside, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../../evil"), io.BytesIO())
    url = f"{service.pool.url}/v1/templates/{digest}"
    for content in (other, link.getvalue(), outside.getvalue(), b"", b"no archive" * 100):
        answer = httpx.put(url, content=content, timeout=60)
        assert answer.status_code >= 400, content[:40]
        assert httpx.get(url).status_code == 404
    whole = b"".join(pack(service.store.path(digest)))
    assert httpx.put(url, content=whole, timeout=60).status_code == 200
    assert httpx.get(url).status_code == 200


def test_a_template_that_nobody_has_is_refused_with_the_field(service: Service) -> None:
    for kept in (False, True):
        with pytest.raises(InvalidConfiguration) as caught:
            service.provider.open(SandboxSpec(kept=kept, digest="0" * 64), "alice")
        assert caught.value.field == "template"
