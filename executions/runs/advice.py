"""What an answer advises whose program missed something: a few short texts, and usually none.

A text is for who has run the program. What a program missed is found in what it put out, which may
say anything: advice decides nothing, and is recorded nowhere.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from executions.kernel.text import from_json
from executions.runs import extensions
from executions.runs.models import Execution
from executions.runs.results import LOOKED_AT_CHARACTERS, may_have_missed
from providers.manager import loaded
from providers.values import Packages

Installer = Literal["pip", "npm"]

# Packages that are named, those first that programs ask for most.
MOST_NAMED = 15
MOST_ADVICE = 5
_FIRST = (
    *("numpy", "pandas", "matplotlib", "scipy", "scikit-learn", "requests", "httpx", "openpyxl"),
    *("pillow", "beautifulsoup4", "lxml", "pyarrow", "sympy"),
)
# What the tools that install say where they cannot, and a shell where there is no tool.
_NO_NPM = r"npm (ERR!|error) .*(ENOTFOUND|EAI_AGAIN|ENETUNREACH|ECONNREFUSED|E403|403 )"
_INSTALLS = re.compile(
    r"ERROR: (Could not find a version that satisfies|No matching distribution found for)"
    r"|error: externally-managed-environment"
    r"|No module named '?(pip|ensurepip)\b"
    r"|\b(pip3?|uv|conda|npm|npx|yarn|pnpm): (command )?not found"
    r"|\bpip3? install\b.*(not found|No such file)"
    r"|No such file or directory: '(pip3?|uv|conda|npm)'"
    rf"|{_NO_NPM}"
)
_OF_NODE = re.compile(rf"{_NO_NPM}|\b(npm|npx|yarn|pnpm): (command )?not found|directory: 'npm'")
_PYTHON = re.compile(
    r"^ModuleNotFoundError: No module named '([^'\n]{1,200})'"
    r"|: No module named ([\w.]{1,200})\s*\Z",
    re.MULTILINE,
)
_NODE = re.compile(r"Cannot find (?:module|package) '([^'./\n][^'\n]{0,200})'")


@dataclass(frozen=True)
class Missed:
    """What a program missed: a `module`, which is the name that it imported, or "" where an
    installation failed. `installer` is what installs for the language that it is written in."""

    installer: Installer
    module: str = ""


def missed_by(execution: Execution) -> Missed | None:
    """Return what the program of an execution missed, None where nothing is known of it."""
    if execution.finished_at is None or not may_have_missed(execution):
        return None
    stderr = execution.stderr[-LOOKED_AT_CHARACTERS:]
    both = f"{execution.stdout[-LOOKED_AT_CHARACTERS:]}\n{stderr}"
    # Whatever the exit code: a program may go on without, and a wait for the network ends late.
    if _INSTALLS.search(both):
        return Missed("npm" if _OF_NODE.search(both) else "pip")
    if execution.exit_code in (0, None):
        return None
    found = _PYTHON.search(f"{stderr}\n{_exception_line(execution)}")
    if found is not None:
        module = found[1] or found[2]
        # Left out of this machine's Python, and not to be installed.
        is_own = module.partition(".")[0] in sys.stdlib_module_names
        return None if is_own or not module.isprintable() else Missed("pip", module[:60])
    if (found := _NODE.search(stderr)) is not None and found[1].isprintable():
        return Missed("npm", found[1][:60])
    return None


def advice_of(execution: Execution) -> list[str]:
    """Return the advice for an execution, as of now: what is there, and then what extensions say,
    such as which template or which network has what it missed."""
    said = []
    if (missed := missed_by(execution)) is not None:
        said.append(_about_packages(missed, execution.provider))
    said += extensions.advise(execution)
    return list(dict.fromkeys(filter(None, said)))[:MOST_ADVICE]


def advice_text(execution: Execution) -> str:
    """Return the same as lines for a door that has no place but the program's own output."""
    return "".join(f"Advice: {line}\n" for line in advice_of(execution))


def packages_of(provider_id: str) -> Packages | None:
    """Return what Python programs of a provider can import, None where this process does not know
    it."""
    lease = next((each for each in loaded() if each.provider_id == provider_id), None)
    return None if lease is None else lease.provider.get_packages()


def importable(known: Mapping[str, Packages]) -> str:
    """Return a sentence for the description of a tool: what Python code can import with every
    provider that knows its packages, by the provider's id. Empty where none does."""
    if not known:
        return ""
    if any(each.state == "preparing" for each in known.values()):
        return "Packages for Python code are being installed now."
    first, *others = known.values()
    names = name_packages(
        {
            name: version
            for name, version in first.versions.items()
            if all(name in each.versions for each in others)
        }
    )
    return f"Python code can import {names or 'the standard library alone'}."


def name_packages(versions: Mapping[str, str]) -> str:
    """Return the names of packages, as far as a line has room."""
    names = {name.replace("_", "-").lower() for name in versions}
    first = [name for name in _FIRST if name in names]
    found = [*first, *sorted(names.difference(first))]
    if len(found) > MOST_NAMED:
        found = [*found[:MOST_NAMED], f"{len(found) - MOST_NAMED} more"]
    return ", ".join(found)


def _about_packages(missed: Missed, provider_id: str) -> str:
    what = f"There is no module {missed.module!r}." if missed.module else ""
    known = packages_of(provider_id)
    if known is None:
        return what
    if missed.installer == "npm":
        there = f"There are: {name_packages(known.node)}." if known.node else ""
        return f"{what} {there}".strip()
    if known.state == "preparing":
        return f"{what} Packages are being installed now: try again in a minute.".strip()
    names = name_packages(known.versions) or "Python's standard library alone"
    why = f" The installation of packages failed: {known.reason}." if known.reason else ""
    return f"{what} There are: {names}.{why}".strip()


def _exception_line(execution: Execution) -> str:
    """What ended the program, of which the end of a long output may say nothing."""
    if not execution.exception:
        return ""
    told = from_json(execution.exception)
    return f"{told['type']}: {told['message']}"
