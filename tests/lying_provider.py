"""A provider of another package that answers whatever a test wants, as pip would install it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from providers import registry
from providers.manager import manager
from tests.provider_package import Packages
from tests.running import activate

MODULE = "lying_provider_package"

SOURCE = '''
"""`behaviour` has one function for each method; what is not there is done honestly."""

from providers.base import ExecutionResult, Health, SandboxInstance, SandboxProvider

behaviour = {}
calls = []


def _do(name, honest):
    calls.append(name)
    return behaviour[name]() if name in behaviour else honest


class Liar(SandboxProvider):
    id = "liar"
    name = "Liar"

    @property
    def isolation(self):
        return behaviour["isolation"]() if "isolation" in behaviour else "namespaces"

    def initialize(self, config):
        return _do("initialize", True)

    def create_instance(self, template="python", *, owner=""):
        instance = SandboxInstance("1", self.id, "running", {"runtime": "lies"})
        return _do("create_instance", instance)

    def execute_code(self, instance_id, code, language, timeout=10, arguments=None, **options):
        return _do("execute_code", ExecutionResult("42\\n", "", 0, 0.1))

    def destroy_instance(self, instance_id):
        return _do("destroy_instance", True)

    def health_check(self):
        return _do("health_check", Health(True))

    def get_supported_languages(self):
        return _do("get_supported_languages", ["python"])
'''


class Liar:
    """The provider in force. `does` says what one of its methods does from now on."""

    def __init__(self) -> None:
        self.module = import_module(MODULE)
        self.module.behaviour.clear()
        self.module.calls.clear()

    @property
    def calls(self) -> list[str]:
        return list(self.module.calls)

    def does(self, method: str, action: Any) -> None:
        self.module.behaviour[method] = action

    def answers(self, **fields: Any) -> None:
        """Have every run answered with an ExecutionResult of these fields, whatever they are."""
        from providers.base import ExecutionResult

        given = {"stdout": "", "stderr": "", "exit_code": 0, "execution_time": 0.1, **fields}
        self.does("execute_code", lambda: ExecutionResult(**given))


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
