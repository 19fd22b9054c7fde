"""What a program finds that has taken over the proxy's process, and what its end leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from providers.errors import InvalidConfiguration
from providers.network import Attempt, Layer, Network, NetworkPolicy
from providers.runtime.network.client import NetworkProxy
from tests.attacks.network.proxied import (
    ADDRESS,
    BOUND_SECONDS,
    Proxied,
    allowing,
    get,
    read_all,
    status_of,
)
from tests.support.waiting import wait_until


class Pool:
    """A proxy process with one gate over a listener."""

    def __init__(self, proxy: NetworkProxy, port: int) -> None:
        self.proxy = proxy
        self.port = port
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.attempts: list[Attempt] = []

    @property
    def pid(self) -> int:
        process = self.proxy._process
        assert process is not None
        return process.pid

    async def open(self) -> Any:
        network = allowing(f"{ADDRESS}:{self.port}")
        return await self.proxy.open(self.listener, network, "alice", self.attempts.append)

    async def ask(self, host: str = ADDRESS) -> int:
        def talk() -> int:
            with socket.create_connection(self.listener.getsockname(), BOUND_SECONDS) as sock:
                sock.sendall(get(host, self.port))
                return status_of(read_all(sock))

        return await asyncio.get_running_loop().run_in_executor(None, talk)


@asynccontextmanager
async def pool_of(port: int) -> AsyncIterator[Pool]:
    proxy = NetworkProxy([ADDRESS])
    pool = Pool(proxy, port)
    try:
        yield pool
    finally:
        await proxy.close()
        pool.listener.close()


def status(pid: int) -> dict[str, list[str]]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_it_has_no_privileges(proxied: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "a secret of the pool")
    port = proxied.upstream().port

    async def look() -> None:
        async with pool_of(port) as pool:
            await pool.open()
            # It serves, so that it has given them up.
            assert await pool.ask() == 200
            found = status(pool.pid)
            user = "65534" if os.geteuid() == 0 else str(os.geteuid())
            assert found["Uid"] == [user] * 4
            assert found["NoNewPrivs"] == ["1"]
            for name in ("CapEff", "CapPrm", "CapInh", "CapAmb"):
                assert int(found[name][0], 16) == 0
            if os.geteuid() == 0:
                assert found["Groups"] == []
                assert found["Gid"] == ["65534"] * 4
            limits = Path(f"/proc/{pool.pid}/limits").read_text()
            (core,) = (line for line in limits.splitlines() if line.startswith("Max core"))
            assert core.split()[4:6] == ["0", "0"]
            if os.geteuid() == 0:
                environment = Path(f"/proc/{pool.pid}/environ").read_bytes()
                assert b"secret" not in environment

    run(look())


def test_it_ends_with_its_pool() -> None:
    program = f"""
import asyncio, socket
from providers.network import Layer, Network, NetworkPolicy
from providers.runtime.network.client import NetworkProxy

async def main():
    proxy = NetworkProxy()
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    network = Network((Layer("tenant", NetworkPolicy.parse("open")),))
    gate = await proxy.open(listener, network, "alice", print)
    await gate.sync()
    print(proxy._process.pid, flush=True)
    await asyncio.sleep({BOUND_SECONDS})

asyncio.run(main())
"""
    folder = Path(__file__).parents[3]
    with subprocess.Popen([sys.executable, "-c", program], cwd=folder, stdout=-1) as child:
        assert child.stdout is not None
        pid = int(child.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        child.kill()

    def has_ended() -> bool:
        try:
            return status(pid)["State"][0] == "Z"
        except (FileNotFoundError, ProcessLookupError):
            return True

    wait_until(has_ended, BOUND_SECONDS)


def test_gates_work_again_after_it_was_killed(proxied: Proxied) -> None:
    port = proxied.upstream().port

    async def kill() -> None:
        async with pool_of(port) as pool:
            gate = await pool.open()
            assert await pool.ask() == 200
            first = pool.pid
            os.kill(first, signal.SIGKILL)
            assert await pool.ask() == 200
            assert pool.pid != first
            assert await pool.ask("127.0.0.1") == 403
            await gate.close()
            whys = [each.why for each in pool.attempts]
            assert whys == ["", "proxy_ended", "", "not_allowed"]

    run(kill())


def test_a_gate_that_was_closed_at_once_takes_nothing_from_the_next(proxied: Proxied) -> None:
    port = proxied.upstream().port

    async def reopen() -> None:
        async with pool_of(port) as pool:
            for _ in range(10):
                await (await pool.open()).close()
            gate = await pool.open()
            assert [await pool.ask() for _ in range(10)] == [200] * 10
            await gate.close()
            assert len(pool.attempts) == 10

    run(reopen())


def test_lists_as_long_as_they_may_be_are_held_and_longer_ones_are_refused(
    proxied: Proxied,
) -> None:
    lines = [f"h{number}.example:8{number:03} # {'😀' * 970}" for number in range(500)]
    layer = Layer("tenant", NetworkPolicy.parse("allowlist", lines))

    async def open_both() -> None:
        proxy = NetworkProxy()
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            gate = await proxy.open(first, Network((layer,) * 3), "alice", lambda _: None)
            await gate.change(Network((layer,) * 2))
            with pytest.raises(InvalidConfiguration) as refused:
                await proxy.open(second, Network((layer,) * 6), "alice", lambda _: None)
            assert refused.value.field == "network"
            other = await proxy.open(second, allowing("good.example"), "bob", lambda _: None)
            async with asyncio.timeout(30):
                await other.sync()
                await other.close()
                await gate.close()
        await proxy.close()

    asyncio.run(open_both())
