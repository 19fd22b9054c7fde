"""Callers who follow without end: so many that others wait, or for longer than they may."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from executions.runs.event_stream import MOST_OF_EXECUTION
from tests.support.e2b_door import envelope
from tests.support.mcp_client import ACCEPT
from tests.support.processes import ROOT, clean_environment
from tests.support.raw_http import ask, connect, read, request
from tests.support.site import EXECUTIONS, MANAGE, Site, sleeper
from tests.support.streaming import NDJSON
from tests.support.waiting import wait_until

FOLLOWERS = 250
# A stream that ends later than that has not ended because of the right that was lost: whatever it
# tells of goes on for longer.
GOES_ON_SECONDS, ENDS_SECONDS = 240, 60

PREPARE = """
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY, get_user_model
from django.contrib.auth.models import Permission
from django.contrib.sessions.backends.db import SessionStore
from executions.models import Tenant
from executions.tenants.keys import create_api_key
tenant = Tenant.objects.get(slug="wonderland")
print(create_api_key(tenant, "reader", scopes="read")[1])
for number in range({keys}):
    print(create_api_key(tenant, f"number {{number}}")[1])
user = get_user_model().objects.create_user("follower", password="x", is_staff=True)
user.user_permissions.set(Permission.objects.filter(codename="view_execution"))
store = SessionStore()
store[SESSION_KEY] = str(user.pk)
store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
store[HASH_SESSION_KEY] = user.get_session_auth_hash()
store.create()
print(store.session_key)
"""


@pytest.fixture
def site(streaming_site: Site) -> Site:
    return streaming_site


@dataclass
class Prepared:
    reader: str
    keys: list[str]
    sign_in: str


@pytest.fixture(scope="module")
def prepared(streaming_site: Site) -> Prepared:
    """A key that may only read, keys to be revoked, and a person who is signed in."""
    done = subprocess.run(
        [*MANAGE, "shell", "-v", "0", "-c", PREPARE.format(keys=len(KINDS) + 1)],
        env=clean_environment(streaming_site.data_dir),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    reader, *keys, sign_in = done.stdout.split()
    return Prepared(reader, keys, sign_in)


def write(site: Site, statement: str, *values: str) -> None:
    """As another process of the service does it."""
    path = site.data_dir / "cofferdam.sqlite3"
    with closing(sqlite3.connect(path, timeout=60)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def revoke(site: Site, key: str) -> None:
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
    key_hash = hashlib.sha256(key.encode()).hexdigest()
    write(site, "UPDATE executions_apikey SET revoked_at = ? WHERE key_hash = ?", now, key_hash)


def waiting_execution(site: Site, key: str) -> str:
    """One that is queued, and will be for a day."""
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    body = {"code": "pass", "mode": "async", "run_at": later}
    answer = ask(site.service, "POST", EXECUTIONS, body, key=key)
    assert answer.status == 202, answer.body
    return str(answer.json["id"])


def test_those_who_follow_one_execution_hold_up_nobody_and_are_bounded(
    site: Site, prepared: Prepared
) -> None:
    path = f"{EXECUTIONS}/{waiting_execution(site, site.alice)}/events"
    asking = request("GET", path, key=prepared.reader, Accept=NDJSON)
    with ExitStack() as stack:
        followers = [connect(site.service, asking) for _ in range(FOLLOWERS)]
        for each in followers:
            stack.enter_context(each)
        answers = [read(each) for each in followers]
        refused = [each for each in answers if each.status == 429]
        assert [each.status for each in answers if each not in refused] == [200] * MOST_OF_EXECUTION
        assert len(refused) == FOLLOWERS - MOST_OF_EXECUTION
        assert {each.json["error"]["code"] for each in refused} == {"SB008"}
        assert all(int(each.headers["retry-after"]) > 0 for each in refused)
        site.assert_serves_others()
        # An administrator looks at the same execution, and a stranger at one of his own.
        of_admin = request("GET", path, Cookie=f"sessionid={prepared.sign_in}")
        own = f"{EXECUTIONS}/{waiting_execution(site, site.charlie)}/events"
        for sent in (of_admin, request("GET", own, key=site.charlie)):
            with connect(site.service, sent) as other:
                assert read(other).status == 200
    wait_until(lambda: status_of(site, asking) == 200, 60)


def status_of(site: Site, sent: bytes) -> int:
    with connect(site.service, sent) as connection:
        return read(connection).status


# What each kind of stream is begun with: the request, and what it has to say before the key goes.
Begun = tuple[str, str, Any, dict[str, str]]


def session_of(site: Site, key: str) -> str:
    answer = ask(site.service, "POST", "/api/v1/sessions", {}, key=key)
    assert answer.status == 201, answer.body
    return str(answer.json["id"])


def a_run(site: Site, key: str) -> Begun:
    return "POST", EXECUTIONS, sleeper(GOES_ON_SECONDS), {"Accept": NDJSON}


def events(site: Site, key: str) -> Begun:
    return "GET", f"{EXECUTIONS}/{waiting_execution(site, key)}/events", None, {"Accept": NDJSON}


def a_cell(site: Site, key: str) -> Begun:
    path = f"/api/v1/sessions/{session_of(site, key)}/executions"
    return "POST", path, sleeper(GOES_ON_SECONDS), {"Accept": NDJSON}


def a_process(site: Site, key: str) -> Begun:
    path = f"/api/v1/sessions/{session_of(site, key)}/processes"
    body = {"shell": f"sleep {GOES_ON_SECONDS}", "background": True}
    answer = ask(site.service, "POST", path, body, key=key)
    assert answer.status == 201, answer.body
    return "GET", f"{path}/{answer.json['pid']}/events", None, {"Accept": NDJSON}


def files(site: Site, key: str) -> Begun:
    return "GET", f"/api/v1/sessions/{session_of(site, key)}/files/events", None, {}


def _sandbox_of(site: Site, key: str) -> dict[str, str]:
    answer = ask(site.service, "POST", "/sandboxes", {"templateID": "base"}, key=key)
    assert answer.status == 201, answer.body
    return {
        "E2b_Sandbox_Id": answer.json["sandboxID"],
        "X_Access_Token": answer.json["envdAccessToken"],
    }


def a_command_of_e2b(site: Site, key: str) -> Begun:
    command = {"cmd": "/bin/bash", "args": ["-l", "-c", f"sleep {GOES_ON_SECONDS}"]}
    body = envelope({"process": command})
    return "POST", "/process.Process/Start", body, _sandbox_of(site, key)


def files_of_e2b(site: Site, key: str) -> Begun:
    body = envelope({"path": "/home/user"})
    return "POST", "/filesystem.Filesystem/WatchDir", body, _sandbox_of(site, key)


def a_cell_of_e2b(site: Site, key: str) -> Begun:
    code = f"import time; time.sleep({GOES_ON_SECONDS})"
    return "POST", "/execute", {"code": code}, _sandbox_of(site, key)


def a_tool_of_mcp(site: Site, key: str) -> Begun:
    arguments = {"code": f"import time; time.sleep({GOES_ON_SECONDS})", "timeout": 250}
    body = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": "run_code", "arguments": arguments},
    }
    return "POST", "/mcp", body, {"Accept": ACCEPT, "MCP_Protocol_Version": "2025-06-18"}


RUNS = (a_run, a_cell, a_cell_of_e2b, a_tool_of_mcp)
KINDS: list[Callable[[Site, str], Begun]] = [
    *RUNS,
    events,
    a_process,
    files,
    a_command_of_e2b,
    files_of_e2b,
]


@pytest.fixture(autouse=True)
def _nothing_left(site: Site) -> Iterator[None]:
    """The processes of a test end with their sessions."""
    before = sessions_of(site)
    yield
    for each in sessions_of(site) - before:
        answer = ask(site.service, "DELETE", f"/api/v1/sessions/{each}", key=site.alice)
        assert answer.status == 204, answer.body


def sessions_of(site: Site) -> set[str]:
    answer = ask(site.service, "GET", "/api/v1/sessions?state=open", key=site.alice)
    return {each["id"] for each in answer.json["results"]}


@contextmanager
def begun(
    site: Site, key: str, sent: Begun, cookie: str = ""
) -> Iterator[http.client.HTTPConnection]:
    """A connection with the request on its way."""
    method, path, body, headers = sent
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    kind = "application/connect+json" if isinstance(body, bytes) else "application/json"
    wanted = {name.replace("_", "-"): value for name, value in headers.items()}
    wanted["Content-Type"] = kind
    if "X-Access-Token" not in wanted and key:
        wanted["X-API-Key"] = key
    if cookie:
        wanted["Cookie"] = cookie
    connection = http.client.HTTPConnection("127.0.0.1", site.service.port, timeout=ENDS_SECONDS)
    with closing(connection):
        connection.request(method, path, content, wanted)
        yield connection


def answered(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return answer


def rest_of(answer: http.client.HTTPResponse) -> bytes:
    """What still came, of an answer that may break off."""
    found = b""
    with contextlib.suppress(http.client.IncompleteRead, ConnectionError):
        while piece := answer.read1(65536):
            found += piece
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_revoked_hears_no_more(
    site: Site, prepared: Prepared, kind: Callable[[Site, str], Begun]
) -> None:
    key = prepared.keys[KINDS.index(kind)]
    # A colleague's stream beside it goes on.
    own = f"{EXECUTIONS}/{waiting_execution(site, site.alice)}/events"
    with begun(site, site.alice, ("GET", own, None, {})) as others:
        kept = answered(others)
        with begun(site, key, kind(site, key)) as connection:
            if kind in RUNS:
                site.wait_for_running(1)
            # The head of an answer over MCP comes with the first thing that is told: here with 401.
            answer = None if kind is a_tool_of_mcp else answered(connection)
            revoke(site, key)
            found = rest_of(answer or connection.getresponse())
        # Nothing has come of it, and it has not ended.
        others.sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            kept.read1(1)
    assert b"unauthenticated" in found, found
    if kind in RUNS:
        # As if its client had left.
        site.wait_for_running(0)
    site.assert_serves_others()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM auth_user_user_permissions WHERE user_id ="
        " (SELECT id FROM auth_user WHERE username = 'follower')",
        "DELETE FROM django_session WHERE session_key = ?",
    ],
    ids=["permission", "signed out"],
)
def test_a_person_who_is_signed_out_or_may_not_look_any_more_hears_no_more(
    site: Site, prepared: Prepared, statement: str
) -> None:
    path = f"{EXECUTIONS}/{waiting_execution(site, site.alice)}/events"
    cookie = f"sessionid={prepared.sign_in}"
    if "django_session" in statement:
        write(
            site,
            "INSERT INTO auth_user_user_permissions (user_id, permission_id) SELECT u.id, p.id FROM"
            " auth_user u, auth_permission p"
            " WHERE u.username = 'follower' AND p.codename = 'view_execution'",
        )
    with begun(site, "", ("GET", path, None, {}), cookie) as connection:
        answer = answered(connection)
        write(site, statement, *([prepared.sign_in] if "?" in statement else []))
        assert b"unauthenticated" in rest_of(answer)


def test_a_detached_run_goes_on_without_the_key_that_followed_it(
    site: Site, prepared: Prepared
) -> None:
    key = prepared.keys[-1]
    method, _, body, headers = a_run(site, key)
    with begun(site, key, (method, f"{EXECUTIONS}?detach=1", body, headers)) as connection:
        answer = answered(connection)
        execution_id = json.loads(answer.readline())["id"]
        revoke(site, key)
        assert b"unauthenticated" in rest_of(answer)
    path = f"{EXECUTIONS}/{execution_id}"
    assert ask(site.service, "GET", path, key=site.alice).json["status"] == "running"
    assert ask(site.service, "POST", f"{path}/cancel", {}, key=site.alice).status == 200
