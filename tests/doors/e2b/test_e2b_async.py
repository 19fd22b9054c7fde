"""E2B's asynchronous SDK, which hears of files by a stream and has many calls open at once."""

from __future__ import annotations

import asyncio
from typing import Any

from e2b import FilesystemEventType
from e2b_code_interpreter import AsyncSandbox

from tests.support.site import Site


def test_many_calls_of_one_sandbox_are_open_at_once(door: Site) -> None:
    asyncio.run(_together())


def test_more_commands_than_a_tenant_has_followers_for_are_all_told(door: Site) -> None:
    asyncio.run(_many())


async def _many() -> None:
    made = await asyncio.gather(*(AsyncSandbox.create(timeout=120) for _ in range(2)))
    try:
        waiting = [
            sandbox.commands.run(
                f"read -t 1 a; echo {n}; exit {n % 2}", stdin=True, background=True
            )
            for sandbox in made
            for n in range(20)
        ]
        started = await asyncio.gather(*waiting)
        ended = await asyncio.gather(*(each.wait() for each in started), return_exceptions=True)
        told = [str(getattr(each, "stdout", each)) for each in ended]
        assert told == [f"{n}\n" for _ in made for n in range(20)]
        assert [each.exit_code for each in ended] == [n % 2 for _ in made for n in range(20)]  # type: ignore[union-attr]
    finally:
        await asyncio.gather(*(sandbox.kill() for sandbox in made))


async def _together() -> None:
    sandbox = await AsyncSandbox.create(timeout=120)
    try:
        seen: asyncio.Queue[Any] = asyncio.Queue()
        await sandbox.files.make_dir("watched")
        watch = await sandbox.files.watch_dir("watched", on_event=seen.put)
        waits = "import os, time\nwhile not os.path.exists('watched/go'): time.sleep(.01)"
        cell = asyncio.create_task(sandbox.run_code(waits))
        waiting = [sandbox.commands.run(f"sleep .2; echo {n}") for n in range(8)]
        told = await asyncio.gather(*waiting)
        assert [each.stdout for each in told] == [f"{n}\n" for n in range(8)]
        await sandbox.files.write("watched/go", "1")
        event = await asyncio.wait_for(seen.get(), 60)
        assert (event.name, event.type) == ("go", FilesystemEventType.CREATE)
        assert (await cell).error is None
        await watch.stop()
    finally:
        await sandbox.kill()
