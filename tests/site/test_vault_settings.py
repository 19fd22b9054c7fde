"""The settings of the server that has values of credentials: what cannot be is refused at start."""

from __future__ import annotations

from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from sandbox_site import vault
from sandbox_site.environment import StrictEnv
from tests.support.certificates import Authority

TOKEN = "hvs.0123456789-planted"
HTTPS = "https://vault.example.com:8200"


def server(monkeypatch: pytest.MonkeyPatch, **given: str) -> vault.Server:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    env = StrictEnv()
    return vault.server(env, env.networks("VAULT_ALLOWED_NETWORKS"))


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"VAULT_TOKEN": TOKEN}, "VAULT_TOKEN needs VAULT_URL"),
        ({"VAULT_NAMESPACE": "team"}, "VAULT_NAMESPACE needs VAULT_URL"),
        ({"VAULT_CA_FILE": "ca.pem"}, "VAULT_CA_FILE needs VAULT_URL"),
        ({"VAULT_URL": HTTPS}, "VAULT_URL needs VAULT_TOKEN"),
    ],
)
def test_a_part_without_the_others_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=why) as refused:
        server(monkeypatch, **given)
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"VAULT_URL": "vault:8200"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": f"https://me:{TOKEN}@vault.example.com"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": f"{HTTPS}/v1"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": f"{HTTPS}?a=b"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": "https://vault.example.com:99999"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": "https://[::1"}, "VAULT_URL: must be such as"),
        ({"VAULT_URL": "http://vault.example.com"}, "VAULT_ALLOWED_NETWORKS"),
        ({"VAULT_URL": "http://127.0.0.1:8200"}, "VAULT_ALLOWED_NETWORKS"),
        ({"VAULT_URL": "https://10.0.0.1:8200"}, "VAULT_ALLOWED_NETWORKS"),
        ({"VAULT_URL": "https://169.254.169.254"}, "VAULT_ALLOWED_NETWORKS"),
        (
            {"VAULT_URL": "http://10.0.0.2", "VAULT_ALLOWED_NETWORKS": "10.0.0.1"},
            "VAULT_ALLOWED_NETWORKS",
        ),
        ({"VAULT_URL": HTTPS, "VAULT_TOKEN": f"{TOKEN} x"}, "VAULT_TOKEN: must be printable"),
        ({"VAULT_URL": HTTPS, "VAULT_TOKEN": f"{TOKEN}\r\nX: y"}, "VAULT_TOKEN: must be printable"),
        ({"VAULT_URL": HTTPS, "VAULT_NAMESPACE": "a b"}, "VAULT_NAMESPACE: 'a b' is not"),
        ({"VAULT_URL": HTTPS, "VAULT_CA_FILE": "/nowhere"}, "VAULT_CA_FILE: cannot read"),
        ({"VAULT_URL": HTTPS, "VAULT_CA_FILE": __file__}, "VAULT_CA_FILE: cannot read"),
        (
            {
                "VAULT_URL": "http://vault:8200",
                "VAULT_ALLOWED_NETWORKS": "vault:8200",
                "VAULT_CA_FILE": "ca.pem",
            },
            "VAULT_CA_FILE: plain http",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name_and_without_the_token(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], why: str
) -> None:
    with pytest.raises(ImproperlyConfigured, match=why) as refused:
        server(monkeypatch, **{"VAULT_TOKEN": TOKEN, **given})
    assert TOKEN not in str(refused.value)


def test_what_fits_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert server(monkeypatch) == vault.Server("", "", "", "")
    ca = tmp_path / "ca.pem"
    ca.write_text(Authority().pem)
    token = tmp_path / "token"
    token.write_text(f"{TOKEN}\n")
    given = {"VAULT_URL": f"{HTTPS}/", "VAULT_TOKEN_FILE": str(token), "VAULT_CA_FILE": str(ca)}
    found = server(monkeypatch, **given, VAULT_NAMESPACE="team/a")
    assert found == vault.Server(HTTPS, TOKEN, "team/a", ca.read_text())


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("http://vault:8200", "vault:8200"),
        ("https://10.0.0.1", "10.0.0.0/8"),
        ("http://[::1]:8200", "[::1]:8200"),
    ],
)
def test_an_address_that_is_not_public_is_for_the_operator_to_allow(
    monkeypatch: pytest.MonkeyPatch, url: str, allowed: str
) -> None:
    given = {"VAULT_URL": url, "VAULT_ALLOWED_NETWORKS": allowed, "VAULT_TOKEN": TOKEN}
    assert server(monkeypatch, **given).url == url
