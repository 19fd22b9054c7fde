"""Network credentials in tests: a form, rows as others write them, a provider that takes changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from django.db import connection

from executions.capabilities.network import credential_changes
from executions.capabilities.network.credentials import credentials_in_force
from executions.capabilities.network.models import NetworkCredential
from providers.credentials import Credential
from providers.services.settings_cache import forget_all
from tests.conftest import Caller
from tests.support.networks import VALUE

OTHER = "tok-9876543210-another"
ADD = "admin:executions_networkcredential_add"
CHANGE = "admin:executions_networkcredential_change"
LIST = "admin:executions_networkcredential_changelist"

FORM = {
    "tenant_slug": "",
    "name": "prices",
    "placement": "header",
    "field": "X-Key",
    "rules": "https://api.example.com/v1",
    "variable": "PRICES",
    "new_value": VALUE,
}


@pytest.fixture(autouse=True)
def _no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is called by hand."""
    monkeypatch.setattr(credential_changes._loop, "start_if_possible", lambda: True)


@pytest.fixture(autouse=True)
def _no_holder() -> Any:
    yield
    credential_changes._forget()


def in_force(caller: Caller | None = None) -> dict[str, str]:
    """Values in force by label, in their order."""
    forget_all()
    found = credentials_in_force(caller.tenant.slug if caller else "")
    return {each.label: each.value.reveal() for each in found}


def write(row: NetworkCredential, **columns: Any) -> None:
    """As somebody who can write to the database."""
    NetworkCredential.objects.filter(pk=row.pk).update(**columns)


def token_of(row: NetworkCredential) -> bytes:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT value FROM executions_networkcredential WHERE id = %s",
            [row.pk],
        )
        return bytes(cursor.fetchone()[0])


def put_token(row: NetworkCredential, token: bytes) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE executions_networkcredential SET value = %s WHERE id = %s", [token, row.pk]
        )


class Taken:
    """A provider at its outer edge: what it was sent."""

    id = "taken"

    def __init__(self) -> None:
        self.changes: list[Mapping[str, Credential | None]] = []
        self.does: Callable[[], None] = lambda: None

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self.does()
        self.changes.append(changes)

    @property
    def said(self) -> list[dict[str, str | None]]:
        return [
            {key: None if each is None else each.label for key, each in changes.items()}
            for changes in self.changes
        ]
