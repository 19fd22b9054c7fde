"""Somebody who may configure providers wants the key that another administrator has entered.

He has a listening socket, which whoever runs the server would even let providers connect to, and
tries every way to have the stored key sent there. Over the real web server and its commands.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from providers.services.trial import AT_ONCE
from tests.support.listener import Listener
from tests.support.processes import ROOT, Service, clean_environment, free_port, started, web_server
from tests.support.site import bootstrapped, credentials, kept_folder

KEY = "e2b_the-stored-key-0123456789"
ENVIRONMENT_KEY = "acs-the-environments-key-0123456789"
PASSWORD = "correct horse battery"

NO_CONTENT = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
NOT_REACHABLE = "Not reachable. The server's log has the reason."


class Deployment:
    """A real server with its data directory, an administrator's key and two signed-in ones."""

    def __init__(self, service: Service, data_dir: Path, environment: dict[str, str]) -> None:
        self.service, self.data_dir, self.environment = service, data_dir, environment
        self.credentials = credentials(data_dir)
        self.key = (data_dir.parent / "ops-key").read_text()

    def manage(self, *arguments: str) -> str:
        return manage(self.environment, *arguments)

    def by_key(self) -> httpx.Client:
        return httpx.Client(
            base_url=self.service.url, headers={"X-API-Key": self.key}, timeout=60, trust_env=False
        )

    def signed_in(self, name: str, password: str) -> httpx.Client:
        client = httpx.Client(base_url=self.service.url, timeout=60, trust_env=False)
        client.get("/admin/login/?next=/admin/")
        form = {"username": name, "password": password, "next": "/admin/"}
        answer = client.post(
            "/admin/login/?next=/admin/",
            data={**form, "csrfmiddlewaretoken": client.cookies["csrftoken"]},
        )
        assert answer.status_code == 302, answer.text
        client.headers["X-CSRFToken"] = client.cookies["csrftoken"]
        return client

    def entries(self, kind: str) -> list[dict[str, Any]]:
        with contextlib.closing(sqlite3.connect(self.data_dir / "cofferdam.sqlite3")) as database:
            found = database.execute(
                "SELECT statement FROM executions_ledgerentry WHERE kind = ? ORDER BY sequence",
                [kind],
            )
            return [json.loads(statement) for (statement,) in found]


def manage(environment: dict[str, str], *arguments: str) -> str:
    ran = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout.strip()


def prepare(folder: Path) -> None:
    """An installation with a second administrator, and an operator's key."""
    bootstrapped(folder / "data")
    environment = clean_environment(folder / "data")
    second = environment | {"DJANGO_SUPERUSER_PASSWORD": PASSWORD}
    manage(second, "createsuperuser", "--noinput", "--username", "second", "--email", "")
    key = manage(environment, "create_api_key", "demo", "--name", "ops", "--scope", "admin")
    (folder / "ops-key").write_text(key)


@contextlib.contextmanager
def deployed(folder: Path, **extra: str) -> Iterator[Deployment]:
    made = kept_folder("attacked-secrets", prepare, Path(__file__))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    data_dir = folder / "data"
    # The worst that whoever runs the server may have set.
    settings = {"PROVIDER_ALLOWED_NETWORKS": "127.0.0.0/8", **extra}
    ports = {"PORT": str(free_port()), "POOL_PORT": str(free_port())}
    environment = clean_environment(data_dir, **ports, **settings)
    command = web_server(ports["PORT"], "tests.attacks.stepless:application")
    with started(command, environment, ROOT, folder / "log") as service:
        service.wait_until_ready()
        yield Deployment(service, data_dir, environment)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Listener]:
    """What the server's environment names as the proxy of all schemes, in every test."""
    with Listener(answer=NO_CONTENT) as listener:
        yield listener


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory, proxy: Listener) -> Iterator[Deployment]:
    proxies = {
        name: proxy.url
        for upper in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
        for name in (upper, upper.lower())
    }
    with deployed(
        tmp_path_factory.mktemp("attacked"),
        AGENTRUN_ACCESS_KEY_ID=ENVIRONMENT_KEY,
        AGENTRUN_ACCESS_KEY_SECRET=ENVIRONMENT_KEY[::-1],
        AGENTRUN_ACCOUNT_ID="1234567890123456",
        **proxies,
    ) as running:
        yield running


@pytest.fixture
def honest() -> Iterator[Listener]:
    """Where the key belongs. It answers like no service, which is all the same here."""
    with Listener(answer=b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as listener:
        yield listener


@pytest.fixture
def attacker() -> Iterator[Listener]:
    with Listener(answer=NO_CONTENT) as listener:
        yield listener


def e2b(url: str, **more: Any) -> dict[str, Any]:
    return {"api_url": url, "sandbox_url": url, **more}


def pool(url: str, **more: Any) -> dict[str, Any]:
    return {"endpoint": url, "max_retries": 0, **more}


MASKED = "••••" + KEY[-4:]
IMPORT = """
from django.core.management import CommandError, call_command
for file in {files}:
    try:
        call_command("import_settings", file)
    except CommandError as error:
        print("refused:", *str(error).splitlines())
    else:
        print("imported", file)
"""
# The provider, its addresses, its secret; and how a secret may come back that was not entered.
PROVIDERS = [("e2b", e2b, "api_key"), ("self_managed", pool, "token")]
UNTOUCHED = [MASKED, "", None]


def save(client: httpx.Client, provider: str, config: dict[str, Any], **more: Any) -> Any:
    body = {"provider_type": provider, "config": config, "set_active": False, **more}
    return client.post("/api/admin/sandbox/config", json=body)


def trial_of(client: httpx.Client, provider: str, config: dict[str, Any] | None = None) -> Any:
    body: dict[str, Any] = {"provider_type": provider}
    answer = client.post(
        "/api/admin/sandbox/test", json=body if config is None else body | {"config": config}
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("provider", "at", "secret"), PROVIDERS)
def test_neither_a_try_nor_a_change_sends_the_stored_key_to_another_address(
    deployment: Deployment,
    honest: Listener,
    attacker: Listener,
    provider: str,
    at: Any,
    secret: str,
) -> None:
    with deployment.by_key() as client:
        assert save(client, provider, at(honest.url, **{secret: KEY})).status_code == 200
        for untouched in UNTOUCHED:
            stolen = at(attacker.url, **({} if untouched is None else {secret: untouched}))
            tried = trial_of(client, provider, stolen)
            assert (tried["success"], set(tried["errors"])) == (False, {secret}), tried
            assert tried["errors"][secret].startswith("Enter it again")
            for more in ({}, {"test_connection": True}):
                refused = save(client, provider, stolen, **more)
                assert refused.status_code == 400
                assert set(refused.json()["details"]) == {secret}
        trial_of(client, provider)
        stored = client.get("/api/admin/sandbox/config").json()["data"][provider]
        assert honest.url in stored.values()
    honest.settle()
    assert KEY.encode() in honest.received
    assert (attacker.connections, attacker.received) == (0, b"")


def test_a_try_by_a_key_is_in_the_ledger_with_its_addresses_before_it_connects(
    deployment: Deployment, attacker: Listener
) -> None:
    with deployment.by_key() as client:
        trial_of(client, "self_managed", pool(attacker.url, token="his own token"))
    attacker.settle()
    assert attacker.connections
    entry = deployment.entries("trial")[-1]
    assert entry["actor"].startswith("key:")
    assert (entry["subject"], entry["addresses"]) == ("self_managed", {"endpoint": attacker.url})
    assert "his own token" not in json.dumps(entry)


def test_the_form_sends_it_nowhere_else_either(
    deployment: Deployment, honest: Listener, attacker: Listener
) -> None:
    with deployment.by_key() as client:
        assert save(client, "e2b", e2b(honest.url, api_key=KEY)).status_code == 200
    with contextlib.closing(deployment.signed_in("second", PASSWORD)) as admin:
        page = admin.get("/admin/providers/providerconfig/add/?provider=e2b", follow_redirects=True)
        version = re.search(r'name="_version" value="(\d+)"', page.text)
        assert version
        form = {"_version": version[1], "region": "us", "timeout": "30", "template": ""}
        for path in ("validate/", "test/"):
            answer = admin.post(
                f"/admin/providers/providerconfig/live/e2b/{path}", data=form | e2b(attacker.url)
            )
            assert "api_key" in answer.json()["errors"], answer.text
        saved = admin.post(str(page.url), data=form | e2b(attacker.url))
        assert "Enter it again" in saved.text
    assert (attacker.connections, attacker.received) == (0, b"")


def test_a_restored_version_brings_its_own_key_and_never_todays(
    deployment: Deployment, honest: Listener, attacker: Listener
) -> None:
    with deployment.by_key() as client:
        save(client, "e2b", e2b(attacker.url, api_key="e2b_his-own-key-0123"))
        save(client, "e2b", e2b(honest.url, api_key=KEY))
    with contextlib.closing(sqlite3.connect(deployment.data_dir / "cofferdam.sqlite3")) as database:
        ((older,),) = database.execute(
            "SELECT id FROM providers_configversion WHERE subject = 'e2b' "
            "ORDER BY version DESC LIMIT 1 OFFSET 1"
        )
    with contextlib.closing(deployment.signed_in("second", PASSWORD)) as admin:
        answer = admin.post(f"/admin/providers/configversion/{older}/restore/", data={"reason": ""})
        assert answer.status_code == 302
        trial_of(admin, "e2b")
    attacker.settle()
    assert b"e2b_his-own-key-0123" in attacker.received
    assert KEY.encode() not in attacker.received


def test_an_imported_file_cannot_move_it(
    deployment: Deployment, honest: Listener, attacker: Listener, tmp_path: Path
) -> None:
    with deployment.by_key() as client:
        save(client, "self_managed", pool(honest.url, token=KEY))
    for number, token in enumerate(UNTOUCHED):
        value = json.dumps(pool(attacker.url) | ({} if token is None else {"token": token}))
        record = {"name": "sandbox.self_managed", "data_type": "json", "value": value}
        file = tmp_path / f"{number}.json"
        file.write_text(json.dumps({"system_settings": [record]}))
    files = sorted(map(str, tmp_path.glob("*.json")))
    told = deployment.manage("shell", "-v", "0", "-c", IMPORT.format(files=files)).splitlines()
    assert len(told) == len(UNTOUCHED)
    assert all(re.match("refused: .*token: Enter it again", line) for line in told), told
    with deployment.by_key() as client:
        trial_of(client, "self_managed")
    assert (attacker.connections, attacker.received) == (0, b"")


def test_a_service_that_redirects_takes_no_key_along(
    deployment: Deployment, attacker: Listener
) -> None:
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(deployment.by_key())
        asked, redirecting = [], []
        for status in (302, 307):
            head = f"HTTP/1.1 {status} Elsewhere\r\nLocation: {attacker.url}/\r\n"
            for provider, at, secret in PROVIDERS:
                answer = f"{head}Content-Length: 0\r\n\r\n".encode()
                redirecting.append(stack.enter_context(Listener(answer=answer)))
                asked.append((provider, at(redirecting[-1].url, **{secret: KEY})))
        # No more are tried at the same time.
        with ThreadPoolExecutor(AT_ONCE) as threads:
            trials = list(threads.map(lambda each: trial_of(client, *each), asked))
        for listener in redirecting:
            listener.settle()
        assert all(KEY.encode() in listener.received for listener in redirecting)
    assert {trial["message"] for trial in trials} == {NOT_REACHABLE}
    assert (attacker.connections, attacker.received) == (0, b"")


def test_a_key_of_the_environment_goes_to_no_address_that_was_entered(
    deployment: Deployment, attacker: Listener
) -> None:
    stolen = {"data_endpoint": attacker.url, "control_endpoint": attacker.url}
    with deployment.by_key() as client:
        trial = trial_of(client, "aliyun_codeinterpreter", stolen)
        assert set(trial["errors"]) == {"access_key_id", "access_key_secret"}
        assert save(client, "aliyun_codeinterpreter", stolen).status_code == 400
    assert (attacker.connections, attacker.received) == (0, b"")


def test_under_the_two_person_rule_none_of_it_works_either(
    honest: Listener, attacker: Listener, tmp_path: Path
) -> None:
    with deployed(tmp_path, TWO_PERSON_RULE="true") as deployment:
        first = deployment.signed_in("admin", deployment.credentials["ADMIN_PASSWORD"])
        second = deployment.signed_in("second", PASSWORD)
        pending = save(first, "e2b", e2b(honest.url, api_key=KEY))
        assert pending.status_code == 202, pending.text
        number = pending.json()["pending"]
        approval = f"/admin/providers/pendingchange/{number}/approve/"
        assert second.post(approval).status_code == 302
        for client in (first, second, deployment.by_key()):
            for untouched in UNTOUCHED:
                stolen = e2b(attacker.url, **({} if untouched is None else {"api_key": untouched}))
                assert set(trial_of(client, "e2b", stolen)["errors"]) == {"api_key"}
                assert save(client, "e2b", stolen).status_code in (400, 403)
        trial_of(second, "e2b")
        honest.settle()
        assert KEY.encode() in honest.received
        assert deployment.entries("trial")[-1]["actor"] == "user:second"
    assert (attacker.connections, attacker.received) == (0, b"")


def test_a_proxy_of_the_environment_gets_nothing(
    deployment: Deployment, honest: Listener, proxy: Listener
) -> None:
    with deployment.by_key() as client:
        for provider, at, secret in PROVIDERS:
            trial_of(client, provider, at(honest.url, **{secret: KEY}))
    honest.settle()
    assert KEY.encode() in honest.received
    assert (proxy.connections, proxy.received) == (0, b"")


def test_a_try_tells_no_port_from_another(deployment: Deployment) -> None:
    """Closed, a service of another kind, one that is silent at first, one that breaks off."""
    with contextlib.ExitStack() as stack:
        reserved = stack.enter_context(socket.socket())
        reserved.bind(("127.0.0.1", 0))
        banner = stack.enter_context(Listener(answer=b"220 mail.internal ESMTP\r\n"))
        web = stack.enter_context(Listener(answer=b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"))
        breaking = stack.enter_context(Listener())
        closed = f"http://127.0.0.1:{reserved.getsockname()[1]}"
        urls = [closed, banner.url, web.url, breaking.url]
        urls += [url.replace("http:", "https:") for url in urls]
        asked = [
            (provider, at(url, **{secret: "his own key"}))
            for provider, at, secret in PROVIDERS
            for url in urls
        ]
        client = stack.enter_context(deployment.by_key())
        with ThreadPoolExecutor(AT_ONCE) as threads:
            answers = list(threads.map(lambda each: trial_of(client, *each), asked))
    assert all(answer == answers[0] for answer in answers), answers
    assert (answers[0]["message"], answers[0]["latency_ms"]) == (NOT_REACHABLE, None)


def test_addresses_of_this_network_are_refused_unless_they_are_allowed(
    attacker: Listener, tmp_path: Path
) -> None:
    with (
        deployed(tmp_path, PROVIDER_ALLOWED_NETWORKS="") as deployment,
        deployment.by_key() as client,
    ):
        for url in (
            attacker.url,
            f"https://localhost:{attacker.port}",
            f"https://[::ffff:127.0.0.1]:{attacker.port}",
            f"https://2130706433:{attacker.port}",
            "https://169.254.169.254",
            "https://[fd00:ec2::254]",
            "https://10.0.0.1",
            "https://100.64.0.1",
            "http://93.184.216.34",
            "file:///etc/passwd",
        ):
            for provider, at, secret in PROVIDERS:
                trial = trial_of(client, provider, at(url, **{secret: "his own key"}))
                assert trial["code"] == "SB002", (url, trial)
    assert attacker.connections == 0
