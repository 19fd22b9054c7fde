"""What the service installs: all that it imports, and little else."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# In a process that finds no other package, the service is loaded whole, with the SDKs.
LOAD = """
import importlib.abc, runpy, sys

class Others(importlib.abc.MetaPathFinder):
    names = set(sys.argv[1:])

    def find_spec(self, name, path, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"{name} is not installed", name=name)

sys.meta_path.insert(0, Others())
runpy.run_path("bundle/load.py", run_name="__main__")
import providers.aliyun_codeinterpreter.sdk, providers.e2b.machine
print("loaded", len(sys.modules))
"""


def _locked() -> set[str]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return {_normal(line.partition("==")[0]) for line in lines if re.match(r"[a-z0-9]", line)}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_service_loads_whole_with_the_locked_packages_alone() -> None:
    others = {
        name
        for name, owners in packages_distributions().items()
        if not {_normal(owner) for owner in owners} & _locked() and name.isidentifier()
    }
    assert {"pytest", "hypothesis", "moto"} <= others
    loading = subprocess.run(
        [sys.executable, "-c", LOAD, *others],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert loading.stdout.startswith("loaded "), loading.stderr


def test_what_only_tests_use_and_what_nobody_imports_is_not_installed() -> None:
    unused = {
        "pytest",
        "litellm",
        "numpy",
        "mysql-connector-python",
        "sqlalchemy",
        "agentrun-mem0ai",
    }
    assert not unused & _locked()
