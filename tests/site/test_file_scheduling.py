"""A process of the suite that dies: its other tests run, and the run says which one it died of."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.processes import ROOT

DIES = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(3)\ndef test_after(): pass\n"
WAITS = "import time\ndef test_waits(): time.sleep(600)\n"
PASSES = "def test_one(): pass\ndef test_two(): pass\n"


def test_the_others_run_and_the_fatal_one_is_named(tmp_path: Path) -> None:
    for name, text in {"a": PASSES, "b": DIES, "c": PASSES, "d": WAITS, "e": PASSES}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    limits = "[pytest]\nfaulthandler_timeout = 3\nfaulthandler_exit_on_timeout = true\n"
    (tmp_path / "pytest.ini").write_text(limits)
    plugins = ("no:django", "no:cacheprovider", "tests.support.file_scheduling")
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadfile", "-rf", "-q"]
    done = subprocess.run(
        [*command, *(f"-p{each}" for each in plugins), str(tmp_path)],
        cwd=tmp_path,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "2 failed, 8 passed" in done.stdout, done.stdout + done.stderr
    for name in ("test_b.py::test_dies", "test_d.py::test_waits"):
        assert f"crashed while running '{name}" in done.stdout, done.stdout
