"""The page that connects an agent with a key: who sees the secret, and that the blocks work."""

from __future__ import annotations

import html
import json
import re
import shlex
import tomllib
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from executions.capabilities.policies.approvals import AskedBySame, ensure_not_requester
from executions.doors.codex.connection import admit
from executions.doors.codex.credentials import capability_of
from executions.tenants.keys import create_api_key
from executions.tenants.models import ApiKey
from executions.tenants.service import ADMINISTRATOR, AUDITOR, OPERATOR
from tests.admin.pages.key_pages import KEYS
from tests.conftest import Caller
from tests.support.execution_rows import make_rows
from tests.support.roles import member

pytestmark = pytest.mark.django_db

SCOPES = "execute sessions files"


@pytest.fixture
def key(alice: Caller) -> ApiKey:
    return create_api_key(alice.tenant, "laptop", None, SCOPES)[0]


def at(key: ApiKey) -> str:
    return f"{KEYS}{key.pk}/connect/"


def block_of(answer: Any, name: str) -> str:
    found = re.search(rf'id="{name}-block"[^>]*>([^<]*)<', answer.content.decode())
    return html.unescape(found[1]) if found else ""


def environment(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.content
    (found,) = tomllib.loads(block_of(answer, "codex"))["environments"]
    return dict(found)


def test_the_block_is_that_of_the_command_and_its_token_opens_the_door(
    key: ApiKey, capsys: pytest.CaptureFixture[str]
) -> None:
    sent = {"template": "data@2", "network": "pypi.org,files.example", "folder": "/home/a b"}
    answer = member(OPERATOR).post(at(key), sent)
    options = [f"--{name}={text}" for name, text in sent.items()]
    given = ("--tenant", "wonderland", "--key", "laptop", "--url", "ws://testserver", *options)
    call_command("codex_config", *given)
    assert block_of(answer, "codex") == capsys.readouterr().out
    found = environment(answer)
    url = urlsplit(found["url"])
    assert {name: text for name, (text,) in parse_qs(url.query).items()} == sent
    header = {"HTTP_AUTHORIZATION": f"Bearer {found['auth_bearer_token']}"}
    assert admit(url.path, {**header, "QUERY_STRING": url.query}).key_id == key.pk


def test_the_address_is_as_safe_as_the_page(key: ApiKey) -> None:
    answer = member(OPERATOR).post(at(key), {}, secure=True)
    assert environment(answer)["url"] == "wss://testserver/codex/"
    assert "https://testserver/mcp" in block_of(answer, "claude")


def test_the_secret_comes_by_post_alone_is_not_kept_and_is_noted(
    key: ApiKey, caplog: pytest.LogCaptureFixture
) -> None:
    token, client = capability_of(key), member(OPERATOR)
    page = client.get(at(key))
    assert token not in page.content.decode()
    assert "no-store" in page["Cache-Control"]
    assert not LogEntry.objects.exists()
    answer = client.post(at(key), {})
    assert token in answer.content.decode()
    assert "no-store" in answer["Cache-Control"]
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.user.get_username()) == (str(key.pk), "operator")
    assert "with a token" in entry.get_change_message()
    assert token not in entry.change_message
    assert token not in caplog.text
    assert token not in str([*client.cookies.values()])


def test_another_site_can_have_no_token_shown_and_hears_of_none(key: ApiKey) -> None:
    client = Client(enforce_csrf_checks=True)
    client.cookies = member(OPERATOR).cookies
    answer = client.post(at(key), {})
    assert answer.status_code == 403
    assert capability_of(key) not in answer.content.decode()
    assert not LogEntry.objects.exists()
    page = client.get(at(key))
    assert page.status_code == 200
    assert page["X-Frame-Options"] == "DENY"
    assert page["Referrer-Policy"] in ("same-origin", "no-referrer")
    assert client.post(f"{at(key)}?folder=/a", {"template": "x" * 600}).status_code == 403


def test_who_was_shown_a_token_approves_nothing_that_is_asked_with_it(key: ApiKey) -> None:
    asked = make_rows(1, api_key_prefix=key.prefix)[0].pk
    client = member(OPERATOR)
    person = get_user_model().objects.get(username="operator")
    client.get(at(key))
    ensure_not_requester(asked, person)
    assert client.post(at(key), {}).status_code == 200
    with pytest.raises(AskedBySame, match="key"):
        ensure_not_requester(asked, person)


def test_the_blocks_for_claude_code_are_read_by_their_own_parsers(key: ApiKey) -> None:
    page = member(OPERATOR).get(at(key))
    add, start = block_of(page, "claude").splitlines()
    *words, address, option, header = shlex.split(add)
    assert words == ["claude", "mcp", "add", "--transport", "http", "cofferdam"]
    assert (address, option) == ("http://testserver/mcp", "--header")
    assert header == "Authorization: Bearer cfd_..."
    assert shlex.split(start) == ["claude", "--tools", "", "--allowedTools", "mcp__cofferdam"]
    server = json.loads(block_of(page, "mcp"))["mcpServers"]["cofferdam"]
    assert server["url"] == address
    assert server["headers"] == {"Authorization": "Bearer cfd_..."}


def test_who_may_not_make_such_a_key_gets_none(key: ApiKey, alice: Caller) -> None:
    only_changes = get_user_model().objects.create_user("clerk", is_staff=True)
    for name in ("view_apikey", "change_apikey"):
        only_changes.user_permissions.add(Permission.objects.get(codename=name))
    clerk = Client()
    clerk.force_login(only_changes)
    strong = create_api_key(alice.tenant, "root", None, "admin execute sessions")[0]
    for client, asked in ((member(AUDITOR), key), (clerk, key), (member(OPERATOR), strong)):
        for answer in (client.get(at(asked)), client.post(at(asked), {})):
            assert answer.status_code == 403
            assert capability_of(asked) not in answer.content.decode()
    assert Client().post(at(key), {}).status_code == 302
    assert member(ADMINISTRATOR).post(at(strong), {}).status_code == 200
    assert [entry.object_id for entry in LogEntry.objects.all()] == [str(strong.pk)]


@pytest.mark.parametrize(
    "over", [{"revoked_at": timezone.now()}, {"expires_at": timezone.now() - timedelta(days=1)}]
)
def test_a_key_that_is_not_valid_connects_nothing(key: ApiKey, over: dict[str, Any]) -> None:
    ApiKey.objects.filter(pk=key.pk).update(**over)
    answer = member(OPERATOR).post(at(key), {})
    assert answer.status_code in (403, 404)
    assert capability_of(key) not in answer.content.decode()


def test_one_person_alone_gets_no_working_key_under_the_two_person_rule(
    key: ApiKey, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    answer = member(ADMINISTRATOR).post(at(key), {})
    assert environment(answer)["auth_bearer_token"] == "cfd_..."
    assert capability_of(key) not in answer.content.decode()
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"folder": "relative"}, "folder: Must be an absolute path"),
        ({"network": "no host"}, "network: "),
        ({"template": "x" * 501}, "at most 500"),
        ({"folder": '<script>alert(1)</script>"\n'}, "folder: Must be an absolute path"),
    ],
)
def test_what_the_door_would_refuse_is_an_error_of_its_field(
    key: ApiKey, sent: dict[str, str], said: str
) -> None:
    answer = member(OPERATOR).post(at(key), sent)
    page = answer.content.decode()
    assert answer.status_code == 400
    assert said in html.unescape(page)
    assert "<script>alert" not in page
    assert capability_of(key) not in page
    assert not LogEntry.objects.exists()


def test_what_is_typed_stays_within_its_text(key: ApiKey) -> None:
    sent = {"folder": '/a"\nurl = "ws://evil.example'}
    found = environment(member(OPERATOR).post(at(key), sent))
    assert found["url"].startswith("ws://testserver/codex/?folder=%2Fa%22")


def test_a_key_that_lacks_what_agents_need_says_so(alice: Caller) -> None:
    weak = create_api_key(alice.tenant, "<b>weak", None, "execute")[0]
    page = member(OPERATOR).get(at(weak)).content.decode()
    assert "lacks the scopes sessions, files" in page
    assert "<b>weak" not in page


def test_the_page_of_a_key_leads_there(key: ApiKey) -> None:
    assert at(key) in member(OPERATOR).get(f"{KEYS}{key.pk}/change/").content.decode()
    assert at(key) not in member(AUDITOR).get(f"{KEYS}{key.pk}/change/").content.decode()
