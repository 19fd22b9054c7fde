"""JSON that a caller sent, read within bounds: what is large in a process of its own.

What comes back of that process are few large texts and a bounded number of values, so that nothing
here holds up the threads beside it for long, whatever was sent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any, BinaryIO

from providers import json_values
from providers.json_values import BASE64, NO_BASE64, TooMuch
from providers.threads import reset_after_fork

MOST_VALUES = 100_000
# More than arguments may have, so that it is said of them.
MOST_DEPTH = 400
MOST_TEXT = 8 * 1024 * 1024
# Of what is read at once, without a process.
SMALL_BYTES = 64 * 1024
PLAIN_BYTES = 1024 * 1024
PLAIN_MARKS = 16_000

_COMMAND = (sys.executable, "-I", "-S", json_values.__file__)
_MOST_SAID = 8 * 1024 * 1024


class CannotRead(Exception):
    """There is no process or no room on the disk for it now."""


@dataclass(frozen=True)
class Bounds:
    """Of a JSON text: bytes, values, of which a list and an object count twice, and levels."""

    bytes: int
    values: int
    depth: int = MOST_DEPTH


LARGEST = Bounds(1 << 40, MOST_VALUES)


@dataclass(frozen=True)
class Base64:
    """A long text that was to be base64, decoded; None where it was none, with the `problem`."""

    content: bytes | None
    problem: str = ""


@dataclass(frozen=True)
class Read:
    """A JSON text's value, and how many values it has at most."""

    value: Any
    values: int


def read_text(text: bytes, bounds: Bounds = LARGEST) -> Read:
    """The value of a text, read here. Raises TooMuch, and ValueError for what is no JSON."""
    if len(text) > bounds.bytes:
        raise TooMuch(f"Must be at most {bounds.bytes} bytes")
    text = json_values.as_utf8(text)
    values = json_values.check(text, bounds.values, bounds.depth)
    try:
        return Read(json.loads(text, parse_constant=_refuse_constant), values)
    except RecursionError:
        raise ValueError(f"nested more than {bounds.depth} levels deep") from None


def is_plain(text: bytes) -> bool:
    """Whether reading it here takes some milliseconds at most."""
    if len(text) <= SMALL_BYTES:
        return True
    return len(text) <= PLAIN_BYTES and sum(map(text.count, _MARKS)) <= PLAIN_MARKS


def read_file(
    body: Any, size: int, encoded: Sequence[str] = (), most_text: int = MOST_TEXT
) -> Read:
    """The value of the text in a temporary file of so many bytes. Long texts of its files with the
    names `encoded` are Base64. Waits, and may be called by any thread.

    Raises TooMuch, ValueError for what is no JSON, and CannotRead.
    """
    if size <= PLAIN_BYTES:
        body.seek(0)
        text = body.read()
        if is_plain(text):
            return read_text(text)
    try:
        body.flush()
        # A file that is still in memory goes to the disk by this.
        return _read_apart(body.fileno(), encoded, most_text)
    except OSError as error:
        raise CannotRead(str(error)) from error


def read_bytes(text: bytes, encoded: Sequence[str] = (), most_text: int = MOST_TEXT) -> Read:
    """As `read_file`, of a text that is in memory."""
    if is_plain(text):
        return read_text(text)
    with TemporaryFile() as body:
        body.write(text)
        return read_file(body, len(text), encoded, most_text)


def _read_apart(body: int, encoded: Sequence[str], most_text: int) -> Read:
    with TemporaryFile() as told:
        reader = _living() or _Reader()
        question = (MOST_VALUES, MOST_DEPTH, most_text, tuple(encoded))
        is_read = reader.read(json.dumps(question).encode(), body, told.fileno())
        _idle.append(reader)
        if not is_read:
            raise TooMuch("Takes more time or memory to read than allowed")
        return _read_answer(told)


class _Reader:
    """A process that forks another for each text. It ends when its socket does, so that it does not
    outlive this one, which need not fork: that would hold up all its threads."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        with its:
            self._process = subprocess.Popen(
                _COMMAND,
                stdin=its.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={"PYTHONHASHSEED": "random"},
            )

    def lives(self) -> bool:
        return self._process.poll() is None

    def read(self, question: bytes, body: int, told: int) -> bool:
        """Whether the answer is in the file `told`. Raises OSError where the process has ended."""
        try:
            socket.send_fds(self._socket, [question], [body, told])
            answer = self._socket.recv(1)
        except OSError:
            self.end()
            raise
        if not answer:
            self.end()
            raise OSError("the process that reads has ended")
        return answer == json_values.DONE

    def end(self) -> None:
        self._socket.close()
        with self._process as ended:
            ended.kill()


def _living() -> _Reader | None:
    """One that waits. What has ended it meanwhile says nothing of the next text."""
    with suppress(IndexError):
        while True:
            if (reader := _idle.pop()).lives():
                return reader
            reader.end()
    return None


def _read_answer(told: BinaryIO) -> Read:
    """It comes from a process that has read hostile text: nothing of it is more than a value."""
    told.seek(0)
    line = told.readline(_MOST_SAID)
    said = json.loads(line)
    if problem := said.get("too_much"):
        raise TooMuch(str(problem))
    if problem := said.get("problem"):
        raise ValueError(str(problem))
    at = len(line) + said["rest"]
    value = json.loads(os.pread(told.fileno(), said["rest"], len(line)))
    for path, kind, length in said["parts"]:
        # Of a file a whole object is read at once, without the interpreter's lock.
        content = os.pread(told.fileno(), length, at)
        at += length
        part: Any = Base64(content)
        if kind == NO_BASE64:
            part = Base64(None, content.decode())
        elif kind != BASE64:
            part = content.decode("utf-8", "surrogatepass")
        value = _placed(value, path, part)
    return Read(value, said["values"])


def _placed(value: Any, path: list[str | int], part: Any) -> Any:
    if not path:
        return part
    place = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = part
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_MARKS = (b",", b"[", b"{", b"\\")
_idle: list[_Reader] = []
# The parent's processes answer the parent.
reset_after_fork(_idle.clear)
