"""The SDKs that are driven, where they are, and what a walk through one of them told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT
from tests.support.required import missing, require
from tests.support.site import MANAGE, Site, clean_environment

# .ci/install-e2b-sdks puts them there.
INSTALLED = Path("/usr/local/lib/cofferdam-e2b")
HERE = ROOT / "tests" / "e2b_sdks"


@dataclass(frozen=True)
class Sdk:
    """`versions` are those of `e2b` and of the code interpreter. `flavour` is the walk's argument."""

    name: str
    versions: tuple[str, str]
    flavour: str
    is_old: bool = False


SDKS = (
    Sdk("Python 2.63.0", ("2.63.0", "2.11.5"), "sync"),
    Sdk("Python 2.63.0, async", ("2.63.0", "2.11.5"), "async"),
    Sdk("Python 2.45.1", ("2.45.1", "2.9.1"), "sync", is_old=True),
    Sdk("Python 2.45.1, async", ("2.45.1", "2.9.1"), "async", is_old=True),
    Sdk("npm 2.51.0", ("2.51.0", "2.8.0"), "npm"),
)


@dataclass(frozen=True)
class Walk:
    """`outcomes` has for each method that was called `works`, or what it was refused with."""

    sdk: Sdk
    versions: tuple[str, ...]
    methods: set[str]
    outcomes: dict[str, str]

    @property
    def called(self) -> set[str]:
        return set(self.outcomes)


def begin(sdk: Sdk, site: Site, key: str = "") -> subprocess.Popen[str]:
    """A program of its own, which has only the three variables to go by."""
    if (sdk.flavour == "npm" or sdk.is_old) and not INSTALLED.is_dir():
        missing(f"{INSTALLED} is not there (.ci/install-e2b-sdks)")
    command = [sys.executable, str(HERE / "walk.py"), sdk.flavour, sdk.name]
    if sdk.flavour == "npm":
        command = [str(INSTALLED / "node"), str(HERE / "walk.mjs"), "npm", sdk.name]
    environment = {
        "PATH": os.environ["PATH"],
        "E2B_API_URL": site.service.url,
        "E2B_SANDBOX_URL": site.service.url,
        "E2B_API_KEY": key or site.alice,
    }
    if sdk.is_old:
        environment["PYTHONPATH"] = str(INSTALLED / "python")
    if sdk.flavour == "npm":
        # A module's imports are looked for beside it alone.
        environment["E2B_SDK"] = str(
            INSTALLED / "node_modules" / "@e2b" / "code-interpreter" / "dist" / "index.mjs"
        )
    return subprocess.Popen(
        command,
        env=environment,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(sdk: Sdk, process: subprocess.Popen[str], seconds: float = 400) -> Walk:
    """What it told. Raises AssertionError with what it said of a failure."""
    try:
        said, complaint = process.communicate(timeout=seconds)
    finally:
        process.kill()
    lines = [json.loads(line) for line in said.splitlines()]
    assert process.returncode == 0, f"{sdk.name}, after {lines[-1:]}: {complaint[-4000:]}"
    (about,) = [line for line in lines if "methods" in line]
    outcomes = {
        line["method"]: "works" if line["outcome"] == "works" else line["said"]
        for line in lines
        if "method" in line
    }
    return Walk(sdk, tuple(about["versions"]), set(about["methods"]), outcomes)


# All but that of administrators.
SCOPES = ("execute", "files", "read", "sessions", "templates")


def key_in_their_form(site: Site) -> str:
    """The older SDK takes no other."""
    scopes = [f"--scope={each}" for each in SCOPES]
    done = subprocess.run(
        [*MANAGE, "create_api_key", "wonderland", "--name", "e2b", "--e2b", *scopes],
        env=clean_environment(site.data_dir),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.strip()


# Of each language the one that is newest.
NEWEST = (SDKS[0], SDKS[-1])


def walk(site: Site, sdks: Sequence[Sdk] = SDKS) -> list[Walk]:
    """All of them at once: each waits more than it works."""
    require("git")
    key = key_in_their_form(site)
    begun = [(sdk, begin(sdk, site, key)) for sdk in sdks]
    return [finish(sdk, process) for sdk, process in begun]
