"""Whatever a container does, those beside it are served as before."""

from __future__ import annotations

import asyncio
from typing import Any

from providers.values import Job
from tests.support.docker_engine import (
    Containers,
)


def test_a_memory_bomb_next_door_does_not_disturb(containers: Containers) -> None:
    bomb, neighbour = containers.start(), containers.start()

    async def side_by_side() -> tuple[Any, Any]:
        code = "held = []\nwhile True: held.append(bytearray(1 << 20))"
        jobs = [
            sandbox.run(Job(text, "python", 20))
            for sandbox, text in ((bomb, code), (neighbour, "print('undisturbed')"))
        ]
        first, second = await asyncio.gather(*jobs)
        return first, second

    exploded, undisturbed = containers.loop.call(side_by_side())
    assert (exploded.out_of_memory, exploded.exit_code) == (True, None)
    assert (undisturbed.stdout, undisturbed.out_of_memory) == ("undisturbed\n", False)
    for sandbox in (bomb, neighbour):
        containers.loop.call(sandbox.destroy())


NUISANCES = {
    "a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "a full disk": """
while True:
    try:
        with open("filler", "wb") as file:
            while True: file.write(bytes(1 << 20))
    except OSError: pass
""",
    "a flood of output": "while True: print('x' * 10_000)",
}


def test_nuisances_leave_the_others_their_time(containers: Containers) -> None:
    nuisances = {name: containers.start() for name in NUISANCES}
    others = [containers.start() for _ in range(2)]

    async def side_by_side() -> tuple[dict[str, Any], list[str]]:
        going_on, begun = {}, []
        for name, code in NUISANCES.items():
            says = asyncio.Event()
            job = Job(f"print('begun', flush=True)\n{code}", "python", 2)
            run = nuisances[name].run(job, lambda _, says=says: says.set())
            going_on[name] = asyncio.create_task(run)
            begun.append(says.wait())
        await asyncio.wait_for(asyncio.gather(*begun), 60)
        # One CPU is the most that each has of this machine. Who is starved is timed out.
        printed = [(await one.run(Job("print(1)", "python", 10))).stdout for one in others]
        return {name: await run for name, run in going_on.items()}, printed

    try:
        ended, printed = containers.loop.call(side_by_side())
    finally:
        for sandbox in (*nuisances.values(), *others):
            containers.loop.call(sandbox.destroy())
    assert printed == ["1\n"] * len(others)
    # What fills the memory is ended for that, what only makes noise when its time is over.
    for name, result in ended.items():
        assert result.timed_out or result.out_of_memory, name
    assert containers.present() == []
