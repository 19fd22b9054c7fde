"""How often code ran, counted outside of the service: whatever anybody says."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Protocol

# Of a process's name the kernel keeps 15 characters.
_NAME_CHARACTERS = 15
_LOOK_SECONDS = 0.05
# Long enough to be seen on a busy machine.
_LEAST_SECONDS = 0.5

_WRITES = """
import os, time
out = os.open({path!r}, os.O_WRONLY | os.O_APPEND)
os.write(out, b"{token} began\\n")
time.sleep({seconds})
os.write(out, b"{token} ended\\n")
print("{token}")
"""

_SHOWS = """
import time
with open("/proc/self/comm", "w") as name:
    name.write("{name}")
time.sleep({seconds})
print("{token}")
"""


class Witness(Protocol):
    def code(self, token: str, seconds: float) -> str:
        """A program that can be counted, and takes about so long."""

    def began(self) -> dict[str, int]:
        """How often the program of each token began."""

    def ended(self) -> dict[str, int] | None:
        """How often it came to its end; None where that cannot be seen."""

    def running(self) -> list[str]:
        """What of it runs now, as far as that can be seen."""

    def stop(self) -> None: ...


class Written:
    """The code writes into a file: exact, and only where nothing keeps it from that."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        folder.chmod(0o777)
        self._path = folder / "witness"
        self._path.touch()
        self._path.chmod(0o666)

    def code(self, token: str, seconds: float) -> str:
        return _WRITES.format(path=str(self._path), token=token, seconds=seconds)

    def began(self) -> dict[str, int]:
        return self._counted("began")

    def ended(self) -> dict[str, int]:
        return self._counted("ended")

    def running(self) -> list[str]:
        return []

    def stop(self) -> None:
        """Nothing of it runs."""

    def _counted(self, wanted: str) -> dict[str, int]:
        counts: dict[str, int] = {}
        for line in self._path.read_text().splitlines():
            token, _, what = line.partition(" ")
            if what == wanted:
                counts[token] = counts.get(token, 0) + 1
        return counts


class Seen:
    """The code gives its process a name, which is looked for in /proc: through every wall of a
    container. Two runs of the same are two processes; one that was too short for a look is missed.
    """

    def __init__(self) -> None:
        self._found: dict[str, set[tuple[str, str]]] = {}
        self._tokens: dict[str, str] = {}
        self._goes_on = True
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def code(self, token: str, seconds: float) -> str:
        name = f"c{token}"[:_NAME_CHARACTERS]
        self._tokens[name] = token
        return _SHOWS.format(name=name, token=token, seconds=max(seconds, _LEAST_SECONDS))

    def began(self) -> dict[str, int]:
        return {token: len(seen) for token, seen in self._found.items()}

    def ended(self) -> None:
        return None

    def running(self) -> list[str]:
        return [token for _, token in self._look()]

    def stop(self) -> None:
        self._goes_on = False
        self._thread.join(10)

    def _work(self) -> None:
        while self._goes_on:
            for process, token in self._look():
                self._found.setdefault(token, set()).add(process)
            time.sleep(_LOOK_SECONDS)

    def _look(self) -> list[tuple[tuple[str, str], str]]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                stat = (folder / "stat").read_text()
            except OSError:
                continue
            name = stat[stat.index("(") + 1 : stat.rindex(")")]
            if token := self._tokens.get(name):
                started_at = stat[stat.rindex(")") + 2 :].split()[19]
                found.append(((folder.name, started_at), token))
        return found
