"""Variables of a single run: they reach its program and what that starts, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from django.conf import settings

from providers.errors import InvalidConfiguration, ProviderUnavailable
from providers.runtime.launchers.docker import DockerLauncher, DockerSettings
from providers.runtime.launchers.oci import GvisorLauncher, RuncLauncher
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.requests import request_frame
from providers.values import ExecutionResult, InputFile, Job, SandboxSpec
from tests.conftest import require
from tests.providers.launchers.tenant_kernels import Kernels
from tests.providers.pool.tenant_pools import SHARED
from tests.support.sandboxes import Local
from tests.support.warm_pools import WarmPool

# What decides elsewhere which code a program begins with, or what it trusts.
HOSTILE = {
    "ARGUMENTS": "forged",
    "BASH_ENV": "/workspace/evil.sh",
    "ENV": "/workspace/evil.sh",
    "GCONV_PATH": "/workspace",
    "HOME": "/nowhere",
    "IFS": "/",
    "LANG": "nowhere",
    "LD_AUDIT": "/workspace/evil.so",
    "LD_LIBRARY_PATH": "/workspace",
    "LD_PRELOAD": "/workspace/evil.so",
    "MPLBACKEND": "module://evil",
    "NODE_OPTIONS": "--require=/workspace/evil.js",
    "NODE_PATH": "/workspace",
    "PATH": "/nowhere",
    "PWD": "/nowhere",
    "PYTHONHOME": "/nowhere",
    "PYTHONINSPECT": "1",
    "PYTHONPATH": "/workspace",
    "PYTHONSTARTUP": "/workspace/evil.py",
    "PYTHONUSERBASE": "/workspace",
    "PYTHONWARNINGS": "error",
    "TMPDIR": "/nowhere",
}
_EVIL = "open('/workspace/was_here', 'w').write('evil')"
FILES = tuple(
    InputFile(name, content.encode())
    for name, content in {
        "evil.js": "require('fs').writeFileSync('/workspace/was_here', 'evil')",
        "evil.py": _EVIL,
        "evil.sh": "echo evil",
        "evil.so": "no library",
        # What the runner may import after it has the variables.
        "json.py": _EVIL,
        "sitecustomize.py": _EVIL,
        "usercustomize.py": _EVIL,
    }.items()
)
LOOK = {
    "python": "import os; print(sorted(os.environ.items()))",
    "nodejs": "console.log(Object.entries(process.env).sort())",
    "bash": "printenv | sort",
}
# Ends as it should, having seen that they are there.
ATTACK = {
    "python": "import os; print(os.environ['LD_PRELOAD'], os.path.exists('was_here'))",
    "nodejs": "console.log(process.env.LD_PRELOAD, require('fs').existsSync('was_here') ? 'True' : 'False')",
    "bash": 'echo "$LD_PRELOAD" $([ -e was_here ] && echo True || echo False)',
}

ON_DEMAND = replace(SHARED, size=0)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("docker-runc", "docker-runsc")]


def launcher_named(name: str, request: pytest.FixtureRequest, folder: Path) -> Launcher | None:
    if name == "bubblewrap":
        require("bwrap")
        return None
    if name == "gvisor":
        require("runsc")
        return GvisorLauncher(settings.DATA_DIR, "ptrace")
    if name == "runc":
        require("runc")
        (folder / "run").mkdir()
        return RuncLauncher(folder, "runc")
    request.getfixturevalue("engine")
    runtime = name.removeprefix("docker-")
    return DockerLauncher(DockerSettings(runtime=runtime, pool_id=f"variables-{runtime}"))


@pytest.fixture(scope="module", params=["bubblewrap", "gvisor", "runc", *SLOW])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WarmPool]:
    """A pool at the level `tenant`, so that one sandbox serves several runs."""
    launcher = launcher_named(request.param, request, tmp_path_factory.mktemp("variables"))
    try:
        opened = WarmPool(ON_DEMAND, launcher=launcher, in_all_languages=True)
    except ProviderUnavailable as error:
        pytest.skip(error.message)
    with opened:
        yield opened


def assert_attacked(result: ExecutionResult, language: str) -> None:
    """The program ran to its end as its own code says, and with the variables."""
    printed = "/workspace/evil.so False\n"
    # Bash alone starts with the variables, and so with what one of them names.
    assert result.stdout == ("evil\n" * (language == "bash") + printed)
    assert result.exit_code == 0
    assert "cannot be preloaded" in result.stderr or language != "bash"


@pytest.mark.parametrize("language", ["python", "nodejs", "bash"])
def test_nothing_of_them_is_left_in_a_sandbox_that_serves_again(
    shared: WarmPool, language: str
) -> None:
    if language not in shared.launcher.languages():
        pytest.skip(f"there is no {language} here")
    numbers = set()

    def run(code: str, **how: object) -> ExecutionResult:
        sandbox = shared.acquire("alice", language)
        numbers.add(sandbox.number)
        try:
            return shared.run_in(sandbox, code, language=language, **how)  # type: ignore[arg-type]
        finally:
            shared.release(sandbox)

    before = run(LOOK[language]).stdout
    assert_attacked(run(ATTACK[language], environment=HOSTILE, files=FILES), language)
    assert [run(LOOK[language]).stdout for _ in range(2)] == [before, before]
    assert len(numbers) == 1


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    require("runsc")
    kernels = Kernels(tmp_path_factory.mktemp("kernels"))
    yield kernels
    kernels.close()


@pytest.mark.parametrize("language", ["python", "nodejs", "bash"])
def test_nothing_of_them_is_in_the_next_run_of_a_tenants_kernel(
    kernels: Kernels, language: str
) -> None:
    require({"python": "python3", "nodejs": "node", "bash": "bash"}[language])
    before = kernels.run("alice", LOOK[language], language).stdout
    attacked = kernels.run("alice", ATTACK[language], language, environment=HOSTILE, files=FILES)
    assert_attacked(attacked, language)
    assert kernels.run("alice", LOOK[language], language).stdout == before


def run_once(local: Local, code: str, language: str = "python", **how: object) -> ExecutionResult:
    sandbox = local.provider.open(SandboxSpec(language), "alice")
    try:
        return sandbox.run(Job(code, language, **how))  # type: ignore[arg-type]
    finally:
        sandbox.close()


def test_a_time_zone_is_in_force(local: Local) -> None:
    zone = {"TZ": "XYZ-3"}
    python = run_once(local, "import time; print(time.strftime('%z'))", environment=zone)
    bash = run_once(local, "date +%z", "bash", environment=zone)
    assert (python.stdout, bash.stdout) == ("+0300\n", "+0300\n")


@pytest.mark.parametrize("language", ["python", "nodejs", "bash"])
def test_all_that_the_api_accepts_arrives(bubblewrap: Local, language: str) -> None:
    require({"python": "python3", "nodejs": "node", "bash": "bash"}[language])
    given = {f"V{number}": "é" * 300 for number in range(99)} | {"LAST": "x" * 5000}
    count = {
        "python": "import os\nprint(sum(len(os.fsencode(v)) for v in os.environ.values()))",
        "nodejs": "console.log(Buffer.byteLength(Object.values(process.env).join('')))",
        "bash": "printenv | cut -d= -f2- | tr -d '\\n' | wc -c",
    }[language]
    without, having = (
        int(run_once(bubblewrap, count, language, environment=each).stdout) for each in ({}, given)
    )
    assert having - without == sum(len(value.encode()) for value in given.values())


def test_more_than_a_guest_reads_is_refused_by_name() -> None:
    huge = {"NAME": "\x01" * 30_000}
    with pytest.raises(InvalidConfiguration) as caught:
        request_frame(Job("1", environment=huge), 1, 2**28, again=False)
    assert (caught.value.field, "\x01" in caught.value.message) == ("environment", False)
