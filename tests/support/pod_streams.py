"""The port of a kubelet: `exec`, `attach` and logs of its containers.

Streams are those of v4.channel.k8s.io over WebSocket: each message begins with the number of its
stream. No stream can be ended by itself. SPDY is not spoken, which older kubectl's exec needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import ssl
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.node_pods import NodePod, Pods
from tests.support.pod_container import Container

PROTOCOL = "v4.channel.k8s.io"
_INPUT, _OUTPUT, _ERROR, _STATUS = range(4)
_CHUNK = 1 << 16
_SUCCESS = {"metadata": {}, "status": "Success"}
_numbers = itertools.count()


class StreamServer:
    """Serves the containers of these Pods to one client: the API server, by its certificate."""

    def __init__(self, pods: Pods, client: str) -> None:
        self._pods = pods
        self._client = client
        self._runner: web.AppRunner | None = None
        self._sockets: set[web.WebSocketResponse] = set()
        self._readings: set[asyncio.Task[Any]] = set()

    async def start(self, port: int, context: ssl.SSLContext) -> None:
        """Raises OSError where the port is taken."""
        application = web.Application(middlewares=[self._check])
        add = application.router.add_route
        add("*", "/exec/{namespace}/{pod}/{container}", self._exec)
        add("*", "/attach/{namespace}/{pod}/{container}", self._attach)
        add("GET", "/containerLogs/{namespace}/{pod}/{container}", self._log)
        runner = web.AppRunner(application, handler_cancellation=False)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context).start()
        except OSError:
            await runner.cleanup()
            raise
        self._runner = runner

    async def close(self) -> None:
        """Cut all connections."""
        for socket in list(self._sockets):
            if socket._req is not None and socket._req.transport is not None:
                socket._req.transport.abort()
        for task in self._readings:
            task.cancel()
        if self._runner:
            await self._runner.shutdown()
            await self._runner.cleanup()

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> Any:
        peer = request.transport and request.transport.get_extra_info("peercert")
        names = [value for part in (peer or {}).get("subject", ()) for _, value in part]
        if self._client not in names:
            raise web.HTTPForbidden
        return await handler(request)

    def _pod(self, request: web.Request) -> NodePod:
        place = request.match_info
        for pod in self._pods.values():
            if (pod.namespace, pod.name) == (place["namespace"], place["pod"]):
                return pod
        raise web.HTTPNotFound(text="pod does not exist")

    def _container(self, request: web.Request) -> tuple[Container, dict[str, Any]]:
        found = self._pod(request).containers.get(request.match_info["container"])
        if found is None:
            raise web.HTTPNotFound(text="container not found in pod")
        return found

    async def _open(self, request: web.Request, first: int) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(protocols=[PROTOCOL], max_msg_size=0, compress=False)
        await socket.prepare(request)
        self._sockets.add(socket)
        # By this a client knows that it is connected.
        await socket.send_bytes(bytes([first]))
        return socket

    async def _close(self, socket: web.WebSocketResponse, status: dict[str, Any] | None) -> None:
        self._sockets.discard(socket)
        with contextlib.suppress(ConnectionError, RuntimeError, aiohttp.ClientError):
            if status:
                await socket.send_bytes(bytes([_STATUS]) + json.dumps(status).encode())
            await socket.close()

    async def _log(self, request: web.Request) -> web.Response:
        log = self._pod(request).logs.get(request.match_info["container"], b"")
        return web.Response(body=bytes(log), content_type="text/plain")

    async def _attach(self, request: web.Request) -> web.StreamResponse:
        container, _ = self._container(request)
        wanted = _wanted_streams(request)
        socket = await self._open(request, _OUTPUT if _OUTPUT in wanted else _STATUS)

        async def send(number: int, data: bytes) -> None:
            if number in wanted and not socket.closed:
                await socket.send_bytes(bytes([number]) + data)

        attachment = container.attach(send)

        async def read() -> None:
            async for message in socket:
                if _is_input(message) and _INPUT in wanted:
                    await container.write(attachment, message.data[1:])

        async def end() -> None:
            await asyncio.shield(container.end)
            await container.read_all()

        works = [asyncio.create_task(each) for each in (read(), end(), attachment.over.wait())]
        try:
            await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)
            container.detach(attachment)
            await self._close(socket, _SUCCESS if container.end.done() else None)
        return socket

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        container, process = self._container(request)
        wanted = _wanted_streams(request)
        command = await container.exec(request.query.getall("command"), process, next(_numbers))
        socket = await self._open(request, _OUTPUT if _OUTPUT in wanted else _STATUS)

        async def pump(number: int, stream: asyncio.StreamReader) -> None:
            while data := await stream.read(_CHUNK):
                if number in wanted and not socket.closed:
                    with contextlib.suppress(ConnectionError):
                        await socket.send_bytes(bytes([number]) + data)

        async def read() -> None:
            async for message in socket:
                if _is_input(message) and _INPUT in wanted:
                    with contextlib.suppress(ConnectionError):
                        command.stdin.write(message.data[1:])
                        await command.stdin.drain()
            # The command goes on without a client, as on a real node.
            command.stdin.close()

        if _INPUT not in wanted:
            command.stdin.close()
        reading = asyncio.create_task(read())
        pumps = asyncio.gather(pump(_OUTPUT, command.stdout), pump(_ERROR, command.stderr))
        self._readings.add(reading)
        reading.add_done_callback(self._readings.discard)
        await pumps
        code = await command.wait()
        await self._close(socket, _SUCCESS if code == 0 else _failure(code))
        reading.cancel()
        return socket


def _is_input(message: aiohttp.WSMessage) -> bool:
    return message.type == aiohttp.WSMsgType.BINARY and message.data[:1] == bytes([_INPUT])


def _wanted_streams(request: web.Request) -> set[int]:
    names = {"input": _INPUT, "output": _OUTPUT, "error": _ERROR}
    return {number for name, number in names.items() if request.query.get(name) in ("1", "true")}


def _failure(code: int) -> dict[str, Any]:
    return {
        "metadata": {},
        "status": "Failure",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }
