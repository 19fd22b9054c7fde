"""Sandboxes with an image's root file system, by the launchers that need no engine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker
import pytest

from providers.errors import CreationFailed, ProviderUnavailable
from providers.runtime.launchers.images import ImageStore
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.kept import Kept
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.pool_manager import Revision, open_revision
from providers.runtime.service.settings import ServiceSettings
from providers.values import ExecutionResult, Job
from tests.support.docker_engine import SMALL_IMAGE, small_root
from tests.support.images import (
    MARKER,
    config_of,
    entry,
    layer,
    link,
    machine_archive,
    machine_layers,
    oci_archive,
)
from tests.support.required import require

LOOK = """
import json, os, pwd, sys

def tried(path):
    try:
        with open(path, "w") as file:
            file.write("x")
    except OSError as error:
        return type(error).__name__
    return "done"

print(json.dumps({
    "release": open("/etc/os-release").read() if os.path.exists("/etc/os-release") else "",
    "python": sys.executable,
    "former": os.path.exists("/usr/share/former"),
    "machine": [name for name in ("/etc/debian_version", "/usr/bin/apt", "/usr/share") if os.path.exists(name)],
    "written": {path: tried(path) for path in (
        "/x", "/usr/x", "/etc/x", "/etc/passwd", "/cofferdam/x", "/opt/tools/bin/python3",
        "/workspace/x", "/tmp/x", "/dev/shm/x", "/home/user/x",
    )},
    "name": pwd.getpwuid(os.getuid()).pw_name,
    "environment": {name: os.environ.get(name) for name in ("OF_THE_IMAGE", "TMPDIR", "HOME", "PATH")},
    "devices": sorted(os.listdir("/dev")),
}))
"""


class Line:
    """A pool service's pool in a loop of its own."""

    def __init__(
        self, kind: str, data_dir: Path, best_first: tuple[str, ...] = (), **settings: Any
    ) -> None:
        choice = LauncherChoice(kind, data_dir, "test-images", "ptrace", best_first=best_first)
        wanted = {"pool_size": 1, "max_sandboxes": 4, "queue_timeout": 120, **settings}
        read = ServiceSettings.from_config(wanted)
        self.loop = BackgroundLoop("test-images")
        try:
            self.line: Revision = self.loop.call(open_revision(choice, read))
        except BaseException:
            self.loop.stop()
            raise

    def run(self, code: str, template: str) -> ExecutionResult:
        language = self.line.templates[template].language

        async def run() -> ExecutionResult:
            sandbox = await self.line.pool.acquire(template, "")
            try:
                return await sandbox.run(Job(code, language, 30))
            finally:
                await self.line.pool.release(sandbox)

        return self.loop.call(run())

    def look(self, template: str = "own") -> dict[str, Any]:
        result = self.run(LOOK, template)
        assert result.exit_code == 0, result.stderr
        seen: dict[str, Any] = json.loads(result.stdout)
        return seen

    def close(self) -> None:
        async def close() -> None:
            await self.line.pool.close()
            self.line.launcher.close()

        self.loop.call(close())
        self.loop.stop()


def required(kind: str) -> None:
    require({"gvisor": "runsc"}.get(kind, kind))
    if os.geteuid() != 0:
        pytest.skip("runc makes containers as root")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with the image `own`."""
    folder = tmp_path_factory.mktemp("images")
    ImageStore(folder / "data").add("own", machine_archive(folder / "own.tar"))
    (folder / "data" / "run").mkdir()
    return folder / "data"


@pytest.fixture(scope="module", params=["gvisor", "runc"])
def line(request: pytest.FixtureRequest, data_dir: Path) -> Iterator[Line]:
    required(request.param)
    templates = "own:python=own, scripts:bash=own"
    opened = Line(request.param, data_dir, templates=templates, base_bash_image="own")
    yield opened
    opened.close()


def test_a_program_sees_the_image_and_not_the_machine(line: Line) -> None:
    seen = line.look()
    assert seen["release"] == MARKER
    assert seen["python"] == "/opt/tools/bin/python3"
    assert not seen["former"]
    assert seen["machine"] == ["/usr/share"]
    assert seen["name"] == "sandbox"
    assert seen["environment"] == {
        "OF_THE_IMAGE": "yes",
        "TMPDIR": "/tmp",
        "HOME": "/workspace",
        "PATH": "/opt/tools/bin:/cofferdam/bin:/workspace/.local/bin",
    }


def test_the_root_cannot_be_written_to(line: Line) -> None:
    written = line.look()["written"]
    places = {"/workspace/x", "/tmp/x", "/dev/shm/x", "/home/user/x"}
    assert {path for path, result in written.items() if result == "done"} == places
    assert line.look()["written"] == written


def test_its_digest_is_in_every_result_and_its_python_in_the_template(line: Line) -> None:
    digest = ImageStore(line.line.launcher._data_dir).find("own").digest  # type: ignore[attr-defined]
    assert line.run("print(1)", "own").metadata["image_digest"] == digest
    assert line.line.templates["own"].interpreter.startswith("python 3.")
    assert "image_digest" not in line.run("print(1)", "python").metadata


def test_a_template_without_an_image_has_this_machines_programs(line: Line) -> None:
    assert line.look("python")["release"] != MARKER


@pytest.mark.parametrize("template", ["bash", "scripts"])
def test_a_shell_is_the_images_own(line: Line, template: str) -> None:
    result = line.run('cat() { echo "$(<"$1")"; }; cat /etc/os-release; echo $BASH', template)
    assert result.stdout == f"{MARKER}/opt/tools/bin/bash\n", result.stderr


def test_a_session_has_the_interpreters_of_its_image(line: Line) -> None:
    async def work() -> list[str]:
        sandbox = await line.line.pool.acquire("own", "")
        try:
            kept = await Kept.open(sandbox, {}, line.line.commands(sandbox.template))
            await kept.ask("context.create", {"language": "bash", "context": "shell"})
            jobs = [
                Job("print(open('/etc/os-release').read(), end='')", "python", 30),
                Job("echo $BASH", "bash", 30, context="shell"),
            ]
            return [(await kept.run(job, lambda _: None)).stdout for job in jobs]
        finally:
            await line.line.pool.release(sandbox)

    assert line.loop.call(work()) == [MARKER, "/opt/tools/bin/bash\n"]


def test_restored_sandboxes_have_the_image_too(data_dir: Path) -> None:
    required("gvisor")
    line = Line("gvisor", data_dir, templates="own:python=own", preload="uuid, decimal")
    try:
        for template, is_own in (("own", True), ("python", False), ("own", True)):
            assert (line.look(template)["release"] == MARKER) is is_own
        counts = line.line.launcher.counts
        assert counts["restored"] >= 3
        assert counts["failed_restores"] == 0
    finally:
        line.close()


def test_a_tenants_kernel_is_of_one_image(data_dir: Path) -> None:
    required("gvisor")
    line = Line("gvisor", data_dir, templates="own:python=own")
    try:
        launcher = line.line.launcher

        async def run(name: str) -> ExecutionResult:
            template = line.line.templates[name]
            sandbox = await Sandbox.start(launcher.for_owner("alice"), template)
            try:
                return await sandbox.run(Job(LOOK, "python", 30))
            finally:
                await sandbox.destroy()

        for name, is_own in (("own", True), ("python", False)):
            result = line.loop.call(run(name))
            assert result.exit_code == 0, result.stderr
            seen = json.loads(result.stdout)
            assert (seen["release"] == MARKER) is is_own
            assert seen["written"]["/usr/x"] != "done"
            assert ("image_digest" in result.metadata) is is_own
    finally:
        line.close()


@pytest.mark.parametrize("kind", ["gvisor", "runc", "crun", "bubblewrap", "none"])
def test_a_name_that_is_not_there_is_told_with_its_field(kind: str, data_dir: Path) -> None:
    # A tool that is not installed says so only once its images are there.
    for field, value in (("base_nodejs_image", "nothing"), ("templates", "x:python=nothing")):
        with pytest.raises(ProviderUnavailable) as caught:
            Line(kind, data_dir, **{field: value})
        assert f"{field}:" in caught.value.message
        if kind in ("gvisor", "runc", "crun"):
            assert caught.value.field == field
            assert "manage.py pool_images import nothing" in caught.value.message


@pytest.mark.parametrize("kind", ["bubblewrap", "none"])
def test_a_launcher_without_images_says_so(kind: str, data_dir: Path) -> None:
    with pytest.raises(ProviderUnavailable, match="POOL_LAUNCHER=gvisor, runc, crun") as caught:
        Line(kind, data_dir, base_bash_image="own")
    assert caught.value.field == "base_bash_image"


def test_auto_takes_the_first_that_has_images(data_dir: Path) -> None:
    required("runc")
    line = Line("auto", data_dir, ("bubblewrap", "runc"), templates="own:python=own")
    try:
        assert line.line.kind == "runc"
        assert line.look()["release"] == MARKER
    finally:
        line.close()
    with pytest.raises(ProviderUnavailable, match=r"templates: .*templates: .*import nothing"):
        Line("auto", data_dir, ("bubblewrap", "runc"), templates="own:python=nothing")


def test_what_an_image_lacks_is_told_with_the_field(tmp_path: Path) -> None:
    layers = machine_layers(with_python=False)
    config = config_of(layers, Env=["PATH=/opt/tools/bin"])
    store = ImageStore(tmp_path)
    store.add("shell", oci_archive(tmp_path / "shell.tar", *layers, config=config))
    with pytest.raises(ProviderUnavailable, match=r"base_bash_image: .*no python3"):
        Line("runc", tmp_path, base_bash_image="shell")
    store.add("own", machine_archive(tmp_path / "own.tar"))
    with pytest.raises(ProviderUnavailable, match=r"templates: .*no interpreter of nodejs"):
        Line("runc", tmp_path, templates="scripts:nodejs=own")


def test_a_pool_keeps_the_image_that_it_began_with(tmp_path: Path) -> None:
    required("runc")
    (tmp_path / "run").mkdir()
    store = ImageStore(tmp_path)
    root = store.add("own", machine_archive(tmp_path / "own.tar")).root
    line = Line("runc", tmp_path, templates="own:python=own")
    try:
        store.remove("own")
        assert line.look()["release"] == MARKER
    finally:
        line.close()
    with pytest.raises(ProviderUnavailable, match="templates"):
        Line("runc", tmp_path, templates="own:python=own")
    layers = machine_layers()
    store.add("other", oci_archive(tmp_path / "other.tar", layers[1]))
    assert not root.exists()


def test_an_image_of_docker_save_runs_without_the_engine(
    engine: docker.DockerClient, tmp_path: Path
) -> None:
    required("runc")
    (tmp_path / "run").mkdir()
    name = f"{SMALL_IMAGE}-saved"
    engine.api.import_image_from_data(small_root(), repository=name, tag="latest", changes=[])
    try:
        subprocess.run(["docker", "save", "--output", tmp_path / "saved.tar", name], check=True)
    finally:
        engine.images.remove(name)
    ImageStore(tmp_path).add("saved", tmp_path / "saved.tar")
    line = Line("runc", tmp_path, base_python_image="saved")
    try:
        result = line.run("import os; print(os.path.exists('/usr/share'))", "python")
        assert (result.stdout, result.exit_code) == ("False\n", 0), result.stderr
    finally:
        line.close()


# In the place of the guest, which would load the filter of system calls.
HOSTILE = """#!/bin/bash
exec /usr/bin/python3 -I -S -c '
import ctypes, errno, os, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(*arguments):
    return "done" if libc.syscall(*arguments) >= 0 else errno.errorcode[ctypes.get_errno()]
def opened(*arguments):
    try:
        socket.socket(*arguments).close()
    except OSError as error:
        return errno.errorcode[error.errno]
    return "done"
NEW_USER = 0x10000000
print("unshare", call(272, NEW_USER), "clone", call(56, NEW_USER | 17, 0, 0, 0, 0),
      "clone3", call(435, 0, 0), "bpf", call(321, 0, 0, 0), "keyctl", call(250, 0, 0, 0),
      "tiocsti", call(16, 0, 0x5412, 0), "vsock", opened(40, 1, 0), "inet", opened(2, 1, 0),
      "uevent", opened(16, 3, 15), file=sys.stderr)
'
"""


def test_an_image_whose_python_is_hostile_has_no_more_system_calls(tmp_path: Path) -> None:
    """The tool itself refuses them: the guest's own filter is in the hands of the image."""
    required("runc")
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of calls are those of x86-64")
    (tmp_path / "run").mkdir()
    hostile = layer(
        (entry("opt/tools/bin/python3.11", mode=0o755), HOSTILE.encode()),
        link("opt/tools/bin/python3", "python3.11"),
    )
    layers = [*machine_layers(with_python=False), hostile]
    config = config_of(layers, Env=["PATH=/opt/tools/bin"])
    archive = oci_archive(tmp_path / "hostile.tar", *layers, config=config)
    ImageStore(tmp_path).add("hostile", archive)
    line = Line("runc", tmp_path, base_python_image="hostile")
    try:
        with pytest.raises(CreationFailed) as caught:
            line.run("print(1)", "python")
    finally:
        line.close()
    assert (
        "unshare EPERM clone EPERM clone3 ENOSYS bpf EPERM keyctl EPERM tiocsti EPERM "
        "vsock EAFNOSUPPORT inet done uevent EPROTONOSUPPORT"
    ) in caught.value.message
