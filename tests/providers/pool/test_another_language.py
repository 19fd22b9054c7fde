"""A language whose programs are files for an interpreter is one row of the table."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.support.processes import ROOT

ROW = """
from providers import languages
row = languages.Language("perl", interpreters=("perl",), has_main=False, program="main.pl")
languages.TABLE += (row,)
languages.OURS += ("perl",)
languages._BY_NAME["perl"] = row
"""
PROGRAM = """
import json, sys
from pathlib import Path
from django.conf import settings
settings.configure(
    DATA_DIR=Path(sys.argv[2]), MINIMUM_ISOLATION="namespaces", POOL_AUTOSTART=True, POOL_TOKEN="",
    SANDBOX_LOCAL_PYTHON="", SANDBOX_LOCAL_UNISOLATED=False,
)
from providers.local import service
from providers.local.provider import LocalProvider
from providers.values import InputFile, Job, SandboxSpec
from tests.support import service_here

service.start = service_here.start_here
provider = LocalProvider()
provider.initialize(LocalProvider.check_config({"launcher": sys.argv[1], "gvisor_platform": "ptrace"}))
results = []
for code in ("print 6 * 7", "open(my $f, '<', 'in.txt'); print <$f>; exit 3"):
    sandbox = provider.open(SandboxSpec("perl"), "alice")
    result = sandbox.run(Job(code, "perl", files=[InputFile("in.txt", b"read")]))
    sandbox.close()
    results.append([result.stdout, result.exit_code])
print(json.dumps([provider.get_supported_languages(), results]))
provider.close()
service_here.close_all()
"""


@pytest.mark.parametrize(("launcher", "tool"), [("bubblewrap", "bwrap"), ("gvisor", "runsc")])
def test_its_row_is_all_that_it_needs(launcher: str, tool: str, tmp_path: Path) -> None:
    require(tool)
    require("perl")
    done = subprocess.run(
        [sys.executable, "-c", ROW + PROGRAM, launcher, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    languages, results = json.loads(done.stdout)
    assert "perl" in languages
    assert results == [["42", 0], ["read", 3]]
