"""What strangers, liars and those who leave may do at the door for E2B's SDKs: nothing."""

from __future__ import annotations

import gzip
import socket

import httpx
import pytest
from e2b import InvalidArgumentException
from e2b.exceptions import SandboxNotRunningException
from e2b_code_interpreter import Sandbox

from tests.support.e2b_door import envelope, headers_of, native_of, opened, post, records
from tests.support.raw_http import ask
from tests.support.site import Site
from tests.support.waiting import wait_until

STREAM = {"Content-Type": "application/connect+json"}
START = {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", "sleep 600"]}, "stdin": False}
UNKNOWN = "0" * 32


def test_a_strangers_sandbox_is_not_there_whoever_asks(door: Site, sandbox: Sandbox) -> None:
    api = httpx.Client(base_url=door.service.url, headers={"X-API-KEY": door.charlie})
    bare = httpx.Client(base_url=door.service.url)
    theirs = api.post("/v2/sandboxes", json={}).json()
    token, real = theirs["envdAccessToken"], sandbox.sandbox_id
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("POST", "/connect"),
        ("POST", "/pause"),
        ("POST", "/timeout"),
        ("GET", "/metrics"),
    ):
        told = [
            api.request(method, f"/sandboxes/{each}{path}", json={"timeout": 5} if path else None)
            for each in (real, UNKNOWN)
        ]
        assert told[0].status_code == told[1].status_code == 404, path
        assert told[0].content == told[1].content
    calls = (
        ("GET", "/health", b""),
        ("GET", "/files?path=a", b""),
        ("POST", "/process.Process/List", b"{}"),
        ("POST", "/process.Process/Start", envelope(START)),
        ("POST", "/filesystem.Filesystem/ListDir", b'{"path":""}'),
        ("POST", "/execute", b'{"code":"1"}'),
        ("GET", "/contexts", b""),
    )
    for credential in ({"X-Access-Token": token}, {"X-API-KEY": door.charlie}):
        for method, path, content in calls:
            told = [
                bare.request(
                    method,
                    path,
                    content=content,
                    headers={**credential, "E2b-Sandbox-Id": each},
                )
                for each in (real, UNKNOWN)
            ]
            assert told[0].status_code == told[1].status_code == 502, path
            assert told[0].content == told[1].content
            assert "The sandbox was not found" in told[0].text
    for path in ("/health", "/contexts"):
        headers = {"E2b-Sandbox-Id": real}
        assert bare.get(path, headers=headers).status_code == 401
    signed = sandbox.download_url("a")
    named = {"E2b-Sandbox-Id": theirs["sandboxID"]}
    assert bare.get(signed, headers=named).status_code == 401
    api.delete(f"/sandboxes/{theirs['sandboxID']}")
    for client in (api, bare):
        client.close()


def test_what_is_no_token_of_a_sandbox_opens_nothing(door: Site, sandbox: Sandbox) -> None:
    token = headers_of(sandbox)["X-Access-Token"]
    with opened() as other:
        for wrong in (
            headers_of(other)["X-Access-Token"],
            token[:-1] + ("1" if token[-1] == "0" else "0"),
            "1x" + "0" * 64,
            "x",
        ):
            sent = headers_of(sandbox, **{"X-Access-Token": wrong})
            assert httpx.get(f"{door.service.url}/health", headers=sent).status_code == 502, wrong


@pytest.mark.parametrize(
    "content",
    [
        envelope(START, length=2**32 - 1),
        envelope(START, length=10_000),
        envelope(START, length=3),
        envelope(START, flags=1),
        envelope(START)[:3],
        envelope(START) * 2,
        b"\x00\x00\x00\x00\x02[]",
        b"",
    ],
)
def test_envelopes_that_lie_start_nothing(door: Site, sandbox: Sandbox, content: bytes) -> None:
    before = records(door, 1)
    answer = post(door, "/process.Process/Start", content, headers_of(sandbox, **STREAM))
    assert answer.status_code in (400, 501)
    assert records(door, 1) == before


def test_what_unpacks_to_more_than_a_body_may_be_is_refused(door: Site, sandbox: Sandbox) -> None:
    bomb = gzip.compress(bytes(70 * 1024 * 1024))
    headers = headers_of(
        sandbox, **{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}
    )
    assert post(door, "/files?path=bomb", bomb, headers).status_code == 413
    assert post(door, "/files?path=bomb", bomb[:1000], headers).status_code == 400
    assert not sandbox.files.exists("bomb")


def test_a_body_without_a_length_is_not_read_for_strangers(door: Site, sandbox: Sandbox) -> None:
    def pieces() -> object:
        for _ in range(64):
            yield bytes(64 * 1024)

    for path in ("/files?path=x", "/process.Process/Start", "/execute"):
        answer = httpx.post(
            f"{door.service.url}{path}",
            content=pieces(),  # type: ignore[arg-type]
            headers={"E2b-Sandbox-Id": sandbox.sandbox_id},
        )
        assert answer.status_code in (401, 413), path


def test_a_command_outlives_the_client_that_leaves(door: Site) -> None:
    with opened() as sandbox:
        body = envelope(START)
        lines = [
            "POST /process.Process/Start HTTP/1.1",
            "Host: 127.0.0.1",
            "Content-Type: application/connect+json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in headers_of(sandbox).items()),
        ]
        with socket.create_connection(("127.0.0.1", door.service.port), timeout=30) as client:
            client.sendall("\r\n".join([*lines, "", ""]).encode() + body)
            assert b"start" in client.recv(65536) + client.recv(65536)
        (left,) = sandbox.commands.list()
        assert left.args[-1] == "sleep 600"
        door.assert_serves_others()
    wait_until(lambda: records(door, 1)[0]["status"] == "cancelled", 60)


def test_a_sandbox_that_ends_ends_what_is_told_of_it(door: Site) -> None:
    with opened() as sandbox:
        running = sandbox.commands.run("sleep 600", background=True)
        assert ask(door.service, "DELETE", native_of(sandbox), key=door.alice).status == 204
        with pytest.raises(SandboxNotRunningException):
            running.wait()
        with pytest.raises(SandboxNotRunningException):
            sandbox.commands.run("true")


def test_names_that_could_be_taken_for_others_are_refused(sandbox: Sandbox) -> None:
    for path in ("", "/", "/home/user", "~", "."):
        with pytest.raises(InvalidArgumentException):
            sandbox.files.write(path, "x")
        with pytest.raises(InvalidArgumentException):
            sandbox.files.remove(path)
