"""A launcher whose guests are real processes that speak the protocol as a test wants them to."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field

from providers.errors import CreationFailed
from providers.runtime.pool.launcher import Guest, Launcher, ProcessGuest
from providers.runtime.pool.template import Template

PRELUDE = """
import json, os, struct, sys, time

def frame(header, *parts):
    text = json.dumps({**header, "parts": [[name, len(content)] for name, content in parts]}).encode()
    return struct.pack(">I", len(text)) + text + b"".join(content for _, content in parts)

def say(data):
    while data:
        data = data[os.write(1, data):]

def exactly(size):
    data = b""
    while len(data) < size:
        more = os.read(0, size - len(data))
        if not more:
            sys.exit()
        data += more
    return data

def listen():
    header = json.loads(exactly(struct.unpack(">I", exactly(4))[0]))
    return header, {name: exactly(size) for name, size in header["parts"]}

def answer(header, *parts, **changes):
    fields = {"type": "result", "id": header["id"], "exit_code": 0, "seconds": 0.1}
    return frame({**fields, **changes}, *parts)

READY = frame({"type": "ready"})
"""

# Marks the processes of a test's guests on this machine.
MARK = "impostor-guest"

OBEDIENT = """
say(READY)
header, parts = listen()
say(answer(header, ("stdout", parts["code"])))
time.sleep(1000)
"""


@dataclass
class Impostor(Launcher):
    """Each guest runs `script` after the prelude. `failing` starts fail; `broken` ones raise."""

    script: str = OBEDIENT
    failing: str = ""
    broken: Exception | None = None
    attempts: int = 0
    runtime: str = "impostor"
    enforced_by: dict[str, str] = field(default_factory=dict)
    rest_seconds: float = 0.015
    guests: list[ProcessGuest] = field(default_factory=list)

    async def prepare(self) -> None:
        """Nothing is needed."""

    def languages(self) -> list[str]:
        return ["python"]

    def interpreter(self, language: str, template: str = "") -> str | None:
        return sys.executable

    def node_runner(self) -> list[str]:
        return [""]

    def close(self) -> None:
        """Nothing is held."""

    async def start(self, template: Template) -> Guest:
        self.attempts += 1
        if self.broken:
            raise self.broken
        if self.failing:
            raise CreationFailed(self.failing)
        program = PRELUDE + textwrap.dedent(self.script)
        guest = ProcessGuest([sys.executable, "-I", "-S", "-c", program, MARK], None)
        self.guests.append(guest)
        return guest
