"""What strangers, liars and those who leave may do at the door for MCP: nothing."""

from __future__ import annotations

import json
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mcp.shared.exceptions import MCPError

from tests.support.mcp_client import (
    ACCEPT,
    LEGACY,
    call,
    called,
    connected,
    go,
    initialize,
    refusal,
    send,
)
from tests.support.processes import ROOT, clean_environment
from tests.support.raw_http import ask, connect
from tests.support.site import EXECUTIONS, MANAGE, Site
from tests.support.waiting import wait_until

SLEEP = "import time\nprint('on', flush=True)\ntime.sleep(80)"


@pytest.fixture(scope="module")
def keys(streaming_site: Site) -> dict[str, str]:
    """Of a colleague, of one who may only read, and of those that are held to something else."""
    code = (
        "from executions.models import Tenant\n"
        "from executions.tenants.keys import create_api_key\n"
        "t = Tenant.objects.get(slug='wonderland')\n"
        "for name, bounds in {'colleague': {}, 'reader': {'scopes': 'read'},\n"
        "    'language': {'languages': 'ruby'}, 'provider': {'providers': 'e2b'},\n"
        "    'template': {'templates': 'data'}}.items():\n"
        "    print('key', name, create_api_key(t, name, **bounds)[1])"
    )
    done = subprocess.run(
        [*MANAGE, "shell", "-c", code],
        env=clean_environment(streaming_site.data_dir),
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    lines = [line.split() for line in done.stdout.decode().splitlines()]
    return {line[1]: line[2] for line in lines if line[:1] == ["key"]}


def test_of_a_stranger_nothing_is_there_and_a_colleague_shares_all(
    streaming_site: Site, keys: dict[str, str]
) -> None:
    async def work() -> None:
        async with connected(streaming_site) as owner:
            opened = await called(owner, "session_open")
            here = {"session_id": opened["session_id"]}
            await called(owner, "file_write", path="a", text="mine", **here)
            code = "open('artifacts/a', 'w').write('mine')"
            ran = await called(owner, "run_code", code=code)
            started = await called(owner, "command_start", command="sleep 60", **here)
            process = {**here, "pid": started["pid"]}
        calls: tuple[tuple[str, dict[str, Any]], ...] = (
            ("session_run", {**here, "code": "1"}),
            ("command_run", {**here, "command": "ls"}),
            ("command_start", {**here, "command": "ls"}),
            ("command_output", process),
            ("command_signal", {**process, "signal": "SIGKILL"}),
            ("file_list", here),
            ("file_read", {**here, "path": "a"}),
            ("file_write", {**here, "path": "a", "text": "theirs"}),
            ("session_reset", here),
            ("session_close", here),
            ("execution_output", {"execution_id": ran["execution_id"]}),
        )
        uris = (
            f"cofferdam://executions/{ran['execution_id']}",
            ran["artifacts"][0]["uri"],
            f"cofferdam://sessions/{here['session_id']}/transcript",
        )
        async with connected(streaming_site, streaming_site.charlie) as stranger:
            for name, arguments in calls:
                assert "ot found." in await refusal(stranger, name, **arguments), name
            for uri in uris:
                with pytest.raises(MCPError, match="ot found"):
                    await stranger.read_resource(uri)
            listed = [each.uri for each in (await stranger.list_resources()).resources]
            assert not [uri for uri in listed if here["session_id"] in uri]
            sessions = (await called(stranger, "session_list"))["sessions"]
            assert here["session_id"] not in [each["session_id"] for each in sessions]
        async with connected(streaming_site, keys["colleague"]) as colleague:
            assert (await called(colleague, "file_read", path="a", **here))["text"] == "mine"
            for uri in uris:
                assert (await colleague.read_resource(uri)).contents
            await called(colleague, "session_close", **here)

    go(work)


def test_a_key_sees_and_calls_only_what_its_scopes_allow(
    streaming_site: Site, keys: dict[str, str]
) -> None:
    async def work() -> None:
        async with connected(streaming_site, keys["reader"]) as reader:
            names = {tool.name for tool in (await reader.list_tools()).tools}
            assert names == {"session_list", "command_output", "execution_output"}
            for name in ("run_code", "session_open", "file_write"):
                said = json.loads(await refusal(reader, name, code="1"))
                assert said["error"]["code"] == "forbidden"

    go(work)


def test_a_key_is_held_to_its_bounds(streaming_site: Site, keys: dict[str, str]) -> None:
    async def work() -> None:
        async with connected(streaming_site) as owner:
            here = {"session_id": (await called(owner, "session_open"))["session_id"]}
        runs: tuple[tuple[str, dict[str, Any]], ...] = (
            ("run_code", {"code": "1"}),
            ("session_open", {}),
            ("session_run", {**here, "code": "1"}),
            ("command_run", {**here, "command": "ls"}),
            ("command_start", {**here, "command": "ls"}),
        )
        beyond = {"language": runs, "provider": runs, "template": runs[1:2]}
        for bound, calls in beyond.items():
            async with connected(streaming_site, keys[bound]) as client:
                for name, arguments in calls:
                    said = json.loads(await refusal(client, name, **arguments))["error"]
                    assert (said["code"], said["field"]) == ("forbidden", bound), name
        async with connected(streaming_site) as owner:
            await called(owner, "session_close", **here)

    go(work)


def test_an_mcp_session_is_its_keys_alone(streaming_site: Site, keys: dict[str, str]) -> None:
    given = send(streaming_site, initialize()).headers["mcp-session-id"]
    listing = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
    version = {"MCP_Protocol_Version": LEGACY}
    assert send(streaming_site, listing, Mcp_Session_Id=given, **version).status_code == 200
    for wrong in (given[:-1] + ("0" if given[-1] != "0" else "1"), "x", given * 50):
        answer = send(streaming_site, listing, Mcp_Session_Id=wrong)
        assert answer.status_code in (404, 431), wrong
    for key in (streaming_site.charlie, keys["colleague"]):
        assert send(streaming_site, listing, key, Mcp_Session_Id=given).status_code == 404


def test_only_the_client_that_began_a_run_cancels_it(
    streaming_site: Site, keys: dict[str, str]
) -> None:
    mine, other = (send(streaming_site, initialize()).headers["mcp-session-id"] for _ in range(2))
    theirs = send(streaming_site, initialize(), keys["colleague"]).headers["mcp-session-id"]
    cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
    with ThreadPoolExecutor() as pool:
        body = call(7, "run_code", code=SLEEP, timeout=80)
        running = pool.submit(send, streaming_site, body, Mcp_Session_Id=mine)
        wait_until(lambda: _last(streaming_site)["status"] == "running", 60)
        for key, session in ((streaming_site.alice, other), (keys["colleague"], theirs)):
            assert send(streaming_site, cancel, key, Mcp_Session_Id=session).status_code == 202
        assert send(streaming_site, cancel).status_code == 202
        for bad in (None, [], {}, {"requestId": "7"}, {"requestId": [7]}, {"requestId": 1e300}):
            message = {**cancel, "params": bad}
            send(streaming_site, message, Mcp_Session_Id=mine)
        assert _last(streaming_site)["status"] == "running"
        assert send(streaming_site, cancel, Mcp_Session_Id=mine).status_code == 202
        assert _last(streaming_site)["status"] == "cancelled"
        assert "cancelled" in running.result().text


@pytest.mark.parametrize("version", [LEGACY, "2026-07-28"])
def test_who_leaves_ends_the_run_and_holds_nothing(streaming_site: Site, version: str) -> None:
    message = call(1, "run_code", code=SLEEP, timeout=80)
    said = [f"MCP-Protocol-Version: {version}"]
    if version != LEGACY:
        message["params"]["_meta"] = {
            "io.modelcontextprotocol/protocolVersion": version,
            "io.modelcontextprotocol/clientCapabilities": {},
        }
        said += ["Mcp-Method: tools/call", "Mcp-Name: run_code"]
    leaving = [_begin(streaming_site, message, said) for _ in range(3)]
    wait_until(lambda: streaming_site.running() == len(leaving), 60)
    for connection in leaving:
        connection.close()
    streaming_site.wait_for_running(0)
    assert _last(streaming_site)["status"] == "cancelled"
    streaming_site.assert_serves_others()


def test_no_page_of_a_browser_and_no_other_name_gets_in(streaming_site: Site) -> None:
    own = streaming_site.service.url
    assert send(streaming_site, initialize(), Origin=own).status_code == 200
    for origin in ("http://evil.example", "null", "https://127.0.0.1.evil.example", "", "http://["):
        assert send(streaming_site, initialize(), Origin=origin).status_code == 403, origin
    assert send(streaming_site, initialize(), Host="evil.example").status_code == 400
    both = {"Host": "evil.example", "Origin": "http://evil.example"}
    assert send(streaming_site, initialize(), **both).status_code == 400


def test_what_is_no_message_is_refused_and_costs_nothing(streaming_site: Site) -> None:
    for content in (b"", b"{", b"nope", b"\xff", b'{"a": NaN}', b"[" * 100_000):
        answer = send(streaming_site, content)
        assert answer.status_code == 400, content[:10]
        assert answer.json()["error"]["code"] == -32700
    for message in (
        *([], [initialize()], 1, None, {}, {"jsonrpc": "2.0"}, {"method": 1}),
        {"jsonrpc": "2.0", "id": {}, "method": "ping"},
        {"jsonrpc": "1.0", "id": 1, "method": "ping"},
    ):
        content = json.dumps(message).encode()
        assert send(streaming_site, content).status_code == 400, message
    unknown = {"jsonrpc": "2.0", "id": 1, "method": "no/such"}
    assert "-32601" in send(streaming_site, unknown).text
    assert send(streaming_site, initialize(), MCP_Protocol_Version="1999-01-01").status_code == 400
    assert send(streaming_site, initialize(), Accept="text/html").status_code == 406
    assert send(streaming_site, initialize(), Content_Type="text/plain").status_code in (400, 415)
    large = send(streaming_site, b" " * (8 * 1024 * 1024 + 1))
    assert large.status_code == 413
    for key in ("cfd_" + "x" * 43,):
        answer = send(streaming_site, initialize(), key)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"].startswith("Bearer")
    for method in ("GET", "DELETE", "PUT"):
        answer = ask(streaming_site.service, method, "/mcp", key=streaming_site.alice)
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
    streaming_site.assert_serves_others()


def _begin(site: Site, message: Any, headers: list[str]) -> socket.socket:
    content = json.dumps(message).encode()
    head = [
        "POST /mcp HTTP/1.1",
        "Host: 127.0.0.1",
        f"X-API-Key: {site.alice}",
        f"Accept: {ACCEPT}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        *headers,
    ]
    return connect(site.service, "\r\n".join([*head, "", ""]).encode() + content)


def _last(site: Site) -> dict[str, Any]:
    found = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    last: dict[str, Any] = found[0] if found else {"status": ""}
    return last
