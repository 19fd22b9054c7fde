"""The pool service runs code and keeps sandboxes with its own packages alone."""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import packages_distributions
from pathlib import Path
from zoneinfo import ZoneInfo

from providers.sandbox import KeptSandbox
from providers.values import Job, SandboxSpec
from tests.support.pool_service import provider_of, running, running_as
from tests.support.processes import ROOT

LOCK = ROOT / "deploy" / "pool-requirements.txt"

# `manage.py` in a process that finds none of the packages that are named first.
WITHOUT = """
import importlib, json, pkgutil, runpy, sys
from importlib.machinery import PathFinder

others = set(json.loads(sys.argv.pop(1)))

class OwnPackages:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name in others else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = OwnPackages
import providers.runtime
for module in pkgutil.walk_packages(providers.runtime.__path__, "providers.runtime."):
    if not module.name.startswith("providers.runtime.guest"):
        importlib.import_module(module.name)
sys.argv[0] = "manage.py"
runpy.run_path("manage.py", run_name="__main__")
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(path: Path) -> dict[str, str]:
    """Each package of a lock with its version and its hashes."""
    entries = re.findall(r"^([a-z0-9][\w.-]*)==((?:.|\n {4})+)", path.read_text(), re.M)
    return {normal(name): text for name, text in entries}


def test_its_packages_are_those_of_the_service_in_the_same_versions() -> None:
    own = locked(LOCK)
    # What Pods need is an extra of the service, and part of the pool's own image.
    service = {**locked(ROOT / "requirements-kubernetes.txt"), **locked(ROOT / "requirements.txt")}
    assert {"aiohttp", "docker", "django-environ"} <= own.keys()
    versions = {name: text.split()[0] for name, text in own.items()}
    assert versions == {name: service[name].split()[0] for name in own}


def test_it_runs_code_and_keeps_sandboxes_with_its_own_packages_alone(tmp_path: Path) -> None:
    own = locked(LOCK)
    others = [
        name
        for name, owners in packages_distributions().items()
        if not {normal(owner) for owner in owners} & own.keys() and name.isidentifier()
    ]
    assert {"django", "rest_framework", "e2b", "agentrun", "pytest"} <= set(others)
    command = [
        sys.executable,
        "-c",
        WITHOUT,
        json.dumps(others),
        "pool",
        "--launcher",
        "bubblewrap",
    ]
    with running_as(tmp_path / "log", command) as pool:
        assert pool.ragflow("def main(): print(6 * 7)").body["stdout"] == "42\n"
        with provider_of(pool.url) as provider:
            sandbox = provider.open(SandboxSpec(), "alice")
            assert sandbox.run(Job("print('once')")).stdout == "once\n"
            sandbox.close()
            kept = provider.open(SandboxSpec(kept=True), "alice")
            assert isinstance(kept, KeptSandbox)
            kept.run(Job("x = 1"))
            assert kept.run(Job("print(x)")).stdout == "1\n"
            kept.close()


def test_its_log_has_the_time_zone_of_the_installation(tmp_path: Path) -> None:
    extra = {"TIME_ZONE": "Asia/Tokyo", "LOG_FORMAT": "text", "LOG_LEVEL": "INFO"}
    with running(tmp_path / "log", **extra) as pool:
        pool.ragflow("def main(): pass")
        line = next(each for each in pool.service.output.splitlines() if "pool opened" in each)
    at = datetime.strptime(line.split()[0], "%H:%M:%S").replace(tzinfo=UTC)
    ago = datetime.now(ZoneInfo("Asia/Tokyo")).replace(tzinfo=UTC) - at
    # The line has no date.
    assert ago.seconds < 600
