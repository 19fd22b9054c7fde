"""What the units of a host may do, with their own restrictions: the pool alone makes sandboxes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.deployed import SYSTEMD
from tests.support.docker_engine import missing
from tests.support.processes import ROOT

POOL = SYSTEMD / "cofferdam-pool.service"
CLOSED = (
    *([SYSTEMD / f"cofferdam-{name}.service"] for name in ("web", "worker")),
    [POOL, SYSTEMD / "pool-docker.conf"],
)
RESTRICTED = ROOT / "tests/support/restricted.py"


def try_as(units: list[Path], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a service of the units runs, as a user that every machine has."""
    if os.geteuid() != 0:
        missing("another user needs root")
    copies = []
    for unit in units:
        copy = folder / unit.name
        copy.write_text(unit.read_text().replace("User=cofferdam", "User=nobody"))
        copies.append(str(copy))
    words = ["/usr/bin/python3", str(RESTRICTED), *copies, "--", *command]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd="/")


@pytest.mark.parametrize("units", CLOSED, ids=lambda units: units[-1].stem)
@pytest.mark.parametrize(
    "command",
    [
        ["unshare", "--user", "true"],
        ["unshare", "--mount", "true"],
        ["bwrap", "--ro-bind", "/", "/", "true"],
        ["/usr/bin/python3", "-c", "import socket; socket.socket(socket.AF_NETLINK, 3)"],
        ["/usr/bin/python3", "-c", "import mmap; mmap.mmap(-1, 1, prot=7)"],
    ],
    ids=["users", "mounts", "bwrap", "netlink", "code"],
)
def test_what_answers_and_what_works_cannot_make_a_sandbox(
    units: list[Path], command: list[str], tmp_path: Path
) -> None:
    require("bwrap")
    done = try_as(units, tmp_path, *command)
    assert done.returncode, done.stdout
    refusals = ("not permitted", "denied", "No permissions")
    assert any(each in done.stderr for each in refusals), done.stderr


def test_the_pool_can(tmp_path: Path) -> None:
    require("bwrap")
    done = try_as([POOL], tmp_path, "bwrap", "--ro-bind", "/", "/", "true")
    assert done.returncode == 0, done.stderr


def test_all_that_is_closed_is_closed_alike() -> None:
    def closed(path: Path) -> list[str]:
        text = path.read_text()
        return text[text.index("NoNewPrivileges=yes") :].partition("\n[Install]")[0].splitlines()

    texts = [closed(units[-1]) for units in CLOSED]
    assert texts[0] == texts[1] == texts[2]
    assert len(texts[0]) > 25
