"""Codex has the sandbox send requests: to the hosts of the session's network, and no others."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterator

import pytest

from tests.providers.network.upstreams import LARGE, Upstream
from tests.support.codex_door import Client, Refused, capability_path, opened
from tests.support.raw_http import ask
from tests.support.required import require
from tests.support.site import EXECUTIONS, Site, site_with_network
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    with Upstream(tmp_path_factory.mktemp("files")) as upstream:
        yield upstream


@pytest.fixture(scope="module")
def site(server: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    folder = tmp_path_factory.mktemp("site")
    with site_with_network(folder, f"{server.rule}\nelsewhere.example.com") as running:
        yield running


@pytest.fixture(scope="module")
def client(site: Site, server: Upstream) -> Iterator[Client]:
    with opened(site, f"{capability_path(site)}?network={server.rule}") as made:
        yield made


def send(client: Client, url: str, **more: object) -> dict[str, object]:
    params = {"method": "GET", "url": url, "requestId": "r1", **more}
    answer: dict[str, object] = client.call("http/request", **params)
    return answer


def test_a_request_is_sent_by_the_sandbox_and_recorded(
    site: Site, server: Upstream, client: Client
) -> None:
    answer = send(client, f"{server.url}/echo", headers=[{"name": "X-Mine", "value": "1"}])
    assert answer["status"] == 200
    assert b"X-Mine: 1" in b64decode(str(answer["bodyBase64"])).title()
    rows = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    assert [(each["language"], each["status"]) for each in rows] == [("command", "succeeded")]

    def is_recorded() -> bool:
        """With the session, which tells of its attempts when it is looked after."""
        found = ask(site.service, "GET", "/api/v1/network/attempts", key=site.alice).json["results"]
        return any(each["outcome"] == "allowed" for each in found)

    wait_until(is_recorded, 60)


def test_an_answer_can_come_piece_by_piece(server: Upstream, client: Client) -> None:
    client.told.clear()
    answer = send(client, f"{server.url}/echo", streamResponse=True)
    assert (answer["status"], answer["bodyBase64"]) == (200, "")
    client.call("environment/info")
    told = [each["params"] for each in client.told if each["method"] == "http/request/bodyDelta"]
    assert [each["seq"] for each in told] == list(range(1, len(told) + 1))
    assert [each["done"] for each in told] == [False] * (len(told) - 1) + [True]
    assert b"GET /echo" in b"".join(b64decode(each["deltaBase64"]) for each in told)


def test_redirects_are_followed_unless_the_client_stops_them(
    server: Upstream, client: Client
) -> None:
    stopped = send(client, f"{server.url}/elsewhere", redirectPolicy="stop")
    assert str(stopped["status"]).startswith("3")


def test_other_hosts_are_not_reached(server: Upstream, client: Client) -> None:
    assert send(client, "http://elsewhere.example.com/")["status"] == 403


@pytest.mark.parametrize(
    "params",
    [
        {"method": "GET\r\nX: 1"},
        {"url": "file:///etc/passwd"},
        {"url": "ftp://127.0.0.2/"},
        {"bodyBase64": "!"},
        {"bodyBase64": b64encode(bytes(40_000)).decode()},
        {"headers": [{"name": "A", "value": "", "valueEnvVar": "HOME"}]},
        {"headers": [{"name": "A\r\nB", "value": "1"}]},
    ],
)
def test_what_is_no_request_is_not_sent(
    server: Upstream, client: Client, params: dict[str, object]
) -> None:
    with pytest.raises(Refused):
        send(client, **{"url": f"{server.url}/echo", **params})  # type: ignore[arg-type]


def test_an_answer_that_is_too_large_is_refused(server: Upstream, client: Client) -> None:
    assert LARGE > 4 * 1024 * 1024
    with pytest.raises(Refused, match="more than"):
        send(client, f"{server.url}/large")


def test_with_a_network_the_clients_own_management_fails(client: Client) -> None:
    with pytest.raises(Refused, match="enforceManagedNetwork"):
        client.start("managed", "true", enforceManagedNetwork=True)
