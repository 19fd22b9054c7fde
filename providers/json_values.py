"""The values of a JSON text: counted before any is made, and its long texts taken out.

This file runs as a process of its own too (`json_reading`): what it costs to read a hostile text is
then not the service's. It knows the standard library only.
"""

from __future__ import annotations

import binascii
import json
import os
import re
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

# Bytes from which on a text is taken out, and of all that is left then.
LONG_TEXT = 16 * 1024
MOST_REST = 6 * 1024 * 1024
# Of the process. It is for the work of a second.
CPU_SECONDS = 20
WALL_SECONDS = 60
MEMORY_BYTES = 256 * 1024 * 1024
MEMORY_TIMES = 6

DONE, FAILED = b"+", b"-"
_MESSAGE_BYTES = 64 * 1024

TEXT, BASE64, NO_BASE64 = "text", "base64", "no base64"
Path = tuple[str | int, ...]
Part = tuple[Path, str, bytes]

# One without its end takes the rest of the text with it: otherwise the rest would be searched anew
# from each of its quotes.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+("?)'
_STRINGS = re.compile(_STRING, re.DOTALL)
_MARKS = re.compile(_STRING + rb"|[\[\]{},]", re.DOTALL)
_NO_BASE64_CHARACTER = re.compile(r"[^A-Za-z0-9+/=\r\n]")
_COMMA, _OPENING, _CLOSING = ord(","), b"[{", b"]}"


class TooMuch(ValueError):
    """It is JSON, and more of it than is read."""


def as_utf8(text: bytes) -> bytes:
    """The same text in UTF-8. Raises ValueError."""
    encoding = json.detect_encoding(text)
    if encoding == "utf-8":
        return text
    return text.decode(encoding, "surrogatepass").encode("utf-8", "surrogatepass")


def check(text: bytes, most_values: int, most_depth: int) -> int:
    """How many values a text in UTF-8 has at most. A list and an object count twice.

    Raises TooMuch for more than there may be, and ValueError for a nesting that is too deep.
    """
    opening = text.count(b"[") + text.count(b"{")
    values = 1 + text.count(b",") + opening
    if values <= most_values and opening <= most_depth:
        return values
    values, depth = 1, 0
    for found in _MARKS.finditer(text):
        mark = text[found.start()]
        if mark == _COMMA:
            values += 1
        elif mark in _OPENING:
            values += 1
            depth += 1
            if depth > most_depth:
                raise ValueError(f"nested more than {most_depth} levels deep")
        elif mark in _CLOSING:
            depth -= 1
        if values > most_values:
            raise TooMuch(f"Must contain at most {most_values} values")
    return values


def taken_apart(
    text: bytes, most_values: int, most_text: int, encoded: set[str]
) -> tuple[bytes, list[Part]]:
    """The value of a text that was checked, compact and with nulls in place of its long texts, and
    these, each with where it belongs. Those of files under the names `encoded` are base64, and
    decoded.

    Raises ValueError for what is no JSON, and TooMuch.
    """
    nonce = os.urandom(16).hex()
    pieces: list[bytes] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for number, found in enumerate(_STRINGS.finditer(text)):
        if number > 2 * most_values:
            # There are more than values with their names: it is no JSON, as is found below.
            break
        start, end = found.span()
        if not found[1]:
            # It is cut off: no JSON, as is found below.
            break
        if end - start > LONG_TEXT:
            pieces += [text[at:start], f'"{nonce}{len(spans)}"'.encode()]
            spans.append((start, end))
            at = end
    rest = b"".join([*pieces, text[at:]]) if spans else text
    try:
        value = json.loads(rest, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        # Its place is another one in what was sent.
        raise ValueError(error.msg if spans else str(error)) from None
    parts, seen = [], memoryview(text)
    for path, number in _places_of(value, nonce) if spans else ():
        start, end = spans[number]
        is_encoded = _is_of_file(path) and path[-1] in encoded
        parts.append((path, *_content(seen[start:end], most_text, is_encoded)))
    for path, _, _ in parts:
        value = _emptied(value, path)
    compact = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    rest = compact.encode("utf-8", "surrogatepass")
    if len(rest) > MOST_REST:
        raise TooMuch(f"Must have at most {MOST_REST} bytes, not counting its long texts")
    return rest, parts


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _places_of(value: Any, nonce: str) -> Iterator[tuple[Path, int]]:
    todo: list[tuple[Path, Any]] = [((), value)]
    while todo:
        path, each = todo.pop()
        if isinstance(each, str):
            if each.startswith(nonce):
                yield path, int(each[len(nonce) :])
        elif isinstance(each, list):
            todo += (((*path, index), child) for index, child in enumerate(each))
        elif isinstance(each, dict):
            for name, child in each.items():
                if name.startswith(nonce):
                    raise TooMuch(f"Names must be shorter than {LONG_TEXT} bytes")
                todo.append(((*path, name), child))


def _is_of_file(path: Path) -> bool:
    """Whether it is of one of the files of a request, or of a request that is to be sent later.

    What has the same name elsewhere is the caller's own value, and stays as it is.
    """
    return path[-3:-2] == ("files",) and path[:-3] in ((), ("request",))


def _content(literal: memoryview, most_text: int, is_encoded: bool) -> tuple[str, bytes]:
    """What a literal of a string stands for."""
    if is_encoded:
        # Base64 has no character that JSON escapes.
        with suppress(ValueError):
            return BASE64, binascii.a2b_base64(literal[1:-1], strict_mode=True)
    content = str(json.loads(bytes(literal))).encode("utf-8", "surrogatepass")
    if is_encoded:
        try:
            return BASE64, binascii.a2b_base64(content.translate(None, b"\r\n"), strict_mode=True)
        except ValueError:
            return NO_BASE64, base64_problem(content.decode("utf-8", "replace")).encode()
    if len(content) > most_text:
        raise TooMuch(f"Must contain no text of more than {most_text} bytes")
    return TEXT, content


def base64_problem(text: str) -> str:
    """Why a text is no base64: where it has a character that is none, or that it is not whole.

    Line breaks do not count.
    """
    if (found := _NO_BASE64_CHARACTER.search(text)) is not None:
        return f"Must be base64: character {found.start() + 1} is {found[0]!a}."
    return "Must be base64: it is incomplete, or has `=` before its end."


def _emptied(value: Any, path: Path) -> Any:
    if not path:
        return None
    place = value
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = None
    return value


def main() -> None:
    """Read one file after another, each in a process of its own that this one forks: it is small,
    and nobody waits for it meanwhile. It ends when its input does.

    A message at the socket that is the input is what `_read` takes, with the file and another for
    the answer; a byte says that the answer is there, or that there is none.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked = socket.socket(fileno=0)
    while True:
        message, files, _, _ = socket.recv_fds(asked, _MESSAGE_BYTES, 2)
        if not message:
            return
        child = os.fork()
        if not child:
            try:
                file, answer = files
                _read(file, answer, *json.loads(message))
                os._exit(0)
            finally:
                os._exit(1)
        for file in files:
            os.close(file)
        _, status = os.waitpid(child, 0)
        asked.send(FAILED if status else DONE)


def _read(
    file: int, answer: int, most_values: int, most_depth: int, most_text: int, encoded: list[str]
) -> None:
    """Write what the text in a file says: a line that says what follows it, the value without its
    long texts, and these."""
    size = os.fstat(file).st_size
    most = MEMORY_BYTES + MEMORY_TIMES * size
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(WALL_SECONDS)
    os.nice(5)
    rest, parts = b"", list[Part]()
    said: dict[str, Any]
    try:
        text = as_utf8(_all_of(file, size))
        values = check(text, most_values, most_depth)
        rest, parts = taken_apart(text, most_values, most_text, set(encoded))
        lengths = [(path, kind, len(content)) for path, kind, content in parts]
        said = {"values": values, "rest": len(rest), "parts": lengths}
    except MemoryError:
        said = {"too_much": "Takes more memory to read than allowed"}
    except TooMuch as error:
        said = {"too_much": str(error)}
    except (ValueError, RecursionError) as error:
        said = {"problem": str(error)[:500]}
    with open(answer, "wb") as out:
        out.write(json.dumps(said).encode() + b"\n")
        if "values" in said:
            out.write(rest)
            for _, _, content in parts:
                out.write(content)


def _all_of(file: int, size: int) -> bytes:
    """All of it, wherever whoever else has the file open has come in it."""
    pieces, at = [], 0
    while piece := os.pread(file, max(1, size - at), at):
        pieces.append(piece)
        at += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


if __name__ == "__main__":
    main()
