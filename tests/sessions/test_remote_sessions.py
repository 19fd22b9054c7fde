"""A session whose sandbox a remote service keeps: what of it is there again after a sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executions.kernel import background
from executions.runs import event_log
from executions.sessions.maintenance import maintain
from providers.leases import close_all
from providers.manager import manager
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.remote_providers import aliyun_config, e2b_config
from tests.support.running import activate
from tests.support.sessions import URL, aged, cell, opened, row, wait_for


@pytest.fixture(params=["e2b", "aliyun_codeinterpreter"])
def _at_a_service(
    request: pytest.FixtureRequest, transactional_db: None, tmp_path: Path, settings: Any
) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    if request.param == "e2b":
        e2b: E2BServer = request.getfixturevalue("e2b_server")
        activate("e2b", e2b_config(e2b))
    else:
        aliyun: AgentRunServer = request.getfixturevalue("aliyun_server")
        activate("aliyun_codeinterpreter", aliyun_config(aliyun))
    yield
    assert background.wait_for_keyed_work()
    wait_for(lambda: not event_log.ids())
    close_all()
    manager.close()


@pytest.mark.usefixtures("_at_a_service")
def test_files_and_contexts_are_there_after_a_sleep(alice: Caller, bob: Caller) -> None:
    session = opened(alice)
    url = f"{URL}/{session['id']}"
    made = alice.client.post(f"{url}/contexts", {"language": "python", "id": "mine"})
    assert (made.status_code, made.json()["id"]) == (201, "mine")
    assert cell(alice, session, "x = 41", context="mine").json()["context_kept"] is True
    told = bob.client.post(
        f"{url}/processes", {"shell": "mkdir -p .d; printf %s it > .d/f; exit 3", "timeout": 10}
    ).json()
    assert (told["status"], told["exit_code"]) == ("failed", 3)
    assert background.wait_for_keyed_work()
    aged(session, used_at=601)
    maintain()
    assert row(session).state == "asleep"
    again = cell(alice, session, "print(open('.d/f').read(), 'x' in globals())", context="mine")
    assert again.json()["stdout"] == "it False\n"
    assert row(session).wakes == 1
    assert alice.client.delete(url).status_code == 204


@pytest.mark.usefixtures("_at_a_service")
def test_variables_of_a_cell_are_set_or_refused_by_name(alice: Caller) -> None:
    session = opened(alice)
    code = "import os; print(os.environ.get('NAME'))"
    answer = cell(alice, session, code, env={"NAME": "value"})
    if session["provider"] == "e2b":
        assert answer.json()["stdout"] == "value\n"
    else:
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "env")
    assert cell(alice, session, code).json()["stdout"] == "None\n"
    assert alice.client.delete(f"{URL}/{session['id']}").status_code == 204
