"""Our programs for a container, which has no file of ours: they go in as arguments and as text."""

from __future__ import annotations

from providers.runtime.pool.guest_files import INSIDE, PACKAGE, SOURCES

_RUNNER = f"{INSIDE}/{PACKAGE}/node_runner.js"

# Node gets its runner as an argument and gives it the name it would have. Without execArgv the
# program's own forks are not started in this way.
_NODE_LOADER = (
    "const Module = require('module'); const source = process.argv.pop(); process.execArgv = []; "
    f"const runner = new Module('{_RUNNER}', null); runner.filename = '{_RUNNER}'; "
    f"runner.paths = []; runner._compile(source, '{_RUNNER}')"
)


def node_runner() -> list[str]:
    """The arguments that give Node.js the text of our runner in place of its path."""
    return ["-e", _NODE_LOADER, text_of("node_runner.js")]


def text_of(name: str) -> str:
    """One of the guest's files."""
    return SOURCES[name].decode()


def sources() -> dict[str, tuple[str, str]]:
    """The guest's modules: what tracebacks call each, and its text."""
    return {
        stem: (f"{INSIDE}/{PACKAGE}/{name}", text_of(name))
        for name in SOURCES
        if (stem := name.removesuffix(".py")) != name
        and stem not in ("__init__", "boot", "probe", "zygote")
    }
