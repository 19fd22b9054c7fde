"""POOL_ALLOWED_ADDRESSES decides at the connection, before anything is read, whatever the token."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.core.exceptions import ImproperlyConfigured

from providers.runtime.service.http import AllowedAddresses
from sandbox_site.environment import StrictEnv
from tests.support.pool_service import running

TOKEN = "a token for the pool"


def said_to(url: str, source: str) -> bytes:
    """What the service sends to a client that connects from `source`, b"" when it breaks off."""
    place = urlsplit(url)
    with socket.create_connection(
        (place.hostname, place.port), timeout=60, source_address=(source, 0)
    ) as client:
        try:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: pool\r\nConnection: close\r\n\r\n")
            return client.recv(4096)
        except ConnectionError:
            return b""


def test_only_named_addresses_are_answered(tmp_path: Path) -> None:
    allowed = {"POOL_ALLOWED_ADDRESSES": "127.0.0.1,10.0.0.0/8", "POOL_TOKEN": TOKEN}
    with running(tmp_path / "log", **allowed) as pool:
        assert said_to(pool.url, "127.0.0.1").startswith(b"HTTP/1.1 200")
        assert said_to(pool.url, "127.0.0.2") == b""
        assert pool.ask("GET", "/v1/stats").status == 200
        assert pool.ask("GET", "/v1/stats", token="wrong").status == 401
        assert "a connection from 127.0.0.2 is refused" in pool.service.output
        code, _ = pool.terminate()
        assert code == 0


def test_what_listens_on_every_address_answers_those_with_the_token_unless_told_otherwise(
    tmp_path: Path,
) -> None:
    with running(tmp_path / "log", "--host", "0.0.0.0", POOL_TOKEN=TOKEN) as pool:
        assert said_to(pool.url, "127.0.0.2").startswith(b"HTTP/1.1 200")
        assert pool.ask("GET", "/v1/stats", token="wrong").status == 401


@pytest.mark.parametrize(
    ("host", "only_loopback", "named", "expected"),
    [
        ("127.0.0.9", True, [], True),
        ("::1", True, [], True),
        ("::ffff:127.0.0.1", True, [], True),
        ("10.0.0.1", True, [], False),
        ("fe80::1%eth0", True, [], False),
        ("10.0.0.1", False, [], True),
        ("10.0.0.1", True, ["10.0.0.0/8"], True),
        ("::ffff:10.0.0.1", False, ["10.0.0.0/8"], True),
        ("127.0.0.1", True, ["10.0.0.0/8"], False),
    ],
)
def test_whom_the_addresses_let_in(
    host: str, only_loopback: bool, named: list[str], expected: bool
) -> None:
    assert (host in AllowedAddresses.of(named, only_loopback=only_loopback)) is expected


@pytest.mark.parametrize("value", ["pool.internal", "10.0.0.0/33", "10.0.0.1/8", "10.0.0.1:9385"])
def test_what_is_no_network_ends_the_start(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POOL_ALLOWED_ADDRESSES", value)
    with pytest.raises(ImproperlyConfigured, match="POOL_ALLOWED_ADDRESSES"):
        StrictEnv().networks("POOL_ALLOWED_ADDRESSES")
