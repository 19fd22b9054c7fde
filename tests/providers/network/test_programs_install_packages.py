"""Programs whose network has an index install packages for themselves, and for nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from providers.local import packages
from providers.network import Budget, Layer, Network, NetworkPolicy
from providers.sandbox import KeptSandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import Command, ExecutionResult, Job, SandboxSpec
from tests.providers.network.upstreams import ADDRESS, Upstream
from tests.support.index_folders import put_npm_registry, put_simple_index, put_wheel
from tests.support.pool_service import provider_of, running
from tests.support.required import require

TIMEOUT = 60.0
# A program that has installed, an interpreter that it starts, and a command that came along.
USES = """
import subprocess, sys
subprocess.run([{pip}, "install", "-q", "counting"], check=True)
import counting
print(counting.VALUE, flush=True)
subprocess.run([sys.executable, "-c", "import counting; print(counting.VALUE)"], check=True)
subprocess.run(["counting"], check=True)
"""


@dataclass(frozen=True)
class Site:
    """A provider whose environment of packages has pip and counting 1.0, and an index with 2.0."""

    provider: SelfManagedProvider
    index: Upstream

    @property
    def network(self) -> Network:
        policy = NetworkPolicy.parse("allowlist", [self.index.rule])
        return Network((Layer("tenant", policy),), Budget())

    @property
    def environment(self) -> Mapping[str, str]:
        return {
            "PIP_INDEX_URL": f"{self.index.url}/simple",
            "PIP_TRUSTED_HOST": ADDRESS,
            "npm_config_registry": f"{self.index.url}/npm",
        }

    def run(self, code: str, network: Network | None) -> ExecutionResult:
        sandbox = self.provider.open(SandboxSpec(network=network), "alice")
        try:
            return sandbox.run(Job(code, timeout=TIMEOUT, environment=self.environment))
        finally:
            sandbox.close()

    def keep(self, network: Network | None) -> KeptSandbox:
        spec = SandboxSpec(kept=True, network=network, environment=self.environment)
        sandbox = self.provider.open(spec, "alice")
        assert isinstance(sandbox, KeptSandbox)
        return sandbox


def environment_with_pip(folder: Path) -> Path:
    """Make an environment of packages as an installation leaves it; return its interpreter."""
    python = packages.create(folder)
    (place,) = folder.glob("lib/python*/packages")
    (ours,) = Path(sys.prefix).glob("lib/python*/site-packages")
    for each in (*ours.glob("pip"), *ours.glob("pip-*.dist-info")):
        shutil.copytree(each, place / each.name, ignore=shutil.ignore_patterns("__pycache__"))
    wheel = put_wheel(folder, "1.0", 1)
    shutil.unpack_archive(wheel, place, "zip")
    command = place / "bin" / "pip"
    command.parent.mkdir()
    command.write_text(f"#!{python}\nimport runpy\nrunpy.run_module('pip', run_name='__main__')\n")
    command.chmod(0o755)
    # Sandboxes have another user.
    subprocess.run(["chmod", "-R", "a+rX", folder], check=True)
    return python


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor"])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    require({"bubblewrap": "bwrap", "gvisor": "runsc"}[request.param])
    folder = tmp_path_factory.mktemp(request.param)
    (files := folder / "files").mkdir()
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))
    place.chmod(0o755)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, place)
        chosen = {
            "SANDBOX_LOCAL_PYTHON": str(environment_with_pip(place / "packages")),
            "NETWORK_ALLOWED_ADDRESSES": "127.0.0.0/8",
        }
        arguments = ("--launcher", request.param)
        pool = stack.enter_context(running(folder / "log", *arguments, **chosen))
        index = stack.enter_context(Upstream(files))
        put_simple_index(files, "2.0", 2)
        put_npm_registry(files, index.url)
        yield Site(stack.enter_context(provider_of(pool.url, pool_size=1, timeout=60)), index)


@pytest.mark.parametrize("pip", ["'pip'", "sys.executable, '-m', 'pip'"])
def test_a_program_uses_what_it_has_installed(site: Site, pip: str) -> None:
    code = USES.format(pip=pip).replace('"counting"]', '"counting==2.0"]', 1)
    result = site.run(code, site.network)
    # In the place of the version that is there for all.
    assert result.stdout == "2\n2\n2\n", (result.stdout, result.stderr)


def test_what_is_there_is_not_fetched_again(site: Site) -> None:
    before = len(site.index.requests)
    code = USES.format(pip="'pip'").replace('subprocess.run(["counting"], check=True)', "")
    result = site.run(code, site.network)
    assert result.stdout == "1\n1\n", (result.stdout, result.stderr)
    assert len(site.index.requests) == before


def test_what_a_program_installs_is_for_no_other(site: Site) -> None:
    site.run(USES.format(pip="'pip'").replace('"counting"]', '"counting==2.0"]', 1), site.network)
    result = site.run("import counting; print(counting.VALUE)", None)
    assert result.stdout == "1\n", (result.stdout, result.stderr)


@pytest.mark.parametrize(
    ("command", "said"),
    [("pip install absent", "No matching distribution found"), ("npm install absent", "ECONN")],
)
def test_without_a_network_it_fails_and_soon(site: Site, command: str, said: str) -> None:
    require(command.split()[0] if command.startswith("npm") else "bwrap")
    code = f"""
    import subprocess
    done = subprocess.run({command!r}, shell=True, capture_output=True, text=True)
    print(done.returncode, done.stderr)
    """
    result = site.run(textwrap.dedent(code), None)
    assert result.stdout.startswith("1 "), (result.stdout, result.stderr)
    assert said in result.stdout
    # More than that is the sandbox's own slowness.
    assert result.execution_time < TIMEOUT / 2


@pytest.mark.parametrize("line", ["%pip install", "!pip install", "!python -m pip install"])
def test_cells_install_and_import_in_one_cell_and_in_later_ones(site: Site, line: str) -> None:
    kept = site.keep(site.network)
    try:
        installed = kept.run(
            Job(f"{line} -q counting==2.0\nimport counting\nprint(counting.VALUE)", timeout=TIMEOUT)
        )
        assert installed.stdout == "2\n", (installed.stdout, installed.stderr)
        again = kept.run(Job("import importlib; print(importlib.reload(counting).VALUE)"))
        assert again.stdout == "2\n", (again.stdout, again.stderr)
        assert told_by(kept, "python3 -c 'import counting; print(counting.VALUE)'") == b"2\n"
        other = kept.contexts.create("python")
        imported = kept.run(Job("import counting; print(counting.VALUE)", context=other.id))
        assert imported.stdout == "2\n", (imported.stdout, imported.stderr)
    finally:
        kept.close()


def test_a_command_installs_for_cells_and_it_stays_when_the_session_sleeps(site: Site) -> None:
    kept = site.keep(site.network)
    try:
        kept.run(Job("print('the interpreter is there already')"))
        told_by(kept, "pip install -q counting==2.0")
        found = kept.run(Job("import counting; print(counting.VALUE)"))
        assert found.stdout == "2\n", (found.stdout, found.stderr)
        saved = list(kept.files.read_archive())
    finally:
        kept.close()
    # It wakes without a network.
    woken = site.keep(None)
    try:
        woken.files.write_archive(saved)
        found = woken.run(Job("import counting; print(counting.VALUE)"))
        assert found.stdout == "2\n", (found.stdout, found.stderr)
        assert told_by(woken, "counting") == b"2\n"
    finally:
        woken.close()


def test_a_command_installs_with_npm(site: Site) -> None:
    require("npm")
    kept = site.keep(site.network)
    try:
        told_by(kept, "npm install tiny-package")
        assert told_by(kept, "node -p 'require(\"tiny-package\")'") == b"42\n"
        told_by(kept, "npm install -g tiny-package")
        assert b"tiny-package" in told_by(kept, "ls .local/lib/node_modules")
        assert b"_cacache" not in told_by(kept, "ls -a")
    finally:
        kept.close()


def told_by(kept: KeptSandbox, command: str) -> bytes:
    """What a command of a session has put out, which must succeed."""
    process = kept.processes.start(Command(shell=command))
    output: list[bytes] = []
    ended = kept.processes.follow(process.pid, lambda event: output.append(event.data))
    assert ended.exit_code == 0, b"".join(output)
    return b"".join(output)
