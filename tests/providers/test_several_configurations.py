"""One class of provider, configured several times: by name, by region and by price."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.urls import reverse
from hypothesis import given
from hypothesis import strategies as st

from executions.capabilities.spending.service import cost_of
from providers import registry
from providers.errors import InvalidConfiguration
from providers.models import ConfigVersion, ProviderConfig, ProviderPrice
from providers.services import save_config
from providers.services.route_order import _regions, planned
from tests.conftest import Caller
from tests.support.e2b_server import E2BServer
from tests.support.provider_package import Packages, install_probe
from tests.support.remote_providers import e2b_config
from tests.support.routing import hops, last_execution, make_route
from tests.support.running import run

PROBE = {"endpoint": "http://a", "token": "tok-0123456789-wxyz"}
ADD = reverse("admin:providers_providerconfig_add")


@pytest.fixture
def probe(db: None, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    install_probe(Packages(tmp_path, monkeypatch), f"several_{tmp_path.name}")
    yield
    registry.refresh()


@pytest.fixture
def admin(db: None) -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("ann"))
    return client


def test_another_configuration_is_of_its_class() -> None:
    assert registry.get("local@strict") is registry.get("local")
    assert registry.named("local", "strict") == "local@strict"
    assert registry.class_id("local@strict") == "local"


@pytest.mark.parametrize(
    "provider_id", ["local@", "local@Eu", "local@eu@us", "@eu", "nothing@eu", "local@" + "x" * 60]
)
def test_what_names_no_configuration_is_refused(provider_id: str) -> None:
    with pytest.raises(InvalidConfiguration):
        registry.get(provider_id)


@given(st.text(max_size=80))
def test_a_name_is_an_id_that_reads_back_or_refused(name: str) -> None:
    try:
        provider_id = registry.named("local", name)
    except InvalidConfiguration:
        return
    assert registry.class_id(provider_id) == "local"
    assert len(provider_id) <= 64
    assert provider_id.isascii()


def test_one_fails_over_to_the_other_and_the_record_says_which(
    db: None, e2b_server: E2BServer, alice: Caller
) -> None:
    away = {**e2b_config(e2b_server), "api_url": "http://127.0.0.1:9", "region": "us"}
    save_config("e2b", away)
    save_config("e2b@eu", e2b_config(e2b_server))
    make_route("e2b", "e2b@eu")
    answer = run(alice, "print(6 * 7)").json()
    assert (answer["provider"], answer["stdout"]) == ("e2b@eu", "42\n")
    assert hops(last_execution())[0].startswith("e2b failed SB003")
    assert ConfigVersion.objects.filter(subject="e2b@eu").count() == 1


def test_those_of_the_routes_region_go_first_and_the_others_follow(
    db: None, e2b_server: E2BServer, probe: None
) -> None:
    us = save_config("e2b", {**e2b_config(e2b_server), "region": "us"})
    save_config("e2b@eu", {**e2b_config(e2b_server), "region": "eu"})
    save_config("probe", PROBE)
    make_route("probe", "e2b", "e2b@eu", owner="a", region="eu")
    make_route("probe", "e2b", "e2b@eu", owner="b", region="mars")
    assert planned("a", "python") == ["e2b@eu", "probe", "e2b"]
    assert planned("b", "python") == ["probe", "e2b", "e2b@eu"]
    # Of one whose key is lost nothing is known, and the others are served.
    with connection.cursor() as cursor:
        cursor.execute(
            "UPDATE providers_providerconfig SET config = %s WHERE id = %s", [b"x", us.pk]
        )
    _regions.forget()
    assert planned("a", "python")[0] == "e2b@eu"


def test_the_cheapest_is_told_by_what_a_run_costs_there(probe: None) -> None:
    for name in ("probe", "probe@a", "probe@b"):
        save_config(name, PROBE)
    ProviderPrice.objects.create(provider_id="probe", per_second="0.01")
    ProviderPrice.objects.create(provider_id="probe@a", per_second="0", per_run="0.2")
    ProviderPrice.objects.create(
        provider_id="probe@b", per_second="0", per_gb_second="0.002", memory_gb="4"
    )
    make_route("probe@a", "probe", "probe@b", strategy="cheapest")
    assert planned("x", "python") == ["probe@b", "probe", "probe@a"]
    timings = {"start_ms": 500.0, "run_ms": 1500.0}
    assert cost_of("probe", timings) == Decimal("0.02")
    assert cost_of("probe@a", timings) == Decimal("0.2")
    assert cost_of("probe@b", timings) == Decimal("0.016")
    assert cost_of("probe@b", {"start_ms": None}) is None
    # One that nobody has named a price for is not free, but as dear as the first of its class.
    save_config("probe@c", PROBE)
    assert cost_of("probe@c", timings) == Decimal("0.02")
    assert cost_of("local", timings) is None


def test_no_two_give_their_settings_to_one_pool(db: None, admin: Client) -> None:
    first = {"endpoint": "http://127.0.0.1:9385", "pool_size": 2}
    save_config("self_managed", first)
    with pytest.raises(
        InvalidConfiguration, match="'self_managed' already uses this address"
    ) as refused:
        save_config("self_managed@strict", {"endpoint": "http://127.0.0.1:9385/", "pool_size": 9})
    assert refused.value.field == "endpoint"
    body = {"provider_type": "self_managed@strict", "config": first, "set_active": False}
    url = "/api/admin/sandbox/config"
    assert admin.post(url, body, content_type="application/json").status_code == 400
    save_config("self_managed@strict", {"endpoint": "http://127.0.0.1:9386"})
    assert save_config("self_managed", first | {"pool_size": 3}).version == 2
    with pytest.raises(InvalidConfiguration, match="'self_managed@strict' already"):
        save_config("self_managed", {"endpoint": "http://127.0.0.1:9386"})


def test_the_admin_adds_one_by_name_and_lists_it(probe: None, admin: Client) -> None:
    save_config("probe", PROBE)
    page = admin.get(ADD).content.decode()
    assert "Add another, named" in page
    refused = admin.get(f"{ADD}?provider=probe&name=No").content.decode()
    assert "lower case letters" in refused
    sent = PROBE | {"size": "10", "factor": "1.5", "memory": "256m", "behaviour": "start"}
    url = f"{ADD}?provider=probe&name=eu"
    assert "Probe, eu" in admin.get(url).content.decode()
    assert admin.post(url, sent | {"_version": "0"}).status_code == 302
    row = ProviderConfig.objects.get(provider_id="probe@eu")
    assert row.config["size"] == 10
    assert admin.get(url).status_code == 302
    assert f"../{row.pk}/change/" in admin.get(ADD).content.decode()
    live = reverse("admin:providers_validate", args=["probe@eu"])
    assert admin.post(live, sent | {"_version": "1", "size": "0"}).json()["errors"].keys() == {
        "size"
    }


def test_the_admin_api_keeps_its_shapes_and_knows_the_others_by_their_ids(
    probe: None, admin: Client
) -> None:
    root = "/api/admin/sandbox"

    def post(path: str, body: dict[str, Any], method: Callable[..., Any] = admin.post) -> Any:
        return method(f"{root}/{path}", body, content_type="application/json")

    body = {"provider_type": "probe@eu", "config": PROBE, "set_active": False}
    assert post("config", body).status_code == 200
    data = admin.get(f"{root}/config").json()["data"]
    assert data["probe@eu"]["endpoint"] == "http://a"
    assert data["probe"]["endpoint"] != "http://a"
    assert post("active", {"provider": "probe"}, admin.put).status_code == 400
    assert post("active", {"provider": "probe@eu"}, admin.put).status_code == 200
    assert ProviderConfig.objects.get(is_active=True).provider_id == "probe@eu"
    assert post("config", body | {"provider_type": "probe@EU"}).status_code == 400
    listed = admin.get(f"{root}/providers").json()["data"]
    assert "probe@eu" not in {each["id"] for each in listed}
    # Whether or not the active one is up, which this one never is.
    assert "python" in next(each for each in listed if each["id"] == "e2b")["supported_languages"]
