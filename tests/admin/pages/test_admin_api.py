"""`/api/admin/sandbox`: its paths and shapes, who may use it, and that no secret leaves it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.test import Client
from rest_framework.test import APIClient

from executions.tenants.models import ApiKey
from providers import registry
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import save_config
from providers.services.breaker import NOT_REACHABLE
from tests.conftest import Caller, require
from tests.support.provider_package import Packages, install_probe

pytestmark = pytest.mark.django_db

TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}
PROVIDERS = "/api/admin/sandbox/providers"
CONFIG = "/api/admin/sandbox/config"
TEST = "/api/admin/sandbox/test"
ACTIVE = "/api/admin/sandbox/active"


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path, monkeypatch), f"admin_api_{tmp_path.name}")
    yield
    registry.refresh()


@pytest.fixture
def api(alice: Caller, capsys: pytest.CaptureFixture[str]) -> APIClient:
    """Whoever holds a key that the command made with `--scope admin`."""
    call_command("create_api_key", "wonderland", "--name", "ops", "--scope", "admin")
    client = APIClient()
    client.credentials(HTTP_X_API_KEY=capsys.readouterr().out.strip())
    return client


def signed_in(*permissions: str, enforce_csrf: bool = False) -> Client:
    user = get_user_model().objects.create_user("ann", is_staff=True)
    for codename in permissions:
        user.user_permissions.add(Permission.objects.get(codename=f"{codename}_providerconfig"))
    client = Client(enforce_csrf_checks=enforce_csrf)
    client.force_login(user)
    return client


def every_call(client: Any) -> list[int]:
    """The status of each endpoint and method."""
    save = {"provider_type": "probe", "config": GOOD}
    sent = {"content_type": "application/json"} if type(client) is Client else {}
    dump: Callable[[Any], Any] = json.dumps if sent else (lambda body: body)
    return [
        client.get(PROVIDERS).status_code,
        client.get(CONFIG).status_code,
        client.post(CONFIG, dump(save), **sent).status_code,
        client.post(TEST, dump({"provider_type": "probe"}), **sent).status_code,
        client.put(ACTIVE, dump({"provider": "probe"}), **sent).status_code,
    ]


def test_providers_describe_themselves(api: APIClient) -> None:
    data = api.get(PROVIDERS).json()["data"]
    probe = next(entry for entry in data if entry["id"] == "probe")
    assert set(probe) == {
        "id", "name", "description", "icon", "tags", "config_schema", "supported_languages",
    }  # fmt: skip
    assert probe["config_schema"]["token"] == {
        "type": "string", "required": True, "label": "Token", "secret": True, "min": 4,
    }  # fmt: skip
    assert probe["config_schema"]["size"]["max"] == 100


def test_the_configuration_is_grouped_by_provider_with_defaults_and_masks(api: APIClient) -> None:
    data = api.get(CONFIG).json()["data"]
    assert data["active"] is None
    assert (data["probe"]["size"], data["probe"]["token"]) == (10, "")

    assert api.post(CONFIG, {"provider_type": "probe", "config": GOOD}).json() == {
        "message": "Configuration saved"
    }
    data = api.get(CONFIG).json()["data"]
    assert data["active"] == "probe"
    assert data["probe"]["endpoint"] == "http://a"
    assert data["probe"]["token"] == "••••wxyz"


def test_a_masked_value_that_comes_back_keeps_the_stored_one(api: APIClient) -> None:
    save_config("probe", GOOD)
    shown = api.get(CONFIG).json()["data"]["probe"]
    shown["size"] = 20

    assert api.post(CONFIG, {"provider_type": "probe", "config": shown}).status_code == 200
    stored = ProviderConfig.objects.get(provider_id="probe").config
    assert (stored["token"], stored["size"]) == (TOKEN, 20)

    shown["token"] = "••••1234"
    refused = api.post(CONFIG, {"provider_type": "probe", "config": shown})
    assert refused.status_code == 400
    assert "token" in refused.json()["details"]


def test_set_active_false_leaves_the_active_one(api: APIClient) -> None:
    save_config("local", {})
    api.put(ACTIVE, {"provider": "local"})
    api.post(CONFIG, {"provider_type": "probe", "config": GOOD, "set_active": False})
    assert api.get(CONFIG).json()["data"]["active"] == "local"
    assert api.put(ACTIVE, {"provider": "probe"}).json() == {"message": "Active provider updated"}
    assert api.get(CONFIG).json()["data"]["active"] == "probe"


def test_what_is_saved_names_its_author_and_reason(api: APIClient) -> None:
    api.post(CONFIG, {"provider_type": "probe", "config": GOOD, "reason": "Moved."})
    version = ConfigVersion.objects.get()
    key = ApiKey.objects.get(name="ops")
    assert (version.author, version.reason) == (f"key:{key.prefix}", "Moved.")


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        (CONFIG, {"provider_type": "nope", "config": {}}, "Unknown provider"),
        (CONFIG, {"config": {}}, "Unknown provider"),
        (CONFIG, {"provider_type": "probe"}, "Invalid config"),
        (CONFIG, {"provider_type": "probe", "config": [1]}, "Invalid config"),
        (CONFIG, {"provider_type": "probe", "config": {**GOOD, "size": "5"}}, "Invalid config"),
        (CONFIG, {"provider_type": "probe", "config": {**GOOD, "x": 1}}, "Invalid config"),
        (CONFIG, {"provider_type": "probe", "config": GOOD, "set_active": 1}, "Invalid request"),
        (CONFIG, {"provider_type": "probe", "config": GOOD, "typo": 1}, "Invalid request"),
        (CONFIG, [], "Invalid request"),
        (TEST, {"provider_type": "nope"}, "Unknown provider"),
        (ACTIVE, {"provider": "nope"}, "Unknown provider"),
        (ACTIVE, {"provider": "probe"}, "Provider not configured"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(
    api: APIClient, path: str, body: Any, error: str
) -> None:
    answer = api.put(path, body) if path == ACTIVE else api.post(path, body)
    assert (answer.status_code, answer.json()["error"]) == (400, error)
    assert not ProviderConfig.objects.exists()


def test_every_refused_field_is_explained(api: APIClient) -> None:
    config = {"endpoint": "x", "size": 1000}
    answer = api.post(CONFIG, {"provider_type": "probe", "config": config})
    assert set(answer.json()["details"]) == {"endpoint", "token", "size"}


def test_a_connection_that_fails_is_not_saved(api: APIClient) -> None:
    config = GOOD | {"behaviour": "refuse"}
    body = {"provider_type": "probe", "config": config, "test_connection": True}
    answer = api.post(CONFIG, body)
    assert answer.status_code == 400
    assert answer.json() == {
        "error": "Connection failed", "details": NOT_REACHABLE,
    }  # fmt: skip
    assert not ProviderConfig.objects.exists()


def test_a_test_does_not_say_how_an_address_failed(api: APIClient) -> None:
    for behaviour in ("refuse", "no", "crash"):
        config = GOOD | {"behaviour": behaviour}
        answer = api.post(TEST, {"provider_type": "probe", "config": config})
        assert answer.status_code == 200
        body = answer.json()
        assert (body["success"], body["code"], body["latency_ms"]) == (False, "SB003", None)
        assert body["message"] == NOT_REACHABLE
        assert TOKEN not in answer.content.decode()
    refused = api.post(TEST, {"provider_type": "probe", "config": {}}).json()
    assert (refused["code"], set(refused["errors"])) == ("SB002", {"endpoint", "token"})
    assert not ProviderConfig.objects.exists()


def test_a_test_really_runs_code_in_the_configured_sandbox(api: APIClient) -> None:
    require("bwrap")
    body = {"provider_type": "local", "config": {"launcher": "bubblewrap", "pool_size": 1}}
    answer = api.post(TEST, body).json()
    assert answer["success"], answer
    assert 0 < answer["latency_ms"] < 10_000
    assert answer["runtime"] == "bubblewrap"
    assert not ProviderConfig.objects.exists()


def test_with_test_connection_it_is_tested_and_saved(api: APIClient) -> None:
    require("bwrap")
    config = {"launcher": "bubblewrap", "pool_size": 1}
    body = {"provider_type": "local", "config": config, "test_connection": True}
    assert api.post(CONFIG, body).status_code == 200
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"


def test_only_keys_of_scope_admin_are_let_in(
    api: APIClient, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    for caller in (alice, bob, charlie):
        assert every_call(caller.client) == [403] * 5
    assert every_call(APIClient()) == [403] * 5
    wrong = APIClient()
    wrong.credentials(HTTP_AUTHORIZATION="Bearer cfd_nonsense")
    assert every_call(wrong) == [403] * 5
    assert not ProviderConfig.objects.exists()
    assert every_call(api) == [200] * 5


def test_a_wrong_key_is_not_saved_by_a_session(admin_client: Client) -> None:
    assert admin_client.get(CONFIG).status_code == 200
    assert admin_client.get(CONFIG, headers={"X-API-Key": "cfd_x"}).status_code == 403


def test_a_session_needs_the_permission_of_each_call() -> None:
    client = signed_in()
    assert every_call(client) == [403] * 5


def test_a_viewer_only_looks() -> None:
    assert every_call(signed_in("view")) == [200, 200, 403, 403, 403]


def test_whoever_may_not_activate_saves_without_it() -> None:
    client = signed_in("view", "change")
    body = {"provider_type": "probe", "config": GOOD}
    assert client.post(CONFIG, body, content_type="application/json").status_code == 403
    body["set_active"] = False
    assert client.post(CONFIG, body, content_type="application/json").status_code == 200


def test_whoever_may_only_test_cannot_send_the_stored_secret_elsewhere() -> None:
    save_config("probe", GOOD)
    client = signed_in("test")
    stolen = {"provider_type": "probe", "config": {"endpoint": "http://evil"}}
    assert client.post(TEST, stolen, content_type="application/json").status_code == 403
    stored = {"provider_type": "probe"}
    assert client.post(TEST, stored, content_type="application/json").status_code == 200


def test_a_session_needs_its_csrf_token() -> None:
    client = signed_in("view", "change", "activate", enforce_csrf=True)
    body = json.dumps({"provider_type": "probe", "config": GOOD})
    assert client.get(CONFIG).status_code == 200
    assert client.post(CONFIG, body, content_type="application/json").status_code == 403
    client.get("/admin/login/")
    client.get("/admin/")
    token = client.cookies["csrftoken"].value
    accepted = client.post(
        CONFIG, body, content_type="application/json", headers={"X-CSRFToken": token}
    )
    assert accepted.status_code == 200
    assert ConfigVersion.objects.get().author == "user:ann"
    assert LogEntry.objects.get().change_message == "Configuration saved."


def test_under_the_two_person_rule_a_session_asks_and_a_key_may_not(
    api: APIClient, admin_client: Client, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    body = {"provider_type": "probe", "config": GOOD}
    assert api.post(CONFIG, body).status_code == 403
    answer = admin_client.post(CONFIG, body, content_type="application/json")
    assert answer.status_code == 202
    assert PendingChange.objects.get().pk == answer.json()["pending"]
    assert not ProviderConfig.objects.exists()


def test_no_answer_and_no_log_line_holds_a_secret(
    api: APIClient, caplog: pytest.LogCaptureFixture
) -> None:
    secret = GOOD | {"proxy_password": "planted-secret-value"}
    bodies: list[Any] = [
        secret, secret | {"size": 0}, secret | {"behaviour": "crash"}, secret | {"oops": 1},
    ]  # fmt: skip
    texts = [api.get(PROVIDERS).content.decode()]
    for config in bodies:
        body = {"provider_type": "probe", "config": config}
        texts.append(api.post(TEST, body).content.decode())
        texts.append(api.post(CONFIG, body | {"test_connection": True}).content.decode())
        texts.append(api.post(CONFIG, body).content.decode())
        texts.append(api.get(CONFIG).content.decode())
    said = (
        "\n".join(texts)
        + caplog.text
        + json.dumps(list(ConfigVersion.objects.values_list("diff", flat=True)))
    )
    assert "planted-secret-value" not in said
    assert TOKEN not in said
