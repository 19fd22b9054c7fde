"""Servers that have values of credentials: a real OpenBao, and one that answers as it is ordered."""

from __future__ import annotations

import json
import os
import secrets
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.support.processes import free_port
from tests.support.required import missing
from tests.support.waiting import wait_until
from tests.support.wire_server import Answer, Request, WireServer, send_json

BAO = Path("/usr/local/lib/cofferdam-openbao/bao")
TOKEN = "root-0123456789-token"


class OpenBao:
    """A server of a test run's own, over TLS, with the engine KV of version 2 at `secret/`."""

    def __init__(self, folder: Path) -> None:
        self.url = f"https://127.0.0.1:{free_port()}"
        self.ca_file = folder / "vault-ca.pem"
        self.process = subprocess.Popen(
            [
                *(BAO, "server", "-dev", "-dev-no-store-token", f"-dev-root-token-id={TOKEN}"),
                *("-dev-tls", f"-dev-tls-cert-dir={folder}"),
                f"-dev-listen-address={urlsplit(self.url).netloc}",
            ],
            cwd=folder,
            env={"PATH": os.environ["PATH"], "HOME": str(folder)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def wait_until_ready(self) -> None:
        wait_until(self._is_ready, 60)

    def _is_ready(self) -> bool:
        assert self.process.poll() is None, "OpenBao did not start"
        try:
            return bool(self.ask("GET", "secret/config")["data"])
        except (OSError, KeyError):
            return False

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.url}/v1/{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"X-Vault-Token": TOKEN, **headers},
        )
        context = ssl.create_default_context(cafile=str(self.ca_file))
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            found: dict[str, Any] = json.loads(answer.read() or b"{}")
        return found

    def put(self, path: str, mount: str = "secret", **data: Any) -> int:
        """Store another version, and return its number."""
        said = self.ask("POST", f"{mount}/data/{path}", {"data": data})
        return int(said["data"]["version"])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(60)


@pytest.fixture(scope="session")
def openbao(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenBao]:
    if not BAO.exists():
        missing("OpenBao is not installed: .ci/install-openbao")
    server = OpenBao(tmp_path_factory.mktemp("openbao"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@pytest.fixture
def bao(openbao: OpenBao, settings: Any) -> OpenBao:
    """The service has it as VAULT_URL."""
    settings.VAULT_URL = openbao.url
    settings.VAULT_TOKEN = TOKEN
    settings.VAULT_NAMESPACE = ""
    settings.VAULT_CA = openbao.ca_file.read_text()
    settings.VAULT_ALLOWED_NETWORKS = [urlsplit(openbao.url).netloc]
    return openbao


@pytest.fixture
def path() -> str:
    """A secret that no other test has."""
    return f"team/{secrets.token_hex(8)}"


class OrderedVault(WireServer):
    """Answers all requests alike: with `status`, `body` and `headers`, or as a fault says."""

    def __init__(self) -> None:
        super().__init__()
        self.status = 200
        self.body: Any = None
        self.headers: dict[str, str] = {}
        self.tokens: list[str | None] = []

    def has(self, data: Any, **metadata: Any) -> None:
        """Answer as KV does for a version with this data."""
        self.body = {
            "request_id": "5f0e6a0e-6d3f-4b0a-9d7f-1f0a3b2c4d5e",
            "lease_id": "",
            "renewable": False,
            "lease_duration": 0,
            "data": {
                "data": data,
                "metadata": {
                    "created_time": "2026-01-01T00:00:00.000000000Z",
                    "custom_metadata": None,
                    "deletion_time": "",
                    "destroyed": False,
                    "version": 1,
                    **metadata,
                },
            },
            "wrap_info": None,
            "warnings": None,
            "auth": None,
        }

    def operation(self, request: Request) -> str:
        self.tokens.append(request.headers["X-Vault-Token"])
        return f"{request.method} {request.target}"

    def answer(self, operation: str, request: Request, fault: str | None) -> None:
        if fault == "truncated":
            send_json(request, self.status, self.body, truncated=True)
            return
        raise Answer(self.status, self.body, **self.headers)


@contextmanager
def ordered_vault() -> Iterator[OrderedVault]:
    server = OrderedVault()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def ordered(settings: Any) -> Iterator[OrderedVault]:
    """The service has it as VAULT_URL."""
    with ordered_vault() as server:
        settings.VAULT_URL = server.url
        settings.VAULT_TOKEN = TOKEN
        settings.VAULT_NAMESPACE = settings.VAULT_CA = ""
        settings.VAULT_ALLOWED_NETWORKS = [urlsplit(server.url).netloc]
        yield server
