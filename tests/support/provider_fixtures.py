"""Providers for tests to run code with: the real local one, one that does as it is told, none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from executions.runs import active_runs
from providers import registry
from providers.manager import manager
from tests.conftest import require
from tests.support.provider_package import Packages
from tests.support.running import LOCAL, activate


@pytest.fixture
def no_provider(db: None) -> Iterator[None]:
    manager.close()
    yield
    manager.close()


@pytest.fixture
def local_active(db: None) -> None:
    """The real thing: bubblewrap sandboxes on this machine."""
    require("bwrap")
    activate("local", LOCAL)


@pytest.fixture
def scripted(
    db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """A provider of another package that does what the code it is handed says.

    The code runs with `errors` and `ExecutionResult` at hand and binds `answer`. Calling the
    fixture gives what was asked of the provider so far.
    """
    packages = Packages(tmp_path / "packages", monkeypatch)
    packages.install("scripted", {"scripted": "scripted_provider:Scripted"}, {MODULE: SCRIPTED})
    activate("scripted", {})
    module = import_module(MODULE)
    module.events.clear()

    def asked() -> list[str]:
        assert active_runs.wait_for_ends(20)
        return list(module.events)

    yield asked
    manager.close()
    monkeypatch.undo()
    registry.refresh()


MODULE = "scripted_provider"
SCRIPTED = """
from providers import errors
from providers.base import Health, SandboxProvider
from providers.sandbox import Sandbox
from providers.values import ArtifactFile, ExecutionResult
from providers.waiting import carried_out

events = []


class ScriptedSandbox(Sandbox):
    metadata = {"runtime": "none"}

    def __init__(self, ref):
        self.ref = ref

    def run(self, job, emit=None):
        events.append(f"execute in {self.ref}")
        names = {
            "ArtifactFile": ArtifactFile,
            "ExecutionResult": ExecutionResult,
            "errors": errors,
            "events": events,
            "limits": job.limits,
        }
        exec(job.code, names)
        return names.get("answer", ExecutionResult("", "", 0, 0.0))

    def submit_run(self, job, emit=None):
        # The code looks at the rows of the test, which are seen in its own thread alone.
        return carried_out(lambda: self.run(job, emit))

    def close(self):
        events.append(f"destroy {self.ref}")
        if "indestructible" in events:
            raise errors.ConnectionFailed("The sandbox does not answer.")
        return True


class Scripted(SandboxProvider):
    id = "scripted"
    name = "Scripted"
    isolation = "namespaces"

    def initialize(self, config):
        return True

    def open(self, spec, owner):
        events.append(f"create {spec.template} for {owner}")
        if spec.template == "unlucky":
            raise errors.CreationFailed("There is no room for another sandbox.")
        return ScriptedSandbox(f"{owner}-1")

    def health_check(self):
        return Health(True)

    def get_supported_languages(self):
        return ["python", "unlucky"]
"""
