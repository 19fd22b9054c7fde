"""Sandboxes with preloaded modules begin from one image, and share nothing that could be used."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.errors import CreationFailed
from providers.runtime.launchers import warm_images
from providers.runtime.launchers.oci import GvisorLauncher
from providers.runtime.launchers.warm_images import WarmImages
from providers.runtime.pool.background import BackgroundLoop
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.pool.template import Template
from providers.values import Job, SandboxLimits
from tests.conftest import require
from tests.providers.launchers.random_numbers import DRAW, PRELOADED, assert_all_different
from tests.support.environments import environment_with
from tests.support.kept_guest import KeptGuest
from tests.support.rich import require_module

# Cheap to load.
TEMPLATE = Template("python", "python", preload=("random", "uuid"))


class Restoring:
    """A gVisor launcher in a loop of its own."""

    def __init__(self, folder: Path, python: str = "") -> None:
        require("runsc")
        if os.geteuid() != 0:
            pytest.skip("gVisor restores for root alone")
        (folder / "run").mkdir()
        self.loop = BackgroundLoop("test-images")
        self.launcher = GvisorLauncher(folder, "ptrace", python)
        self.loop.call(self.launcher.prepare())
        assert self.launcher._folder
        self.folder = self.launcher._folder / "images"

    def start(self, template: Template = TEMPLATE) -> Sandbox:
        return self.loop.call(Sandbox.start(self.launcher, template))

    def together(self, count: int) -> list[Sandbox]:
        async def begin() -> list[Sandbox]:
            starts = [Sandbox.start(self.launcher, TEMPLATE) for _ in range(count)]
            return await asyncio.gather(*starts)

        return self.loop.call(begin())

    def run_in(self, sandbox: Sandbox, code: str) -> str:
        """What it prints. The sandbox ends."""

        async def run() -> str:
            try:
                result = await sandbox.run(Job(code, timeout=60))
            finally:
                await sandbox.destroy()
            assert result.exit_code == 0, result.stderr
            return result.stdout

        return self.loop.call(run())

    def run(self, code: str, template: Template = TEMPLATE) -> str:
        return self.run_in(self.start(template), code)

    @property
    def images(self) -> list[Path]:
        return sorted(self.folder.iterdir())

    @property
    def counts(self) -> tuple[int, int]:
        counts = self.launcher.counts
        return counts["restored"], counts["failed_restores"]

    def close(self) -> None:
        async def close() -> None:
            self.launcher.close()

        self.loop.call(close())
        self.loop.stop()


@pytest.fixture
def restoring(tmp_path: Path) -> Iterator[Restoring]:
    opened = Restoring(tmp_path)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restoring]:
    opened = Restoring(tmp_path_factory.mktemp("shared"))
    yield opened
    opened.close()


SCIENCE = Template("python", "python", preload=PRELOADED)


def test_restored_sandboxes_draw_different_numbers(shared: Restoring) -> None:
    require_module("numpy")
    restored, failed = shared.counts
    assert_all_different([json.loads(shared.run(DRAW, SCIENCE)) for _ in range(3)])
    assert shared.counts == (restored + 3, failed)


# What a process has that a program starts: nothing of it is an image's.
OF_A_NEW_PROCESS = """
import json, os, subprocess, sys
code = "print(hash('a'), id(object())); print(open('/proc/self/maps').read())"
def of(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
first, *maps = of(sys.executable, "-I", "-S", "-c", code).splitlines()
print(json.dumps({
    "hash seed": first.split()[0],
    "heap": first.split()[1],
    "stack": next(line.split("-")[0] for line in maps if "[stack]" in line),
    "shell": of("bash", "-c", "echo $RANDOM$RANDOM$RANDOM"),
    "kernel": os.urandom(8).hex(),
    "device": open("/dev/urandom", "rb").read(8).hex(),
}))
"""


def test_what_a_restored_sandbox_starts_has_seeds_and_a_layout_of_its_own(
    shared: Restoring,
) -> None:
    assert_all_different([json.loads(shared.run(OF_A_NEW_PROCESS)) for _ in range(2)])


def test_contexts_of_restored_sandboxes_draw_different_numbers(shared: Restoring) -> None:
    def draw() -> list[str]:
        guest = shared.loop.call(shared.launcher.start(TEMPLATE))
        command = {"python": [shared.launcher.interpreter("python") or ""]}
        kept = KeptGuest(guest._channel, command)  # type: ignore[attr-defined]
        assert not kept.keep().failed
        code = "import random, uuid; print(random.random(), uuid.uuid4())"
        assert not kept.ask("context.create", language="python", context="other").failed
        drawn = [kept.run(code, context=name).stdout for name in ("default", "other")]
        shared.loop.call(guest.destroy())
        return drawn

    drawn = [*draw(), *draw()]
    assert len({*drawn}) == 4
    assert "" not in drawn


def _rights(pid: int) -> set[tuple[str, ...]]:
    """What a process and all below it may do on this machine."""
    own = Path(f"/proc/{pid}")
    status = dict(line.split(":", 1) for line in (own / "status").read_text().splitlines())
    kept = ("Name", "Uid", "Gid", "CapPrm", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp")
    spaces = [
        kind
        for kind in ("pid", "net", "mnt", "ipc", "uts", "user")
        if os.readlink(own / "ns" / kind) == os.readlink(f"/proc/self/ns/{kind}")
    ]
    found = {(*(status[name].strip() for name in kept), *spaces, os.readlink(own / "root"))}
    for task in (own / "task").iterdir():
        for child in (task / "children").read_text().split():
            found |= _rights(int(child))
    return found


def test_gvisor_is_as_closed_in_after_a_restore_as_after_a_start(shared: Restoring) -> None:
    seen = []
    for template in (Template("python", "python"), TEMPLATE):
        sandbox = shared.start(template)
        seen.append(_rights(sandbox.guest._process.pid))  # type: ignore[attr-defined]
        shared.loop.call(sandbox.destroy())
    assert seen[0] == seen[1]
    assert len(seen[0]) >= 3


def test_clocks_are_right_after_a_restore(shared: Restoring) -> None:
    code = """
import time
first = time.monotonic()
time.sleep(0.2)
print(time.time(), time.monotonic() - first)
"""
    before = time.time()
    now, slept = map(float, shared.run(code).split())
    assert before <= now <= time.time()
    assert slept >= 0.2


def test_a_restored_sandbox_has_nothing_of_one_before(shared: Restoring) -> None:
    leave = """
import os, random
for place in (".", "/tmp", "/dev/shm"):
    open(place + "/left", "w").close()
random.left = True
os.environ["LEFT"] = "1"
"""
    look = """
import os, random
print(*(os.listdir(place) for place in (".", "/tmp", "/dev/shm")), "LEFT" in os.environ)
print(hasattr(random, "left"), [each for each in os.listdir("/proc") if each.isdigit()])
"""
    untouched = shared.run(look)
    shared.run(leave)
    assert shared.run(look) == untouched
    assert untouched.startswith("['artifacts', 'main.py'] [] [] False\nFalse ['1', ")
    assert shared.counts[1] == 0


def test_an_image_is_made_once_and_is_the_pools_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "of the pool, and of nobody in it")
    opened = Restoring(tmp_path)
    sandboxes = opened.together(3)
    [image] = opened.images
    assert (image.stat().st_mode & 0o777, image.parent.stat().st_mode & 0o777) == (0o700, 0o700)
    stored = b"".join(path.read_bytes() for path in image.iterdir())
    assert b"LANG=C.UTF-8" in stored
    assert b"of the pool, and of nobody in it" not in stored
    assert [opened.run_in(each, "print('here')") for each in sandboxes] == ["here\n"] * 3
    assert opened.counts == (3, 0)
    opened.close()
    assert list((tmp_path / "run").glob("gvisor-*")) == []


def test_without_modules_to_load_there_is_no_image(restoring: Restoring) -> None:
    restoring.run("print(1)", Template("python", "python"))
    assert (restoring.images, restoring.counts) == ([], (0, 0))
    assert not WarmImages.are_for(Template("bash", "bash", preload=("random",)))


def test_a_failed_restore_is_a_fresh_start_and_the_next_image(restoring: Restoring) -> None:
    restoring.run("print(1)")
    [image] = restoring.images
    for path in image.iterdir():
        path.write_bytes(b"")
    assert restoring.run("import random; print('fresh')") == "fresh\n"
    assert (restoring.images, restoring.counts) == ([], (1, 1))
    assert restoring.run("print('restored')") == "restored\n"
    assert restoring.counts == (2, 1)


def _runsc(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> Path:
    """A `runsc` that does all but what is refused, found first."""
    real = shutil.which("runsc")
    program = folder / "bin" / "runsc"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\nfor each; do [ "$each" = "{refused}" ] && exit 1; done\nexec {real} "$@"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    return program


@pytest.mark.parametrize("refused", ["checkpoint", "restore"])
def test_where_gvisor_cannot_restore_it_is_soon_not_asked_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    require("runsc")
    monkeypatch.setattr(warm_images, "MOST_FAILURES", 1)
    _runsc(tmp_path, monkeypatch, refused)
    opened = Restoring(tmp_path)
    try:
        at_once = opened.together(2)
        failed = opened.counts[1]
        # Who waited for an image that could not be made does not try to make it again.
        assert failed == {"checkpoint": 1, "restore": 2}[refused]
        assert [opened.run_in(each, "print(1)") for each in at_once] == ["1\n"] * 2
        assert opened.run("print(1)") == "1\n"
        assert (opened.images, opened.counts) == ([], (0, failed))
    finally:
        opened.close()


def test_another_version_of_gvisor_has_another_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("runsc")
    program = _runsc(tmp_path, monkeypatch, "nothing")
    opened = Restoring(tmp_path)
    try:
        opened.run("print(1)")
        os.utime(program, ns=(1, 1))
        opened.run("print(1)")
        assert (len(opened.images), opened.counts) == (2, (2, 0))
    finally:
        opened.close()


# Holds a file of its own in memory, as libraries hold their code.
HOLDING = """
import mmap
file = open(__file__.replace("holding.py", "held"), "rb")
held = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
version = 1
"""


def test_an_update_of_what_was_loaded_is_another_image(tmp_path: Path) -> None:
    """gVisor would read the pages that are missing from the new file."""
    template = Template("python", "python", preload=("holding",))
    code = "import holding; print(holding.version, holding.held[-1:])"
    modules = {"holding.py": HOLDING, "held": "a" * 8192}
    with environment_with(modules) as (environment, packages):
        opened = Restoring(tmp_path, str(environment / "bin" / "python3"))
        assert opened.run(code, template) == "1 b'a'\n"
        draft = packages / "draft"
        draft.write_text("b")
        draft.rename(packages / "held")
        assert opened.run(code, template) == "1 b'b'\n"
        draft.write_text(HOLDING.replace("= 1", "= 2"))
        draft.rename(packages / "holding.py")
        assert opened.run(code, template) == "2 b'b'\n"
        assert len(opened.images) <= 1
        opened.close()


def test_a_missing_module_is_named_as_without_images(restoring: Restoring) -> None:
    with pytest.raises(CreationFailed, match="'no_such_module'"):
        restoring.start(Template("python", "python", preload=("no_such_module",)))
    assert restoring.images == []


def test_a_start_that_is_given_up_leaves_nothing(restoring: Restoring) -> None:
    async def give_up() -> None:
        start = asyncio.get_running_loop().create_task(restoring.launcher.start(TEMPLATE))
        while not (restoring.folder / "0").exists():
            await asyncio.sleep(0.01)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)

    restoring.loop.call(give_up())
    assert (restoring.images, restoring.counts) == ([], (0, 0))
    assert restoring.run("print(1)") == "1\n"


def test_images_of_former_settings_are_not_kept_for_ever(
    restoring: Restoring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_images, "MOST_IMAGES", 1)
    restoring.run("print(1)")
    restoring.run("print(1)", Template("python", "python", preload=("random",)))
    assert [image.name for image in restoring.images] == ["1"]


def test_each_template_of_a_name_has_its_own_limits(restoring: Restoring) -> None:
    """Settings that change have templates of the same name over the same launcher."""
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    for open_files in (64, 80):
        for preload in ((), ("random",)):
            limits = SandboxLimits(open_files=open_files)
            template = Template("python", "python", limits=limits, preload=preload)
            assert restoring.run(code, template) == f"{open_files}\n"
