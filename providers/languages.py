"""Every language there is: what it is called, and what is known of it wherever it runs.

One with an `interpreter` runs in sandboxes of our own, by the runner that the guest has for it. The
others are for services that bring their own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

VERSION_SECONDS = 10


@dataclass(frozen=True)
class Language:
    """`name` is the one we use; `aliases` are further names, of which `offered` ones are listed.

    `lexer` is Pygments' name for it. `probe` is a program that prints 42, empty where there is none
    that runs everywhere. `interpreters` are the commands it may have, the first that is there.
    `program` is the file that code is written to: with an interpreter and that name, a language
    needs no runner. `image` is the one of its own that Docker sandboxes are started from; without
    one, Python's.
    """

    name: str
    aliases: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    lexer: str = "text"
    probe: str = ""
    interpreters: tuple[str, ...] = ()
    has_main: bool = True
    program: str = ""
    image: str = ""


TABLE = (
    Language(
        "python",
        ("py", "python3"),
        (),
        "python",
        "print(6 * 7)",
        ("python3",),
        program="main.py",
        image="cofferdam/python",
    ),
    Language(
        "nodejs",
        ("javascript", "js", "node"),
        ("javascript",),
        "javascript",
        "console.log(6 * 7)",
        ("node", "nodejs"),
        program="main.js",
        image="cofferdam/nodejs",
    ),
    Language(
        "bash",
        ("sh", "shell"),
        (),
        "bash",
        "echo $((6 * 7))",
        ("bash",),
        has_main=False,
        program="main.sh",
    ),
    Language("typescript", ("ts",), (), "typescript", "console.log(6 * 7)"),
    Language("r", (), (), "r", "cat(6 * 7)"),
    Language("java", (), (), "java", "System.out.println(6 * 7);"),
    Language("go", ("golang",), (), "go"),
)

_BY_NAME = {name: each for each in TABLE for name in (each.name, *each.aliases)}

# Those that run in sandboxes of our own.
OURS = tuple(each.name for each in TABLE if each.interpreters)


def language_of(name: str) -> Language | None:
    """The language of this name or alias."""
    return _BY_NAME.get(name)


def normalize_language(name: str) -> str:
    """The one name we use for a language: `javascript` and `nodejs` are the same interpreter."""
    found = _BY_NAME.get(name)
    return found.name if found else name


def offered_names(names: Iterable[str]) -> list[str]:
    """These languages, and the further names that callers are told of."""
    names = list(names)
    known = [_BY_NAME[name] for name in names if name in _BY_NAME]
    return names + [alias for each in known for alias in each.offered]


def probe_of(names: Iterable[str]) -> tuple[str, str] | None:
    """The first of these names that there is a probe for, and the probe."""
    for name in names:
        found = _BY_NAME.get(name)
        if found and found.probe:
            return name, found.probe
    return None


def version_of(language: str, interpreter: str) -> str:
    """Such as `python 3.11.2`, as this machine's interpreter says, empty where it does not."""
    try:
        modified = Path(interpreter).stat().st_mtime_ns
    except OSError:
        return ""
    return _asked(language, interpreter, modified)


@lru_cache(maxsize=64)
def _asked(language: str, interpreter: str, modified: int) -> str:
    try:
        asked = subprocess.run(
            [interpreter, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=VERSION_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return version_in(language, asked.stdout.decode("utf-8", "replace"))


def version_in(language: str, text: str) -> str:
    """The language and the version that its interpreter has told."""
    found = re.search(r"\d+(\.\d+)+", text[:1000])
    return f"{language} {found[0]}" if found else ""
