"""Configurations as a file in the browser: what leaves, what comes in, and what is refused."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from executions.tenants.service import AUDITOR, OPERATOR
from providers import registry
from providers.admin import exchange
from providers.models import PendingChange, ProviderConfig
from providers.services import activate, approve, save_config
from providers.services.exchange import MOST_BYTES
from tests.support.provider_package import Packages, install_probe
from tests.support.roles import member
from tests.support.settings_files import record

pytestmark = pytest.mark.django_db

IMPORT, EXPORT = (
    "/admin/providers/providerconfig/import/",
    "/admin/providers/providerconfig/export/",
)
TOKEN = "tok-0123456789-wxyz"
GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def _probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    install_probe(Packages(tmp_path / "packages", monkeypatch), f"exchange_{tmp_path.name}")
    yield
    registry.refresh()


def looked_at(client: Client, *records: dict[str, str], text: bytes | None = None) -> str:
    """The page after a file was chosen."""
    body = text if text is not None else json.dumps({"system_settings": records}).encode()
    answer = client.post(IMPORT, {"file": SimpleUploadedFile("settings.json", body)})
    assert answer.status_code == 200
    assert "no-store" in answer["Cache-Control"]
    return html.unescape(answer.content.decode())


def token_of(page: str) -> str:
    found = re.search(r'name="_looked_at" value="([^"]+)"', page)
    return found[1] if found else ""


def config(provider_id: str = "probe") -> dict[str, Any]:
    found: dict[str, Any] = ProviderConfig.objects.get(provider_id=provider_id).config
    return found


def test_an_export_has_every_secret_masked_and_comes_in_again(admin_client: Client) -> None:
    save_config("probe", GOOD | {"size": 3})
    answer = admin_client.get(EXPORT)
    assert answer["Content-Disposition"] == 'attachment; filename="system_settings.json"'
    assert "no-store" in answer["Cache-Control"]
    assert TOKEN not in answer.content.decode()
    assert LogEntry.objects.get().change_message == "Exported (secrets masked)."

    page = looked_at(admin_client, text=answer.content)
    assert "is unchanged" in page
    assert "Nothing to change" in page
    changed = answer.content.replace(b'\\"size\\": 3', b'\\"size\\": 4')
    page = looked_at(admin_client, text=changed)
    assert TOKEN not in page
    done = admin_client.post(IMPORT, {"_looked_at": token_of(page), "_reason": "more"}, follow=True)
    assert "was imported" in done.content.decode()
    assert (config()["size"], config()["token"]) == (4, TOKEN)


def test_a_file_is_shown_before_it_does_anything(admin_client: Client) -> None:
    save_config("local", {"pool_size": 2})
    page = looked_at(
        admin_client,
        record("sandbox.provider_type", "probe"),
        record("sandbox.probe", GOOD),
        record("sandbox.local", {"pool_size": 3}),
        record("sandbox.nothere", {"a": "<script>"}),
    )
    assert "will become the active provider." in page
    assert "nothere is skipped" in page
    assert "ends in wxyz" in page
    assert TOKEN not in page
    assert not ProviderConfig.objects.filter(provider_id="probe").exists()

    admin_client.post(IMPORT, {"_looked_at": token_of(page)})
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe"
    assert config("local")["pool_size"] == 3


def test_a_stored_secret_goes_nowhere_else_by_a_file(admin_client: Client) -> None:
    save_config("probe", GOOD)
    save_config("probe@other", GOOD | {"token": "tok-of-the-other-abcd"})
    for secret in ("", "••••wxyz", None):
        page = looked_at(
            admin_client, record("sandbox.probe", {"endpoint": "http://evil", "token": secret})
        )
        assert "Enter it again" in page
        assert not token_of(page)
    # What stands for the secret of another one is no secret.
    page = looked_at(admin_client, record("sandbox.probe", GOOD | {"token": "••••abcd"}))
    assert "Nothing was changed" in page
    assert not token_of(page)
    assert config() == {**config(), **GOOD}


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 60_000,
        b'{"system_settings": ' + b'{"a":' * 20_000,
        b"a: &a [x]\nb: [*a, *a]\n",
        b"\xff\xfe",
        b"9" * 100_000,
        json.dumps({"system_settings": [record("sandbox.probe", "[" * 50_000)]}).encode(),
        b'{"system_settings": [{"name": 1}]}',
        b"null",
    ],
)
def test_what_is_no_such_file_is_refused(admin_client: Client, text: bytes) -> None:
    page = looked_at(admin_client, text=text)
    assert "Nothing was changed." in page
    assert not token_of(page)


def test_a_file_that_is_too_large_is_refused_unread(admin_client: Client) -> None:
    page = looked_at(admin_client, text=b" " * (MOST_BYTES + 1))
    assert "Must be at most 128 KiB" in page


def test_under_the_two_person_rule_an_import_waits(admin_client: Client, settings: Any) -> None:
    save_config("local", {"pool_size": 2})
    second = User.objects.create_superuser("second")
    settings.TWO_PERSON_RULE = True
    page = looked_at(
        admin_client,
        record("sandbox.provider_type", "probe"),
        record("sandbox.probe", GOOD),
        record("sandbox.local", {"pool_size": 3}),
    )
    assert "A second administrator must approve the import." in page
    admin_client.post(IMPORT, {"_looked_at": token_of(page)})
    assert not ProviderConfig.objects.filter(provider_id="probe").exists()
    waiting = {change.subject: change for change in PendingChange.objects.all()}
    assert {name: change.action for name, change in waiting.items()} == {
        "probe": "save_and_activate",
        "local": "save",
    }
    approve(waiting["probe"], approver=second)
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe"


def test_what_is_imported_reads_as_what_is_saved(admin_client: Client, settings: Any) -> None:
    save_config("probe", GOOD)
    second = User.objects.create_superuser("second")
    settings.TWO_PERSON_RULE = True
    written = "http://a/us\u202e\u3164-1"
    page = looked_at(
        admin_client,
        record("sandbox.probe", GOOD | {"endpoint": written}),
        record("sandbox.not\u202ehere", {}),
    )
    shown = "http://a/us[U+202E][U+3164]-1"
    assert shown in page
    assert "not[U+202E]here is skipped" in page

    admin_client.post(IMPORT, {"_looked_at": token_of(page)})
    change = PendingChange.objects.get()
    waiting = admin_client.get(f"/admin/providers/pendingchange/{change.pk}/change/")
    approve(change, approver=second)
    assert config()["endpoint"] == written
    version = admin_client.get("/admin/providers/configversion/")
    for each in (page, waiting.content.decode(), version.content.decode()):
        assert shown in each
        assert not {"\u202e", "\u3164"} & set(each)


def test_nobody_makes_more_than_what_was_looked_at(
    admin_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_config("probe", GOOD)
    page = looked_at(admin_client, record("sandbox.probe", GOOD | {"size": 4}))
    token = token_of(page)
    assert TOKEN not in token

    # By somebody else, changed, made up, too late, or after another's change.
    other = Client()
    other.force_login(User.objects.create_superuser("other"))
    for client, sent in ((other, token), (admin_client, "A" + token[1:]), (admin_client, "é")):
        answer = client.post(IMPORT, {"_looked_at": sent}).content.decode()
        assert "This file differs from the preview" in answer
    with monkeypatch.context() as later:
        later.setattr(exchange, "_SECONDS", -1)
        answer = admin_client.post(IMPORT, {"_looked_at": token}).content.decode()
        assert "The preview has expired." in answer
    save_config("probe", GOOD | {"size": 9})
    answer = admin_client.post(IMPORT, {"_looked_at": token}).content.decode()
    assert "Another user changed the configuration of" in answer
    assert config()["size"] == 9


def test_what_was_active_when_it_was_looked_at_is_not_made_active_again(
    admin_client: Client,
) -> None:
    save_config("probe", GOOD)
    save_config("local", {"pool_size": 2})
    activate("probe")
    page = looked_at(
        admin_client,
        record("sandbox.provider_type", "probe"),
        record("sandbox.local", {"pool_size": 3}),
    )
    assert "will become the active provider." not in page
    activate("local")
    answer = admin_client.post(IMPORT, {"_looked_at": token_of(page)}).content.decode()
    assert "Another provider was activated" in answer
    assert ProviderConfig.objects.get(is_active=True).provider_id == "local"
    assert config("local")["pool_size"] == 2


def test_all_of_a_file_is_made_or_nothing(admin_client: Client) -> None:
    save_config("probe", GOOD)
    save_config("local", {"pool_size": 2})
    page = looked_at(
        admin_client,
        record("sandbox.local", {"pool_size": 3}),
        record("sandbox.probe", GOOD | {"size": 4}),
    )
    save_config("probe", GOOD | {"size": 9})
    admin_client.post(IMPORT, {"_looked_at": token_of(page)})
    assert config("local")["pool_size"] == 2


def test_who_may_do_what(settings: Any, django_user_model: Any) -> None:
    save_config("probe", GOOD)
    for role in (AUDITOR, OPERATOR):
        client = member(role)
        assert client.get(EXPORT).status_code == 200
        assert client.get(IMPORT).status_code == 403
        assert client.post(IMPORT, {}).status_code == 403
        assert IMPORT not in client.get("/admin/providers/providerconfig/").content.decode()
    nobody = django_user_model.objects.create_user("nobody", is_staff=True)
    client = Client()
    client.force_login(nobody)
    assert client.get(EXPORT).status_code == 403

    # Who may change configurations and not choose the active one.
    codes = ("add_providerconfig", "change_providerconfig", "view_providerconfig")
    nobody.user_permissions.add(*Permission.objects.filter(codename__in=codes))
    page = looked_at(client, record("sandbox.provider_type", "probe"))
    assert "have permission to choose the active" in page
    forged = Client(enforce_csrf_checks=True)
    forged.force_login(nobody)
    assert forged.post(IMPORT, {"_looked_at": "x"}).status_code == 403
