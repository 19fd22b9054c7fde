"""Which containers a pool takes for orphans, when they may outlive the process that made them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from providers.runtime.launchers.docker_engine import Listed
from providers.runtime.launchers.docker_owner import (
    ABSENT_SECONDS,
    OWNER_LABEL,
    Owner,
)
from providers.runtime.pool.state_store import GRACE_SECONDS, SandboxRecord, StateStore, boot, now

CONTAINER = "b" * 64
NOW = 1e9


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[StateStore]:
    memory = StateStore(tmp_path, "pool")
    assert memory.take()
    yield memory
    memory.let_go()


@pytest.fixture
def gone() -> int:
    """A process id that is nobody's."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def of_a_dead_process(owner: Owner, pid: int) -> Listed:
    """A kept container whose owner, by its name, has ended."""
    name = re.sub(rf"-{os.getpid()}-(\d+)-", f"-{pid}-7-", owner.kept_name(1))
    return Listed(CONTAINER, name, owner.labels, NOW - 10)


def saved(memory: StateStore, left: float) -> SandboxRecord:
    remembered = SandboxRecord(
        container=CONTAINER,
        ref="ref",
        owner="alice",
        template="python",
        language="python",
        runtime="runc",
        limits={},
        interpreter="",
        marker="00",
        found={},
        version=1,
        boot=boot(),
        opened_at=now(),
        expires_at=now() + left,
        seconds=abs(left),
    )
    memory.save(remembered)
    return remembered


def test_what_is_remembered_is_no_orphan_until_its_lease_is_over(
    memory: StateStore, gone: int
) -> None:
    owner = Owner("pool", memory)
    container = of_a_dead_process(owner, gone)

    saved(memory, 100)
    assert not owner.is_orphan(container, set(), NOW)
    saved(memory, -1 - GRACE_SECONDS)
    assert owner.is_orphan(container, set(), NOW)
    memory.forget(CONTAINER)
    assert owner.is_orphan(container, set(), NOW)


def test_one_that_has_ended_is_an_orphan_whatever_is_remembered(
    memory: StateStore, gone: int
) -> None:
    owner = Owner("pool", memory)
    saved(memory, 100)
    dead = replace(of_a_dead_process(owner, gone), is_running=False)
    dead.labels[OWNER_LABEL] = re.sub(r"/\d+/\d+/", f"/{gone}/7/", owner.mark)

    assert owner.is_orphan(dead, set(), NOW)


def test_another_pool_leaves_what_is_kept_until_its_owner_was_away_for_long(
    memory: StateStore, gone: int, tmp_path: Path
) -> None:
    owner = Owner("pool", memory)
    elsewhere = Owner("pool", StateStore(tmp_path / "elsewhere", "pool"))
    without = Owner("another")
    container = of_a_dead_process(owner, gone)

    for other in (elsewhere, without):
        assert not other.is_orphan(container, set(), NOW)
        assert not other.is_orphan(container, set(), NOW + ABSENT_SECONDS - 1)
        assert other.is_orphan(container, set(), NOW + ABSENT_SECONDS + 1)


def test_one_whose_owner_lives_is_nobodys_orphan(memory: StateStore, tmp_path: Path) -> None:
    owner, other = Owner("pool", memory), Owner("another")
    kept = Listed(CONTAINER, owner.kept_name(1), owner.labels, NOW)

    for looking in (other, Owner("pool", memory)):
        assert not looking.is_orphan(kept, set(), NOW)
        assert not looking.is_orphan(kept, set(), NOW + 10 * ABSENT_SECONDS)
    assert not owner.is_orphan(kept, {kept.name}, NOW)
    assert owner.is_orphan(kept, set(), NOW)


def test_one_process_at_a_time_has_what_is_remembered(memory: StateStore, tmp_path: Path) -> None:
    second = StateStore(tmp_path, "pool")
    assert not second.take()
    assert StateStore(tmp_path, "another").take()
    memory.let_go()
    assert second.take()
    assert second.home == memory.home
    second.let_go()


def test_a_lease_is_never_longer_than_it_was_and_ends_with_the_machine(memory: StateStore) -> None:
    remembered = saved(memory, 100)

    assert 99 < remembered.left <= 100
    # As if the clock had been put back.
    assert replace(remembered, expires_at=now() + 5000).left == 100
    assert replace(remembered, boot="another").is_over


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        b'{"container": "x"}',
    ],
)
def test_what_is_no_such_file_is_not_believed(memory: StateStore, content: bytes) -> None:
    saved(memory, 100)
    folder = next(memory._folder.glob("*.json")).parent
    (folder / f"{'c' * 64}.json").write_bytes(content)
    # Of another container than its name says.
    (folder / f"{'d' * 64}.json").write_bytes((folder / f"{CONTAINER}.json").read_bytes())

    assert [each.container for each in memory.all()] == [CONTAINER]
    assert {each.stem for each in folder.glob("*.json")} == {CONTAINER}
    assert memory.of_container("../lock") is None
