"""A cell of a session through the whole API, beside a cell of a Jupyter kernel gateway.

Also how soon what a program prints reaches its reader, and what a single run takes beside many
open sessions. The gateway gets a virtual environment of its own, below var/bench.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.measure import Figures, measure, percentiles, table, write_json
from benchmarks.service import ROOT, Service, api_caller, http_caller, running_service

CELL = "x = 1\nx"
GATEWAY = ROOT / "var" / "bench" / "jupyter"
# Says when it said so, by a clock that sandbox and reader share.
PRINTS = (
    "import time\nfor _ in range(40):\n    print(time.time(), flush=True)\n    time.sleep(0.05)"
)
STAYS = "import time\nfor n in range(600):\n    print(n, flush=True)\n    time.sleep(1)"

# Without it every cell waits 40 ms for an acknowledgement, which is not what is compared here.
_WITHOUT_DELAY = """
import socket
import tornado.iostream

begin = tornado.iostream.IOStream.__init__

def begin_without_delay(self, connection, *arguments, **options):
    if connection.family == socket.AF_INET:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    begin(self, connection, *arguments, **options)

tornado.iostream.IOStream.__init__ = begin_without_delay
# It is taken back after every answer.
tornado.iostream.IOStream.set_nodelay = lambda self, value: None
from kernel_gateway import launch_instance
launch_instance()
"""


def opened(service: Service) -> str:
    """The id of a new session."""
    answer = _ask(service, "POST", "/api/v1/sessions", {})
    return str(json.loads(answer.read())["id"])


def first_bytes(service: Service, session: str) -> Figures:
    """From `print` to the reader of the stream, in ms."""
    answer = _ask(
        service, "POST", f"/api/v1/sessions/{session}/executions", {"code": PRINTS}, stream=True
    )
    took = []
    for line in iter(answer.readline, b""):
        event = json.loads(line)
        if event["type"] == "stdout":
            took.append((time.time() - float(event["text"].split()[0])) * 1000)
    return percentiles("print to the reader of the stream", 1, took)


@contextmanager
def crowd(service: Service, count: int) -> Iterator[None]:
    """So many sessions, each with a cell that prints every second and a stream that is read."""
    sessions: list[str] = []

    def read(answer: http.client.HTTPResponse) -> None:
        while answer.readline():
            continue

    try:
        for _ in range(count):
            sessions.append(opened(service))
            path = f"/api/v1/sessions/{sessions[-1]}/executions"
            answer = _ask(service, "POST", path, {"code": STAYS, "timeout": 300}, stream=True)
            threading.Thread(target=read, args=(answer,), daemon=True).start()
        yield
    finally:
        for session in sessions:
            _ask(service, "DELETE", f"/api/v1/sessions/{session}", {})


@contextmanager
def running_gateway() -> Iterator[Callable[[], Callable[[], None]]]:
    """A kernel gateway, as what makes callers of a kernel of it."""
    if not (GATEWAY / "bin" / "jupyter-kernelgateway").exists():
        subprocess.run([sys.executable, "-m", "venv", GATEWAY], check=True)
        pip = [GATEWAY / "bin" / "pip", "install", "-q", "jupyter_kernel_gateway", "ipykernel"]
        subprocess.run(pip, check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [GATEWAY / "bin" / "python", "-c", _WITHOUT_DELAY]
    command += [f"--KernelGatewayApp.port={port}", "--log-level=ERROR"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with ExitStack() as clients:
        clients.callback(process.wait, 10)
        clients.callback(process.terminate)
        _wait_for(port)
        yield lambda: _gateway_caller(port, clients)


def _gateway_caller(port: int, clients: ExitStack) -> Callable[[], None]:
    loop = asyncio.new_event_loop()

    async def connect() -> aiohttp.ClientWebSocketResponse:
        client = aiohttp.ClientSession(f"http://127.0.0.1:{port}")
        clients.callback(lambda: loop.run_until_complete(client.close()))
        async with client.post("/api/kernels", json={"name": "python3"}) as made:
            kernel = (await made.json())["id"]
        return await client.ws_connect(f"/api/kernels/{kernel}/channels")

    async def run(channel: aiohttp.ClientWebSocketResponse) -> None:
        number = uuid.uuid4().hex
        header = {"msg_id": number, "msg_type": "execute_request", "version": "5.3"}
        header |= {"session": "bench", "username": "", "date": ""}
        content = {"code": CELL, "silent": False, "store_history": True, "allow_stdin": False}
        frame = {"header": header, "parent_header": {}, "metadata": {}, "content": content}
        await channel.send_json({**frame, "channel": "shell"})
        left = {"execute_result", "execute_reply"}
        while left:
            told = json.loads((await channel.receive()).data)
            if told["parent_header"].get("msg_id") == number:
                left.discard(told["msg_type"])

    channel = loop.run_until_complete(connect())
    return lambda: loop.run_until_complete(run(channel))


def _ask(
    service: Service, method: str, path: str, body: dict[str, Any], *, stream: bool = False
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=60)
    headers = {"X-API-Key": service.api_key, "Content-Type": "application/json"}
    if stream:
        headers["Accept"] = "application/x-ndjson"
    connection.request(method, path, json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status not in (200, 201, 204):
        raise RuntimeError(f"unexpected answer: {answer.read()[:500]!r}")
    return answer


def _wait_for(port: int) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError("the gateway did not start")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sessions", description=__doc__)
    parser.add_argument("--calls", type=int, default=300, help="calls per row (300)")
    parser.add_argument("--sessions", type=int, default=200, help="open beside a single run (200)")
    parser.add_argument("--json", type=Path, default=ROOT / "var" / "bench" / "sessions.json")
    arguments = parser.parse_args()
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        config = {"launcher": "bubblewrap", "max_sandboxes": 512}
        bounds = {"SESSIONS_PER_TENANT": "1000", "SANDBOX_MAX_TOTAL": "1000"}
        service = held.enter_context(running_service(folder, config, **bounds))
        print("measuring ...", flush=True)
        rows: list[Figures] = []
        with running_gateway() as make_caller:
            rows.append(
                measure(
                    "Jupyter kernel gateway, a cell", make_caller, callers=1, calls=arguments.calls
                )
            )
        session = opened(service)
        path = f"/api/v1/sessions/{session}/executions"
        content = json.dumps({"code": CELL}).encode()
        headers = {"X-API-Key": service.api_key}

        def cells() -> Callable[[], None]:
            return http_caller(service.port, path, content, headers, b'"text/plain":"1"')

        def runs() -> Callable[[], None]:
            return api_caller(service, {"code": "print(1)"}, b'"stdout":"1\\n"')

        rows.append(measure("a cell through the API", cells, callers=1, calls=arguments.calls))
        rows.append(first_bytes(service, session))
        rows.append(measure("a single run", runs, callers=1, calls=arguments.calls))
        before = service.memory_bytes()
        with crowd(service, arguments.sessions):
            memory = [service.memory_bytes()]
            name = f"a single run beside {arguments.sessions} sessions"
            rows.append(measure(name, runs, callers=1, calls=arguments.calls))
            memory.append(service.memory_bytes())
        print(table(rows, rows[0]))
        told = [round(each / 2**20) for each in (before, *memory)]
        print(
            "memory of the service: {} MiB, with the sessions {}, after the runs {}".format(*told)
        )
        write_json(arguments.json, rows, {"memory_mib": told})
        print(f"written to {arguments.json}")


if __name__ == "__main__":
    main()
