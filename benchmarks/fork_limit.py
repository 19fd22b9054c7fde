"""What a run in a warm container cannot undercut: its way there and back, and a bare fork.

In one container nothing is run at all, in the others a child is forked for each line that comes
in, runs the program with its output in a pipe, and ends. Nothing is checked, bounded or cleaned.
One container per caller, spoken to over its attach stream.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import docker

from benchmarks.measure import Call, Figures, measure

IMAGE = "cofferdam/python"

_SERVER = """
import os
def run(code):
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(into, 1)
        exec(compile(code, "main.py", "exec"), {"__name__": "__main__"})
        os._exit(0)
    os.close(into)
    text = b""
    while data := os.read(out, 65536):
        text += data
    os.close(out)
    os.waitpid(pid, 0)
    return text
while line := os.read(0, 65536):
    os.write(1, b"1\\n" if line == b"echo" else run(line))
"""

_PROGRAM = b"import os; os.write(1, b'1\\n')"


@contextmanager
def servers(runtime: str, count: int) -> Iterator[list[socket.socket]]:
    """So many containers with the server in them; the sockets of their attach streams."""
    client = docker.from_env()
    containers = []
    streams = []
    command = ["python3", "-I", "-S", "-c", _SERVER]
    options = {"runtime": runtime, "network_mode": "none", "stdin_open": True}
    try:
        for _ in range(count):
            container = client.containers.create(IMAGE, command, **options)
            containers.append(container)
            stream = container.attach_socket(params={"stdin": 1, "stdout": 1, "stream": 1})
            streams.append(stream._sock)
            container.start()
        yield streams
    finally:
        for stream in streams:
            stream.close()
        for container in containers:
            container.remove(force=True)


def caller(stream: socket.socket, line: bytes) -> Call:
    """Sends the line and waits for what it printed, a 1."""

    def call() -> None:
        stream.sendall(line)
        answer = b""
        # The engine puts 8 bytes before each piece of output.
        while len(answer) < 10:
            answer += stream.recv(4096)
        if not answer.endswith(b"1\n"):
            raise RuntimeError(f"unexpected answer: {answer!r}")

    return call


def fork_limit(runtime: str, calls: int) -> list[Figures]:
    """The way alone, one fork at a time, and as many as keep both processors busy."""
    return [
        _measure("attach stream, there and back", runtime, b"echo", 1, calls),
        _measure("fork per run, over the attach stream", runtime, _PROGRAM, 1, calls),
        _measure("fork per run, over the attach stream", runtime, _PROGRAM, 4, 4 * calls),
    ]


def _measure(name: str, runtime: str, line: bytes, count: int, calls: int) -> Figures:
    with servers(runtime, count) as streams:
        left = list(streams)
        return measure(name, lambda: caller(left.pop(), line), callers=count, calls=calls)
