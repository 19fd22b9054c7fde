"""Memory groups on both hierarchies: the files written are the kernel's, the layout is by version.

The version that this machine has is tried on the machine itself, the other one on a folder that
looks like it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from providers.pool.cgroup import Cgroup, CgroupParent, Evidence
from tests.conftest import require
from tests.sandboxes import LocalProcess


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
    assert group.evidence() == Evidence()
    (tmp_path / events).write_text("under_oom 0\noom_kill 0\n")
    assert group.evidence() == Evidence(out_of_memory=False)
    (tmp_path / peak).write_text("4096\n")
    assert group.evidence() == Evidence(False, 4096)
    (tmp_path / events).write_text("under_oom 0\noom_kill 2\n")
    assert group.evidence() == Evidence(True, 4096)


def test_groups_of_dead_processes_are_removed_and_those_of_living_ones_stay(
    tmp_path: Path, proc: Path
) -> None:
    base = tmp_path / "cgroup/memory/our/own"
    (base / "cofferdam-1-0/7").mkdir(parents=True)
    (base / f"cofferdam-{os.getpid()}-0/7").mkdir(parents=True)
    CgroupParent.create(tmp_path / "cgroup", proc)
    assert not (base / "cofferdam-1-0").exists()
    assert (base / f"cofferdam-{os.getpid()}-0/7").exists()


def test_removing_a_group_that_is_gone_is_no_error(tmp_path: Path) -> None:
    asyncio.run(Cgroup(tmp_path / "gone", 2).remove())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make memory groups")
def test_a_real_sandbox_has_a_group_while_it_lives(tmp_path: Path) -> None:
    require("bwrap")
    with LocalProcess(tmp_path, launcher="bubblewrap", pool_size=1) as owner:
        owner.start("import time\ntime.sleep(0.5)\nprint('done')")
        groups = list(
            Path("/sys/fs/cgroup").rglob(f"cofferdam-{owner.process.pid}-*/*/cgroup.procs")
        )
        assert any(len(group.read_text().split()) >= 2 for group in groups)
        assert owner.read()["stdout"] == "done\n"
    assert not list(Path("/sys/fs/cgroup").rglob(f"cofferdam-{owner.process.pid}-*"))
