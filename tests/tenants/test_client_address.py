"""Whose address a request has: what trusted proxies say, and nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from hypothesis import given
from hypothesis import strategies as st

from executions.runs.models import Execution
from sandbox_site.client_address import client_address, read_forwarded, read_networks
from tests.conftest import Caller

PROXIES = read_networks(["10.0.0.0/8", "2001:db8:1::/48", "127.0.0.1"])


def meta(peer: str, forwarded: str | None = None, **others: str) -> dict[str, Any]:
    sent = {} if forwarded is None else {"HTTP_X_FORWARDED_FOR": forwarded}
    return {"REMOTE_ADDR": peer} | sent | others


@pytest.mark.parametrize(
    ("peer", "forwarded", "found"),
    [
        ("192.0.2.1", None, "192.0.2.1"),
        ("192.0.2.1", "198.51.100.7", "192.0.2.1"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "203.0.113.9, 198.51.100.7, 10.0.0.2", "198.51.100.7"),
        ("10.0.0.1", "10.0.0.3 ,10.0.0.2", "10.0.0.3"),
        ("10.0.0.1", "203.0.113.9, unknown", "10.0.0.1"),
        ("10.0.0.1", "203.0.113.9, unknown, 10.0.0.2", "10.0.0.2"),
        ("10.0.0.1", "203.0.113.9,", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.7:4711", "198.51.100.7"),
        ("10.0.0.1", "[2001:db8:9::1]:443", "2001:db8:9::1"),
        ("10.0.0.1", "2001:DB8:9:0::1", "2001:db8:9::1"),
        ("10.0.0.1", "fe80::1%eth0", "fe80::1"),
        ("2001:db8:1::5", "2001:db8:9::1", "2001:db8:9::1"),
        ("::ffff:10.0.0.1", "::ffff:198.51.100.7", "198.51.100.7"),
        ("10.0.0.1", "198.51.100.7.", "10.0.0.1"),
        ("10.0.0.1", "0x7f.1", "10.0.0.1"),
        ("10.0.0.1", "127.1", "10.0.0.1"),
        ("", "198.51.100.7", ""),
        ("unix:", "198.51.100.7", ""),
    ],
)
def test_the_nearest_that_is_no_trusted_proxy(peer: str, forwarded: str | None, found: str) -> None:
    assert client_address(meta(peer, forwarded), PROXIES) == found


@given(st.text(max_size=200))
def test_nothing_that_a_stranger_sends_moves_her_address(sent: str) -> None:
    assert client_address(meta("192.0.2.1", sent), PROXIES) == "192.0.2.1"
    assert client_address(meta("10.0.0.1", f"{sent},192.0.2.1"), PROXIES) == "192.0.2.1"


def test_without_trusted_proxies_nobody_is_believed(settings: Any) -> None:
    settings.TRUSTED_PROXIES = []
    sent = meta("127.0.0.1", "198.51.100.7", HTTP_X_FORWARDED_PROTO="https")
    read_forwarded(sent)
    assert sent == {"REMOTE_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("peer", "said", "left"),
    [
        ("10.0.0.1", "https", "https"),
        ("10.0.0.1", "https, HTTP", "http"),
        ("10.0.0.1", "", None),
        ("192.0.2.1", "https", None),
    ],
)
def test_the_scheme_is_believed_of_the_same_proxies(
    peer: str, said: str, left: str | None, settings: Any
) -> None:
    settings.TRUSTED_PROXIES = PROXIES
    sent = meta(peer, None, HTTP_X_FORWARDED_PROTO=said)
    read_forwarded(sent)
    assert sent.get("HTTP_X_FORWARDED_PROTO") == left


def test_the_record_has_the_clients_address(alice: Caller, settings: Any, scripted: Any) -> None:
    settings.TRUSTED_PROXIES = PROXIES
    for peer, expected in (("10.0.0.1", "198.51.100.7"), ("192.0.2.1", "192.0.2.1")):
        answer = alice.client.post(
            "/api/v1/executions",
            {"code": "pass"},
            REMOTE_ADDR=peer,
            HTTP_X_FORWARDED_FOR="203.0.113.9, 198.51.100.7",
        )
        assert answer.status_code == 200, answer.content
        assert Execution.objects.get(pk=answer.json()["id"]).client_address == expected


def test_https_behind_a_proxy(client: Any, settings: Any) -> None:
    settings.TRUSTED_PROXIES = PROXIES
    settings.SECURE_SSL_REDIRECT = True
    secure = {"HTTP_X_FORWARDED_PROTO": "https"}
    assert client.get("/api/schema", REMOTE_ADDR="10.0.0.1", **secure).status_code == 200
    assert client.get("/api/schema", REMOTE_ADDR="192.0.2.1", **secure).status_code == 301


@pytest.mark.parametrize("text", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.256"])
def test_what_is_no_network_is_refused(text: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="TRUSTED_PROXIES"):
        read_networks([text])


def test_https_without_a_trusted_proxy_is_told(settings: Any, capsys: Any) -> None:
    settings.HTTPS_ONLY, settings.TRUSTED_PROXIES = True, []
    call_command("check", "--tag", "security")
    assert "sandbox_site.W001" in capsys.readouterr().err
