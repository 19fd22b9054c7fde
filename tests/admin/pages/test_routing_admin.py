"""The plain pages for routes, prices, breakers, budgets and the comparison of providers."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.urls import reverse

from executions.capabilities.spending.models import Budget
from executions.capabilities.spending.service import compare_providers
from executions.tenants.models import Tenant
from providers.errors import ConnectionFailed
from providers.fields import DecryptionError
from providers.models import CircuitBreaker, ProviderConfig, ProviderPrice, Route
from providers.services import breaker
from providers.services.route_order import planned
from tests.conftest import Caller
from tests.support.agentrun_server import AgentRunServer
from tests.support.e2b_server import E2BServer
from tests.support.routing import make_route
from tests.support.running import run

Services = tuple[E2BServer, AgentRunServer]
pytestmark = pytest.mark.django_db

PAGES = [
    *("providers_route", "providers_providerprice", "providers_circuitbreaker"),
    *("executions_budget", "executions_spending", "executions_spendingalert"),
]


@pytest.mark.parametrize("page", PAGES)
def test_every_list_can_be_opened(admin_client: Client, page: str) -> None:
    assert admin_client.get(reverse(f"admin:{page}_changelist")).status_code == 200


def test_a_route_made_in_the_admin_is_in_force_at_once(
    admin_client: Client, services: Services
) -> None:
    assert planned("wonderland", "python") == []
    Tenant.objects.create(slug="wonderland", name="W")
    form = {
        "owner": "wonderland",
        "language": "",
        "strategy": "priority",
        "is_active": "on",
        "steps-TOTAL_FORMS": "1",
        "steps-INITIAL_FORMS": "0",
        "steps-0-provider": ProviderConfig.objects.get(provider_id="e2b").pk,
        "steps-0-position": "0",
        "steps-0-weight": "1",
    }
    response = admin_client.post(reverse("admin:providers_route_add"), form)
    assert response.status_code == 302, response.content.decode()
    assert Route.objects.get().owner == "wonderland"
    assert planned("wonderland", "python") == ["e2b"]
    assert planned("elsewhere", "python") == []


def test_a_route_can_be_opened_when_the_key_of_a_configuration_is_lost(
    admin_client: Client, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = make_route("e2b")

    def lost(*args: object) -> None:
        raise DecryptionError("lost")

    monkeypatch.setattr("providers.fields.EncryptedJSONField.from_db_value", lost)
    page = reverse("admin:providers_route_change", args=[route.pk])
    assert admin_client.get(page).status_code == 200
    assert planned("", "python") == ["e2b"]


@pytest.mark.parametrize(
    ("page", "form", "told"),
    [
        ("providers_providerprice", {"provider_id": "e2c", "per_second": "1"}, "no provider"),
        (
            "executions_budget",
            {"tenant_slug": "wonderlnad", "limit": "1"},
            "one of the available choices",
        ),
        ("providers_route", {"owner": "wonderlnad"}, "one of the available choices"),
        ("providers_route", {"language": "pyhton"}, "one of the available choices"),
        ("providers_route", {"region": "nowhere"}, "one of the available choices"),
    ],
)
def test_a_name_that_nothing_has_is_refused(
    admin_client: Client, page: str, form: dict[str, str], told: str
) -> None:
    others = {"per_run": "0", "per_gb_second": "0", "memory_gb": "0", "period": "day"}
    others |= {"strategy": "priority", "steps-TOTAL_FORMS": "0", "steps-INITIAL_FORMS": "0"}
    sent = {**others, "warn_percent": "80", **form}
    answer = admin_client.post(reverse(f"admin:{page}_add"), sent)
    assert answer.status_code == 200
    assert told in answer.content.decode()


def test_a_route_without_steps_is_refused(admin_client: Client, services: Services) -> None:
    form = {"owner": "", "language": "", "strategy": "priority", "is_active": "on"}
    nothing = {"steps-TOTAL_FORMS": "0", "steps-INITIAL_FORMS": "0"}
    answer = admin_client.post(reverse("admin:providers_route_add"), form | nothing)
    assert "A route needs at least one provider." in answer.content.decode()
    assert not Route.objects.exists()
    # Nor is the last one taken from it.
    route = make_route("e2b")
    step = route.steps.get()
    removed = {
        "steps-TOTAL_FORMS": "1",
        "steps-INITIAL_FORMS": "1",
        "steps-0-id": step.pk,
        "steps-0-route": route.pk,
        "steps-0-provider": step.provider_id,
        "steps-0-position": "0",
        "steps-0-weight": "1",
        "steps-0-DELETE": "on",
    }
    page = reverse("admin:providers_route_change", args=[route.pk])
    answer = admin_client.post(page, form | removed)
    assert "A route needs at least one provider." in answer.content.decode()
    assert route.steps.get() == step


def test_the_list_of_routes_shows_their_steps(
    admin_client: Client, services: Services, django_assert_max_num_queries: Any
) -> None:
    for language in ("python", "nodejs", "bash"):
        make_route("aliyun_codeinterpreter", "e2b", language=language)
    # What the sidebar counts is looked up once in a while.
    admin_client.get(reverse("admin:providers_route_changelist"))
    with django_assert_max_num_queries(12):
        shown = admin_client.get(reverse("admin:providers_route_changelist")).content.decode()
    assert shown.count("aliyun_codeinterpreter, e2b") == 3


def test_a_breaker_can_be_seen_and_reset_but_not_made_up(admin_client: Client) -> None:
    for _ in range(breaker.THRESHOLD):
        breaker.report_failure("e2b", ConnectionFailed("It does not answer."))
    page = admin_client.get(reverse("admin:providers_circuitbreaker_changelist")).content.decode()
    assert "Out of service" in page
    assert "It does not answer." in page
    assert admin_client.get(reverse("admin:providers_circuitbreaker_add")).status_code == 403
    row = CircuitBreaker.objects.get()
    assert not breaker.admits("e2b")
    admin_client.post(
        reverse("admin:providers_circuitbreaker_delete", args=[row.pk]), {"post": "yes"}
    )
    assert breaker.admits("e2b")


def test_providers_are_compared(admin_client: Client, services: Services, alice: Caller) -> None:
    make_route("e2b", "aliyun_codeinterpreter")
    ProviderPrice.objects.create(provider_id="e2b", per_second="0.5")
    run(alice, "print(1)")
    services[0].fail("create", "503")
    run(alice, "print(2)")
    services[0].fail("execute", "500")
    run(alice, "print(3)")
    rows = {row.provider: row for row in compare_providers()}
    e2b, aliyun = rows["e2b"], rows["aliyun_codeinterpreter"]
    assert (e2b.executions, e2b.errors, e2b.left) == (2, 1, 1)
    assert (aliyun.executions, aliyun.errors, aliyun.left) == (1, 0, 0)
    assert e2b.p50_ms is not None
    assert e2b.cost is not None
    assert (aliyun.cost, aliyun.priced, aliyun.unpriced) == (None, 0, 1)
    assert e2b.priced + e2b.unpriced == 2
    page = admin_client.get(reverse("admin:executions_comparison")).content.decode()
    assert "aliyun_codeinterpreter" in page
    assert "1 (50.0 %)" in page
    assert admin_client.get(reverse("admin:executions_comparison") + "?hours=x'").status_code == 200


def test_the_comparison_is_for_who_may_see_spending(client: Client) -> None:
    user = get_user_model().objects.create_user("clerk", password="x", is_staff=True)
    client.force_login(user)
    assert client.get(reverse("admin:executions_comparison")).status_code == 403
    user.user_permissions.add(Permission.objects.get(codename="view_spending"))
    assert client.get(reverse("admin:executions_comparison")).status_code == 200


def test_what_is_known_no_more_does_not_refuse_a_row(
    admin_client: Client, services: Services
) -> None:
    route = make_route("e2b", owner="gone")
    page = reverse("admin:providers_route_change", args=[route.pk])
    assert "gone (no longer exists)" in admin_client.get(page).content.decode()
    step = route.steps.get()
    sent = {
        "owner": "gone",
        "strategy": "weighted",
        "is_active": "on",
        "steps-TOTAL_FORMS": "1",
        "steps-INITIAL_FORMS": "1",
        "steps-0-id": step.pk,
        "steps-0-route": route.pk,
        "steps-0-provider": step.provider_id,
        "steps-0-position": "0",
        "steps-0-weight": "1",
    }
    assert admin_client.post(page, sent).status_code == 302
    assert Route.objects.get().strategy == "weighted"


def test_the_budget_of_a_tenant_that_is_gone_does_not_become_that_of_all(
    admin_client: Client,
) -> None:
    budget = Budget.objects.create(tenant_slug="gone", period="day", limit=1)
    page = reverse("admin:executions_budget_change", args=[budget.pk])
    shown = admin_client.get(page).content.decode()
    selected = re.findall(r"<option[^>]* selected[^>]*>([^<]+)<", shown)
    assert "gone (no longer exists)" in selected
    assert "All tenants together" not in selected
    sent = {"tenant_slug": "gone", "period": "day", "limit": "2", "warn_percent": "80"}
    refused = admin_client.post(page, sent)
    assert refused.status_code == 200
    assert "Must be the slug of a tenant, or empty." in refused.content.decode()
    assert Budget.objects.get().limit == 1


def test_of_very_many_tenants_a_mistyped_one_is_refused_too(
    admin_client: Client, services: Services, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executions.admin.frame.MOST", 0)
    Tenant.objects.create(slug="wonderland", name="W")
    sent = {
        "strategy": "priority",
        "steps-TOTAL_FORMS": "1",
        "steps-INITIAL_FORMS": "0",
        "steps-0-provider": ProviderConfig.objects.get(provider_id="e2b").pk,
        "steps-0-position": "0",
        "steps-0-weight": "1",
    }
    page = reverse("admin:providers_route_add")
    refused = admin_client.post(page, {**sent, "owner": "wonderlnad"}).content.decode()
    assert "Must be the slug of a tenant" in refused
    assert admin_client.post(page, {**sent, "owner": "wonderland"}).status_code == 302


def test_a_page_that_asks_whether_to_delete_says_what_happens_then(
    admin_client: Client, services: Services
) -> None:
    e2b = ProviderConfig.objects.get(provider_id="e2b")
    ProviderConfig.objects.filter(pk=e2b.pk).update(is_active=True)
    alone = make_route("e2b", owner="wonderland")
    make_route("e2b", "aliyun_codeinterpreter", owner="elsewhere")
    page = admin_client.get(
        reverse("admin:providers_providerconfig_delete", args=[e2b.pk])
    ).content.decode()
    assert "This is the active provider. Runs without a route are rejected" in page
    assert "wonderland, every language: have no provider and are rejected" in page
    assert "elsewhere, every language: continue with aliyun_codeinterpreter" in page

    make_route("aliyun_codeinterpreter")
    Route.objects.filter(pk=alone.pk).update(minimum_isolation="gvisor")
    page = admin_client.get(
        reverse("admin:providers_route_delete", args=[alone.pk])
    ).content.decode()
    assert "use route every tenant, every language" in page
    assert "gvisor, no longer applies" in page
    shown = admin_client.get(reverse("admin:providers_route_change", args=[alone.pk]))
    assert "If deactivated: Runs of route wonderland" in shown.content.decode()


def test_deleting_the_price_of_a_class_names_what_else_had_it(
    admin_client: Client, services: Services
) -> None:
    for name in ("e2b@eu", "e2b@us", "e2b@priced"):
        ProviderConfig.objects.create(provider_id=name)
    ProviderPrice.objects.create(provider_id="e2b@priced", per_second=1)
    price = ProviderPrice.objects.create(provider_id="e2b", per_second=1)
    page = reverse("admin:providers_providerprice_delete", args=[price.pk])
    shown = admin_client.get(page).content.decode()
    assert "Runs on e2b will be unpriced, and not limited by budgets." in shown
    assert "The same applies to configurations without a price: e2b@eu, e2b@us." in shown

    ProviderPrice.objects.exclude(pk=price.pk).delete()
    named = ProviderPrice.objects.create(provider_id="e2b@eu", per_second=1)
    page = reverse("admin:providers_providerprice_delete", args=[named.pk])
    shown = admin_client.get(page).content.decode()
    assert "Runs on e2b@eu will be priced as e2b." in shown
    assert "The same applies" not in shown


def test_who_may_not_delete_it_is_told_nothing(client: Client, services: Services) -> None:
    route = make_route("e2b")
    client.force_login(get_user_model().objects.create_user("clerk", is_staff=True))
    answer = client.get(reverse("admin:providers_route_delete", args=[route.pk]))
    assert answer.status_code == 403
