"""Advice for who misses a package: why it cannot be installed, what is there, who adds more.

It is found in what a program put out, which may say anything: it is advice, and decides nothing.
"""

import os
import sys

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from .cell import Cell
    from .request import Run

# Of the end of an output: a traceback, or what pip says last.
LOOKED_AT_BYTES = 8192
# Packages that are named, those first that programs ask for most.
MOST_NAMED = 15
_FIRST = (
    *("numpy", "pandas", "matplotlib", "scipy", "requests", "httpx", "openpyxl", "pillow"),
    *("beautifulsoup4", "lxml", "plotly", "scikit-learn", "sympy"),
)

# What the tools that install say where there is no network, and a shell where there is no tool.
_INSTALLS = (
    rb"ERROR: (Could not find a version that satisfies|No matching distribution found for)",
    rb"error: externally-managed-environment",
    rb"No module named '?(pip|ensurepip)\b",
    rb"\b(pip3?|uv|conda|npm|npx|yarn|pnpm): (command )?not found",
    rb"\bpip3? install\b.*(not found|No such file)",
    rb"No such file or directory: '(pip3?|uv|conda|npm)'",
    rb"npm (ERR!|error) .*(ENOTFOUND|EAI_AGAIN|ENETUNREACH)",
)
_PYTHON = rb"^ModuleNotFoundError: No module named '([^'\n]{1,200})'"
_NODE = rb"Cannot find (?:module|package) '([^'./\n][^'\n]{0,200})'"
_COMMAND_LINE = rb": No module named ([\w.]{1,200})\s*$"


def tell(run: "Run | Cell") -> None:
    """Put a line of advice to what a run has put out, where it missed a package."""
    told = advice(run.exit_code, run.stdout.content, run.stderr.content)
    if told:
        run.stderr.add(told)


def advice(exit_code: "int | None", stdout: bytes, stderr: bytes) -> bytes:
    """A line for the end of stderr, empty where nothing was missed. `exit_code` is None for a
    program that did not end by itself."""
    stderr = stderr[-LOOKED_AT_BYTES:]
    both = stdout[-LOOKED_AT_BYTES:] + b"\n" + stderr
    # Most programs say none of these words, and `re` is dear to load.
    if not any(word in both for word in (b"No module named", b"not found", b"annot find", b"npm ")):
        if b"ERROR: " not in both and b"externally-managed" not in both and b"'pip" not in both:
            return b""
    import re

    is_installing = any(re.search(pattern, both) for pattern in _INSTALLS)
    has_failed = exit_code not in (0, None)
    python = has_failed and re.search(_PYTHON, stderr, re.MULTILINE)
    python = python or (has_failed and re.search(_COMMAND_LINE, stderr))
    node = has_failed and re.search(_NODE, stderr)
    if not (is_installing or python or node):
        return b""
    what = "Packages cannot be installed"
    found = python or node
    if found and not is_installing:
        name = found[1].decode("utf-8", "replace")
        if not name.isprintable() or (
            python and name.partition(".")[0] in getattr(sys, "stdlib_module_names", ())
        ):
            return b""
        what = f"There is no module {name[:60]!r}, and modules cannot be installed"
    there = "" if node and not is_installing else f" There are: {', '.join(packages())}."
    said = (
        f"{what}: a sandbox has no network, by design.{there} An administrator can add packages, "
        "with an image (build_images --template) or a virtual environment (SANDBOX_LOCAL_PYTHON)."
    )
    start = b"\n" if stderr and not stderr.endswith(b"\n") else b""
    return start + b"Advice: " + said.encode() + b"\n"


def packages() -> "list[str]":
    """The installed packages of Python, as far as a line has room, or what is there instead."""
    names = set()
    for folder in _folders():
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            name, _, kind = entry.rpartition(".")
            if kind in ("dist-info", "egg-info"):
                names.add(name.partition("-")[0].replace("_", "-").lower())
    names -= {"pip", "setuptools", "wheel"}
    first = [name for name in _FIRST if name in names]
    found = [*first, *sorted(names.difference(first))]
    if len(found) > MOST_NAMED:
        return [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more"]
    return found or ["Python's standard library"]


def _folders() -> "set[str]":
    """Where packages lie, also for an interpreter that has not looked."""
    import site

    found = {path for path in sys.path if path.endswith("-packages")}
    found.update(site.getsitepackages())
    above = os.path.dirname(os.path.dirname(sys.executable))
    if os.path.exists(f"{above}/pyvenv.cfg"):
        found.update(site.getsitepackages([above]))
    return found
