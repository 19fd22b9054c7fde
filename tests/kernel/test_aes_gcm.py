"""Stored secrets are under AES-256-GCM, each bound to its column."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.core.management import call_command
from django.db import connection
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.network.models import NetworkCredential
from executions.capabilities.schedules.models import Schedule
from executions.capabilities.webhooks.models import WebhookDelivery, WebhookSecret
from executions.runs.models import Execution
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from providers import aes_gcm
from providers.fields import DecryptionError, EncryptedJSONField
from providers.models import ConfigVersion, PendingChange, ProviderConfig
from providers.services import encrypted_fields
from sandbox_site.models import InstallationMark
from tests.support.networks import credential

SECRET = {"token": "tok-0123456789-wxyz"}
SECRET_TEXT = "0123456789-wxyz"


def column_of(model: Any, column: str) -> bytes:
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {column} FROM {model._meta.db_table}")
        return bytes(cursor.fetchone()[0])


def put(model: Any, column: str, token: bytes) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {model._meta.db_table} SET {column} = %s", [token])


def _version() -> Any:
    return ConfigVersion.objects.create(
        subject="e2b", version=1, content=SECRET, content_hash="", author="user:ann"
    )


def _pending() -> Any:
    return PendingChange.objects.create(
        subject="e2b", action="save", base_version=0, config=SECRET, author="user:ann"
    )


def _execution() -> Any:
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return Execution.objects.create(
        tenant=tenant,
        pending=SECRET,
        status="queued",
        language="python",
        deadline=timezone.now(),
        timeout=10,
    )


def _mark() -> Any:
    # Every start of an instance leaves marks; this one is alone.
    InstallationMark.objects.all().delete()
    return InstallationMark.objects.create(name="STORAGE_URL", mark=SECRET_TEXT)


def _session() -> Any:
    return Session.objects.create(language="python", env=SECRET, ref=SECRET_TEXT)


def _webhook_secret() -> Any:
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return WebhookSecret.objects.create(tenant=tenant, secret=SECRET_TEXT)


def _credential() -> Any:
    row = credential()
    # `save` seals what it is given: the column itself is looked at.
    NetworkCredential.objects.filter(pk=row.pk).update(value=SECRET)
    return row


def _schedule() -> Any:
    tenant = Tenant.objects.create(slug="wonderland", name="Wonderland")
    return Schedule.objects.create(tenant=tenant, request=SECRET, next_at=timezone.now())


def _delivery() -> Any:
    execution = _execution()
    return WebhookDelivery.objects.create(
        tenant=execution.tenant, tenant_slug="wonderland", execution=execution, url=SECRET_TEXT
    )


def secret_of(row: Any, column: str) -> Any:
    return SECRET if isinstance(row._meta.get_field(column), EncryptedJSONField) else SECRET_TEXT


ROWS: dict[str, Callable[[], Any]] = {
    "providers.ProviderConfig.config": lambda: ProviderConfig.objects.create(
        provider_id="e2b", config=SECRET
    ),
    "providers.ConfigVersion.content": _version,
    "providers.PendingChange.config": _pending,
    "executions.Execution.pending": _execution,
    "executions.NetworkCredential.value": _credential,
    "executions.Session.env": _session,
    "executions.Session.ref": _session,
    "executions.Schedule.request": _schedule,
    "executions.WebhookSecret.secret": _webhook_secret,
    "executions.WebhookDelivery.url": _delivery,
    "sandbox_site.InstallationMark.mark": _mark,
}


def test_every_encrypted_column_is_among_those_tested() -> None:
    found = {f"{model._meta.label}.{column.name}" for model, column in encrypted_fields()}
    assert found == set(ROWS)


@pytest.mark.django_db
@pytest.mark.parametrize("name", ROWS)
def test_a_value_opens_with_plain_aes_256_gcm_and_the_documented_key(
    name: str, settings: Any
) -> None:
    """By nothing of ours: as an auditor would, from docs/deployment/keys.md."""
    row = ROWS[name]()
    column = name.rpartition(".")[2]
    token = column_of(row, column)
    context = f"{row._meta.db_table}.{column}".encode()
    derived = HKDF(SHA256(), 32, salt=None, info=b"cofferdam A256GCM1" + context)
    key = derived.derive(settings.FERNET_KEYS[0].encode())
    assert len(key) * 8 == 256
    plain = AESGCM(key).decrypt(token[8:20], token[20:], b"A256GCM1" + context)
    assert token[:8] == b"A256GCM1"
    secret = secret_of(row, column)
    assert (plain.decode() if isinstance(secret, str) else json.loads(plain)) == secret


@pytest.mark.django_db
@pytest.mark.parametrize("name", ROWS)
def test_every_column_is_rotated_to_a_new_key(name: str, settings: Any) -> None:
    row = ROWS[name]()
    column = name.rpartition(".")[2]
    settings.FERNET_KEYS = ["a new key for tests, as long as keys are", *settings.FERNET_KEYS]
    call_command("rotate_keys", stdout=StringIO(), stderr=StringIO())
    settings.FERNET_KEYS = settings.FERNET_KEYS[:1]
    assert getattr(type(row).objects.get(), column) == secret_of(row, column)


@pytest.mark.django_db
def test_a_value_moved_to_another_column_does_not_open() -> None:
    version, change = _version(), _pending()
    put(change, "config", column_of(version, "content"))
    with pytest.raises(DecryptionError, match=r"PendingChange\.config"):
        PendingChange.objects.get()


@pytest.mark.django_db
def test_the_same_value_never_looks_the_same_twice() -> None:
    row = ROWS["providers.ProviderConfig.config"]()
    before = column_of(row, "config")
    ProviderConfig.objects.update(config=SECRET)
    assert column_of(row, "config")[8:20] != before[8:20]


@given(st.binary(max_size=200), st.integers(min_value=0), st.integers(0, 7))
def test_no_changed_bit_goes_unnoticed(plain: bytes, place: int, bit: int) -> None:
    token = aes_gcm.seal(["new", "old"], "table.column", plain)
    assert aes_gcm.unseal(["newest", "new"], "table.column", token) == plain
    altered = bytearray(token)
    altered[place % len(token)] ^= 1 << bit
    with pytest.raises(aes_gcm.NotOpened):
        aes_gcm.unseal(["new"], "table.column", bytes(altered))
    with pytest.raises(aes_gcm.NotOpened):
        aes_gcm.unseal(["new"], "table.other", token)
    with pytest.raises(aes_gcm.NotOpened):
        aes_gcm.unseal(["another"], "table.column", token)


@given(st.binary(max_size=60))
def test_what_is_no_token_is_refused(junk: bytes) -> None:
    for token in (junk, aes_gcm.PREFIX + junk[:27]):
        with pytest.raises(aes_gcm.NotOpened):
            aes_gcm.unseal(["key"], "table.column", token)
