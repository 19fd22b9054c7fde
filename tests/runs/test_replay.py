"""Replaying: the same code again, here or elsewhere, and both outcomes side by side."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from executions.capabilities.playground import service
from executions.capabilities.playground.service import (
    differences_of,
    recorded_request,
    replay_sync,
    route_to,
)
from executions.kernel.presentation import PageTime
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from executions.runs.models import Execution
from providers.errors import InvalidConfiguration
from providers.manager import manager
from providers.models import ProviderConfig
from providers.services import activate as make_active
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.running import LOCAL, run

pytestmark = pytest.mark.django_db

CODE = "answer = ExecutionResult(f'{len(events)} events', '', 0, 0.0, has_result=True, result=[1])"


def page_of(execution: Execution) -> str:
    return f"/admin/executions/execution/{execution.pk}/replay"


@pytest.fixture
def operator(db: None) -> Client:
    """Staff who may look at executions and replay them."""
    user = get_user_model().objects.create_user("operator", password="x", is_staff=True)
    user.user_permissions.set(
        Permission.objects.filter(codename__in=("view_execution", "replay_execution"))
    )
    client = Client()
    client.force_login(user)
    return client


def recorded(caller: Caller, code: str = CODE, **body: Any) -> Execution:
    return Execution.objects.get(pk=run(caller, code, **body).json()["id"])


def test_a_replay_is_what_was_run_and_a_record_of_its_own(scripted: object, alice: Caller) -> None:
    before = recorded(alice, arguments={"a": 1}, timeout=7, entrypoint="script")

    after = replay_sync(before).execution

    assert after.pk != before.pk
    assert after.replay_of == before
    for name in ("code", "arguments", "language", "entrypoint", "timeout", "provider"):
        assert getattr(after, name) == getattr(before, name), name
    assert after.tenant_slug == "internal"
    said = LedgerEntry.objects.get(kind="replay").stated
    assert (said["subject"], said["provider"]) == (str(before.pk), "scripted")
    assert LedgerEntry.objects.filter(execution_id=after.pk).exists()
    assert verify().is_intact
    listed = alice.client.get("/api/v1/executions").json()["results"]
    assert [each["id"] for each in listed] == [str(before.pk)]


def test_what_differs_is_named(scripted: Callable[[], list[str]], alice: Caller) -> None:
    before = recorded(alice)
    after = replay_sync(before).execution

    differing = {
        each.name for each in differences_of(before, after) if each.matters and not each.is_same
    }
    assert differing == {"stdout"}


def test_another_provider_runs_it_with_its_own_configuration(
    scripted: object, local_too: None, alice: Caller
) -> None:
    before = recorded(alice, "print('hello')")

    after = replay_sync(before, "local").execution

    assert (before.provider, after.provider) == ("scripted", "local")
    assert (after.status, after.stdout, after.runtime) == ("succeeded", "hello\n", "bubblewrap")
    assert after.config_version == 3
    assert ProviderConfig.objects.get(is_active=True).provider_id == "scripted"


@pytest.fixture
def local_too(scripted: object) -> None:
    """A second provider, configured and not active."""
    from tests.conftest import require

    require("bwrap")
    ProviderConfig(pk=2, provider_id="local", config=LOCAL, version=3).save(force_insert=True)


def test_what_is_not_all_there_is_not_replayed(
    scripted: object, alice: Caller, settings: Any
) -> None:
    content = base64.b64encode(b"x").decode()
    with_file = recorded(alice, files=[{"path": "a.txt", "content_base64": content}])
    assert with_file.input_files[0]["path"] == "a.txt"
    with pytest.raises(InvalidConfiguration, match="files"):
        replay_sync(with_file)
    queued = recorded(alice, mode="async")
    with pytest.raises(InvalidConfiguration, match="Has not ended"):
        replay_sync(queued)
    settings.SANDBOX_STORE_CODE = "never"
    with pytest.raises(InvalidConfiguration, match="only its hash"):
        replay_sync(recorded(alice))
    settings.SANDBOX_STORE_CODE = "always"
    changed = recorded(alice)
    changed.code = "answer = None"
    with pytest.raises(InvalidConfiguration, match="Differs from the code that ran"):
        recorded_request(changed)
    with pytest.raises(InvalidConfiguration, match="no configuration"):
        replay_sync(recorded(alice), "nowhere")
    assert not LedgerEntry.objects.filter(kind="replay").exists()


def test_an_operator_replays_and_sees_both_outcomes(
    scripted: object, alice: Caller, operator: Client
) -> None:
    execution = recorded(
        alice, "answer = ExecutionResult(f'<b>{len(events)}</b>\\nsame\\u202e', '', 0, 0.0)"
    )
    assert (
        page_of(execution)
        in operator.get(f"/admin/executions/execution/{execution.pk}/change/").content.decode()
    )
    assert 'name="provider"' in operator.get(page_of(execution)).content.decode()

    page = operator.post(page_of(execution), {"provider": "scripted"}, follow=True)

    text = page.content.decode()
    assert "&lt;b&gt;2&lt;/b&gt;" in text
    assert "&lt;b&gt;5&lt;/b&gt;" in text
    assert "same[U+202E]" in text
    assert "\u202e" not in text
    stdout = re.search(r'<tbody class="(\w+)">\s*<tr class="line-(\w+)">\s*<th[^>]*>stdout', text)
    assert stdout is not None
    assert stdout.groups() == ("differs", "changed")
    assert LedgerEntry.objects.get(kind="replay").stated["actor"] == "user:operator"


def test_a_refusal_is_shown(scripted: object, alice: Caller, operator: Client) -> None:
    execution = recorded(alice)
    page = operator.post(page_of(execution), {"provider": "nowhere"}, follow=True)
    assert "There is no configuration of &#x27;nowhere&#x27;" in page.content.decode()
    Execution.objects.filter(pk=execution.pk).update(code="")
    assert "cannot be replayed" in operator.get(page_of(execution)).content.decode()


def test_only_who_may_replay_replays(scripted: object, alice: Caller) -> None:
    execution = recorded(alice)
    user = get_user_model().objects.create_user("auditor", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_execution"))
    auditor = Client()
    auditor.force_login(user)

    assert auditor.post(page_of(execution)).status_code == 403
    assert (
        page_of(execution)
        not in auditor.get(f"/admin/executions/execution/{execution.pk}/change/").content.decode()
    )
    assert Client().post(page_of(execution)).status_code == 302
    assert Client(enforce_csrf_checks=True).post(page_of(execution)).status_code in (302, 403)
    assert Execution.objects.count() == 1


def test_long_outcomes_are_compared_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MAX_LINES", 50)
    difference = service.Difference("stdout", "a\n" * 10_000, "b\n" * 10_000)
    assert len(difference.lines(PageTime())) == 50
    assert difference.is_cut


def test_under_the_two_person_rule_one_person_chooses_no_other_provider(
    scripted: object, local_too: None, alice: Caller, operator: Client, settings: Any
) -> None:
    before = recorded(alice)
    settings.TWO_PERSON_RULE = True
    assert operator.get(page_of(before)).context["providers"] == ["scripted"]
    operator.post(page_of(before), {"provider": "local"})
    assert Execution.objects.count() == 1
    # The tenant that replays belong to is made here; that is no change of anybody's rights.
    operator.post(page_of(before), {"provider": "scripted"})
    assert Execution.objects.get(replay_of=before).provider == "scripted"


def test_a_replay_runs_where_the_ledger_says_though_another_is_active_by_then(
    services: tuple[E2BServer, AgentRunServer],
) -> None:
    """The ledger's entry is written before the run, and names the provider."""
    make_active("e2b")
    route = route_to("e2b")
    make_active("aliyun_codeinterpreter")
    manager.close()
    with manager.lease() as active, route() as lease:
        assert (active.provider_id, lease.provider_id) == ("aliyun_codeinterpreter", "e2b")
