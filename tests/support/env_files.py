"""Reading an environment file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import ROOT, clean_environment


def load(file: Path | str, *names: str, cwd: Path = ROOT, **environment: str) -> Any:
    """The values of settings in a fresh process. Raises AssertionError with what it printed."""
    shown = ", ".join(f"settings.{name}" for name in names)
    code = f"import json; from sandbox_site import settings; print(json.dumps([{shown}]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=clean_environment(ROOT / "nowhere") | {"ENV_FILE": str(file)} | environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    return values[0] if len(names) == 1 else values


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.env"
    path.touch(0o600)
    return path
