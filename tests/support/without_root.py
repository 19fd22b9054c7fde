"""Running a test's code without root."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.lent_users import ordinary_user
from tests.support.sandboxes import LocalProcess

UID = 60_123


@contextmanager
def without_root(user: int = UID, *, lent: bool = False, **config: Any) -> Iterator[LocalProcess]:
    """A provider in the hands of an ordinary user, to whom others are lent if `lent` says so."""
    if lent:
        with ordinary_user() as user, without_root(user, **config) as process:
            yield process
        return
    with tempfile.TemporaryDirectory(prefix="cofferdam-unprivileged-") as folder:
        uid = None
        if os.geteuid() == 0:
            uid = user
            os.chown(folder, user, user)
        with LocalProcess(Path(folder), uid=uid, **config) as process:
            assert process.greeting == {"ready": True}
            yield process
