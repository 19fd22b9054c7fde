"""Virtual environments of an operator's in tests."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path


@contextlib.contextmanager
def environment_with(modules: Mapping[str, str]) -> Iterator[tuple[Path, Path]]:
    """A virtual environment with these files in it, where sandboxes have nothing of their own, and
    its folder of packages."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    found = folder / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", "--without-pip", found], check=True)
    (packages,) = found.glob("lib/python*/site-packages")
    for name, text in modules.items():
        (packages / name).write_text(text)
    # Whoever made it lets others read it: a sandbox has another user.
    subprocess.run(["chmod", "-R", "a+rX", found], check=True)
    yield found, packages
    shutil.rmtree(folder)
