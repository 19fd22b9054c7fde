"""Requests of a virtual node to the API server."""

from __future__ import annotations

import asyncio
import json
import ssl
from datetime import UTC, datetime
from typing import Any

import aiohttp

RETRY_SECONDS = 0.2
MERGE = "application/merge-patch+json"
_MOST_LINE = 1 << 24


def timestamp() -> str:
    """The time as Kubernetes writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class ApiError(Exception):
    """The API server has refused a request."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code} {message}")
        self.code = code


class Api:
    """Requests to the API server."""

    def __init__(self, url: str, context: ssl.SSLContext) -> None:
        self.url = url
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self._session = aiohttp.ClientSession(connector=connector, read_bufsize=_MOST_LINE)

    async def request(self, method: str, path: str, body: Any = None, kind: str = "") -> Any:
        """Raises ApiError, aiohttp.ClientError, TimeoutError."""
        headers = {"Content-Type": kind or "application/json"}
        data = None if body is None else json.dumps(body)
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._session.request(
            method, self.url + path, data=data, headers=headers, timeout=timeout
        ) as answer:
            found = await answer.json(content_type=None)
            if answer.status >= 400:
                raise ApiError(answer.status, str(found.get("message")))
            return found

    async def patch(self, path: str, body: Any) -> Any:
        return await self.request("PATCH", path, body, MERGE)

    async def insist(self, method: str, path: str, body: Any, kind: str = "") -> Any:
        """Ask again until the API server answers. Raises ApiError where it refuses."""
        while True:
            try:
                return await self.request(method, path, body, kind)
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError):
                await asyncio.sleep(RETRY_SECONDS)
            except ApiError as error:
                if error.code < 500 and error.code != 429:
                    raise
                await asyncio.sleep(RETRY_SECONDS)

    async def watch(self, path: str) -> Any:
        """The events of a watch, as objects, until it ends."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        async with self._session.get(self.url + path, timeout=timeout) as answer:
            if answer.status >= 400:
                raise ApiError(answer.status, await answer.text())
            async for line in answer.content:
                yield json.loads(line)

    async def close(self) -> None:
        await self._session.close()
