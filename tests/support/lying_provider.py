"""A provider of another package that answers whatever a test wants, as pip would install it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from providers import registry
from providers.manager import manager
from tests.support.provider_package import Packages
from tests.support.running import activate

MODULE = "lying_provider_package"

SOURCE = '''
"""`behaviour` has one function for each method; what is not there is done honestly."""

from providers.base import Health, SandboxProvider
from providers.sandbox import Sandbox
from providers.values import ExecutionResult

behaviour = {}
calls = []
jobs = []
specs = []


def _do(name, honest):
    calls.append(name)
    return behaviour[name]() if name in behaviour else honest


class LiarsSandbox(Sandbox):
    ref = "1"

    def __init__(self, metadata=None):
        self.metadata = {"runtime": "lies"} if metadata is None else metadata

    def run(self, job, emit=None):
        jobs.append(job)
        return _do("run", ExecutionResult("42\\n", "", 0, 0.1))

    def close(self):
        return _do("close", True)


class Liar(SandboxProvider):
    id = "liar"
    name = "Liar"

    @property
    def isolation(self):
        return behaviour["isolation"]() if "isolation" in behaviour else "namespaces"

    def initialize(self, config):
        return _do("initialize", True)

    @property
    def holds_network(self):
        return behaviour["holds_network"]() if "holds_network" in behaviour else False

    @property
    def holds_templates(self):
        return behaviour["holds_templates"]() if "holds_templates" in behaviour else False

    def has_own_template(self, name):
        return name in behaviour["own"]() if "own" in behaviour else False

    @property
    def template_bases(self):
        return behaviour["template_bases"]() if "template_bases" in behaviour else frozenset()

    def open(self, spec, owner):
        specs.append(spec)
        return _do("open", LiarsSandbox())

    def health_check(self):
        return _do("health_check", Health(True))

    def get_supported_languages(self):
        return _do("get_supported_languages", ["python"])

    def get_packages(self):
        return _do("get_packages", None)

    @property
    def max_timeout(self):
        return behaviour["max_timeout"]() if "max_timeout" in behaviour else None

    def is_full(self):
        return _do("is_full", False)
'''


class Liar:
    """The provider in force. `does` says what one of its methods does from now on."""

    def __init__(self) -> None:
        self.module = import_module(MODULE)
        self.module.behaviour.clear()
        self.module.calls.clear()
        self.module.jobs.clear()
        self.module.specs.clear()

    @property
    def calls(self) -> list[str]:
        return list(self.module.calls)

    def does(self, method: str, action: Any) -> None:
        self.module.behaviour[method] = action

    def answers(self, **fields: Any) -> None:
        """Have every run answered with an ExecutionResult of these fields, whatever they are."""
        from providers.values import ExecutionResult

        given = {"stdout": "", "stderr": "", "exit_code": 0, "execution_time": 0.1, **fields}
        self.does("run", lambda: ExecutionResult(**given))


@pytest.fixture
def liar(db: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Liar]:
    packages = Packages(tmp_path / "packages", monkeypatch)
    packages.install("liar", {"liar": f"{MODULE}:Liar"}, {MODULE: SOURCE})
    activate("liar", {})
    manager.close()
    yield Liar()
    manager.close()
    monkeypatch.undo()
    registry.refresh()
