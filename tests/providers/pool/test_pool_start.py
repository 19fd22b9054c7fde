"""Who starts the pool service, and when it becomes what runs the code."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import docker
import pytest
from django.core.management import call_command

from providers.models import ProviderConfig
from providers.runtime.service.docker_check import Docker, find_docker
from providers.services import activate, save_config
from sandbox_site.bootstrap import ensure_provider
from tests.support.processes import (
    NO_DOCKER,
    ROOT,
    STOP_SECONDS,
    clean_environment,
    free_port,
    started,
)


class Engine:
    """Answers as a Docker engine does when asked for an image, which it has or has not."""

    def __init__(self, folder: Path) -> None:
        self.has_images = False
        self.url = f"unix://{folder}/engine"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{folder}/engine")
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                request = connection.recv(65536).decode()
                missing = "/images/" in request and not self.has_images
                body = json.dumps(
                    {"message": "No such image", "ApiVersion": "1.41", "Id": "sha256:1"}
                )
                connection.sendall(
                    f"HTTP/1.1 {'404 Not Found' if missing else '200 OK'}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
                    f"Connection: close\r\n\r\n{body}".encode()
                )

    def stop(self) -> None:
        self._listener.close()
        Path(self.url.removeprefix("unix://")).unlink()


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    engine = Engine(tmp_path)
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    yield engine
    if Path(engine.url.removeprefix("unix://")).exists():
        engine.stop()


def active() -> str:
    return ProviderConfig.objects.get(is_active=True).provider_id


def test_no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("providers.runtime.service.docker_check.ANSWER_SECONDS", 0.3)
    monkeypatch.setenv("DOCKER_HOST", NO_DOCKER)
    assert find_docker() is Docker.ABSENT
    silent = socket.socket(socket.AF_UNIX)
    silent.bind(f"{tmp_path}/silent")
    silent.listen()
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/silent")
    assert find_docker() is Docker.ABSENT
    silent.close()


def test_an_engine_with_and_without_images(stand_in: Engine) -> None:
    assert find_docker() is Docker.WITHOUT_IMAGES
    stand_in.has_images = True
    assert find_docker() is Docker.READY


@pytest.mark.django_db
def test_containers_run_the_code_once_their_images_are_there(
    stand_in: Engine, settings: Any
) -> None:
    settings.POOL_PORT, settings.POOL_SIZE, settings.POOL_TOKEN = 19999, 3, "ours"
    advice = ensure_provider()
    assert "manage.py build_images" in advice
    assert active() == "local"

    stand_in.has_images = True
    assert "at the provider self_managed" in ensure_provider()
    assert active() == "self_managed"
    config = ProviderConfig.objects.get(is_active=True).config
    assert config["endpoint"] == "http://127.0.0.1:19999"
    assert (config["pool_size"], config["token"]) == (3, "ours")

    stand_in.stop()
    assert "at the provider local" in ensure_provider()
    assert active() == "local"


@pytest.mark.django_db
@pytest.mark.parametrize("provider_id", ["local", "self_managed"])
def test_what_an_admin_has_chosen_stays(stand_in: Engine, provider_id: str) -> None:
    stand_in.has_images = provider_id == "local"
    ensure_provider()
    save_config(provider_id, {})
    activate(provider_id)
    for _ in range(2):
        ensure_provider()
        assert active() == provider_id


@pytest.mark.django_db
def test_a_configuration_that_an_admin_has_changed_stays(stand_in: Engine) -> None:
    ensure_provider()
    save_config("local", {"pool_size": 7})
    stand_in.has_images = True
    ensure_provider()
    assert active() == "local"


@pytest.mark.django_db
def test_the_missing_images_are_told_with_the_one_command(stand_in: Engine) -> None:
    told = StringIO()
    call_command("bootstrap", stdout=told)
    assert "python manage.py build_images" in told.getvalue()


def test_up_starts_the_pool_and_ends_it(engine: docker.DockerClient, tmp_path: Path) -> None:
    pool_port = free_port()
    environment = clean_environment(
        tmp_path / "data",
        PORT=str(free_port()),
        POOL_PORT=str(pool_port),
        DOCKER_HOST=os.environ["DOCKER_HOST"],
        SANDBOX_EXECUTOR_MANAGER_POOL_SIZE="1",
    )
    manage = [sys.executable, "manage.py"]
    subprocess.run([*manage, "bootstrap"], env=environment, cwd=ROOT, check=True)
    key = dict(
        line.split("=", 1) for line in (tmp_path / "data/credentials.txt").read_text().splitlines()
    )["API_KEY"]
    with started([*manage, "up"], environment, ROOT, tmp_path / "log") as service:
        service.wait_until_ready()
        request = urllib.request.Request(
            f"{service.url}/api/v1/executions",
            json.dumps({"code": "print('in a container')"}).encode(),
            {"Content-Type": "application/json", "X-API-Key": key},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            body = json.load(answer)
        assert (body["status"], body["provider"]) == ("succeeded", "self_managed")
        assert body["stdout"] == "in a container\n"
        assert body["runtime"] in ("gvisor", "runc")
        service.look()
        service.process.send_signal(signal.SIGTERM)
        code, seconds = service.wait_for_end()
        assert (code, seconds < STOP_SECONDS) == (0, True), service.output
        assert service.survivors() == []
    left = engine.containers.list(
        all=True, filters={"label": f"cofferdam.pool=port-{pool_port}"}, ignore_removed=True
    )
    assert left == []
