"""What the playground shows as curl, Python and JavaScript makes just the request that is typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from executions.capabilities.playground.service import snippets_of
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.tenants.service import OPERATOR
from providers.values import InputFile
from tests.conftest import Caller
from tests.support.playground import PAGE, sent
from tests.support.required import require
from tests.support.roles import member

pytestmark = pytest.mark.one_database

# Whatever one of the three languages could take for the end of a text, or for a command.
CODE = (
    '\n# it\'s "quoted" `id` $(id) $HOME \\n \\ ${x} \'\'\'  """ %s %d !!\nJSON = {\n}\nJSON\n'
    "# </script> \u202e\u2028\x0b\x85 \U0001f600 \U000e0001 \u4e2d\n"
    "answer = ExecutionResult('', '', 0, 0.0)\n"
)
ARGUMENTS: dict[str, Any] = {
    "it's": ['"', "\\", "\u202e", None, True, 0.1, 10**15],
    "__proto__": {"a": 1},
    "$HOME": "`id`",
}
NAME = "it's $(id) 1.csv"


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("with_files", [False, True])
def test_each_of_them_sends_what_was_typed(
    scripted: object, alice: Caller, live_server: Any, tmp_path: Path, with_files: bool
) -> None:
    for program in ("bash", "curl", "node"):
        require(program)
    files = [InputFile(path=NAME, content=b""), InputFile(path="b", content=b"")]
    request = ExecutionRequest(
        CODE,
        arguments=ARGUMENTS,
        timeout=7,
        entrypoint="script",
        files=files if with_files else (),
    )
    (tmp_path / NAME).write_bytes(bytes(range(256)) * 1000)
    (tmp_path / "b").write_bytes(b"")
    snippets = snippets_of(request, f"{live_server}/api/v1/executions")
    (tmp_path / "it.mjs").write_text(snippets["JavaScript"])
    for command in (
        ["bash", "-c", snippets["curl"]],
        [sys.executable, "-c", snippets["Python"]],
        ["node", "it.mjs"],
    ):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={"PATH": os.environ["PATH"], "API_KEY": alice.key_text, "HOME": "/nowhere"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        execution = Execution.objects.get()
        assert execution.code == CODE, command[0]
        assert json.loads(execution.arguments) == ARGUMENTS, command[0]
        assert (execution.timeout, execution.entrypoint) == (7, "script")
        facts = [(each["path"], each["size_bytes"]) for each in execution.input_files]
        assert facts == ([(NAME, 256_000), ("b", 0)] if with_files else [])
        assert str(execution.pk) in done.stdout
        execution.delete()


@pytest.mark.django_db
def test_the_page_gives_them_and_no_key(alice: Caller) -> None:
    operator = member(OPERATOR)
    told = sent(operator, CODE.replace("\n", "\r\n"), to="snippets", provider="nowhere").json()
    for text in told["snippets"].values():
        assert "http://testserver/api/v1/executions" in text
        assert "API_KEY" in text
        assert "nowhere" not in text
        # Nothing that hides or moves what stands beside it.
        assert not {"\u202e", "\u2028", "\x0b", "\x85", "\U000e0001"} & set(text)
    page = operator.post(f"{PAGE}snippets", {"code": CODE, "language": "python"}).content.decode()
    assert "&lt;/script&gt;" in page
    assert not Execution.objects.exists()
