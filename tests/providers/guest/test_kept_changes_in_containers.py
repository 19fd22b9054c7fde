"""What has changed is told in containers as it is elsewhere, by the notices of either kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from providers.runtime.pool.kept import Kept
from providers.values import Job
from tests.support.docker_engine import Containers

pytest_plugins = ["tests.support.pool_fixtures"]


@pytest.fixture
def kept(containers: Containers) -> Iterator[Kept]:
    sandbox = containers.start()
    try:
        yield containers.loop.call(Kept.open(sandbox, {}, {}))
    finally:
        containers.loop.call(sandbox.destroy())


async def changes(kept: Kept, mark: str, *, thorough: bool = False) -> tuple[str, set[str]]:
    """The next mark, and the paths of what has changed or gone."""
    names: set[str] = set()
    async for header, parts in kept.stream("file.changes", {"mark": mark, "thorough": thorough}):
        for each in json.loads(parts.get("data", b"[]")):
            names.add(each["path"] if header["event"] == "entries" else f"-{each}")
    return str(header["mark"]), names


def test_the_kernel_says_where_to_look_and_a_thorough_look_needs_no_such_word(
    containers: Containers, kept: Kept
) -> None:
    def run(code: str) -> None:
        result = containers.loop.call(kept.run(Job(code), lambda frame: None))
        assert result.exit_code == 0, result.stderr

    def look(*, thorough: bool = False) -> set[str]:
        nonlocal mark
        mark, names = containers.loop.call(changes(kept, mark, thorough=thorough))
        return names

    mark = ""
    run("import mmap, os\nopen('m', 'wb').write(bytes(8192))\nopen('gone', 'w').close()")
    assert look() == {"artifacts", "gone", "m"}
    run("with open('m', 'r+b') as f: m = mmap.mmap(f.fileno(), 0)\nm[0] = 1")
    run("os.mkdir('d'); open('d/f', 'w').write('x'); os.remove('gone')")
    assert look() >= {"-gone", "d", "d/f"}
    look(thorough=True)
    run("import time; time.sleep(0.05)")
    look(thorough=True)
    # Whoever has not looked cannot know, and nobody is told before it ends.
    run("m[0] = 2")
    assert look() == set()
    assert look(thorough=True) == {"m"}
    run("m.close()")
    assert look() == {"m"}
