"""What the provider's page asks the server while it is filled in: checks, and a test run."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from providers.models import ProviderConfig
from providers.services import save_config
from providers.services.breaker import NOT_REACHABLE
from tests.admin.pages.provider_pages import GOOD, TOKEN, admin, as_posted, packages, page_of, staff

__all__ = ("admin", "packages")

pytestmark = pytest.mark.django_db


def live(what: str, provider_id: str = "probe") -> str:
    return reverse(f"admin:providers_{what}", args=[provider_id])


def test_values_are_checked_and_tried_before_they_are_saved(admin: Client) -> None:
    row = save_config("probe", GOOD)
    data = as_posted(admin.get(page_of(row)))
    answer = admin.post(live("validate"), data | {"size": "0", "endpoint": "x"})
    assert set(answer.json()["errors"]) == {"size", "endpoint"}
    assert admin.post(live("validate"), data).json() == {"errors": {}}
    refused = admin.post(live("test"), data | {"behaviour": "refuse"}).json()
    assert (refused["success"], refused["code"]) == (False, "SB003")
    crashed = admin.post(live("test"), data | {"behaviour": "crash"})
    assert crashed.json()["message"] == refused["message"] == NOT_REACHABLE
    assert TOKEN not in crashed.content.decode()
    assert ProviderConfig.objects.get().version == 1
    assert admin.get(live("test")).status_code == 404
    assert admin.post(live("test", "nowhere"), {"_stored": "1"}).status_code == 404
    assert "failed with SB003" in LogEntry.objects.order_by("pk")[0].change_message


def test_only_who_may_change_tries_other_values_than_the_stored_ones(client: Client) -> None:
    save_config("probe", GOOD)
    data = GOOD | {"_version": "1", "endpoint": "http://evil"}
    viewer = staff(client, "view")
    for what in ("validate", "test"):
        assert viewer.post(live(what), data).status_code == 403
    assert viewer.post(live("test"), {"_stored": "1"}).status_code == 403
    tester = User.objects.create_user("tester", is_staff=True)
    tester.user_permissions.add(Permission.objects.get(codename="test_providerconfig"))
    client.force_login(tester)
    assert client.post(live("test"), data).status_code == 403
    assert client.post(live("test"), {"_stored": "1"}).status_code == 200
