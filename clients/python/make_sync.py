"""Generate cofferdam/_sync from cofferdam/_async: the same client without `await`.

python make_sync.py            (then `ruff check --fix` and `ruff format`)
"""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "cofferdam"
HEAD = "# Generated from cofferdam/_async by make_sync.py: do not edit.\n"
WORDS = {
    "async def ": "def ",
    "async with ": "with ",
    "async for ": "for ",
    "await ": "",
    "_async": "_sync",
    "asyncio": "time",
    "AsyncIterator": "Iterator",
    "AsyncClient": "Client",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "anext(": "next(",
    "aiter_bytes": "iter_bytes",
    "aclose": "close",
    "aread": "read",
}
_ANY = re.compile("|".join(map(re.escape, sorted(WORDS, key=len, reverse=True))))
_CLASS = re.compile(r"\bAsync(?=[A-Z])")


def made() -> dict[str, str]:
    """The text of each module, before it is formatted."""
    return {
        path.name: HEAD + _CLASS.sub("", _ANY.sub(lambda found: WORDS[found[0]], path.read_text()))
        for path in sorted((PACKAGE / "_async").glob("*.py"))
    }


if __name__ == "__main__":
    (PACKAGE / "_sync").mkdir(exist_ok=True)
    for name, text in made().items():
        (PACKAGE / "_sync" / name).write_text(text)
