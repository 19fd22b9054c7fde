"""What is being made yields the processors to what runs, by the weight of its group."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool.cgroup import CgroupParent, Weights
from providers.runtime.pool.pool import PoolSettings
from tests.support.sandboxes import require
from tests.support.warm_pools import WarmPool

FULL, SMALL = 100, 12


def weigh(folder: Path, *names: str, version: int = 2) -> tuple[Weights, list[Path]]:
    weights = Weights(folder, version)
    weights.hurry(is_wanted=False)
    groups = [folder / name for name in names]
    for group in groups:
        group.mkdir()
        weights.add(group)
    return weights, groups


def weight(group: Path, name: str = "cpu.weight") -> int:
    return int((group / name).read_text())


def test_a_group_yields_until_it_is_told_not_to_and_theirs_has_the_sum(tmp_path: Path) -> None:
    weights, (first, second) = weigh(tmp_path, "1", "2")
    assert (weight(first), weight(second), weight(tmp_path)) == (SMALL, SMALL, 2 * SMALL)
    weights.set(first, yields=False)
    assert (weight(first), weight(second)) == (FULL, SMALL)
    weights.forget(first)
    # What was forgotten is not weighed again, whoever still tells of it.
    weights.set(first, yields=True)
    assert (weight(first), weight(tmp_path)) == (FULL, SMALL)


@pytest.mark.parametrize(
    ("version", "name", "full", "most"),
    [(1, "cpu.shares", 1024, 3 * 1024), (2, "cpu.weight", FULL, FULL)],
)
def test_idle_sandboxes_leave_a_busy_one_no_weight_that_starves_the_service(
    version: int,
    name: str,
    full: int,
    most: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    weights, groups = weigh(tmp_path, *map(str, range(300)), version=version)
    for group in groups:
        weights.set(group, yields=False)
    assert {weight(group, name) for group in groups} == {full}
    assert weight(tmp_path, name) == most


def test_nothing_yields_while_somebody_waits_for_it(tmp_path: Path) -> None:
    weights, (first, second) = weigh(tmp_path, "1", "2")
    weights.set(first, yields=False)
    weights.hurry(is_wanted=True)
    late = tmp_path / "3"
    late.mkdir()
    weights.add(late)
    assert [weight(each) for each in (first, second, late)] == [FULL, FULL, FULL]
    weights.hurry(is_wanted=False)
    assert [weight(each) for each in (first, second, late)] == [FULL, SMALL, SMALL]


def test_without_the_right_to_weigh_there_are_sandboxes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The files of a real group cannot be left behind in the folder by whoever removes it.
    monkeypatch.setattr(Path, "rmdir", lambda path: shutil.rmtree(path))
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("3:cpu:/none\n2:memory:/own\n")
    (tmp_path / "cgroup" / "memory" / "own").mkdir(parents=True)
    parent = CgroupParent.create(tmp_path / "cgroup", proc)
    assert parent is not None
    assert parent.weights is None
    group = parent.new(1 << 30)
    group.yield_processors(yields=False)
    parent.hurry(is_wanted=True)
    assert group.procs == [f"{group.path}/cgroup.procs"]


@pytest.mark.skipif(os.geteuid() != 0, reason="makes groups")
def test_a_warm_sandbox_weighs_little_and_one_that_was_handed_out_as_much_as_any() -> None:
    require("bwrap")
    with WarmPool(PoolSettings(size=1, capacity=2)) as pool:
        pool.settle(idle=1)
        assert isinstance(pool.launcher, BubblewrapLauncher)
        parent = pool.launcher._cgroups
        if parent is None or parent.weights is None:
            pytest.skip("no group of processor time can be made here")
        name = "cpu.weight" if parent.version == 2 else "cpu.shares"

        def weights() -> list[int]:
            assert parent is not None
            assert parent.weights is not None
            groups = [each for each in parent.weights.parent.iterdir() if each.is_dir()]
            return sorted(int((each / name).read_text()) for each in groups)

        (small,) = weights()
        sandbox = pool.acquire()
        assert max(weights()) > 5 * small
        assert pool.run_in(sandbox, "print(1)").stdout == "1\n"
        # It has had its run: what is left of it is the end.
        assert max(weights()) == small
        pool.release(sandbox)
