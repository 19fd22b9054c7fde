"""The list of hosts as it is configured: where its token may go, and what an admin sees of it."""

from __future__ import annotations

import re

import pytest
from django.test import Client

from providers.errors import InvalidConfiguration
from providers.models import ProviderConfig, ProviderHealth
from providers.schema import mask
from providers.self_managed.provider import SelfManagedProvider
from providers.services import save_config
from providers.services.health import check_all
from tests.support.processes import free_port

A, B, C = (f"http://127.0.0.1:{port}" for port in (9385, 9386, 9387))
TOKEN = "a token of some length"
PAGE = "/admin/providers/providerconfig"


def saved(*addresses: str, **config: str) -> dict[str, object]:
    row = save_config("self_managed", {"endpoint": "\r\n".join(addresses), **config})
    stored: dict[str, object] = ProviderConfig.objects.get(pk=row.pk).config
    return stored


@pytest.mark.parametrize("sent", ["", mask(TOKEN)])
def test_a_host_is_added_with_the_token_and_not_without_it(db: None, sent: str) -> None:
    """Who may change the list must not have the stored token sent to a host of his own."""
    saved(A, token=TOKEN)
    for addresses in ((A, B), (B,), (B, A), (f"{A}/elsewhere", A)):
        with pytest.raises(InvalidConfiguration, match="token: Enter it again") as refused:
            saved(*addresses, token=sent)
        assert refused.value.field == "token"
    assert saved(A, B, token=TOKEN)["token"] == TOKEN


def test_the_token_stays_where_no_host_is_new(db: None) -> None:
    saved(A, B, C, token=TOKEN)
    assert saved(C, A, B)["token"] == TOKEN
    assert saved(C, A, B, drained=B)["token"] == TOKEN
    assert saved(C, f"{A}/")["token"] == TOKEN
    # One that comes back is a new one.
    with pytest.raises(InvalidConfiguration, match="token"):
        saved(A, B, C)


def test_a_list_shares_no_host_with_another_configuration(db: None) -> None:
    saved(A, B)
    with pytest.raises(InvalidConfiguration, match="already uses") as refused:
        save_config("self_managed@other", {"endpoint": f"{C}\n{B}/"})
    assert refused.value.field == "endpoint"
    save_config("self_managed@other", {"endpoint": C})


def test_one_address_is_stored_and_described_as_ever(db: None) -> None:
    assert saved(A)["endpoint"] == A
    endpoint = SelfManagedProvider.get_config_schema()["endpoint"]
    assert (endpoint["type"], endpoint["required"], endpoint["multiline"]) == ("string", True, True)


def test_the_provider_s_page_shows_each_host(db: None, admin_client: Client) -> None:
    dead, drained = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    saved(dead, drained, drained=drained)
    row = ProviderConfig.objects.get()
    ProviderHealth.objects.create(
        provider_id="self_managed",
        config_version=row.version,
        healthy=True,
        latency_ms=1,
        checked_at=row.updated_at,
        figures={
            "capacity": 4,
            "hosts": [
                {"address": dead, "state": "not answering", "problem": "<b>It is away.</b>"},
                {"address": drained, "state": "drained", "problem": "", "sessions": 3, "busy": 3},
            ],
        },
    )
    page = admin_client.get(f"{PAGE}/{row.pk}/change/").content.decode()
    assert re.search(rf"{re.escape(drained)}</th><td>drained</td><td>3</td><td>3</td>", page)
    assert "&lt;b&gt;It is away." in page
    # Of another version nothing is known yet.
    saved(dead)
    assert "not answering" not in admin_client.get(f"{PAGE}/{row.pk}/change/").content.decode()


def test_a_check_of_hosts_that_are_all_away_says_no_more_than_of_one(db: None) -> None:
    saved(*(f"http://127.0.0.1:{free_port()}" for _ in range(2)))
    check_all()
    found = ProviderHealth.objects.get()
    assert not found.healthy
    assert "hosts" not in (found.figures or {})
    save_config("self_managed", {"endpoint": f"http://127.0.0.1:{free_port()}"})
    check_all()
    assert ProviderHealth.objects.get().message == found.message
