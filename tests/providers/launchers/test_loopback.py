"""A program reaches a server of its own, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.support.docker_engine import Containers
from tests.support.sandboxes import Local, LocalProcess
from tests.support.without_root import without_root

OWN_SERVER = """
import socket, threading
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"), (0, "localhost")):
    family = family or socket.AF_INET
    with socket.create_server((host, 5000), family=family) as server:
        def answer():
            connection, _ = server.accept()
            connection.sendall(b"served")
            connection.close()
        thread = threading.Thread(target=answer)
        thread.start()
        with socket.create_connection((host, 5000), timeout=60) as client:
            print(client.recv(100).decode())
        thread.join()
"""


@pytest.fixture(scope="module")
def ordinary() -> Iterator[LocalProcess]:
    require("bwrap")
    with without_root(launcher="bubblewrap", pool_size=1) as process:
        yield process


def test_a_program_reaches_its_own_server(local: Local) -> None:
    result = local.run(OWN_SERVER)
    assert result.stdout == "served\n" * 3, result.stderr


def test_a_program_reaches_its_own_server_without_root(ordinary: LocalProcess) -> None:
    result = ordinary.run(OWN_SERVER)
    assert result["stdout"] == "served\n" * 3, result["stderr"]


def test_a_program_in_a_container_reaches_its_own_server(containers: Containers) -> None:
    # Engines turn IPv6 off in containers.
    result = containers.run(OWN_SERVER.replace('(socket.AF_INET6, "::1"), ', ""))
    assert result.stdout == "served\n" * 2, result.stderr


def test_javascript_reaches_its_own_server(bubblewrap: Local) -> None:
    require("node")
    code = """
        const http = require('http')
        const server = http.createServer((_, answer) => answer.end('served')).listen(0, '127.0.0.1', async () => {
          console.log(await (await fetch(`http://127.0.0.1:${server.address().port}`)).text())
          server.close()
        })
    """
    assert bubblewrap.run(code, "nodejs").stdout == "served\n"
