"""What the network of a sandbox costs: connections, large bodies, many sandboxes, and neighbours.

`providers.runtime.pool` over a launcher of this machine, with the proxy in its own process and an
HTTPS server in another one. Direct is the same client on this machine, without sandbox and proxy.
"""

from __future__ import annotations

import argparse
import asyncio
import http.server
import json
import multiprocessing
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from providers.network import Budget, Layer, Network, NetworkPolicy
from providers.runtime.network.client import NetworkProxy
from providers.runtime.pool.pool import Pool, PoolSettings
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.runtime.service.launchers import LauncherChoice
from providers.runtime.service.settings import ServiceSettings
from providers.values import InputFile, Job, SandboxLimits
from tests.support.certificates import Authority

ADDRESS = "127.0.0.2"
LARGE = 100 * 1024 * 1024
AUTHORITY = "authority.pem"

# The same program inside and outside.
CLIENT = """
import json, ssl, sys, time, urllib.request
url, kind, calls = json.loads(sys.argv[1]) if len(sys.argv) > 1 else ARGUMENTS
context = ssl.create_default_context(cafile=None if kind == "opened" else "authority.pem")
opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context))
taken = []
for _ in range(calls):
    began = time.perf_counter()
    with opener.open(url) as answer:
        while answer.read(1 << 20):
            pass
    taken.append(time.perf_counter() - began)
print(json.dumps(taken))
"""
HOLD = """
import socket, time
held = socket.create_connection(("127.0.0.1", 3128))
held.sendall(b"CONNECT HOST HTTP/1.1\\r\\nHost: HOST\\r\\n\\r\\n")
assert held.recv(100).split()[1] == b"200"
time.sleep(SECONDS)
"""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        size = LARGE if self.path == "/large" else 100
        self.send_response(200)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        piece = bytes(1 << 18)
        for start in range(0, size, len(piece)):
            self.wfile.write(piece[: size - start])

    def log_message(self, *_: object) -> None:
        """Nothing: each request would be a line."""


def _serve(certificate: str, port: Connection) -> None:
    server = http.server.ThreadingHTTPServer((ADDRESS, 0), _Handler)
    server.daemon_threads = True
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(
        server.socket, server_side=True, do_handshake_on_connect=False
    )
    port.send(server.server_address[1])
    server.serve_forever()


class Bench:
    """A pool whose sandboxes reach one HTTPS server."""

    def __init__(self, pool: Pool, proxy: NetworkProxy, authority: str, port: int) -> None:
        self.pool, self.proxy, self.authority, self.port = pool, proxy, authority, port
        self.url = f"https://{ADDRESS}:{port}"
        rules = NetworkPolicy.parse("allowlist", [f"{ADDRESS}:{port}"])
        self.network = Network((Layer("tenant", rules),), Budget(bytes=1 << 50))
        read = NetworkPolicy.parse("allowlist", [f"GET https://{ADDRESS}:{port}"])
        self.opened = Network((Layer("tenant", read),), Budget(bytes=1 << 50))

    async def run(
        self,
        code: str,
        seconds: float = 120,
        *,
        networked: bool = True,
        network: Network | None = None,
    ) -> Any:
        """Run code in a sandbox; its result."""
        sandbox: Sandbox = await self.pool.acquire("python")
        try:
            if networked:
                await sandbox.network.open(self.proxy, network or self.network, "bench")
            files = (InputFile(AUTHORITY, self.authority.encode()),)
            return await sandbox.run(Job(code, timeout=seconds, files=files))
        finally:
            await self.pool.release(sandbox)

    async def inside(self, path: str, calls: int, kind: str = "tunnel") -> list[float]:
        given = json.dumps([self.url + path, kind, calls])
        network = self.opened if kind == "opened" else self.network
        result = await self.run(CLIENT.replace("ARGUMENTS", given), network=network)
        if not result.stdout:
            raise RuntimeError(result.stderr)
        return list(json.loads(result.stdout))

    async def outside(self, folder: Path, path: str, calls: int) -> list[float]:
        given = json.dumps([self.url + path, "", calls])
        process = await asyncio.create_subprocess_exec(
            *("/usr/bin/python3", "-c", CLIENT, given), cwd=folder, stdout=subprocess.PIPE
        )
        try:
            output, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return list(json.loads(output))


@asynccontextmanager
async def opened(kind: str, folder: Path, capacity: int) -> AsyncIterator[Bench]:
    """A pool of this launcher with a server that its sandboxes may reach."""
    authority = Authority()
    (folder / AUTHORITY).write_text(authority.pem)
    certificate = authority.issue(folder, addresses=[ADDRESS]).path
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.Process(target=_serve, args=(str(certificate), theirs), daemon=True)
    server.start()
    (folder / "run").mkdir()
    choice = LauncherChoice(kind, folder, "bench", "ptrace")
    _, launcher, _ = await choice.open(ServiceSettings())
    limits = replace(SandboxLimits(), memory_bytes=256 << 20)
    templates = {"python": make_template("python", "python", launcher, limits)}
    pool = Pool(launcher, templates, PoolSettings(2, capacity, capacity, 120))
    pool.open()
    proxy = NetworkProxy(["127.0.0.0/8"], str(folder / AUTHORITY))
    try:
        yield Bench(pool, proxy, authority.pem, ours.recv())
    finally:
        await pool.close()
        launcher.close()
        await proxy.close()
        server.kill()


async def memory_of_many(bench: Bench, counts: tuple[int, int]) -> dict[int, int]:
    """KiB of the proxy while so many sandboxes have an open connection each."""
    found = {}
    for count in counts:
        host = f"{ADDRESS}:{bench.port}"
        code = HOLD.replace("HOST", host).replace("SECONDS", "15")
        runs = [asyncio.create_task(bench.run(code, 60)) for _ in range(count)]
        await asyncio.sleep(10)
        pid = bench.proxy.pid
        smaps = Path(f"/proc/{pid}/smaps_rollup").read_text()
        found[count] = next(int(line.split()[1]) for line in smaps.splitlines() if "Pss:" in line)
        done = await asyncio.gather(*runs)
        if any(each.exit_code for each in done):
            print("some connections were refused", file=sys.stderr)
    return found


async def neighbours(bench: Bench, folder: Path, calls: int) -> tuple[float, float, float]:
    """p50 of short runs, in ms: alone, while four sandboxes download, and while four programs
    outside of sandboxes do."""

    async def short() -> float:
        taken = []
        for _ in range(calls):
            began = time.perf_counter()
            await bench.run("print(1)", networked=False)
            taken.append((time.perf_counter() - began) * 1000)
            await asyncio.sleep(0.05)
        return statistics.median(taken)

    async def beside(download: Callable[[], Coroutine[Any, Any, Any]]) -> float:
        downloads = [asyncio.create_task(download()) for _ in range(4)]
        await asyncio.sleep(2)
        found = await short()
        for each in downloads:
            each.cancel()
        await asyncio.gather(*downloads, return_exceptions=True)
        return found

    alone = await short()
    inside = await beside(lambda: bench.inside("/large", 1000))
    return alone, inside, await beside(lambda: bench.outside(folder, "/large", 1000))


async def measure(kind: str, calls: int) -> None:
    """Print all rows of a launcher."""
    with tempfile.TemporaryDirectory(prefix="cofferdam-bench-") as name:
        folder = Path(name)
        async with opened(kind, folder, 210) as bench:
            for title, path, count in (
                ("a new HTTPS connection", "/", calls),
                ("100 MB", "/large", 5),
            ):
                direct: list[float] = []
                taken: dict[str, list[float]] = {"tunnel": [], "opened": []}
                for _ in range(3):
                    direct += await bench.outside(folder, path, count)
                    for way, found in taken.items():
                        found += await bench.inside(path, count, way)
                theirs = statistics.median(direct)
                for way, found in taken.items():
                    ours = statistics.median(found)
                    print(
                        f"{kind}: {title}, {way}: {ours * 1000:.2f} ms, direct "
                        f"{theirs * 1000:.2f} ms, ratio {ours / theirs:.2f}"
                    )
            alone, inside, outside = await neighbours(bench, folder, calls)
            print(
                f"{kind}: a neighbour's run: alone {alone:.1f} ms, during four downloads "
                f"{inside:.1f} ms, ratio {inside / alone:.2f}; during four outside of sandboxes "
                f"{outside:.1f} ms, ratio {outside / alone:.2f}"
            )
            for count, kib in (await memory_of_many(bench, (10, 200))).items():
                print(f"{kind}: the proxy with {count} sandboxes connected: {kib / 1024:.1f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launchers", nargs="+", default=["bubblewrap"])
    parser.add_argument("--calls", type=int, default=50, help="calls of each kind in a round (50)")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    for kind in options.launchers:
        asyncio.run(measure(kind, options.calls))


if __name__ == "__main__":
    main()
