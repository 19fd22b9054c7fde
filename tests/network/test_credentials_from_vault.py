"""Credentials whose values come from Vault: fetched, followed, revoked with their source, sealed."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from executions import tasks
from executions.capabilities.network import credential_changes, vault
from executions.capabilities.network.capability import CAPABILITY
from executions.capabilities.network.credential_changes import Holder, look, register
from executions.capabilities.network.credentials import find_credential, put_credential, revoke
from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.network.sources import fetch_value, follow_sources
from executions.capabilities.network.vault import Place, fetch, read_place
from executions.capabilities.retention.service import begin
from executions.kernel.http import Answer
from executions.ledger.models import LedgerEntry
from executions.ledger.verification import verify
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, PendingChange
from providers.services import approve, history
from providers.services.guarded_rows import restore
from tests.attacks.test_writers_records import undone
from tests.conftest import Caller
from tests.support.credentials import ADD, CHANGE, FORM, OTHER, Taken, in_force, write
from tests.support.networks import VALUE, credential
from tests.support.vaults import TOKEN, OpenBao, OrderedVault, ordered_vault
from tests.support.wire_server import refusing

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("lists_forgotten")]

SOURCE = "secret/openai#api_key"


@pytest.fixture
def served(ordered: OrderedVault) -> OrderedVault:
    """A server that has VALUE, unless it is ordered otherwise."""
    ordered.has({"api_key": VALUE})
    return ordered


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(credential_changes._loop, "start_if_possible", lambda: True)
    yield
    credential_changes._forget()


def sourced(source: str = SOURCE, name: str = "prices", tenant: str = "") -> NetworkCredential:
    """A credential whose value was fetched."""
    return credential(name, tenant=tenant, value=fetch_value(source), source=source)


def entries() -> int:
    return LedgerEntry.objects.filter(kind="network_credential").count()


def actions() -> list[str]:
    found = LedgerEntry.objects.filter(kind="network_credential").order_by("sequence")
    return [json.loads(each.statement)["action"] for each in found]


# A real server.


def test_a_value_is_fetched_and_each_other_one_is_the_next_version(bao: OpenBao, path: str) -> None:
    bao.put(path, api_key=VALUE, other="not-this-one")
    row = sourced(f"secret/{path}#api_key")
    assert in_force() == {"prices@1": VALUE}
    before = entries()
    assert follow_sources() == 0
    assert bao.put(path, api_key=VALUE, other="changed-only-this") == 2
    assert follow_sources() == 0
    assert (in_force(), entries()) == ({"prices@1": VALUE}, before)
    taken: Any = Taken()
    register(Holder(taken, {str(row.pk): 1}))
    bao.put(path, api_key=f"{OTHER}\n")
    assert follow_sources() == 1
    assert in_force() == {"prices@2": OTHER}
    look()
    assert taken.said == [{str(row.pk): "prices@2"}]
    assert actions() == ["created", "changed"]
    assert "Fetched from its source." in ConfigVersion.objects.values_list("reason", flat=True)
    assert verify().is_intact


@pytest.mark.parametrize("how", ["deleted", "destroyed", "with its history", "without its key"])
def test_what_is_deleted_at_its_source_is_revoked(
    how: str, bao: OpenBao, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    bao.put(path, api_key="an-earlier-value")
    bao.put(path, api_key=VALUE)
    row = sourced(f"secret/{path}#api_key")
    taken: Any = Taken()
    register(Holder(taken, {str(row.pk): 1}))
    if how == "deleted":
        bao.ask("DELETE", f"secret/data/{path}")
    elif how == "destroyed":
        bao.ask("PUT", f"secret/destroy/{path}", {"versions": [2]})
    elif how == "with its history":
        bao.ask("DELETE", f"secret/metadata/{path}")
    else:
        bao.put(path, other=VALUE)
    assert follow_sources() == 1
    row.refresh_from_db()
    assert row.value is None
    assert row.revoked_at is not None
    assert in_force() == {}
    look()
    assert taken.said == [{str(row.pk): None}]
    assert actions() == ["created", "revoked"]
    [said] = [each for each in caplog.records if "is revoked" in each.message]
    assert (said.levelno, said.__dict__["alert"]) == (logging.ERROR, "credential_source")
    # What comes back there does not come back here by itself.
    bao.put(path, api_key=OTHER)
    assert follow_sources() == 0
    assert in_force() == {}
    assert verify().is_intact


def test_a_version_that_will_be_deleted_later_is_taken_until_then(bao: OpenBao, path: str) -> None:
    bao.ask("POST", f"secret/metadata/{path}", {"delete_version_after": "3600s"})
    bao.put(path, api_key=VALUE)
    assert fetch_value(f"secret/{path}#api_key") == VALUE


@pytest.mark.parametrize(
    ("columns", "why"),
    [
        ({"VAULT_TOKEN": "wrong-0123456789"}, "refuses VAULT_TOKEN"),
        ({"VAULT_NAMESPACE": "nowhere"}, "VAULT_NAMESPACE"),
        ({"VAULT_CA": ""}, "certificate is not accepted"),
        ({"VAULT_ALLOWED_NETWORKS": []}, "VAULT_ALLOWED_NETWORKS"),
        ({"VAULT_URL": ""}, "Set VAULT_URL and VAULT_TOKEN"),
    ],
)
def test_a_mistake_in_the_settings_erases_nothing(
    columns: dict[str, Any],
    why: str,
    bao: OpenBao,
    path: str,
    settings: Any,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bao.put(path, api_key=VALUE)
    sourced(f"secret/{path}#api_key")
    for name, value in columns.items():
        setattr(settings, name, value)
    assert follow_sources() == 0
    assert in_force() == {"prices@1": VALUE}
    [said] = [each for each in caplog.records if "was not fetched" in each.message]
    assert why in said.message
    assert "prices (installation)" in said.message
    assert said.__dict__["alert"] == "credential_source"


def test_an_engine_that_is_gone_erases_nothing(
    bao: OpenBao, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    bao.ask("POST", "sys/mounts/apart", {"type": "kv", "options": {"version": "2"}})
    bao.put(path, "apart", api_key=VALUE)
    sourced(f"apart/{path}#api_key")
    bao.ask("DELETE", "sys/mounts/apart")
    assert follow_sources() == 0
    assert in_force() == {"prices@1": VALUE}
    assert "Check the mount" in caplog.text


def test_a_namespace_has_secrets_of_its_own(bao: OpenBao, path: str, settings: Any) -> None:
    team = {"X-Vault-Namespace": "team"}
    bao.ask("POST", "sys/namespaces/team", {})
    bao.ask("POST", "sys/mounts/secret", {"type": "kv", "options": {"version": "2"}}, **team)
    bao.ask("POST", f"secret/data/{path}", {"data": {"api_key": OTHER}}, **team)
    bao.put(path, api_key=VALUE)
    settings.VAULT_NAMESPACE = "team"
    assert fetch_value(f"secret/{path}#api_key") == OTHER


def test_a_token_that_may_not_read_it_is_told_what_its_policy_lacks(
    bao: OpenBao, path: str, settings: Any
) -> None:
    allowed = f'path "secret/data/{path}" {{ capabilities = ["read"] }}'
    bao.ask("PUT", "sys/policies/acl/reads", {"policy": allowed})
    made = bao.ask("POST", "auth/token/create", {"policies": ["reads"]})
    bao.put(path, api_key=VALUE)
    settings.VAULT_TOKEN = made["auth"]["client_token"]
    assert fetch_value(f"secret/{path}#api_key") == VALUE
    with pytest.raises(ValidationError, match=r"policy read secret/data/elsewhere") as refused:
        fetch_value("secret/elsewhere#api_key")
    assert list(refused.value.message_dict) == ["source"]


# What a server may answer.


def set_body(server: OrderedVault, body: Any, status: int = 200, **headers: str) -> None:
    server.body, server.status, server.headers = body, status, headers


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (403, {"errors": ["permission denied", TOKEN, VALUE]}, "HTTP 403"),
        (400, {"errors": [TOKEN]}, "HTTP 400"),
        (429, {"errors": [TOKEN]}, "HTTP 429"),
        (500, {"errors": [f"internal error {TOKEN} {VALUE}"]}, "HTTP 500"),
        (503, {"errors": ["Vault is sealed"]}, "Unseal it"),
        (200, b"<html>" + VALUE.encode(), "is not JSON"),
        (200, b"[" * 200_000, "is not JSON"),
        (200, b"\xff\xfe" + VALUE.encode(), "is not JSON"),
        (200, [VALUE], "is not found as a secrets engine"),
        (200, {"data": {"api_key": VALUE}}, "is not found as a secrets engine"),
        (200, {"data": {"data": [VALUE], "metadata": {}}}, "is not found as a secrets engine"),
        (200, {"errors": []}, "is not found as a secrets engine"),
        (404, b"<html>not found</html>", "is not JSON"),
        (404, {}, "is not found as a secrets engine"),
        (404, {"data": None, "warnings": ["Invalid path"]}, "is not found as a secrets engine"),
        (404, {"errors": ["no handler for route"]}, "is not found as a secrets engine"),
        (404, {"data": {"data": {"api_key": OTHER}, "metadata": {}}}, "is not found"),
        (200, {"data": {"data": {"api_key": 12345678}, "metadata": {}}}, "is not a text"),
        (200, {"data": {"data": {"api_key": None}, "metadata": {}}}, "is not a text"),
        (200, {"data": {"data": {"api_key": {"a": VALUE}}, "metadata": {}}}, "is not a text"),
        (200, {"data": {"data": {"api_key": "planted"}, "metadata": {}}}, "Must have 8 to 8192"),
        (200, {"data": {"data": {"api_key": ""}, "metadata": {}}}, "Must have 8 to 8192"),
        (200, {"data": {"data": {"api_key": "planted\u00e9x"}, "metadata": {}}}, "printable ASCII"),
        (200, {"data": {"data": {"api_key": "planted\r\nX: y"}, "metadata": {}}}, "printable"),
        (200, {"data": {"data": {"api_key": OTHER * 1000}, "metadata": {}}}, "8 to 8192"),
        (200, b'"' + VALUE.encode() * 20_000 + b'"', "the answer is too long"),
    ],
)
def test_an_answer_without_a_value_leaves_the_former_one_and_is_logged_without_secrets(
    status: int, body: Any, why: str, served: OrderedVault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    sourced()
    before = entries()
    set_body(served, body, status)
    assert follow_sources() == 0
    assert (in_force(), entries()) == ({"prices@1": VALUE}, before)
    [said] = [each for each in caplog.records if "was not fetched" in each.message]
    assert why in said.message
    with pytest.raises(ValidationError) as refused:
        fetch_value(SOURCE)
    assert list(refused.value.message_dict) == ["source"]
    everything = caplog.text + str(refused.value) + repr(refused.value)
    for secret in (TOKEN, VALUE, OTHER, "planted"):
        assert secret not in everything


@pytest.mark.parametrize("fault", ["hang", "cut", "truncated"])
def test_a_server_that_does_not_answer_leaves_the_former_value(
    fault: str, served: OrderedVault, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    sourced()
    served.has({"api_key": OTHER})
    monkeypatch.setattr(vault, "SECONDS", 0.3)
    served.fault = lambda operation: fault
    assert follow_sources() == 0
    assert in_force() == {"prices@1": VALUE}
    assert "did not answer" in caplog.text


def test_a_server_that_is_down_leaves_the_former_value(
    served: OrderedVault, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sourced()
    with refusing() as settings.VAULT_URL:
        settings.VAULT_ALLOWED_NETWORKS = ["127.0.0.1"]
        assert follow_sources() == 0
    assert in_force() == {"prices@1": VALUE}
    assert "cannot be connected to" in caplog.text


def test_a_turn_ends_in_time_and_what_is_left_keeps_its_value(
    served: OrderedVault, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sourced()
    served.has({"api_key": OTHER})
    monkeypatch.setattr("executions.capabilities.network.sources.TURN_SECONDS", 0.0)
    asked = len(served.requests)
    assert follow_sources() == 0
    assert len(served.requests) == asked
    assert in_force() == {"prices@1": VALUE}
    assert "no time for it" in caplog.text


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed_and_no_other_server_has_the_token(
    status: int, served: OrderedVault, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sourced()
    assert served.tokens == [TOKEN]
    with ordered_vault() as elsewhere:
        elsewhere.has({"api_key": OTHER})
        settings.VAULT_ALLOWED_NETWORKS = ["127.0.0.1"]
        set_body(served, {}, status, Location=f"{elsewhere.url}/v1/secret/data/openai")
        assert follow_sources() == 0
        assert elsewhere.tokens == []
    assert in_force() == {"prices@1": VALUE}
    assert "redirects" in caplog.text


def test_the_address_is_looked_at_anew_at_each_connection(
    served: OrderedVault, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    sourced()
    for url, allowed in (
        (served.url, []),
        (served.url.replace("127.0.0.1", "localhost"), ["localhost:1"]),
        (served.url.replace("http://127.0.0.1", "https://localhost"), []),
        ("http://169.254.169.254", []),
    ):
        settings.VAULT_URL, settings.VAULT_ALLOWED_NETWORKS = url, allowed
        with pytest.raises(ValidationError, match="VAULT_ALLOWED_NETWORKS"):
            fetch_value(SOURCE)
    assert len(served.tokens) == 1
    assert TOKEN not in caplog.text


def test_one_secret_is_asked_for_once_in_a_turn_and_three_tenants_have_their_own(
    served: OrderedVault, alice: Caller, bob: Caller, charlie: Caller
) -> None:
    sourced(tenant=alice.tenant.slug)
    sourced()
    credential("byhand", tenant=charlie.tenant.slug, value="charlies-own-value")
    served.has({"api_key": OTHER})
    asked = len(served.requests)
    assert follow_sources() == 2
    assert served.requests[asked:] == ["GET /v1/secret/data/openai"]
    assert in_force(alice) == in_force(bob) == {"prices@2": OTHER}
    assert in_force(charlie) == {"byhand@1": "charlies-own-value", "prices@2": OTHER}
    revoke(NetworkCredential.objects.get(tenant_slug=alice.tenant.slug))
    assert in_force(alice) == {"prices@2": OTHER}
    served.has({"api_key": VALUE})
    assert follow_sources() == 1
    # One that an administrator revoked is not fetched any more.
    assert NetworkCredential.objects.get(tenant_slug=alice.tenant.slug).revoked_at is not None
    assert in_force(charlie) == {"byhand@1": "charlies-own-value", "prices@3": VALUE}


def test_one_place_that_fails_keeps_no_other_from_its_value(
    served: OrderedVault, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "two", "three"):
        sourced(f"secret/{name}#api_key", name)
    served.has({"api_key": OTHER})
    served.fail("GET /v1/secret/data/two", "500")
    assert follow_sources() == 2
    assert in_force() == {"one@2": OTHER, "three@2": OTHER, "two@1": VALUE}


def test_a_tenant_that_is_being_removed_keeps_no_other_from_its_value(
    served: OrderedVault, charlie: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    sourced(tenant=charlie.tenant.slug)
    sourced()
    begin(charlie.tenant)
    served.has({"api_key": OTHER})
    assert follow_sources() == 1
    assert in_force() == {"prices@2": OTHER}
    assert "slug of a tenant" in caplog.text


def test_without_sources_a_turn_is_one_statement(
    served: OrderedVault, django_assert_num_queries: Any
) -> None:
    credential()
    with django_assert_num_queries(1):
        assert follow_sources() == 0
    assert served.requests == []


def test_the_workers_do_it_each_minute() -> None:
    assert CAPABILITY.tasks == {"executions.tasks.follow_credential_sources": 1}
    assert callable(tasks.follow_credential_sources)


# Who can write to the database.


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("source", "secret/other#api_key"),
        ("source", ""),
        ("rules", "https://evil.test"),
        ("version", 7),
    ],
)
def test_a_row_that_somebody_wrote_is_neither_in_force_nor_fetched_anew(
    column: str, value: Any, served: OrderedVault
) -> None:
    row = sourced()
    with undone():
        write(row, **{column: value})
        served.has({"api_key": OTHER})
        asked = len(served.requests)
        assert follow_sources() == 0
        assert len(served.requests) == asked
        assert in_force() == {}
        assert not verify().is_intact
        with pytest.raises(ValidationError):
            NetworkCredential.objects.get().save()
    assert in_force() == {"prices@1": VALUE}


def test_a_row_that_is_written_while_its_value_is_fetched_is_not_sealed_anew(
    served: OrderedVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sourced()
    with undone():
        for body in ({"api_key": OTHER}, None):
            served.has(body)

            def fetched(place: Place) -> Any:
                write(row, rules="https://evil.test")
                return fetch(place)

            monkeypatch.setattr("executions.capabilities.network.sources.fetch", fetched)
            assert follow_sources() == 0
            row.refresh_from_db()
            assert (row.version, row.revoked_at) == (1, None)
            assert in_force() == {}
            write(row, rules="https://api.example.com")
    assert in_force() == {"prices@1": VALUE}


def test_a_source_that_was_changed_meanwhile_gets_no_value_of_the_former(
    served: OrderedVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    sourced()
    served.has({"api_key": OTHER})

    def fetched(place: Place) -> Any:
        found = fetch(place)
        credential(value="of-another-source", source="secret/b#api_key")
        return found

    monkeypatch.setattr("executions.capabilities.network.sources.fetch", fetched)
    assert follow_sources() == 0
    assert in_force() == {"prices@2": "of-another-source"}


# Sources.


@pytest.mark.parametrize(
    "text",
    [
        "secret",
        "secret/openai",
        "secret/#key",
        "secret#key",
        "/openai#key",
        "secret/openai#",
        "secret/../sys/x#key",
        "secret/./x#key",
        "secret/..#key",
        "../x#key",
        "secret//x#key",
        "secret/x?version=1#key",
        "secret/x%2f..#key",
        "secret/x y#key",
        "secret/x\r\nX-Other: 1#key",
        "secret/x#key#key",
        "https://evil.test/x#key",
        "secret/" + "/".join("a" * 21) + "#key",
    ],
)
def test_what_is_no_place_is_refused_at_the_source(text: str, served: OrderedVault) -> None:
    with pytest.raises(ValidationError) as refused:
        fetch_value(text)
    assert list(refused.value.message_dict) == ["source"]
    with pytest.raises(ValidationError) as refused:
        credential(source=text)
    assert list(refused.value.message_dict) == ["source"]
    assert served.requests == []


def test_a_place_may_have_a_path_of_several_parts() -> None:
    place = read_place("kv-2/team.a/prod/openai#api.key")
    assert place == Place("kv-2", "team.a/prod/openai", "api.key")
    assert str(place) == "kv-2/team.a/prod/openai#api.key"


def test_a_stored_value_is_of_its_source_alone(served: OrderedVault) -> None:
    row = sourced()
    for other in ("", "secret/b#api_key"):
        changed = NetworkCredential.objects.get()
        changed.source = other
        with pytest.raises(ValidationError) as refused:
            changed.save()
        assert list(refused.value.message_dict) == ["source"]
    # Nor by an earlier version that is restored.
    put_credential("prices", OTHER, source="")
    first = ConfigVersion.objects.earliest("version")
    assert history.config_of(first)["source"] == SOURCE
    with pytest.raises(InvalidConfiguration, match="is not from this source"):
        restore(User.objects.create_superuser("ben"), first)
    assert in_force() == {"prices@2": OTHER}
    row.refresh_from_db()
    assert row.source == ""


# The page.

SOURCED = {**FORM, "new_value": "", "source": SOURCE}


def errors_of(answer: Any) -> dict[str, list[str]]:
    assert answer.status_code == 200
    return dict(answer.context["adminform"].form.errors)


def test_the_page_fetches_a_new_source_and_shows_no_value(
    served: OrderedVault, admin_client: Client
) -> None:
    assert admin_client.post(reverse(ADD), SOURCED).status_code == 302
    assert in_force() == {"prices@1": VALUE}
    change = reverse(CHANGE, args=[NetworkCredential.objects.get().pk])
    shown = admin_client.get(change).content.decode()
    assert SOURCE in shown
    assert VALUE not in shown
    # Another binding needs no server.
    served.status = 503
    asked = len(served.requests)
    assert admin_client.post(change, {**SOURCED, "variable": "OTHER"}).status_code == 302
    assert (in_force(), len(served.requests)) == ({"prices@2": VALUE}, asked)
    served.status = 200
    served.has({"api_key": OTHER})
    again = {**SOURCED, "variable": "OTHER", "fetch": "on"}
    assert admin_client.post(change, again).status_code == 302
    assert admin_client.post(change, again).status_code == 302
    assert in_force() == {"prices@3": OTHER}
    # By hand again, with a value.
    by_hand = {**again, "source": "", "fetch": ""}
    assert list(errors_of(admin_client.post(change, by_hand))) == ["source"]
    assert admin_client.post(change, {**by_hand, "new_value": VALUE}).status_code == 302
    assert in_force() == {"prices@4": VALUE}
    assert follow_sources() == 0


@pytest.mark.parametrize(
    ("sent", "field", "message"),
    [
        ({"source": "secret"}, "source", "Must be mount/path#key"),
        ({"source": "secret/openai#none"}, "source", "has no key none"),
        ({"new_value": VALUE}, "new_value", "Leave it empty"),
        ({"source": "", "fetch": "on"}, "source", "Must be where"),
    ],
)
def test_the_page_names_the_field_that_is_wrong(
    sent: dict[str, str], field: str, message: str, served: OrderedVault, admin_client: Client
) -> None:
    errors = errors_of(admin_client.post(reverse(ADD), {**SOURCED, **sent}))
    assert list(errors) == [field]
    [said] = errors[field]
    assert message in said
    assert not NetworkCredential.objects.exists()


def test_the_page_names_the_remedy_where_the_server_does_not_give_it(
    served: OrderedVault, admin_client: Client
) -> None:
    served.status = 503
    errors = errors_of(admin_client.post(reverse(ADD), SOURCED))
    assert errors == {"source": ["The server is sealed or in maintenance (HTTP 503). Unseal it."]}


def test_a_revoked_one_is_active_again_where_somebody_says_so(
    served: OrderedVault, admin_client: Client
) -> None:
    row = sourced()
    change = reverse(CHANGE, args=[row.pk])
    revoke(row)
    assert follow_sources() == 0
    assert admin_client.post(change, SOURCED).status_code == 302
    assert in_force() == {}
    assert admin_client.post(change, {**SOURCED, "fetch": "on"}).status_code == 302
    assert list(in_force().values()) == [VALUE]


def test_a_source_waits_for_a_second_person_who_sees_it_and_not_the_value(
    served: OrderedVault, admin_client: Client, settings: Any
) -> None:
    settings.TWO_PERSON_RULE = True
    ben = User.objects.create_superuser("ben")
    assert admin_client.post(reverse(ADD), SOURCED).status_code == 302
    assert in_force() == {}
    waiting = PendingChange.objects.get(status="waiting")
    shown = {each["field"]: each["after"] for each in waiting.diff}
    assert (shown["source"], shown["value"]) == (SOURCE, "hidden")
    assert follow_sources() == 0
    approve(waiting, approver=ben)
    assert in_force() == {"prices@1": VALUE}
    # What the approved source has later needs no second person.
    served.has({"api_key": OTHER})
    assert follow_sources() == 1
    assert in_force() == {"prices@2": OTHER}
    assert verify().is_intact


# The command.


def command(*arguments: str) -> str:
    out = io.StringIO()
    call_command("network_credential", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_fetches_and_says_why_not(
    served: OrderedVault, alice: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("prices", "--tenant", alice.tenant.slug, "--rule", "https://api.example.com")
    with pytest.raises(CommandError, match=r"^source: .* has no key none"):
        command(*given, "--from-vault", "secret/openai#none")
    assert find_credential("prices", alice.tenant.slug) is None
    said = command(*given, "--from-vault", SOURCE)
    assert "version 1" in said
    assert VALUE not in said
    assert in_force(alice) == {"prices@1": VALUE}
    assert NetworkCredential.objects.get().source == SOURCE
    # A value from elsewhere takes the place of the source.
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(OTHER.encode())))
    command(*given)
    assert follow_sources() == 0
    assert in_force(alice) == {"prices@2": OTHER}
    assert NetworkCredential.objects.get().source == ""


def test_nothing_shows_what_was_fetched(
    served: OrderedVault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    found = fetch(read_place(SOURCE))
    assert VALUE not in repr(found) + caplog.text
    assert TOKEN not in caplog.text
    assert VALUE not in repr(Answer("", VALUE.encode()))
