"""Users of the machine that are lent to an ordinary user (/etc/subuid), one for each sandbox.

`unshare` makes a user namespace, and has `newuidmap` and `newgidmap` map into it whoever we are,
as its root, and the range that was lent to us. Who starts there may become any user of it.

The module also tells why the kernel lets an ordinary user make no user namespaces, and the remedy.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import subprocess
from pathlib import Path

from providers.errors import CreationFailed

# How many users one pool takes of the range. More than it has sandboxes, the ending ones included.
BLOCK = 512

_PROBE_SECONDS = 5.0


class SubordinateUsers:
    """Hands out users of one block, none to two sandboxes that live at the same time.

    `prefix` goes before a command that is to be root over them.
    """

    def __init__(self, prefix: list[str], first: int, claim: socket.socket) -> None:
        self.prefix = prefix
        self._first = first
        self._claim = claim
        self._taken: set[int] = set()
        self._latest = BLOCK - 1

    @classmethod
    def find(cls, bwrap: str) -> SubordinateUsers | None:
        """A block that no other pool of ours has; None where there is none, or no right to it."""
        unshare = shutil.which("unshare")
        if unshare is None:
            return None
        prefix = [unshare, "--user", "--map-root-user", "--map-auto", "--"]
        first, end = _mapped(prefix, bwrap)
        blocks = list(range(first, end - BLOCK + 1, BLOCK))
        # Where pools cannot see each other's claims they still hardly ever choose alike.
        random.shuffle(blocks)
        for block in blocks:
            if claim := _claim(block):
                return cls(prefix, block, claim)
        return None

    def take(self) -> int:
        """A user that has no process, as the namespace numbers it. Raises CreationFailed."""
        for step in range(1, BLOCK + 1):
            number = (self._latest + step) % BLOCK
            if number not in self._taken:
                self._latest = number
                self._taken.add(number)
                return self._first + number
        raise CreationFailed("Every subordinate user of this pool has a sandbox.")

    def give_back(self, uid: int) -> None:
        """Every process of this user is gone."""
        self._taken.discard(uid - self._first)

    def close(self) -> None:
        """Leave the block to others."""
        self._claim.close()


def _mapped(prefix: list[str], bwrap: str) -> tuple[int, int]:
    """The first user and group that can be had, and the one after the last; (1, 1) for none.

    Tried with bubblewrap, because a security module may take away what the namespace promises.
    """
    command = [*prefix, bwrap, "--unshare-net", "--cap-drop", "ALL", "--cap-add", "CAP_SETUID"]
    command += ["--ro-bind", "/", "/", "--", "/bin/cat", "/proc/self/uid_map", "/proc/self/gid_map"]
    try:
        tried = subprocess.run(
            command, capture_output=True, text=True, env={}, timeout=_PROBE_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 1, 1
    ranges = [tuple(map(int, line.split())) for line in tried.stdout.splitlines()]
    # One line for who we are, one for the first range that was lent; the same for groups.
    lent = [(inside, inside + count) for inside, _, count in ranges if inside > 0]
    if len(lent) != 2:
        return 1, 1
    return max(first for first, _ in lent), min(end for _, end in lent)


def _claim(block: int) -> socket.socket | None:
    """Have a block for ourselves until we end, however we do; None where somebody has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    with contextlib.suppress(OSError):
        claim.bind(f"\0cofferdam-subordinate-{os.geteuid()}-{block}")
        return claim
    claim.close()
    return None


SETTINGS = Path("/proc/sys")

# Each setting, the value that forbids user namespaces, and what to do.
_CAUSES = (
    (
        "user.max_user_namespaces",
        "0",
        "Allow some: sudo sysctl -w user.max_user_namespaces=10000.",
    ),
    (
        "kernel.unprivileged_userns_clone",
        "0",
        "Allow them: sudo sysctl -w kernel.unprivileged_userns_clone=1.",
    ),
    (
        "kernel.apparmor_restrict_unprivileged_userns",
        "1",
        "AppArmor allows them only to programs with a profile. Install the profile for bubblewrap: "
        "sudo install -m 0644 deploy/apparmor/cofferdam-bwrap /etc/apparmor.d/ && sudo "
        "apparmor_parser --replace /etc/apparmor.d/cofferdam-bwrap "
        "(docs/deployment/requirements.md#user-namespaces).",
    ),
)

# What bubblewrap, unshare and the zygote say where a namespace or a right in it is refused.
_REFUSALS = re.compile(
    r"permission denied|not permitted|no permissions|creating new namespace failed"
    r"|max_\*_namespaces|no space left",
    re.IGNORECASE,
)


def remedy_for(complaint: str, folder: Path | None = None) -> str:
    """Return the complaint with its cause and remedy, where a kernel setting explains it.

    `folder` has the kernel's settings as files, as /proc/sys has them. Root needs no namespace,
    so do not call this for root.
    """
    if _REFUSALS.search(complaint):
        for name, forbids, remedy in _CAUSES:
            if _value(folder or SETTINGS, name) == forbids:
                return (
                    f"{complaint.rstrip('.')}. Ordinary users may not make user namespaces on this "
                    f"machine ({name} is {forbids}). {remedy}"
                )
    return complaint


def _value(folder: Path, name: str) -> str:
    try:
        return folder.joinpath(*name.split(".")).read_text().strip()
    except OSError:
        return ""
