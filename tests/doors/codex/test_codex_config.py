"""`manage.py codex_config`, and what it prints: a token that stands for a key."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.utils import timezone

from executions.doors.codex.credentials import authenticate, capability_of
from executions.tenants import keys
from executions.tenants.models import ApiKey
from tests.conftest import Caller


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """The environment that the command prints."""
    call_command("codex_config", "--tenant", "wonderland", "--key", "laptop", *options)
    said = tomllib.loads(capsys.readouterr().out)
    assert (said["default"], said["include_local"]) == ("cofferdam", False)
    (environment,) = said["environments"]
    found: dict[str, Any] = environment
    return found


@pytest.fixture
def key(alice: Caller) -> ApiKey:
    return keys.create_api_key(alice.tenant, "laptop")[0]


def test_the_token_is_in_a_header_or_in_the_url(
    key: ApiKey, capsys: pytest.CaptureFixture[str]
) -> None:
    token = capability_of(key)
    said = printed(capsys, "--url", "wss://cofferdam.example.org/", "--folder", "/a b")
    assert said["url"] == "wss://cofferdam.example.org/codex/?folder=%2Fa+b"
    assert said["auth_bearer_token"] == token
    assert printed(capsys, "--in-url")["url"].endswith(f"/codex/{token}")
    assert authenticate(f"/codex/{token}", {}) == key
    assert authenticate("/codex/", {"HTTP_AUTHORIZATION": f"Bearer {token}"}) == key


def test_a_token_ends_with_its_key(key: ApiKey) -> None:
    token = capability_of(key)
    ApiKey.objects.filter(pk=key.pk).update(expires_at=timezone.now() - timedelta(seconds=1))
    with pytest.raises(keys.Unauthenticated):
        authenticate(f"/codex/{token}", {})


def test_a_token_is_of_the_text_of_its_key(key: ApiKey) -> None:
    """Another text under the same number is another key."""
    token = capability_of(key)
    ApiKey.objects.filter(pk=key.pk).update(key_hash="0" * 64)
    with pytest.raises(keys.Unauthenticated):
        authenticate(f"/codex/{token}", {})


def test_a_token_is_of_the_services_secret(key: ApiKey, settings: Any) -> None:
    token = capability_of(key)
    settings.SECRET_KEY = "another"
    with pytest.raises(keys.Unauthenticated):
        authenticate(f"/codex/{token}", {})


def test_a_key_holds_for_its_addresses(key: ApiKey) -> None:
    ApiKey.objects.filter(pk=key.pk).update(addresses="192.0.2.0/24")
    token = capability_of(key)
    assert authenticate(f"/codex/{token}", {"REMOTE_ADDR": "192.0.2.1"}) == key
    with pytest.raises(keys.Unauthenticated):
        authenticate(f"/codex/{token}", {"REMOTE_ADDR": "198.51.100.1"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--key", "nothing"), "no valid API key"),
        (("--url", "https://cofferdam.example.org"), "ws://"),
        (("--url", 'ws://a"\nid = "b'), "ws://"),
        (("--network", "no host"), "network"),
        (("--folder", "relative"), "folder"),
        (("--idle-seconds", "0"), "idle_seconds"),
    ],
)
def test_what_is_not_there_is_refused(
    key: ApiKey, options: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CommandError, match=problem):
        printed(capsys, *options)
