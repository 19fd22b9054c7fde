"""A stranger who says she comes from elsewhere, to the real service behind a trusted proxy."""

from __future__ import annotations

import http.client
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest

from tests.conftest import require
from tests.support.processes import ROOT, Service, clean_environment, free_port, started, web_server
from tests.support.site import bootstrapped, credentials

ADMIN, STRANGER = "203.0.113.9", "198.51.100.7"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, Path]]:
    require("bwrap")
    data_dir = tmp_path_factory.mktemp("addresses") / "data"
    extra = {"PORT": str(free_port()), "TRUSTED_PROXIES": "127.0.0.1"}
    environment = clean_environment(data_dir, **extra)
    bootstrapped(data_dir)
    # The web server alone: nothing here is queued, and the provider is `local`.
    command = web_server(extra["PORT"])
    with started(command, environment, ROOT, data_dir / "log") as running:
        running.wait_until_ready()
        yield running, data_dir


def send(
    service: Service, method: str, path: str, body: bytes, headers: list[tuple[str, str]]
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """What a trusted proxy sends on: every header line as it is given."""
    with closing(http.client.HTTPConnection(urlsplit(service.url).netloc, timeout=60)) as sender:
        sender.putrequest(method, path)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            sender.putheader(name, value)
        sender.endheaders(body)
        answer = sender.getresponse()
        return answer.status, answer.headers, answer.read()


def sign_in(service: Service, password: str, forwarded: list[tuple[str, str]]) -> int:
    _, headers, page = send(service, "GET", "/admin/login/", b"", forwarded)
    cookie = str(headers["Set-Cookie"]).partition(";")[0]
    token = re.search(rb'name="csrfmiddlewaretoken" value="([^"]+)"', page)
    assert token is not None
    form = {"username": "admin", "password": password, "csrfmiddlewaretoken": token[1].decode()}
    sent = [("Cookie", cookie), ("Content-Type", "application/x-www-form-urlencoded")]
    return send(service, "POST", "/admin/login/", urlencode(form).encode(), [*sent, *forwarded])[0]


def test_she_locks_nobody_out_and_is_locked_out_herself(service: tuple[Service, Path]) -> None:
    running, data_dir = service
    password = credentials(data_dir)["ADMIN_PASSWORD"]
    # She sent the administrator's address herself; the proxy has added hers, in the same line or
    # in one of its own.
    forged = [
        [("X-Forwarded-For", f"{ADMIN}, {STRANGER}")],
        [("X-Forwarded-For", ADMIN), ("X-Forwarded-For", STRANGER)],
        [("X-Forwarded-For", f"{ADMIN},,{STRANGER}:4711")],
    ]
    for number in range(5):
        sign_in(running, "wrong", forged[number % len(forged)])
    assert sign_in(running, password, forged[0]) == 429
    assert sign_in(running, password, [("X-Forwarded-For", STRANGER)]) == 429
    assert sign_in(running, password, [("X-Forwarded-For", ADMIN)]) == 302


def test_the_record_has_her_own_address(service: tuple[Service, Path]) -> None:
    running, data_dir = service
    body = json.dumps({"code": "pass"}).encode()
    headers = [
        ("X-API-Key", credentials(data_dir)["API_KEY"]),
        ("Content-Type", "application/json"),
        ("X-Forwarded-For", f"{ADMIN}, {STRANGER}"),
        ("X_Forwarded_For", ADMIN),
        ("X-Real-IP", ADMIN),
        ("Forwarded", f"for={ADMIN}"),
    ]
    status, _, answer = send(running, "POST", "/api/v1/executions", body, headers)
    assert status == 200, answer
    with closing(sqlite3.connect(data_dir / "cofferdam.sqlite3")) as database:
        rows = database.execute("SELECT client_address FROM executions_execution").fetchall()
    assert rows == [(STRANGER,)]
