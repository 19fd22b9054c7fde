"""Remarks on Python code: reported with the result, and nothing more than that."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from providers.errors import InvalidConfiguration
from providers.runtime.guest import advice
from providers.runtime.launchers.bubblewrap import BubblewrapLauncher
from providers.runtime.pool import claims
from providers.runtime.pool.requests import make_template
from providers.runtime.pool.sandbox import Sandbox
from providers.self_managed.provider import SelfManagedProvider
from providers.values import ExecutionResult, Job, SandboxLimits
from tests.conftest import require

CODE = """import subprocess
import json
def main():
    from os import path
    print("ran")
    return eval("1 + 1")
"""

EXPECTED = [
    [1, "subprocess", "starts processes"],
    [4, "os", "reaches files and processes"],
    [6, "eval", "runs text as code"],
]


def run_advised(code: str, data_dir: Any, *, advise: bool = True) -> ExecutionResult:
    require("bwrap")

    async def scenario() -> ExecutionResult:
        launcher = BubblewrapLauncher(data_dir)
        await launcher.prepare()
        try:
            template = make_template("python", "python", launcher, SandboxLimits(), advise=advise)
            sandbox = await Sandbox.start(launcher, template)
            try:
                return await sandbox.run(Job(code, "python", 10))
            finally:
                await sandbox.destroy()
        finally:
            launcher.close()

    return asyncio.run(scenario())


def test_a_result_names_what_is_worth_a_look_and_the_code_runs_all_the_same(tmp_path: Any) -> None:
    result = run_advised(CODE, tmp_path)
    assert (result.stdout, result.result, result.exit_code) == ("ran\n", 2, 0)
    assert result.metadata["advice"] == EXPECTED


def test_nothing_is_said_unless_it_is_asked_for(tmp_path: Any) -> None:
    assert "advice" not in run_advised(CODE, tmp_path, advise=False).metadata


def test_a_program_cannot_take_its_remarks_back(tmp_path: Any) -> None:
    forger = """import os, json
frame = json.dumps({"type": "advice", "remarks": [], "parts": []}).encode()
os.write(4, len(frame).to_bytes(4, "big") + frame)
print("ran")
"""
    result = run_advised(forger, tmp_path)
    assert result.stdout == "ran\n"
    assert result.metadata["advice"] == [[1, "os", "reaches files and processes"]]


@pytest.mark.parametrize("code", ["(" * 100_000, "-" * 100_000 + "1", "def", "\0", ""])
def test_code_without_a_tree_has_no_remarks(code: str, tmp_path: Any) -> None:
    assert run_advised(code, tmp_path).metadata["advice"] == []


@settings(max_examples=200)
@given(st.text())
def test_any_text_can_be_looked_at(code: str) -> None:
    assert len(advice.remarks(code)) <= advice.MOST


@pytest.mark.parametrize(
    "claimed",
    [
        [[1, "os"]],
        [["1", "os", "x"]],
        [[0, "os", "x"]],
        [[1, "os\n", "x"]],
        [[1, None, "x"]],
        [None],
        [[True, "os", "x"]],
    ],
)
def test_a_claimed_remark_that_is_none_is_dropped(claimed: Any) -> None:
    assert claims.read_remarks(claimed) == []


def test_both_switches_belong_to_the_configuration() -> None:
    config = SelfManagedProvider.check_config({"enable_seccomp": True, "enable_ast_analysis": True})
    assert (config["enable_seccomp"], config["enable_ast_analysis"]) == (True, True)
    with pytest.raises(InvalidConfiguration):
        SelfManagedProvider.check_config({"enable_seccomp": "certainly"})
