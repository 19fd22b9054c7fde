"""The MCP server, over HTTP and over standard input and output."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any, TypeVar

import mcp_types as types
from django.conf import settings
from django.db import close_old_connections
from mcp.server.lowlevel.server import Server
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from executions.doors.mcp import results, tool_calls
from executions.doors.mcp.exchange import McpLoop, Served
from executions.doors.mcp.results import (
    DOOR,
    Call,
    Context,
    Door,
    Lacking,
    lacks,
    refused,
    require,
)
from executions.doors.mcp.tool_calls import TOOLS
from executions.doors.native.frame import render_error
from executions.kernel.coroutines import Coroutine, run_sync
from executions.runs.active_runs import ClientRun
from executions.runs.requests import Caller
from executions.tenants import keys
from executions.tenants.quotas import take_request
from executions.tenants.service import ensure_active
from providers.errors import SandboxError

T = TypeVar("T")

INSTRUCTIONS = (
    "Runs code in isolated sandboxes. run_code is for one program: nothing is kept after it. For "
    "several steps open a session: it keeps variables, files and processes until it is closed or "
    "not used for its idle time. Times are in seconds. Long outputs are truncated: "
    "execution_output reads the rest. Every run is recorded. cofferdam://executions/{id} has the "
    "record with its signed receipt."
)


def make_server(door: Door | None = None) -> Server[Any]:
    """A server for clients that come in by `door`, or by the one that their request brings."""

    def door_of(context: Context) -> Door:
        if door is not None:
            return door
        found: Door = context.request.scope[DOOR]  # type: ignore[union-attr]
        return found

    async def list_tools(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        by = door_of(context)
        try:
            languages = await by.do(lambda: tool_calls.languages(by))
        except SandboxError:
            # No provider can be asked. A run says what is the matter.
            languages = []
        tools = [tool.described(languages) for tool in TOOLS.values() if not lacks(by, tool.needs)]
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        context: Context, params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        by = door_of(context)
        if (tool := TOOLS.get(params.name)) is None:
            raise MCPError(types.INVALID_PARAMS, f"Unknown tool: {params.name[:100]}")

        async def tell(progress: float, message: str) -> None:
            await context.session.report_progress(progress, message=message)

        async def check_scopes() -> None:
            require(by, tool.needs, f"tool {params.name}")

        try:
            await by.do(check_scopes)
            tool.refuse_unknown(params.arguments or {})
            return await tool.call(Call(by, dict(params.arguments or {}), tell))
        except Lacking as error:
            return refused("forbidden", str(error))
        except Exception as error:
            said = json.loads(render_error(error, {}).content)
            return refused(
                said["error"]["code"],
                said["error"]["message"],
                field=said["error"]["field"],
                execution_id=said["id"],
            )

    async def list_resources(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourcesResult:
        by, cursor = door_of(context), params.cursor if params else None
        return await _told(by.do(lambda: results.listing(by, cursor)))

    async def list_templates(
        context: Context, params: types.PaginatedRequestParams | None
    ) -> types.ListResourceTemplatesResult:
        return types.ListResourceTemplatesResult(resource_templates=results.templates())

    async def read_resource(
        context: Context, params: types.ReadResourceRequestParams
    ) -> types.ReadResourceResult:
        by = door_of(context)
        return await _told(by.do(lambda: results.reading(by, params.uri)))

    server: Server[Any] = Server(
        "cofferdam",
        version=str(settings.SPECTACULAR_SETTINGS["VERSION"]),
        title="Cofferdam",
        instructions=INSTRUCTIONS,
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_list_resource_templates=list_templates,
        on_read_resource=read_resource,
    )
    # What is told of runs elsewhere is told by their records, with what may be told of them.
    server.middleware.clear()
    return server


async def _told(work: Awaitable[T]) -> T:
    """Its result; its error as MCP has it."""
    try:
        return await work
    except MCPError:
        raise
    except Lacking as error:
        raise MCPError(types.INVALID_REQUEST, str(error)) from None
    except Exception as error:
        known = render_error(error, {})
        said = json.loads(known.content)["error"]
        code = types.INTERNAL_ERROR if known.status_code >= 500 else types.INVALID_PARAMS
        raise MCPError(code, said["message"], data=said) from None


@cache
def _loop(most_bytes: int) -> McpLoop:
    return McpLoop(make_server(), most_bytes)


def served(most_bytes: int) -> Served:
    """Start the server for messages of at most `most_bytes`, unless it was started."""
    return _loop(most_bytes).served()


class StdioDoor:
    """Each call has a thread while it is carried out. With each, the key or the tenant is looked at
    anew."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller

    async def do(self, work: Callable[[], Coroutine[T]]) -> T:
        return await asyncio.to_thread(self._carry_out, work)

    def note(self, run: ClientRun) -> None:
        """The call itself is cancelled, and ends its run."""

    def _carry_out(self, work: Callable[[], Coroutine[T]]) -> T:
        close_old_connections()
        try:
            tenant = self.caller.tenant
            if (key := self.caller.api_key) is not None:
                key.refresh_from_db()
                keys.ensure_valid(key, self.caller.client_address)
            else:
                tenant.refresh_from_db()
                ensure_active(tenant)
            take_request(tenant, only_reads=False).require()
            return run_sync(work())
        finally:
            close_old_connections()


async def serve(caller: Caller) -> None:
    """Answer until the client closes its end."""
    # Standard output is the client's.
    logging.getLogger("mcp").setLevel(logging.WARNING)
    server = make_server(StdioDoor(caller))
    async with stdio_server() as (received, sent):
        await server.run(received, sent, server.create_initialization_options())
