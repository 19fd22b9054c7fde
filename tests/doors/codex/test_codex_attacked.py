"""Who has no right to it, and what no client should send: each is refused, and the door goes on."""

from __future__ import annotations

import socket
from base64 import b64decode, b64encode

import pytest

from tests.support.codex_door import (
    CWD,
    Client,
    Closed,
    Denied,
    Refused,
    Socket,
    capability_path,
    make_key,
    manage,
    opened,
    refused,
)
from tests.support.raw_http import ask
from tests.support.site import EXECUTIONS, Site
from tests.support.waiting import wait_until

_REVOKE = """
from executions.tenants.keys import revoke
from executions.tenants.models import ApiKey
revoke(ApiKey.objects.get(tenant__slug={tenant!r}, name={name!r}))
"""


def denied(site: Site, path: str, **headers: str) -> int:
    with pytest.raises(Denied) as error:
        Socket(site.service, path, **headers)
    return error.value.status


def test_who_shows_no_key_is_not_let_in(streaming_site: Site, path: str) -> None:
    number, mac = path.removeprefix("/codex/").split("x")
    for wrong in (
        "/codex/",
        f"/codex/{number}x{'0' * 64}",
        f"/codex/{int(number, 16) + 1:x}x{mac}",
        f"/codex/{number}x{mac}/more",
        f"/codex/{number}X{mac}",
        f"/codex/{streaming_site.alice}",
        f"/codex/fffffffffffffffx{mac}",
    ):
        assert denied(streaming_site, wrong) == 401, wrong
    assert denied(streaming_site, "/codex/", X_API_Key="cfd_nothing") == 401
    # A wrong capability is not made good by a right key.
    key = streaming_site.alice
    assert denied(streaming_site, f"/codex/{number}x{'0' * 64}", X_API_Key=key) == 401
    assert denied(streaming_site, "/mcp", X_API_Key=key) == 403


def test_a_key_or_its_capability_comes_in_by_a_header(streaming_site: Site, path: str) -> None:
    capability = path.removeprefix("/codex/")
    for headers in (
        {"X_API_Key": streaming_site.alice},
        {"Authorization": f"Bearer {streaming_site.alice}"},
        {"Authorization": f"Bearer {capability}"},
    ):
        Socket(streaming_site.service, "/codex/", **headers).close()


@pytest.mark.parametrize(
    "query",
    [
        "unknown=1",
        "language=python&language=nodejs",
        "network=no%20host",
        "idle_seconds=x",
        "idle_seconds=0",
        "folder=relative",
        "folder=/",
        "template=%00",
        "&".join(f"a{number}=1" for number in range(50)),
    ],
)
def test_a_query_that_names_nothing_is_refused(streaming_site: Site, path: str, query: str) -> None:
    assert denied(streaming_site, f"{path}?{query}") == 400


def test_a_session_is_found_by_its_own_key_alone(streaming_site: Site, client: Client) -> None:
    make_key(streaming_site, "wonderland", "colleague")
    made = client.run("mine", "echo secret > f")
    assert made[0] == 0
    with opened(streaming_site, capability_path(streaming_site)) as mine:
        session_id = mine.run("id", "true") and _session_of(streaming_site)
    for tenant, key in (("wonderland", "colleague"), ("elsewhere", "attack")):
        other = Client(streaming_site.service, capability_path(streaming_site, tenant, key))
        for wanted in (session_id, "01a1fd3e-5869-7be3-b4ad-c3848c823008", "no id"):
            problem = refused(other, "initialize", resumeSessionId=wanted)
            assert (problem.code, problem.message) == (-32600, f"unknown session id {wanted}")
        # It may still open its own.
        other.initialize()
        assert refused(other, "fs/readFile", path=f"{CWD}/f").code == -32004
        assert refused(other, "process/read", processId="mine").code == -32600
        other.close()


def _session_of(site: Site) -> str:
    (last,) = ask(site.service, "GET", f"{EXECUTIONS}?limit=1", key=site.alice).json["results"]
    return str(last["session"])


def test_who_loses_the_key_loses_the_connection(streaming_site: Site) -> None:
    make_key(streaming_site, "wonderland", "lost")
    path = capability_path(streaming_site, key="lost")
    with opened(streaming_site, path) as lost:
        assert lost.run("before", "echo yes") == (0, "yes\n")
        manage(streaming_site, "shell", "-c", _REVOKE.format(tenant="wonderland", name="lost"))
        with pytest.raises((Refused, Closed)) as problem:
            lost.run("after", "echo no")
        code = getattr(problem.value, "code", None)
        assert 1008 in (code, lost.socket.wait_until_closed())
    assert denied(streaming_site, path) == 401


def test_a_key_has_its_scopes_and_no_others(streaming_site: Site) -> None:
    make_key(streaming_site, "scoped", "no-files", scopes="execute sessions")
    with opened(streaming_site, capability_path(streaming_site, "scoped", "no-files")) as found:
        assert found.run("a", "echo 1") == (0, "1\n")
        for method in ("fs/readFile", "fs/getMetadata", "fs/remove"):
            assert "files" in refused(found, method, path=f"{CWD}/f").message
    make_key(streaming_site, "scoped", "no-runs", scopes="files sessions")
    with opened(streaming_site, capability_path(streaming_site, "scoped", "no-runs")) as found:
        with pytest.raises(Refused, match="execute"):
            found.start("a", "true")
        assert found.call("fs/getMetadata", path=CWD)["isDirectory"]
    make_key(streaming_site, "scoped", "no-sessions", scopes="files execute")
    path = capability_path(streaming_site, "scoped", "no-sessions")
    other = Client(streaming_site.service, path)
    assert "sessions" in refused(other, "initialize", clientName="x").message
    other.close()


def test_what_a_policy_refuses_does_not_start_and_is_recorded(streaming_site: Site) -> None:
    key = make_key(streaming_site, "bounded", "bounded", {"languages": "python command"})
    with opened(streaming_site, capability_path(streaming_site, "bounded", "bounded")) as bounded:
        with pytest.raises(Refused, match="policy") as problem:
            bounded.run("a", "echo 1")
        assert problem.value.code == -32600
        # It is as if it had not been named.
        bounded.start("a", "echo", "2")
        assert bounded.output("a") == "2\n"
    rows = ask(streaming_site.service, "GET", f"{EXECUTIONS}?limit=5", key=key).json["results"]
    assert sorted(each["status"] for each in rows) == ["blocked", "succeeded"]


def test_what_cannot_be_carried_out_fails(streaming_site: Site, client: Client) -> None:
    for wish in (
        {"networkProxy": {"port": 1}},
        {"arg0": "other"},
        {"cwd": "/workspace"},
        {"cwd": "file://host/workspace"},
        {"cwd": f"{CWD}/not/there"},
        {"env": {"A=B": "1"}},
        {"env": {"A": 1}},
    ):
        with pytest.raises(Refused):
            client.start("wish", "true", **wish)
    with pytest.raises(Refused, match="argv"):
        client.start("wish")
    asked = client.begin("http/request", method="GET", url="http://a", requestId="1")
    assert "no network" in _refused_answer(client, asked).message
    # A wish for less is met where there is nothing at all.
    client.start("wish", "true", enforceManagedNetwork=True)
    client.wait_for("process/closed", "wish")


def test_ids_of_processes_are_used_once(client: Client) -> None:
    client.start("once", "sleep", "60")
    with pytest.raises(Refused, match="process once already exists") as problem:
        client.start("once", "true")
    assert problem.value.code == -32600
    client.call("process/terminate", processId="once")
    with pytest.raises(Refused, match="already exists"):
        client.start("once", "true")


def test_what_is_not_known_is_answered_and_nothing_ends(
    streaming_site: Site, client: Client
) -> None:
    for _ in range(3):
        assert refused(client, "process/teleport").code == -32601
    assert streaming_site.service.output.count("process/teleport") == 1
    for text in (
        "no json",
        "[]",
        '"text"',
        "null",
        "{}",
        '{"id": 1}',
        '{"id": 1, "result": {}}',
        '{"id": 1.5, "method": "environment/info"}',
        '{"id": null, "method": "environment/info"}',
        '{"id": {"a": 1}, "method": "environment/info"}',
        '{"id": 1, "method": 2}',
        '{"method": "process/output", "params": {}}',
        '[{"id": 1, "method": "environment/info"}]',
        "[" * 100_000,
        "1" * 100_000,
        '{"id": 1, "method": "environment/info", "params": [' + "{}," * 20_000 + "0]}",
        '{"id": 9, "method": "'
        + "m" * 10_000
        + "\ud800".encode("utf-8", "replace").decode()
        + '"}',
    ):
        client.send(text)
        if '"id": 9' in text:
            assert _refused_answer(client, 9).code == -32601
        else:
            assert _refused_answer(client, -1).code == -32600
    assert client.call("environment/info")["cwd"] == CWD
    assert client.call("environment/status") == {"status": "ready"}


def _refused_answer(client: Client, request_id: int) -> Refused:
    with pytest.raises(Refused) as error:
        client.answer_to(request_id)
    return error.value


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("process/start", {"processId": "", "argv": ["true"], "cwd": CWD}),
        ("process/start", {"processId": "x" * 300, "argv": ["true"], "cwd": CWD}),
        ("process/start", {"processId": "p", "argv": "true", "cwd": CWD}),
        ("process/start", {"processId": "p", "argv": ["\0"], "cwd": CWD}),
        ("process/start", {"processId": "p", "argv": ["a"] * 2000, "cwd": CWD}),
        ("process/start", []),
        ("process/read", {"processId": "p", "waitMs": -1}),
        ("process/read", {"processId": "p", "waitMs": 10**400}),
        ("process/read", {"processId": "p", "afterSeq": 10**400}),
        ("http/request", {"method": "GET", "url": CWD, "requestId": "r", "timeoutMs": 10**400}),
        ("process/write", {"processId": 1, "chunk": ""}),
        ("fs/readFile", {"path": "/workspace/f"}),
        ("fs/readFile", {"path": "file:///workspace/%00"}),
        ("fs/readFile", {"path": "file:///workspace/\ud800"}),
        ("fs/copy", {"sourcePath": "file:///\ud800", "destinationPath": CWD}),
        ("process/start", {"processId": "p", "argv": ["true"], "cwd": "file:///\ud800"}),
        ("process/start", {"processId": "p", "argv": ["true"], "cwd": "file:///%FF"}),
        ("process/start", {"processId": "p", "argv": ["\ud800"], "cwd": CWD}),
        ("process/start", {"processId": "p", "argv": ["a"], "cwd": CWD, "env": {"A": "\ud800"}}),
        ("process/start", {"processId": "p", "argv": ["a"], "cwd": CWD, "env": {"\ud800": ""}}),
        ("process/start", {"processId": "p", "argv": ["a"], "cwd": CWD, "env": {"A=B": "\0"}}),
        ("process/write", {"processId": "\ud800", "chunk": 1}),
        ("http/request", {"method": "GET", "url": "http://\ud800", "requestId": "r"}),
        ("fs/readFile", {"path": "file:///workspace/f?x"}),
        ("fs/readFile", {"path": f"file:///{'x' * 5000}"}),
        ("fs/readFile", {"path": "http://127.0.0.1/f"}),
        ("fs/writeFile", {"path": CWD, "dataBase64": ""}),
        ("fs/writeFile", {"path": f"{CWD}/f", "dataBase64": "!"}),
        ("fs/writeFile", {"path": "file:///usr/bin/env", "dataBase64": ""}),
        ("fs/remove", {"path": "file:///"}),
        ("fs/open", {"path": f"{CWD}/f", "handleId": "h" * 40}),
        ("fs/readBlock", {"handleId": "h", "offset": -1, "len": 1}),
    ],
)
def test_parameters_that_are_none_are_refused(client: Client, method: str, params: object) -> None:
    client.send({"id": "bad", "method": method, "params": params})
    assert _refused_answer(client, "bad").code in (-32600, -32602)  # type: ignore[arg-type]


def test_nothing_is_done_before_both_have_said_who_they_are(
    streaming_site: Site, path: str
) -> None:
    early = Client(streaming_site.service, path)
    assert refused(early, "environment/info").code == -32600
    early.send({"method": "initialized"})
    assert _refused_answer(early, -1).code == -32600
    early.call("initialize", clientName="tests")
    with pytest.raises(Refused, match="initialized"):
        early.start("a", "true")
    assert "once" in refused(early, "initialize", clientName="tests").message
    early.close()


def test_a_key_has_so_many_connections(streaming_site: Site) -> None:
    make_key(streaming_site, "many", "many")
    path = capability_path(streaming_site, "many", "many")
    sockets = [Socket(streaming_site.service, path) for _ in range(16)]
    assert denied(streaming_site, path) == 429
    for each in sockets:
        each.close()

    def has_room() -> bool:
        try:
            Socket(streaming_site.service, path).close()
        except Denied:
            return False
        return True

    wait_until(has_room, 60)


def test_a_peer_that_never_reads_is_cut_off(streaming_site: Site, path: str) -> None:
    """The service gives it WEB_SEND_SECONDS, and holds little of what it asked for. What it started
    is there for whoever comes next, and goes on."""
    with opened(streaming_site, path) as idle:
        assert idle.run("big", "head -c 3000000 /dev/zero > big")[0] == 0
        session_id = _session_of(streaming_site)
        idle.socket.raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for _ in range(20):
            idle.begin("fs/readFile", path=f"{CWD}/big")
        script = ["bash", "-c", "echo stuck; read line; echo got $line"]
        wanted = {"argv": script, "cwd": CWD, "env": {}, "tty": False, "pipeStdin": True}
        idle.begin("process/start", processId="stuck", **wanted)
        other = Client(streaming_site.service, path)

        def is_cut_off() -> bool:
            try:
                other.initialize(resumeSessionId=session_id)
            except Refused as error:
                return error.code != -32010
            return True

        wait_until(is_cut_off, 60)
        line = b64encode(b"it\n").decode()
        written = other.call("process/write", processId="stuck", chunk=line, writeId="1")
        assert written == {"status": "accepted"}
        other.wait_for("process/closed", "stuck")
        seen = other.call("process/read", processId="stuck")["chunks"]
        assert b"".join(b64decode(each["chunk"]) for each in seen) == b"stuck\ngot it\n"
        other.close()
        assert ask(streaming_site.service, "GET", "/healthz").status == 200


def test_the_address_is_for_sockets_and_what_is_in_it_is_not_told(
    streaming_site: Site, path: str
) -> None:
    answer = ask(streaming_site.service, "GET", path)
    assert answer.status == 426
    capability = path.removeprefix("/codex/")
    assert capability.encode() not in answer.body
    assert capability not in streaming_site.service.output


def test_a_large_file_comes_back_as_it_was_sent(client: Client) -> None:
    data = bytes(range(256)) * 5000
    text = b64encode(data).decode()
    assert client.call("fs/writeFile", path=f"{CWD}/large", dataBase64=text) == {}
    assert client.call("fs/readFile", path=f"{CWD}/large")["dataBase64"] == text
