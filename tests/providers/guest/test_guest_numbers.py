"""Every number that a guest or its service gives fits the record, or is left out of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from executions.ledger import verification
from tests.conftest import Caller
from tests.support import envd
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.lying_provider import Liar
from tests.support.routing import last_execution, make_route
from tests.support.running import run

Services = tuple[E2BServer, AgentRunServer]

pytestmark = [pytest.mark.django_db, pytest.mark.one_database]

NUMBERS = [
    2**31,
    -(2**31) - 1,
    2**63,
    -(2**63) - 1,
    10**400,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    -1,
    True,
    "7",
    None,
]

# Says what its end was before the interpreter does, between marks that it has found in the frames.
FORGES = """
def main():
    import sys
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, str) and len(value) == 34 and value[0] == chr(30):
                print(value + '{"exit_code": NUMBER}' + value)
                return
        frame = frame.f_back
"""


def assert_recorded(caller: Caller, response: Any) -> dict[str, Any]:
    """An answer that can be asked for again, of a record that the ledger has."""
    answer: dict[str, Any] = response.json()
    assert response.status_code == 200, answer
    again = caller.client.get(f"/api/v1/executions/{answer['id']}").json()
    assert (again["status"], again["exit_code"]) == (answer["status"], answer["exit_code"])
    assert not list(verification.verify().findings)
    return answer


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
@pytest.mark.parametrize("field", ["exit_code", "execution_time"])
def test_a_number_of_the_result(liar: Liar, alice: Caller, field: str, number: Any) -> None:
    liar.answers(**{field: number})
    answer = assert_recorded(alice, run(alice, "print(1)"))
    if field == "exit_code":
        assert (answer["exit_code"], answer["status"]) == (-1 if number == -1 else None, "failed")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: str(number)[:12])
def test_a_number_of_the_metadata(liar: Liar, alice: Caller, number: Any) -> None:
    names = ("memory_peak_bytes", "cpu_seconds", "outputs_skipped", "artifacts_skipped")
    told = dict.fromkeys(names, number)
    liar.answers(metadata={**told, "limits": {"memory_bytes": number}}, outputs=[1])
    assert_recorded(alice, run(alice, "print(1)"))
    json.dumps(last_execution().meta, allow_nan=False)


@pytest.mark.parametrize(
    "number", [2**31, 2**63, 10**400, 10**5000], ids=lambda n: str(len(bin(n)))
)
@pytest.mark.parametrize("provider", ["e2b", "aliyun_codeinterpreter"])
def test_the_exit_code_of_a_remote_program(
    services: Services, alice: Caller, provider: str, number: int
) -> None:
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    text = str(number)
    sys.set_int_max_str_digits(limit)
    make_route(provider)
    for code in (FORGES.replace("NUMBER", text), f"raise SystemExit('{text}')"):
        answer = assert_recorded(alice, run(alice, code))
        assert answer["status"] == "failed" or answer["exit_code"] == 0
    assert answer["exit_code"] in range(256)


@pytest.mark.parametrize("number", [2**31, -(2**40), 2**63])
def test_the_exit_code_of_a_remote_command(
    services: Services, alice: Caller, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def lie(end: dict[str, Any]) -> dict[str, Any]:
        return {**end, "exitCode": number}

    monkeypatch.setattr(envd.Command, "changed_end", staticmethod(lie))
    make_route("e2b")
    response = run(alice, "echo 1", language="bash")
    assert response.status_code in (200, 502, 503)
    assert last_execution().status in ("failed", "error")
    assert not last_execution().retryable


@pytest.mark.parametrize("size", ["-5", str(2**63), "1"])
def test_the_size_of_a_remote_file(
    services: Services, alice: Caller, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    honest = envd.Files.entry

    def entry(files: envd.Files, path: Path) -> dict[str, Any]:
        return honest(files, path) | ({"size": size} if path.is_file() else {})

    monkeypatch.setattr(envd.Files, "entry", entry)
    make_route("e2b")
    code = "with open('artifacts/left.txt', 'w') as file: file.write('left')\nprint('done')"
    answer = assert_recorded(alice, run(alice, code))
    assert answer["stdout"] == "done\n"
    for artifact in answer["artifacts"]:
        assert artifact["size_bytes"] == 4
