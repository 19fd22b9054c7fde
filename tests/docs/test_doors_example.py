"""examples/doors: the same agent through each door, and the same comes of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.e2b_door import records
from tests.support.processes import ROOT
from tests.support.site import Site

EXAMPLE = ROOT / "examples" / "doors"
# As `python agent.py`, but for the teardown of the interpreter: a thread of the E2B SDK's HTTP
# library (pyqwest) that meets it aborts the process now and then, after everything was printed.
RUN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("door", ["native", "e2b", "mcp", "shell"])
def test_the_agent_finds_what_its_page_says(door: str, streaming_site: Site) -> None:
    (shown,) = re.findall(
        r"^```text\n(.*?)^```$", (EXAMPLE / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    done = subprocess.run(
        [sys.executable, "-c", RUN, EXAMPLE / "agent.py", door],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT / "clients" / "python"),
            "COFFERDAM_URL": streaming_site.service.url,
            "COFFERDAM_API_KEY": streaming_site.alice,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert (done.stdout, done.returncode) == (shown, 0), done.stderr
    last = records(streaming_site, 5)
    assert [each["status"] for each in last] == ["succeeded"] * 2 + ["failed"] + ["succeeded"] * 2
    assert len({each["session"] for each in last}) == 1
