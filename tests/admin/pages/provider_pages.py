"""The admin pages of providers in tests: who opens them, their controls, and what a browser posts."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from providers import registry
from providers.models import ProviderConfig
from tests.support.provider_package import Packages, install_probe

LIST = reverse("admin:providers_providerconfig_changelist")


ADD = reverse("admin:providers_providerconfig_add")


TOKEN = "tok-0123456789-wxyz"


GOOD = {"endpoint": "http://a", "token": TOKEN}


@pytest.fixture(autouse=True)
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    installed = Packages(tmp_path, monkeypatch)
    install_probe(installed, f"admin_{tmp_path.name}")
    yield installed
    registry.refresh()


@pytest.fixture
def admin(client: Client) -> Client:
    client.force_login(User.objects.create_superuser("admin"))
    return client


def staff(client: Client, *permissions: str) -> Client:
    user = User.objects.create_user("staff", is_staff=True)
    for permission in permissions:
        user.user_permissions.add(Permission.objects.get(codename=f"{permission}_providerconfig"))
    client.force_login(user)
    return client


def page_of(row: ProviderConfig) -> str:
    return reverse("admin:providers_providerconfig_change", args=[row.pk])


class _Controls(HTMLParser):
    """The controls of a page by name, each with its attributes; a select with its options."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, dict[str, Any]] = {}
        self._select: dict[str, Any] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values: dict[str, Any] = dict(attrs) | {"tag": tag}
        if tag in ("input", "select") and values.get("name"):
            self.found[values["name"]] = values
        if tag == "select":
            self._select = values
            values["options"] = []
        if tag == "option" and self._select is not None:
            self._select["options"].append(values["value"])
            if "selected" in values:
                self._select["value"] = values["value"]


def controls(response: Any) -> dict[str, dict[str, Any]]:
    parser = _Controls()
    parser.feed(response.content.decode())
    return parser.found


def as_posted(response: Any) -> dict[str, str]:
    """What a browser would send for the page as it is."""
    data = {}
    for name, control in controls(response).items():
        kind = control.get("type")
        if kind == "submit" or (kind == "checkbox" and "checked" not in control):
            continue
        data[name] = control.get("value") or ("on" if kind == "checkbox" else "")
    return data


def errors_by_field(response: Any) -> dict[str, list[str]]:
    return {
        field: list(messages)
        for field, messages in response.context["adminform"].form.errors.items()
    }
