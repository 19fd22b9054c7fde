"""`make chaos` and `make soak` start: nothing else runs them between two releases."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.processes import ROOT


@pytest.mark.parametrize("module", ["tests.chaos", "tests.chaos.soak"])
def test_a_long_test_says_what_it_takes(module: str) -> None:
    asked = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (asked.returncode, "--minutes" in asked.stdout) == (0, True), asked.stderr
