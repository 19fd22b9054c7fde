"""The SDK's own client, unmodified, against a running service or against the command."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import httpx2
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from tests.support.processes import ROOT, clean_environment
from tests.support.site import Site

T = TypeVar("T")
LEGACY = "2025-11-25"
ACCEPT = "application/json, text/event-stream"
SECONDS = 90.0


def go(work: Callable[[], Awaitable[T]]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(SECONDS):
            return await work()

    return asyncio.run(bounded())


@asynccontextmanager
async def connected(site: Site, key: str = "", mode: str = "auto") -> AsyncIterator[Client]:
    """As a client of the newest protocol, or with `legacy` as those that shake hands first."""
    headers = {"Authorization": f"Bearer {key or site.alice}"}
    async with httpx2.AsyncClient(headers=headers, timeout=SECONDS) as http:
        transport = streamable_http_client(f"{site.service.url}/mcp", http_client=http)
        async with Client(transport, mode=mode) as client:  # type: ignore[arg-type]
            yield client


@asynccontextmanager
async def over_stdio(data_dir: Path, *options: str) -> AsyncIterator[Client]:
    command = StdioServerParameters(
        command=sys.executable,
        args=["manage.py", "mcp", *options],
        env=clean_environment(data_dir),
        cwd=ROOT,
    )
    async with Client(command) as client:
        yield client


async def called(client: Client, name: str, /, **arguments: Any) -> dict[str, Any]:
    """What a tool that went well said."""
    result = await client.call_tool(name, arguments)
    assert not result.is_error, result.content
    said: dict[str, Any] = result.structured_content
    return said


async def refusal(client: Client, name: str, /, **arguments: Any) -> str:
    """What a tool that did not said."""
    result = await client.call_tool(name, arguments)
    assert result.is_error
    text: str = result.content[0].text  # type: ignore[union-attr]
    return text


def send(site: Site, message: Any, key: str = "", **headers: str) -> httpx.Response:
    """A message as it is, without the SDK."""
    said = {
        "Accept": ACCEPT,
        "Content-Type": "application/json",
        "X-API-Key": key or site.alice,
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    content = message if isinstance(message, bytes) else None
    return httpx.post(
        f"{site.service.url}/mcp",
        content=content,
        json=None if content is not None else message,
        headers=said,
        timeout=60,
    )


def initialize(message_id: object = 1) -> dict[str, Any]:
    client = {"name": "test", "version": "1"}
    params = {"protocolVersion": LEGACY, "capabilities": {}, "clientInfo": client}
    return {"jsonrpc": "2.0", "id": message_id, "method": "initialize", "params": params}


def call(message_id: object, name: str, /, **arguments: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments}
    return {"jsonrpc": "2.0", "id": message_id, "method": "tools/call", "params": params}
