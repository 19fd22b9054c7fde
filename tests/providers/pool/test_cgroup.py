"""Memory groups on both hierarchies: the files written are the kernel's, the layout is by version.

The version that this machine has is tried on the machine itself, the other one on a folder that
looks like it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from providers.runtime.pool.cgroup import (
    Cgroup,
    CgroupParent,
    ResourceUsage,
    memory_keeper,
    own_groups,
)
from tests.conftest import require
from tests.support.cgroups import groups_named
from tests.support.lent_users import COUNT, ordinary_user
from tests.support.sandboxes import LocalProcess
from tests.support.waiting import wait_until
from tests.support.without_root import without_root


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc in which only this process is alive."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / str(os.getpid())).mkdir()
    (proc / "self/cgroup").write_text("5:devices:/\n4:memory:/our/own\n0::/\n")
    return proc


def test_version_2_hangs_below_a_group_at_the_top_that_hands_out_memory(
    tmp_path: Path, proc: Path
) -> None:
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.controllers").write_text("memory pids")
    parent = CgroupParent(root / f"cofferdam-{os.getpid()}", 2)
    parent.path.mkdir()
    group = parent.new(1 << 20)
    assert group.path.parent == parent.path
    assert (group.path / "memory.max").read_text() == str(1 << 20)


def test_version_2_hangs_below_a_delegated_group_whose_processes_make_room(
    tmp_path: Path, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `systemd-run --user -p Delegate=yes` hands one out. At the top nothing may be made."""
    service = tmp_path / "cgroup/user.slice/cofferdam.service"
    service.mkdir(parents=True)
    (tmp_path / "cgroup/cgroup.controllers").write_text("memory pids")
    (proc / "self/cgroup").write_text("0::/user.slice/cofferdam.service\n")
    (service / "cgroup.procs").write_text("11\n")
    make = Path.mkdir

    def refused_at_the_top(path: Path, *arguments: Any, **named: Any) -> None:
        if path.parent == tmp_path / "cgroup":
            raise PermissionError(13, "refused", str(path))
        make(path, *arguments, **named)

    monkeypatch.setattr(Path, "mkdir", refused_at_the_top)
    # The files of a real group cannot be left behind in the folder by whoever removes it.
    monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))
    parent = CgroupParent.create(tmp_path / "cgroup", proc)
    assert parent is not None
    assert parent.path.parent == service
    assert (service / "cgroup.subtree_control").read_text() == "+memory"
    assert (service / "service-of-cofferdam/cgroup.procs").read_text() == "11"
    assert (parent.path / "cgroup.subtree_control").read_text() == "+memory"
    assert memory_keeper(parent) == {"memory": "cgroup v2", "cpu_seconds": "cgroup v2"}
    # Who starts as the second finds itself in that leaf.
    (proc / "self/cgroup").write_text("0::/user.slice/cofferdam.service/service-of-cofferdam\n")
    second = CgroupParent.create(tmp_path / "cgroup", proc)
    assert second is not None
    assert second.path.parent == service


@pytest.mark.parametrize("version", [1, 2])
def test_the_time_of_all_processes_is_the_kernels_figure(tmp_path: Path, version: int) -> None:
    group = Cgroup(tmp_path, version, tmp_path if version == 1 else None)
    assert group.cpu_seconds() is None
    (tmp_path / "cpuacct.usage").write_text("1500000000\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1\nsystem_usec 2\n")
    assert group.cpu_seconds() == 1.5


@pytest.fixture(params=[0, COUNT], ids=["alone", "lent"])
def user(request: pytest.FixtureRequest) -> Iterator[int]:
    with ordinary_user(users=request.param, groups=request.param) as uid:
        yield uid


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may delegate a group here")
def test_a_group_that_was_delegated_to_an_ordinary_user_bounds_its_sandboxes(user: int) -> None:
    """On cgroup v1, which this shows for real: a group of the user's own in the hierarchy."""
    require("bwrap")
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        pytest.skip("this machine has cgroup v2")
    delegated = [
        Path("/sys/fs/cgroup") / name / f"delegated-{os.getpid()}" for name in ("memory", "cpuacct")
    ]
    own = own_groups(Path("/proc"))
    before = [
        Path("/sys/fs/cgroup", name, own[name].lstrip("/"), "cgroup.procs")
        for name in ("memory", "cpuacct")
    ]
    for group in delegated:
        group.mkdir()
        for path in (group, *group.iterdir()):
            os.chown(path, user, user)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    try:
        with without_root(user, launcher="bubblewrap", pool_size=1) as owner:
            result = owner.run("import mmap\nm = mmap.mmap(-1, 1 << 30)\nm.write(bytes(1 << 30))")
            assert result["out_of_memory"] is True
            result = owner.run("print(1)")
            assert result["metadata"]["enforced_by"]["memory"] == "cgroup v1"
    finally:
        for group, root in zip(delegated, before, strict=True):
            root.write_text(str(os.getpid()))
            wait_until(lambda group=group: _removed(group), seconds=60)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_version_1_hangs_below_our_own_group(tmp_path: Path) -> None:
    parent = CgroupParent(tmp_path / "memory/our/own/cofferdam-1", 1)
    parent.path.mkdir(parents=True)
    group = parent.new(1 << 20)
    assert (group.path / "memory.limit_in_bytes").read_text() == str(1 << 20)


def test_without_the_right_to_make_groups_there_is_no_parent(tmp_path: Path, proc: Path) -> None:
    root = tmp_path / "cgroup"
    (root / "memory").mkdir(parents=True)
    # Our own group is not there, as for a process in a container without its hierarchy.
    assert CgroupParent.create(root, proc) is None
    assert list((root / "memory").iterdir()) == []


@pytest.mark.parametrize(
    ("version", "events", "peak"),
    [(1, "memory.oom_control", "memory.max_usage_in_bytes"), (2, "memory.events", "memory.peak")],
)
def test_the_kernels_counters_are_the_evidence(
    tmp_path: Path, version: int, events: str, peak: str
) -> None:
    group = Cgroup(tmp_path, version)
    assert group.evidence() == ResourceUsage()
    (tmp_path / events).write_text("under_oom 0\noom_kill 0\n")
    assert group.evidence() == ResourceUsage(out_of_memory=False)
    (tmp_path / peak).write_text("4096\n")
    assert group.evidence() == ResourceUsage(False, 4096)
    (tmp_path / events).write_text("under_oom 0\noom_kill 2\n")
    assert group.evidence() == ResourceUsage(True, 4096, oom_kills=2)


def test_groups_of_dead_processes_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, proc: Path
) -> None:
    base = tmp_path / "cgroup/memory/our/own"
    (base / "cofferdam-1-0/7").mkdir(parents=True)
    (base / f"cofferdam-{os.getpid()}-0/7").mkdir(parents=True)
    CgroupParent.create(tmp_path / "cgroup", proc)
    assert not (base / "cofferdam-1-0").exists()
    assert (base / f"cofferdam-{os.getpid()}-0/7").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make memory groups")
def test_groups_of_who_has_process_ids_of_its_own_stay_too() -> None:
    """As of another container on this machine, whose groups are seen and whose processes are not."""
    ours = CgroupParent.create()
    assert ours is not None
    code = "from providers.runtime.pool.cgroup import CgroupParent as P; print(bool(P.create()))"
    other = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code]
    assert subprocess.run(other, check=True, capture_output=True).stdout == b"True\n"
    group = ours.new(1 << 20)
    asyncio.run(group.remove())
    ours.remove()
    assert not groups_named(ours.path.name)


def test_removing_a_group_that_is_gone_is_no_error(tmp_path: Path) -> None:
    asyncio.run(Cgroup(tmp_path / "gone", 2).remove())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make memory groups")
def _sizes(parents: list[Path]) -> Iterator[int]:
    """Count the processes in each group below these, as far as it is still there."""
    for parent in parents:
        for group in parent.glob("*/cgroup.procs"):
            with suppress(OSError):
                yield len(group.read_text().split())


def test_a_real_sandbox_has_a_group_while_it_lives(tmp_path: Path) -> None:
    require("bwrap")
    with LocalProcess(tmp_path, launcher="bubblewrap", pool_size=1) as owner:
        # Looking through all groups of a machine takes a while: the code runs after that.
        parents = groups_named(f"cofferdam-{owner.process.pid}-*")
        owner.start("import time\ntime.sleep(3)\nprint('done')")
        wait_until(lambda: max(_sizes(parents), default=0) >= 2, seconds=60)
        assert owner.read()["stdout"] == "done\n"
    assert not groups_named(f"cofferdam-{owner.process.pid}-*")
