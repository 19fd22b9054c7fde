"""Runs and sessions on this machine reach the hosts of their lists, and their records say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from executions.capabilities.network.models import NetworkAttempt
from tests.conftest import Caller
from tests.providers.network.upstreams import ADDRESS, Upstream, upstreams
from tests.support.kept_service import kept_by, sessions_service
from tests.support.networks import listed
from tests.support.required import require
from tests.support.running import run
from tests.support.sessions import cell, opened

pytestmark = pytest.mark.usefixtures("lists_forgotten", "own_storage")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A pool service whose sandboxes may reach this machine."""
    require("bwrap")
    folder = tmp_path_factory.mktemp("service")
    with sessions_service(folder, folder / "log", NETWORK_ALLOWED_ADDRESSES="127.0.0.0/8"):
        yield folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with upstreams(tmp_path_factory.mktemp("upstreams")) as (plain, _, _):
        yield plain


@pytest.fixture(autouse=True)
def _on_the_service(
    transactional_db: None, service: Path, tmp_path: Path, settings: Any
) -> Iterator[None]:
    settings.DATA_DIR = tmp_path
    with kept_by(service, tmp_path):
        yield


def fetching(*urls: str) -> str:
    return f"""
import urllib.request as u
for url in {urls!r}:
    try:
        with u.urlopen(url) as answer:
            answer.read()
            print(answer.status)
    except u.HTTPError as error:
        print(error.code)
"""


def test_a_run_reaches_what_its_lists_allow_and_its_record_has_each_attempt(
    server: Upstream, alice: Caller
) -> None:
    listed(server.rule, "*.example.com")
    answer = run(
        alice,
        fetching(f"{server.url}/echo", "http://elsewhere.example.com/"),
        network={"allow": [server.rule]},
    ).json()
    assert answer["stdout"] == "200\n403\n", answer
    told = answer["network"]
    assert (told["allowed"], told["refused"]) == (1, 1)
    # Each is told when it has ended, and the first may end last.
    allowed, refused = sorted(told["attempts"], key=lambda attempt: str(attempt["outcome"]))
    assert (allowed["host"], allowed["port"], allowed["path"]) == (ADDRESS, server.port, "/echo")
    assert allowed["received"] > 100
    assert (refused["host"], refused["layer"]) == ("elsewhere.example.com", "run")
    rows = NetworkAttempt.objects.filter(execution_id=answer["id"])
    assert sorted(rows.values_list("outcome", flat=True)) == ["allowed", "refused"]
    output = StringIO()
    call_command("verify_ledger", stdout=output)
    assert "Intact" in output.getvalue()


def test_a_stream_tells_of_an_attempt_while_the_run_goes_on(
    server: Upstream, alice: Caller
) -> None:
    listed(server.rule)
    body = {"code": fetching(f"{server.url}/echo"), "network": {"allow": [server.rule]}}
    answer = alice.client.post(
        "/api/v1/executions",
        body,
        content_type="application/json",
        headers={"Accept": "application/x-ndjson"},
    )
    events = [json.loads(line) for line in b"".join(answer).splitlines() if line.strip()]
    (attempt,) = [event["attempt"] for event in events if event["type"] == "network"]
    assert attempt == events[-1]["execution"]["network"]["attempts"][0]


def test_a_run_that_names_none_reaches_nothing(server: Upstream, alice: Caller) -> None:
    listed(server.rule)
    answer = run(alice, fetching(f"{server.url}/echo")).json()
    assert answer["status"] == "failed"
    assert answer["network"] is None


def test_a_session_reaches_its_hosts_until_its_network_is_changed(
    server: Upstream, alice: Caller
) -> None:
    listed(server.rule, "elsewhere.example.com")
    session = opened(alice, network={"allow": [server.rule]})
    code = fetching(f"{server.url}/echo")
    assert cell(alice, session, code).json()["stdout"] == "200\n"
    address = f"/api/v1/sessions/{session['id']}/network"
    changed = alice.client.put(
        address, {"allow": ["elsewhere.example.com"]}, content_type="application/json"
    )
    assert changed.status_code == 200, changed.content
    assert cell(alice, session, code).json()["stdout"] == "403\n"
    assert alice.client.put(address, {"mode": "none"}).status_code == 200
    told = cell(alice, session, code).json()
    assert "URLError" in told["stderr"], told
