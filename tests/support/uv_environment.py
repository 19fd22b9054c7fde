"""A Python environment whose sandboxes have uv, as `manage.py packages` makes one."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from providers.local import packages
from tests.support.required import missing


@contextmanager
def uv_environment() -> Iterator[Path]:
    """Yield its interpreter, which lies where sandboxes have nothing of their own."""
    own = Path(sys.executable).with_name("uv")
    if not own.exists():
        missing("uv is not installed (make venv-dev)")
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    try:
        python = packages.create(folder / "environment")
        program = python.with_name("uv")
        # It leads to where the packages will be.
        program.unlink(missing_ok=True)
        shutil.copyfile(own, program)
        program.chmod(0o755)
        yield python
    finally:
        shutil.rmtree(folder)
