"""Removes what a worker has left in the workspace that was killed in the middle of its work."""

import os
import re
import stat
import time

from . import file_operations
from .folders import walk
from .kept import Refused
from .paths import MOST_DEPTH

# Nobody is served meanwhile, and a program can make the workspace large.
_SECONDS = 2.0
_OURS = re.compile(r"\.cofferdam-[0-9a-f]{16}")


def sweep(base: int) -> None:
    """To be done before anything else is: there is no other worker, so that nothing of these names
    is in use. What is not found in time stays."""
    until = time.monotonic() + _SECONDS
    try:
        for found in walk(base, MOST_DEPTH):
            if time.monotonic() > until:
                return
            if found is None or found.status is None or not _OURS.fullmatch(found.name):
                continue
            try:
                if stat.S_ISREG(found.status.st_mode):
                    os.unlink(found.name, dir_fd=found.folder)
                elif stat.S_ISDIR(found.status.st_mode):
                    for _ in file_operations.discard(base, found.folder, found.name):
                        if time.monotonic() > until:
                            return
            except (OSError, Refused):
                # The program was quicker, or has put something there that is not to be removed.
                continue
    except (OSError, Refused):
        # What cannot be gone through stays as it is.
        return
