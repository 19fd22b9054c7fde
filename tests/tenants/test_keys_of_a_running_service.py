"""Rotating FERNET_KEYS while the service runs: nothing it keeps goes blank or is replaced."""

from __future__ import annotations

import json
import secrets
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from providers import key_ring
from providers.aes_gcm import NotOpened
from providers.key_file import KeyFile
from sandbox_site import keys
from tests.support.processes import ROOT, Service, clean_environment, free_port, started, web_server
from tests.support.site import bootstrapped, kept_folder

TOKEN = "tok-that-is-stored"
CONFIG = {"endpoint": "http://127.0.0.1:9385", "token": TOKEN, "pool_size": 3}
# As the form sends it back: nobody has touched the secret.
UNTOUCHED = {"endpoint": "http://127.0.0.1:9385", "pool_size": 4}
READ = (
    "import django, json; django.setup()\n"
    "from providers.models import ProviderConfig\n"
    "print(json.dumps(ProviderConfig.objects.get(provider_id='self_managed').config))\n"
)


def new_key() -> str:
    return secrets.token_urlsafe(32)


def _prepare(folder: Path) -> None:
    bootstrapped(folder / "data")
    made = subprocess.run(
        [sys.executable, "manage.py", "create_api_key", "demo", "--name", "t", "--scope", "admin"],
        env=clean_environment(folder / "data"),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    (folder / "key").write_text(made.stdout.strip())


class Installation:
    """A data directory, and the commands on it as an operator calls them."""

    def __init__(self, folder: Path) -> None:
        self.data_dir = folder / "data"
        self.environment = clean_environment(self.data_dir, PORT=str(free_port()))
        made = kept_folder("operators-key", _prepare, Path(__file__))
        shutil.copytree(made / "data", self.data_dir)
        key = (made / "key").read_text()
        self.headers = {"X-API-Key": key, "Content-Type": "application/json"}

    def run(self, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment | environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )

    def manage(self, *arguments: str, **environment: str) -> str:
        done = self.run("manage.py", *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def stored(self, **environment: str) -> Any:
        done = self.run("-c", READ, DJANGO_SETTINGS_MODULE="sandbox_site.settings", **environment)
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    @contextmanager
    def serving(self, log: Path, **environment: str) -> Iterator[Service]:
        command = web_server(self.environment["PORT"])
        with started(command, self.environment | environment, ROOT, log) as service:
            service.wait_until_ready()
            yield service

    def ask(self, service: Service, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        request = urllib.request.Request(
            service.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers=self.headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def save(self, service: Service, config: dict[str, Any]) -> tuple[int, Any]:
        body = {"provider_type": "self_managed", "config": config, "set_active": False}
        return self.ask(service, "POST", "/api/admin/sandbox/config", body)

    def shown(self, service: Service) -> Any:
        status, body = self.ask(service, "GET", "/api/admin/sandbox/config")
        assert status == 200
        return body["data"]


@pytest.fixture
def installation(tmp_path: Path) -> Installation:
    return Installation(tmp_path)


def test_keys_in_the_data_directory_are_taken_up_while_the_service_runs(
    installation: Installation, tmp_path: Path
) -> None:
    path = installation.data_dir / keys.FILE_NAME
    old = keys.read(installation.data_dir)["FERNET_KEYS"]
    new = new_key()
    with installation.serving(tmp_path / "log") as service:
        assert installation.save(service, CONFIG)[0] == 200

        path.write_text(path.read_text().replace(old, f"{new},{old}"))
        installation.manage("rotate_keys")

        assert "unreadable" not in installation.shown(service)
        assert installation.shown(service)["self_managed"]["pool_size"] == 3
        assert installation.save(service, UNTOUCHED)[0] == 200
        stored = installation.stored()
        assert stored == CONFIG | stored | {"token": TOKEN, "pool_size": 4}
        # What it writes from now on is under the new key: the old one can go.
        left = json.loads(installation.manage("rotate_keys", "--dry-run", "--json"))["columns"]
        assert sum(entry["rotated"] for entry in left) == 0
        path.write_text(path.read_text().replace(f"{new},{old}", new))
        assert installation.stored()["token"] == TOKEN
        assert installation.shown(service)["self_managed"]["pool_size"] == 4


def test_a_service_with_its_keys_in_the_environment_says_that_it_must_be_restarted(
    installation: Installation, tmp_path: Path
) -> None:
    old, new = keys.read(installation.data_dir)["FERNET_KEYS"], new_key()
    before, after = {"FERNET_KEYS": old}, {"FERNET_KEYS": f"{new},{old}"}
    with installation.serving(tmp_path / "first", **before) as service:
        assert installation.save(service, CONFIG)[0] == 200
        installation.manage("rotate_keys", **after)

        shown = installation.shown(service)
        assert shown["self_managed"] == {}
        assert "restart it" in shown["unreadable"]["self_managed"]
        complete = UNTOUCHED | {"token": "tok-another"}
        for config in (UNTOUCHED, complete):
            status, body = installation.save(service, config)
            assert status == 400
            assert "restart it" in body["details"]["config"]
        body = {"provider_type": "self_managed"}
        _, trial = installation.ask(service, "POST", "/api/admin/sandbox/test", body)
        assert not trial["success"]
        assert "restart it" in trial["message"]
    assert installation.stored(**after)["token"] == TOKEN
    with installation.serving(tmp_path / "second", **after) as service:
        assert "unreadable" not in installation.shown(service)
        assert installation.save(service, UNTOUCHED)[0] == 200
    assert installation.stored(FERNET_KEYS=new)["token"] == TOKEN


@pytest.fixture
def ring(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of keys, and a process that has read it. Its clock stands still."""
    path = tmp_path / "keys"
    path.write_text("first")
    settings.FERNET_KEYS, settings.FERNET_KEYS_FILE = ["first"], KeyFile(path)
    now = [100.0]
    monkeypatch.setattr(key_ring.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(key_ring, "SETTLED_SECONDS", 0.0)
    yield path
    key_ring._ring_of.cache_clear()


def read_keys() -> tuple[Any, ...]:
    """As after a while: it takes two looks to see that nobody is writing."""
    key_ring.fernet_keys()
    return key_ring.fernet_keys()


def test_a_key_that_was_taken_up_stays_good_for_reading(ring: Path) -> None:
    ring.write_text("second,first")
    assert read_keys() == ("second", "first")
    ring.write_text("third")
    assert read_keys() == ("third", "second", "first")


@pytest.mark.parametrize("left", ["", None])
def test_a_file_without_keys_changes_nothing(ring: Path, left: str | None) -> None:
    ring.write_text(left) if left is not None else ring.unlink()
    assert read_keys() == ("first",)


def test_a_file_that_may_still_be_written_encrypts_nothing(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_keys() == ("first",)
    monkeypatch.setattr(key_ring, "SETTLED_SECONDS", 1.0)
    ring.write_text("sec")
    assert read_keys() == ("first",)
    ring.write_text("second,first")
    assert read_keys() == ("first",)


def test_what_the_new_key_has_sealed_is_read_at_once(
    ring: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_keys() == ("first",)
    monkeypatch.setattr(key_ring, "SETTLED_SECONDS", 1.0)
    ring.write_text("second,first")

    def open_with(found: tuple[Any, ...]) -> str:
        if "second" not in found:
            raise NotOpened
        return "opened"

    assert key_ring.opened(open_with) == "opened"
    assert key_ring.fernet_keys() == ("second", "first")
    with pytest.raises(NotOpened):
        key_ring.opened(lambda found: open_with(tuple(key for key in found if key == "first")))
