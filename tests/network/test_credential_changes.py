"""Credentials of runs under way: given once, and sent again when they change."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest

from executions.capabilities.network import credential_changes, credentials
from executions.capabilities.network.credential_changes import Holder, look, register, send
from executions.capabilities.network.credentials import credentials_in_force, revoke
from executions.ledger.verification import verify
from executions.runs.models import Execution
from providers.errors import ProviderUnavailable
from tests.conftest import Caller
from tests.support.credentials import OTHER, Taken, in_force
from tests.support.credentials import _no_holder as _no_holder
from tests.support.credentials import _no_thread as _no_thread
from tests.support.lying_provider import Liar
from tests.support.networks import ALLOWED, VALUE, attempts, credential, listed
from tests.support.running import run

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

ASKED: dict[str, Any] = {"network": {"allow": ["api.example.com"]}}


@pytest.fixture
def holding(liar: Liar) -> Liar:
    """A provider that holds networks, and notes changed credentials."""
    listed("api.example.com", "pypi.org")
    liar.does("holds_network", lambda: True)
    liar.answers(exit_code=0)
    return liar


def test_a_run_is_given_its_credentials_and_its_record_names_them(
    holding: Liar, alice: Caller, charlie: Caller
) -> None:
    credential(tenant=alice.tenant.slug)
    credential("elsewhere", "https://nowhere.test")
    put_in = [{**ALLOWED.to_json(), "host": "api.example.com", "credential": "prices@1"}]
    said = {**attempts(ALLOWED).to_json(), "attempts": put_in}
    holding.answers(metadata={"network": said, "network_credentials": ["forged@1"]}, exit_code=0)
    told = run(alice, "1", **ASKED).json()
    [given] = holding.module.specs[-1].network.credentials
    assert given.value.reveal() == VALUE
    assert told["network"]["credentials"] == ["prices@1"]
    assert told["network"]["attempts"][0]["credential"] == "prices@1"
    found = alice.client.get("/api/v1/network/attempts").json()["results"]
    assert [each["credential"] for each in found] == ["prices@1"]
    read = alice.client.get(f"/api/v1/executions/{told['id']}")
    assert read.json()["network"] == told["network"]
    # Another tenant has neither the credential nor the attempts.
    other = run(charlie, "1", **ASKED).json()
    assert holding.module.specs[-1].network.credentials == ()
    assert other["network"]["credentials"] == []
    assert (
        charlie.client.get("/api/v1/network/attempts").json()["results"][0]["execution"]
        == (other["id"])
    )
    stored = "".join(str(each) for each in Execution.objects.values("meta", "pending"))
    everything = stored + read.content.decode() + json.dumps(told)
    assert VALUE not in everything
    assert verify().is_intact


@pytest.fixture
def taken() -> Any:
    return Taken()


def test_a_look_sends_what_has_changed_since_the_run_was_given_it(taken: Any) -> None:
    assert look() is None
    first, second = credential("one"), credential("two")
    holder = Holder(taken, {str(first.pk): 1, str(second.pk): 1})
    register(holder)
    assert look() == credential_changes.LOOK_SECONDS
    assert taken.changes == []
    credential("one", value=OTHER)
    credential("unrelated")
    look()
    assert taken.said == [{str(first.pk): "one@2"}]
    assert taken.changes[0][str(first.pk)].value.reveal() == OTHER
    revoke(second)
    look()
    look()
    assert taken.said[1:] == [{str(second.pk): None}]
    credential_changes.unregister(holder)
    assert look() is None


def test_a_look_sends_again_what_a_provider_did_not_take(
    taken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    row = credential()
    well: Any = Taken()
    for provider in (taken, well):
        register(Holder(provider, {str(row.pk): 1}))

    def fail() -> None:
        raise ProviderUnavailable("away")

    taken.does = fail
    revoke(row)
    look()
    assert (taken.changes, well.said) == ([], [{str(row.pk): None}])
    assert "did not take" in caplog.text
    taken.does = lambda: None
    look()
    assert (taken.said, len(well.changes)) == ([{str(row.pk): None}], 1)


def test_a_provider_that_hangs_holds_nobody_up_and_gets_no_second_thread(
    taken: Any, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, began = threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        began.release()
        assert goes_on.wait(60)

    taken.does = hang
    try:
        assert send({taken: {"1": None}}, seconds=0.0) == set()
        assert began.acquire(timeout=60)
        assert send({taken: {"1": None}}, seconds=0.0) == set()
        assert not began.acquire(blocking=False)
        assert "still hangs" in caplog.text
    finally:
        goes_on.set()


def test_a_change_reaches_the_providers_of_this_process_once_it_is_committed(
    taken: Any, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    class Lent:
        provider = taken

    monkeypatch.setattr(credential_changes, "loaded", lambda: [Lent, Lent])
    with django_capture_on_commit_callbacks(execute=True):
        row = credential()
        assert taken.changes == []
    with django_capture_on_commit_callbacks(execute=True):
        revoke(row)
    assert taken.said == [{str(row.pk): "prices@1"}, {str(row.pk): None}]


def test_a_revocation_is_sent_though_another_thread_has_just_looked_up_the_former(
    taken: Any, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    class Lent:
        provider = taken

    row = credential()
    assert in_force() == {"prices@1": VALUE}
    monkeypatch.setattr(credential_changes, "loaded", lambda: [Lent])
    # As if its lookup had begun before the commit, and ended after all was forgotten.
    monkeypatch.setattr(credentials._in_force, "forget", lambda **signal: None)
    with django_capture_on_commit_callbacks(execute=True):
        revoke(row)
    assert taken.said == [{str(row.pk): None}]


def test_a_run_is_registered_while_its_code_runs(
    holding: Liar, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = credential()
    registered: list[dict[str, int]] = []
    real = credential_changes.register

    def note(holder: Holder) -> None:
        registered.append(dict(holder.versions))
        real(holder)

    monkeypatch.setattr(credential_changes, "register", note)
    assert run(alice, "1", **ASKED).status_code == 200
    assert run(alice, "1", network={"allow": ["pypi.org"]}).status_code == 200
    assert run(alice, "1").status_code == 200
    assert registered == [{str(row.pk): 1}]
    assert credential_changes._holders == set()


def test_nothing_that_fails_logs_a_value(caplog: pytest.LogCaptureFixture, taken: Any) -> None:
    caplog.set_level(logging.DEBUG)
    row = credential()
    register(Holder(taken, {str(row.pk): 0}))
    taken.does = lambda: (_ for _ in ()).throw(RuntimeError("broken"))
    look()
    assert "broken" in caplog.text
    assert VALUE not in caplog.text
    assert VALUE not in repr(credentials_in_force(""))
