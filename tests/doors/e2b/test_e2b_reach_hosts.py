"""Programs of sandboxes that E2B's SDK makes reach the hosts that it names, and no others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from ipaddress import IPv4Address
from random import randrange

import pytest
from e2b.exceptions import SandboxException, SandboxNotFoundException
from e2b_code_interpreter import AsyncSandbox, Sandbox

from tests.providers.network.upstreams import Upstream
from tests.support.e2b_door import opened
from tests.support.required import missing, require
from tests.support.site import Site, site_with_network

ALL = "0.0.0.0/0"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upstream]:
    """On port 80, which E2B's rules mean, of an address that no other test has."""
    address = str(IPv4Address(randrange(0x7F_10_00_00, 0x7F_FF_00_00)))
    try:
        upstream = Upstream(tmp_path_factory.mktemp("files"), address=(address, 80))
    except PermissionError:
        missing("port 80 needs a right that this user has not")
    with upstream:
        yield upstream


@pytest.fixture(scope="module")
def site(server: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    require("bwrap")
    folder = tmp_path_factory.mktemp("site")
    with (
        site_with_network(folder, f"{server.rule}\nelsewhere.example.com") as running,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("E2B_API_URL", running.service.url)
        patch.setenv("E2B_SANDBOX_URL", running.service.url)
        patch.setenv("E2B_API_KEY", running.alice)
        yield running


def fetching(*urls: str) -> str:
    return f"""
import urllib.request as u
for url in {urls!r}:
    try:
        with u.urlopen(url) as answer:
            answer.read()
            print(answer.status)
    except u.HTTPError as error:
        print(error.code)
    except u.URLError:
        print("no network")
"""


def reached(sandbox: Sandbox, *urls: str) -> list[str]:
    done = sandbox.run_code(fetching(*urls))
    assert done.error is None, done.error
    return "".join(done.logs.stdout).splitlines()


def test_programs_reach_the_hosts_that_are_named_and_no_others(
    server: Upstream, site: Site
) -> None:
    host = server.rule.partition(":")[0]
    urls = (f"{server.url}/echo", "http://elsewhere.example.com/", f"http://{host}:8080/")
    network = {"allow_out": [host], "deny_out": lambda ctx: [ctx.all_traffic]}
    with opened(network=network) as sandbox:
        assert reached(sandbox, *urls) == ["200", "403", "403"]
        run = sandbox.commands.run(f"curl -s -o /dev/null -w '%{{http_code}}' {server.url}/echo")
        assert run.stdout == "200"
        assert sandbox.get_info().network == {"allow_out": [host], "deny_out": [ALL]}
        (fork,) = sandbox.fork()
        with fork:
            assert reached(fork, *urls) == ["200", "403", "403"]


def test_a_sandbox_that_names_no_network_reaches_nothing(server: Upstream, site: Site) -> None:
    for options in ({}, {"allow_internet_access": True}, {"allow_internet_access": False}):
        with opened(**options) as sandbox:
            assert reached(sandbox, f"{server.url}/echo") == ["no network"]


def test_the_network_of_a_sandbox_is_replaced_while_it_runs(server: Upstream, site: Site) -> None:
    host = server.rule.partition(":")[0]
    url = f"{server.url}/echo"
    with opened() as sandbox:
        sandbox.update_network({"allow_internet_access": True})
        # All that the lists around it give, and no more.
        assert reached(sandbox, url, "http://other.example.com/") == ["200", "403"]
        sandbox.update_network({"allow_out": ["elsewhere.example.com"], "deny_out": [ALL]})
        assert reached(sandbox, url) == ["403"]
        with pytest.raises(SandboxException, match="network"):
            sandbox.update_network({"allow_out": ["other.example.com"], "deny_out": [ALL]})
        with pytest.raises(SandboxNotFoundException):
            Sandbox.update_network(sandbox.sandbox_id, {"deny_out": []}, api_key=site.charlie)
        sandbox.update_network({"allow_out": [host], "deny_out": [ALL]})
        assert reached(sandbox, url) == ["200"]
        sandbox.pause()
        again = Sandbox.connect(sandbox.sandbox_id)
        assert reached(again, url) == ["200"]
        sandbox.update_network({"deny_out": [ALL]})
        assert reached(sandbox, url) == ["no network"]
        assert sandbox.get_info().network is None


def test_the_asynchronous_sdk_names_a_network_too(server: Upstream, site: Site) -> None:
    asyncio.run(_replaced(server))


async def _replaced(server: Upstream) -> None:
    host = server.rule.partition(":")[0]
    sandbox = await AsyncSandbox.create(network={"allow_out": [host], "deny_out": [ALL]})
    try:
        done = await sandbox.run_code(fetching(f"{server.url}/echo"))
        assert done.logs.stdout == ["200\n"]
        await sandbox.update_network({"allow_internet_access": False})
        done = await sandbox.run_code(fetching(f"{server.url}/echo"))
        assert done.logs.stdout == ["no network\n"]
    finally:
        await sandbox.kill()
