"""An ordinary user of this machine, for as long as a test lasts, to whom others may be lent."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import require

COUNT = 65_536

# A process may have several at a time.
_numbers = itertools.count()


def first_lent() -> int:
    """The first user that a test of this process may lend, far from what the machine lends."""
    return 1_700_000_000 + os.getpid() % 1000 * COUNT


@contextmanager
def ordinary_user(*, users: int = COUNT, groups: int = COUNT) -> Iterator[int]:
    """The id of a user with an entry for so many in /etc/subuid, and in /etc/subgid."""
    require("newuidmap")
    if os.geteuid() != 0:
        pytest.skip("only root can make a user")
    number = next(_numbers)
    uid = 61_200 + (os.getpid() + 1000 * number) % 4000
    name = f"cofferdam-{os.getpid()}-{number}"
    first = first_lent()
    entries = []
    if users:
        entries += ["--add-subuids", f"{first}-{first + users - 1}"]
    if groups:
        entries += ["--add-subgids", f"{first}-{first + groups - 1}"]
    _run("groupadd", "--gid", str(uid), name)
    try:
        _run("useradd", "--no-create-home", "--uid", str(uid), "--gid", str(uid), name)
        if entries:
            _run("usermod", *entries, name)
        yield uid
    finally:
        # The entries go with the user.
        subprocess.run(["userdel", "--force", name], capture_output=True)
        subprocess.run(["groupdel", name], capture_output=True)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
