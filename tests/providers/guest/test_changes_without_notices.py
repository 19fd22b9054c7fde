"""Where the kernel says nothing of files, each look is one at all of them, and tells the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from providers.runtime.guest import notices
from providers.runtime.guest.file_changes import Memory


@pytest.fixture(params=["none", "on a file system that is not the workspace's alone"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    base = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    descriptor = -1 if request.param == "none" else notices.open_notices()
    yield Memory(base, None if descriptor < 0 else notices.Notices(descriptor, base))
    os.close(base)
    if descriptor >= 0:
        os.close(descriptor)


def told(memory: Memory, mark: str) -> tuple[set[object], list[str], bool]:
    for _ in memory.look(thorough=False):
        continue
    entries, gone, is_complete = memory.known.since(mark)
    return {entry["path"] for entry in entries}, gone, is_complete


def test_what_changed_is_told_without_the_kernels_word(memory: Memory, tmp_path: Path) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    for name in ("a", "b"):
        (folder / name).write_text(name)
    assert told(memory, "") == ({"d", "d/a", "d/b"}, [], True)
    mark = memory.known.mark
    (folder / "a").write_text("changed")
    (folder / "b").unlink()
    (folder / "c").symlink_to("a")
    assert told(memory, mark) == ({"d/a", "d/c"}, ["d/b"], False)


def test_a_change_in_the_same_tick_of_the_clock_is_told_by_the_next_look(
    memory: Memory, tmp_path: Path
) -> None:
    """Size and times may be those that were seen already."""
    file = tmp_path / "f"
    for number in range(3):
        file.write_text(f"{number:03}")
        told(memory, "")
        mark = memory.known.mark
        file.write_text(f"{number:03}"[::-1])
        assert told(memory, mark)[0] == {"f"}


def test_a_look_that_was_broken_off_has_lost_nothing(memory: Memory, tmp_path: Path) -> None:
    for number in range(2000):
        (tmp_path / str(number)).touch()
    looking = memory.look(thorough=False)
    next(looking)
    looking.close()
    assert not memory.is_looking
    assert len(told(memory, "")[0]) == 2000
