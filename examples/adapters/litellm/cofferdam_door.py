"""The way from LiteLLM's sandboxes of E2B to Cofferdam, which has one address for all of them."""

from __future__ import annotations

import os
import re

import httpx
from litellm.llms.custom_httpx.http_handler import AsyncHTTPHandler

# LiteLLM asks a host of its own for each sandbox: https://49999-ID.e2b.app
_HOST = re.compile(r"(\d+)-(\w+)\.e2b\.app")


class Door(httpx.AsyncBaseTransport):
    """Names the sandbox in headers instead, as E2B's SDKs do where E2B_SANDBOX_URL is set."""

    def __init__(self, url: str) -> None:
        self._url = httpx.URL(url)
        self._inner = httpx.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if found := _HOST.fullmatch(request.url.host):
            request.headers["E2b-Sandbox-Port"], request.headers["E2b-Sandbox-Id"] = found.groups()
            request.headers["Host"] = self._url.netloc.decode()
            request.url = self._url.copy_with(raw_path=request.url.raw_path)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def door() -> AsyncHTTPHandler:
    """To be given as `client` to LiteLLM's functions for sandboxes."""
    # A cell may be silent for as long as it runs.
    return AsyncHTTPHandler(timeout=330.0, transport=Door(os.environ["E2B_SANDBOX_URL"]))
