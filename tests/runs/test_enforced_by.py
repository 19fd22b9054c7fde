"""Every result and the provider's page say who bounds memory, time, processes and users."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from providers.models import ProviderConfig, ProviderHealth
from providers.services import health
from tests.conftest import require
from tests.support.sandboxes import Local
from tests.support.without_root import without_root


def test_a_result_says_who_enforced_what(local: Local) -> None:
    said = local.run("print(1)").metadata["enforced_by"]
    assert set(said) == {"memory", "cpu_seconds", "processes", "users", "system_calls"}
    assert said["memory"] in ("cgroup v1", "cgroup v2", "supervisor and rlimits")
    assert local.stats()["enforced_by"] == said


def test_without_root_a_result_says_so() -> None:
    require("bwrap")
    with without_root(launcher="bubblewrap", pool_size=1) as process:
        said = process.run("print(1)")["metadata"]["enforced_by"]
    assert said["memory"] == "supervisor and rlimits"
    assert said["users"] == "user namespace per sandbox"


@pytest.mark.django_db
def test_the_providers_page_says_what_the_last_check_found(admin_client: Client) -> None:
    require("bwrap")
    row = ProviderConfig.objects.create(
        provider_id="local", config={"launcher": "bubblewrap"}, version=1
    )
    page = reverse("admin:providers_providerconfig_change", args=[row.pk])
    assert "Not checked yet" in admin_client.get(page).content.decode()
    health.check_all()
    assert ProviderHealth.objects.get().healthy
    shown = admin_client.get(page).content.decode()
    assert "Enforced by" in shown
    assert '<th scope="row">system calls</th><td>seccomp' in shown
