"""Runs code in Shed, a service that is made up: put your own SDK in the place of its client."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import httpx

from providers.base import ARGUMENTS, FILES
from providers.errors import (
    ConnectionFailed,
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.isolation import NONE
from providers.remote import receiver, service
from providers.remote.base import RemoteProvider
from providers.remote.bounded import BoundedClient
from providers.remote.checked_httpx import CheckedTransport
from providers.remote.receiver import Receiver
from providers.remote.secret import Secret, scrub
from providers.remote.service import AccountClient, Cell, CreateRequest, SandboxDriver
from providers.schema import ConfigField

ADDRESS_VARIABLE = "SHED_URL"


class ShedProvider(RemoteProvider):
    id = "shed"
    name = "Shed"
    description = "A template for a provider of your own."
    isolation = NONE  # What your service has: see providers/isolation.py.
    runtime = "process"
    capabilities = frozenset({ARGUMENTS, FILES})
    languages = ("python",)
    packages = "httpx"
    config_fields = {
        "token": ConfigField("string", "Token", required=True, secret=True),
        "address": ConfigField(
            "string", "Address", required=True, address=True, environment=(ADDRESS_VARIABLE,)
        ),
        "timeout": ConfigField("integer", "Longest run (seconds)", default=30, min=1, max=300),
        **receiver.FIELDS,
    }

    def connect(self, config: Mapping[str, Any]) -> AccountClient:
        trusted = (os.environ.get(ADDRESS_VARIABLE, ""),)
        return Shed(Secret(config["token"]), config["address"], Receiver.of(config, trusted))


class Shed(AccountClient):
    """One account of it."""

    label = "Shed"

    def __init__(self, token: Secret, address: str, receiver: Receiver) -> None:
        self.place = address
        self._token = token
        # It checks whom it connects to, and bounds what it is answered.
        self._client = BoundedClient(transport=CheckedTransport(receiver), base_url=address)

    def create(self, wanted: CreateRequest) -> SandboxDriver:
        asked = {"name": wanted.name, "seconds": wanted.seconds}
        return ShedMachine(self, self.request("POST", "/machines", json=asked).json()["id"])

    def end(self, ref: str) -> bool:
        try:
            self.request("DELETE", f"/machines/{ref}")
        except httpx.HTTPStatusError as error:
            if error.response.status_code == 404:
                return False
            raise
        return True

    def listed(self) -> Iterator[tuple[str, str]]:
        for machine in self.request("GET", "/machines").json():
            yield machine["id"], machine["name"]

    def check(self) -> None:
        self.request("GET", "/machines")

    def translate(self, error: Exception, *, creating: bool) -> SandboxError:
        said = scrub(str(error), [self._token])
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        told: SandboxError
        if status in (401, 403):
            told = ConnectionFailed(f"Shed refuses the token. {said}")
        elif status == 429:
            told = RateLimited(f"Shed's rate limit is reached. {said}")
        elif status == 404 or status == 503:
            told = ProviderUnavailable(f"The sandbox is gone, or Shed is busy. {said}")
        elif status and creating:
            told = CreationFailed(f"Shed could not create a sandbox. {said}")
        elif status:
            told = ProviderUnavailable(f"Shed failed. {said}")
        else:
            told = ConnectionFailed(f"Shed cannot be reached, or its answer is none. {said}")
        told.answered = "status" if status else ""
        return told

    def request(self, method: str, path: str, seconds: float = 0, **options: Any) -> httpx.Response:
        """An answer that says that it went well. Raises what httpx raises."""
        response = self._client.request(
            method,
            path,
            headers={"Authorization": f"Bearer {self._token.reveal()}"},
            timeout=seconds or service.REQUEST_SECONDS,
            **options,
        )
        return response.raise_for_status()


class ShedMachine(SandboxDriver):
    """One sandbox of it."""

    def __init__(self, shed: Shed, ref: str) -> None:
        self._shed = shed
        self.ref = ref

    def run(self, cell: Cell) -> int:
        answer = self._shed.request(
            "POST", f"/machines/{self.ref}/run", cell.seconds + 5, json={"code": cell.text}
        ).json()
        cell.output.stdout(answer["stdout"])
        cell.output.stderr(answer["stderr"])
        return int(answer["exit_code"])

    def write(self, path: str, content: bytes) -> None:
        self._shed.request("PUT", f"/machines/{self.ref}/files/{path}", content=content)
