"""Capabilities are plugged in: without any one of them the rest works, and a new one is a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import ClassVar

import pytest
from django.conf import settings

from executions.runs import extensions
from executions.runs.extensions import Extension
from executions.runs.models import Execution
from sandbox_site import worker
from tests.conftest import Caller
from tests.support.processes import ROOT
from tests.support.running import run

ANSWER = (
    "answer = ExecutionResult(stdout='one two three', stderr='', exit_code=0, execution_time=0.1)"
)


@pytest.mark.parametrize("package", settings.INSTALLED_CAPABILITIES)
def test_the_rest_works_without(package: str, tmp_path: Path) -> None:
    """The settings are read at start, so each is left out in a process of its own."""
    environment = {
        **os.environ,
        "WITHOUT_CAPABILITY": package,
        "DJANGO_SETTINGS_MODULE": "tests.support.settings_without",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0"]
    answer = subprocess.run(
        [*command, f"--basetemp={tmp_path}", "tests/support/without_capability.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stdout[-5000:] + answer.stderr[-2000:]


def test_the_capability_of_the_docs_is_installed_by_one_line(
    tmp_path: Path,
    scripted: Callable[[], list[str]],
    alice: Caller,
    charlie: Caller,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [code] = re.findall(
        r"```python\n(\"\"\"token_budget.*?)```",
        (ROOT / "docs" / "write-a-capability.md").read_text(),
        re.DOTALL,
    )
    (tmp_path / "token_budget").mkdir()
    (tmp_path / "token_budget" / "__init__.py").touch()
    (tmp_path / "token_budget" / "capability.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(extensions.installed())
    monkeypatch.setattr(extensions, "_installed", list(before))
    monkeypatch.setattr(
        settings,
        "INSTALLED_CAPABILITIES",
        [*settings.INSTALLED_CAPABILITIES, "token_budget"],
    )
    extensions.register_installed(before[-1])
    added = [each for each in extensions.installed() if each not in before]
    assert len(added) == 1
    assert extensions.installed()[-1] is before[-1]
    module = import_module("token_budget.capability")
    monkeypatch.setattr(module, "MAX_TOKENS", 5)
    # A worker does the tasks that it names.
    monkeypatch.setattr(module, "forget", module.tokens.clear, raising=False)
    monkeypatch.setattr(type(added[0]), "tasks", {"token_budget.capability.forget": 60})
    assert worker.find_tasks()["token_budget.capability.forget"] == module.forget
    try:
        assert [run(alice, ANSWER).status_code for _ in range(3)] == [200, 200, 429]
        assert run(charlie, ANSWER).status_code == 200
        assert module.tokens == {alice.tenant.slug: 6, charlie.tenant.slug: 3}
    finally:
        del sys.modules["token_budget.capability"], sys.modules["token_budget"]


def test_a_field_whose_capability_is_not_installed_is_refused_by_its_name(
    scripted: Callable[[], list[str]], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [each for each in extensions.installed() if "webhook" not in each.fields]
    monkeypatch.setattr(extensions, "_installed", left)
    answer = run(alice, ANSWER, mode="async", webhook={"url": "https://agent.example/done"})
    assert answer.status_code == 400
    assert answer.json()["error"]["field"] == "webhook"
    assert "INSTALLED_CAPABILITIES" in answer.json()["error"]["message"]


def test_every_hook_of_an_extension_is_called_by_the_core() -> None:
    """A hook that nothing calls would promise what does not happen."""
    source = "".join(
        file.read_text()
        for folder in ("runs", "sessions", "admin", "doors", "tenants")
        for file in (ROOT / "executions" / folder).rglob("*.py")
    )
    hooks = [name for name in vars(Extension) if not name.startswith("_")]
    assert len(hooks) > 20
    assert [
        name for name in hooks if f"each.{name}" not in source and f"extension.{name}" not in source
    ] == []


def test_no_provider_says_what_only_the_service_says_whatever_is_installed(
    scripted: Callable[[], list[str]], alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "_installed", list(extensions.installed())[-1:])
    said = {"policy": {"id": 1, "version": 1, "approved": {"by": "ada"}}, "tool_calls": 7}
    code = ANSWER.replace("0.1)", f"0.1, metadata={said!r})")
    answer = run(alice, code).json()
    assert answer["status"] == "succeeded", answer
    execution = Execution.objects.get(pk=answer["id"])
    assert not {"policy", "tool_calls"} & execution.meta.keys()
    assert answer["policy"] is None


def test_an_extension_that_fails_after_a_run_keeps_no_other_from_its_hook(
    scripted: Callable[[], list[str]],
    alice: Caller,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Extension):
        def after_run(self, execution: Execution) -> None:
            raise ValueError("broken")

    class Last(Extension):
        seen: ClassVar[list[str]] = []

        def after_run(self, execution: Execution) -> None:
            self.seen.append(str(execution.pk))

    monkeypatch.setattr(extensions, "_installed", [Broken(), Last()])
    answer = run(alice, ANSWER).json()
    assert (answer["status"], Last.seen) == ("succeeded", [answer["id"]])
    assert "Broken failed after a run" in caplog.text
