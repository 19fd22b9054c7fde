"""The template of a remote provider passes the contract as it stands, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT


def test_the_template_passes_its_tests_with_nothing_but_the_providers(tmp_path: Path) -> None:
    skip = shutil.ignore_patterns("__pycache__")
    package = tmp_path / "package"
    shutil.copytree(ROOT / "providers", tmp_path / "site" / "providers", ignore=skip)
    shutil.copytree(ROOT / "examples" / "remote_provider", package, ignore=skip)
    # Whatever else of the project is asked for is not there.
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:django",
            "tests",
        ],
        cwd=package,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{tmp_path / 'site'}:{package}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
