"""E2B's secrets: write only, of one tenant, and put into requests of sandboxes that name them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from ipaddress import IPv4Address
from random import randrange
from typing import Any

import pytest
from e2b import Secret
from e2b.exceptions import SecretException, SecretNotFoundException
from e2b_code_interpreter import Sandbox

from executions.capabilities.network.models import NetworkCredential
from executions.ledger.verification import verify
from executions.sessions.models import Session
from tests.conftest import Caller
from tests.providers.network.upstreams import Upstream
from tests.support.certificates import Authority
from tests.support.networks import credential, listed
from tests.support.required import missing, require
from tests.support.site import Site, site_with_network

VALUE = "sk-e2b-0123456789"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Upstream, str]]:
    """On port 443, which E2B's rules mean, of an address that no other test has; and what signs."""
    address = str(IPv4Address(randrange(0x7F_10_00_00, 0x7F_FF_00_00)))
    folder = tmp_path_factory.mktemp("server")
    authority = Authority()
    context = authority.issue(folder, addresses=[address]).server_context()
    try:
        upstream = Upstream(folder, context, address=(address, 443))
    except PermissionError:
        missing("port 443 needs a right that this user has not")
    with upstream:
        yield upstream, authority.pem


@pytest.fixture(scope="module")
def site(server: tuple[Upstream, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    folder = tmp_path_factory.mktemp("site")
    upstream, pem = server
    trusted = folder / "trusted.pem"
    trusted.write_text(pem)
    with (
        site_with_network(folder, upstream.rule, NETWORK_CA_FILE=str(trusted)) as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("E2B_API_URL", running.service.url)
        patch.setenv("E2B_SANDBOX_URL", running.service.url)
        patch.setenv("E2B_API_KEY", running.alice)
        yield running


def network_with(upstream: Upstream, secret: str) -> dict[str, Any]:
    host = upstream.rule.partition(":")[0]
    headers = {"X-Api-Key": f"key {Secret.fill(secret)}"}
    return {
        "allow_out": [host],
        "deny_out": ["0.0.0.0/0"],
        "rules": {host: [{"transform": {"headers": headers}}]},
    }


def test_a_secret_is_put_in_for_code_that_never_has_it(
    server: tuple[Upstream, str], site: Site
) -> None:
    upstream, _ = server
    made = Secret.create("api-key", VALUE)
    assert (made.name, made.version) == ("api-key", 1)
    network = network_with(upstream, "api-key")
    code = f"""
import os, urllib.request as u
request = u.Request({upstream.url + "/echo"!r}, headers={{"X-Api-Key": "none"}})
print(u.urlopen(request).read().decode())
"""
    with Sandbox.create(network=network) as sandbox:
        done = sandbox.run_code(code)
        assert done.error is None, done.error
        assert upstream.headers[-1]["X-Api-Key"] == f"key {VALUE}"
        told = "".join(done.logs.stdout)
        assert VALUE not in told
        assert f"key {'*' * len(VALUE)}" in told
        assert sandbox.get_info().network["rules"] == network["rules"]

        assert Secret.update("api-key", "sk-another-value").version == 2
        sandbox.run_code(code)
        assert upstream.headers[-1]["X-Api-Key"] == "key sk-another-value"

        assert Secret.destroy("api-key") is True
        # TLS is not opened any more, and the program does not trust what signs for the server.
        sent = len(upstream.headers)
        error = sandbox.run_code(code).error
        assert error is not None
        assert "CERTIFICATE_VERIFY_FAILED" in error.value
        assert len(upstream.headers) == sent


def test_the_sdk_lists_finds_and_removes_them(site: Site) -> None:
    for name in ("one", "two"):
        Secret.create(name, VALUE)
    pages = Secret.list()
    assert [each.name for each in pages.next_items()] == ["one", "two"]
    assert not pages.has_next
    found = Secret.get_info("one")
    assert Secret.get_info(found.secret_id).name == "one"
    assert Secret.exists("one")
    with pytest.raises(SecretException, match="already"):
        Secret.create("one", VALUE)
    assert Secret.destroy("one")
    assert not Secret.exists("one")
    assert Secret.destroy("one") is False
    with pytest.raises(SecretNotFoundException):
        Secret.update("one", VALUE)
    assert Secret.create("one", VALUE).version == 2
    for name in ("one", "two"):
        Secret.destroy(name)


def create(caller: Caller, **body: Any) -> Any:
    return caller.client.post("/secrets", json.dumps(body), content_type="application/json")


@pytest.mark.django_db
def test_another_tenant_sees_changes_and_removes_none(
    alice: Caller, bob: Caller, charlie: Caller
) -> None:
    assert create(alice, name="key", value=VALUE).status_code == 201
    assert [each["name"] for each in bob.client.get("/secrets").json()] == ["key"]
    assert charlie.client.get("/secrets").json() == []
    row = NetworkCredential.objects.get()
    for text in ("key", f"secret_{row.pk}"):
        assert charlie.client.get(f"/secrets/{text}").status_code == 404
        changed = charlie.client.post(
            f"/secrets/{text}", {"value": "other-value"}, content_type="application/json"
        )
        assert changed.status_code == 404
        assert charlie.client.delete(f"/secrets/{text}").status_code == 404
    row.refresh_from_db()
    assert (row.version, row.open_value()) == (1, VALUE)
    assert create(charlie, name="key", value="other-value").status_code == 201
    assert verify().is_intact


@pytest.mark.django_db
def test_no_answer_and_no_record_has_the_value(
    alice: Caller, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [create(alice, name="key", value=VALUE), create(alice, name="key", value=VALUE)]
    answers += [alice.client.get("/secrets"), alice.client.get("/secrets/key")]
    answers.append(create(alice, name="Not A Name", value=VALUE))
    answers.append(create(alice, name="other", value=VALUE, metadata={"a": "b"}))
    answers.append(create(alice, name="other", value="short"))
    assert [each.status_code for each in answers] == [201, 409, 200, 200, 400, 501, 400]
    for answer in answers:
        assert VALUE not in answer.content.decode()
    assert VALUE not in caplog.text


@pytest.mark.django_db
def test_what_an_administrator_has_bound_is_not_theirs_to_use(alice: Caller) -> None:
    slug = alice.tenant.slug
    listed("api.example.com", "other.example.com")
    bound = credential("bound", "https://api.example.com", tenant=slug)
    assert alice.client.get("/secrets").json() == []
    assert create(alice, name="bound", value="other-value").status_code == 409
    assert alice.client.delete("/secrets/bound").status_code == 404
    headers = {"Authorization": "${e2b.secrets.bound}"}
    network = {
        "allowOut": ["other.example.com"],
        "denyOut": ["0.0.0.0/0"],
        "rules": {"other.example.com": [{"transform": {"headers": headers}}]},
    }
    answer = alice.client.post(
        "/v2/sandboxes", json.dumps({"network": network}), content_type="application/json"
    )
    assert answer.status_code == 400
    assert "bound" in answer.json()["message"]
    assert not Session.objects.exists()
    bound.refresh_from_db()
    assert bound.version == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("rules", "status"),
    [
        ({"api.example.com": [{"transform": {"headers": {"X-Key": "plain"}}}]}, 501),
        ({"api.example.com": [{"transform": {"headers": {"X": "${e2b.identity.tokens.a}"}}}]}, 501),
        ({"api.example.com": [{"transform": {"headers": {"Host": "${e2b.secrets.key}"}}}]}, 400),
        (
            {"api.example.com": [{"transform": {"headers": {"X": "${e2b.secrets.key}\r\nY: z"}}}]},
            400,
        ),
        ({"api.example.com": [{"transform": {"headers": {"X": "${e2b.secrets.none}"}}}]}, 400),
        ({"api.example.com": [{"forward": "http://x"}]}, 501),
        ({"0.0.0.0/0": [{"transform": {"headers": {"X": "${e2b.secrets.key}"}}}]}, 400),
        ({"*.com": [{"transform": {"headers": {"X": "${e2b.secrets.key}"}}}]}, 400),
        ({"api.example.com": {"transform": {}}}, 400),
        (["api.example.com"], 400),
    ],
)
def test_rules_that_cannot_be_held_are_refused(alice: Caller, rules: Any, status: int) -> None:
    listed("api.example.com")
    create(alice, name="key", value=VALUE)
    network = {"allowOut": ["api.example.com"], "denyOut": ["0.0.0.0/0"], "rules": rules}
    answer = alice.client.post(
        "/v2/sandboxes", json.dumps({"network": network}), content_type="application/json"
    )
    assert answer.status_code == status, answer.content
    assert not Session.objects.exists()
