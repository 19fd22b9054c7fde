"""One agent, four doors: `agent.py native`, `agent.py e2b`, `agent.py mcp`, `agent.py shell`.

What it does is written once, over one function that runs a cell. A language model would write the
cells; here they are what one wrote, an error and its correction included.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from subprocess import PIPE
from typing import Any

# What is told of a cell: the value of its last expression, or the last line of its error.
Cell = Callable[[str], Awaitable[str]]

SALES = "month,sold\\nJanuary,12\\nFebruary,7\\nMarch,20\\n"
CELLS = (
    f'open("sales.csv", "w").write("{SALES}")',
    'import csv\nrows = list(csv.DictReader(open("sales.csv")))\nlen(rows)',
    'max(rows, key=lambda row: row["sales"])["month"]',
    'best = max(rows, key=lambda row: int(row["sold"]))\n[best["month"]]',
    '{"best": best["month"], "total": sum(int(row["sold"]) for row in rows)}',
)


async def work(run: Cell) -> None:
    for number, code in enumerate(CELLS, 1):
        print(f"{number}: {await run(code)}")


def said(record: Any) -> str:
    """Of a record as the native API tells it, in whichever form."""
    if record["status"] != "succeeded":
        return str(record["stderr"]).strip().splitlines()[-1]
    return str(record["outputs"][-1]["text/plain"]) if record["outputs"] else ""


@asynccontextmanager
async def native() -> AsyncIterator[Cell]:
    """The native API, by its client."""
    from cofferdam import AsyncCofferdam

    async with AsyncCofferdam() as client, await client.open_session(idle_seconds=300) as session:

        async def run(code: str) -> str:
            return said((await session.run(code)).raw)

        yield run


@asynccontextmanager
async def e2b() -> AsyncIterator[Cell]:
    """E2B's protocol, by E2B's SDK."""
    for name in ("E2B_API_URL", "E2B_SANDBOX_URL"):
        os.environ[name] = os.environ["COFFERDAM_URL"]
    os.environ["E2B_API_KEY"] = os.environ["COFFERDAM_API_KEY"]
    from e2b_code_interpreter import AsyncSandbox

    async with await AsyncSandbox.create(timeout=300) as sandbox:

        async def run(code: str) -> str:
            told = await sandbox.run_code(code)
            if told.error is not None:
                return f"{told.error.name}: {told.error.value}"
            return told.text or ""

        yield run


@asynccontextmanager
async def mcp() -> AsyncIterator[Cell]:
    """The tools of `/mcp`, by the official SDK."""
    import httpx2
    from mcp.client.client import Client
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {os.environ['COFFERDAM_API_KEY']}"}
    url = f"{os.environ['COFFERDAM_URL']}/mcp"
    async with (
        httpx2.AsyncClient(headers=headers, timeout=120) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):

        async def call(tool: str, **arguments: object) -> Any:
            told = await client.call_tool(tool, arguments)
            if told.is_error:
                raise RuntimeError(f"{tool}: {told.content}")
            return told.structured_content

        session = (await call("session_open", idle_seconds=300))["session_id"]

        async def run(code: str) -> str:
            told = await call("session_run", session_id=session, code=code)
            # Of what was shown these tools tell the texts alone.
            return said({**told, "outputs": [{"text/plain": each} for each in told["outputs"]]})

        yield run
        await call("session_close", session_id=session)


@asynccontextmanager
async def shell() -> AsyncIterator[Cell]:
    """`cofferdam` on the shell."""

    async def call(*arguments: str) -> str:
        command = (sys.executable, "-m", "cofferdam", "session", *arguments)
        process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        told, _ = await process.communicate()
        return told.decode().strip()

    session = await call("open", "--idle", "300")

    async def run(code: str) -> str:
        return said(json.loads(await call("run", session, "-c", code, "--json")))

    yield run
    await call("close", session)


DOORS = {"native": native, "e2b": e2b, "mcp": mcp, "shell": shell}


async def main() -> None:
    async with DOORS[sys.argv[1]]() as run:
        await work(run)


if __name__ == "__main__":
    asyncio.run(main())
