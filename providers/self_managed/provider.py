"""Runs code in the warm containers of a pool service."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

from django.conf import settings

from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    FILES,
    Entrypoint,
    ExecutionResult,
    Health,
    InputFile,
    Limits,
    SandboxInstance,
    SandboxProvider,
)
from providers.errors import (
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
)
from providers.isolation import NAMESPACES, IsolationUnmet, meets, of_runtime
from providers.pool.requests import Job
from providers.pool.service.settings import FIELDS, check_config
from providers.remote import receiver
from providers.schema import ConfigField
from providers.self_managed.client import Handle, PoolClient
from providers.waiting import carried_out

# Where `manage.py pool` listens unless it is told otherwise.
DEFAULT_ENDPOINT = f"http://127.0.0.1:{settings.POOL_PORT}"
LOOK_SECONDS = 0.25


class Backend(Protocol):
    """Where the containers are: a service, or a pool in this process."""

    def push(self) -> dict[str, Any]: ...
    def create(self, template: str, owner: str) -> Handle: ...
    def run(self, handle: Handle, job: Job) -> ExecutionResult: ...
    def destroy(self, handle: Handle) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass
class _Instance:
    """What we know of an instance. Another handle takes its place if it was lost unused."""

    template: str
    owner: str
    handle: Handle
    ended: bool = False


class SelfManagedProvider(SandboxProvider):
    id = "self_managed"
    name = "Self-managed"
    description = "Warm containers of a pool service on your own machines, under gVisor or runc."
    icon = "dns"
    tags = ("self-hosted", "docker", "gvisor")
    capabilities = frozenset({ARGUMENTS, ARTIFACTS, FILES})
    config_fields = {
        "endpoint": ConfigField(
            "string",
            "API endpoint",
            required=True,
            placeholder=DEFAULT_ENDPOINT,
            default=DEFAULT_ENDPOINT,
            max=500,
            address=True,
            description="Where the pool service listens (python manage.py pool).",
        ),
        "token": ConfigField(
            "string",
            "Token",
            secret=True,
            max=500,
            description="The service's POOL_TOKEN. It demands one when others can reach it.",
        ),
        **receiver.FIELDS,
        **FIELDS,
        "max_retries": ConfigField(
            "integer",
            "Most retries",
            default=3,
            min=0,
            max=10,
            description="Only of what provably did not start.",
        ),
        "without_service": ConfigField(
            "string",
            "When no service answers",
            default="fail",
            options=("fail", "in_process"),
            description="fail: refuse with SB003. in_process: keep the containers from within "
            "this process, which then needs access to Docker.",
        ),
    }

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._config: Mapping[str, Any] = {}
        self._languages: list[str] = []
        self._instances: dict[str, _Instance] = {}
        self._lock = threading.Lock()
        self._look_again = 0.0
        self._full = False
        self._reason = "not initialized"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        url = urlsplit(config["endpoint"])
        try:
            valid = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError:
            valid = False
        if not valid or url.query or url.fragment or "@" in url.netloc:
            return False, f"endpoint: Must be an address such as {DEFAULT_ENDPOINT}."
        if config["token"] and not config["token"].isascii():
            return False, "token: Must be ASCII."
        receiver.check_trust(config, [config["endpoint"]])
        check_config(config)
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, apart=False)

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, apart=True)

    def _open(self, config: Mapping[str, Any], *, apart: bool) -> bool:
        pushed = {name: config[name] for name in FIELDS}
        if not meets(NAMESPACES, settings.MINIMUM_ISOLATION):
            # The service has other clients too, such as RAGFlow's.
            pushed["require_gvisor"] = True
        retries = config["max_retries"]
        backend: Backend = PoolClient(
            config["endpoint"].rstrip("/"),
            config["token"] or "",
            retries,
            pushed,
            apart,
            receiver.Receiver.of(config),
        )
        if config["without_service"] == "in_process" and not _is_docker_service(backend):
            from providers.self_managed.in_process import InProcessPool

            backend.close()
            backend = InProcessPool(pushed, settings.DATA_DIR, apart=apart)
        try:
            stats = backend.push()
        except BaseException:
            backend.close()
            raise
        self._languages = list(stats.get("languages", []))
        self._backend, self._config = backend, config
        return True

    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        handle = self._create(template, owner)
        with self._lock:
            self._instances[handle.instance_id] = _Instance(template, owner, handle)
        metadata = {
            "runtime": handle.runtime,
            "isolation": of_runtime(handle.runtime),
            "sharing": handle.sharing,
        }
        return SandboxInstance(handle.instance_id, self.id, "running", metadata)

    def is_full(self) -> bool:
        """As the service has it, a quarter of a second ago at most."""
        now = time.monotonic()
        if now >= self._look_again:
            self._look_again = now + LOOK_SECONDS
            try:
                stats = self._opened().stats()
                self._full = stats["busy"] + stats["waiting"] >= stats["capacity"]
            except (KeyError, SandboxError):
                # Getting a sandbox will tell what is wrong.
                self._full = False
        return self._full

    def execute_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> ExecutionResult:
        backend = self._opened()
        with self._lock:
            instance = self._instances.get(instance_id)
        if instance is None:
            raise ProviderUnavailable(f"There is no instance {instance_id!r}.")
        job = Job(
            code=code,
            language=language,
            timeout=timeout or self._config["timeout"],
            arguments=arguments,
            entrypoint=entrypoint,
            files=files,
            limits=limits or Limits(),
        )
        left: int = self._config["max_retries"]
        while True:
            try:
                result = backend.run(instance.handle, job)
                instance.ended = True
                return result
            except ProviderUnavailable as error:
                # Where it may have begun to run, the service has ended it, or has itself ended.
                instance.ended = error.started
                if not error.may_retry or left == 0:
                    raise
            # The service itself has said that nothing ran: the instance is gone, unused.
            left -= 1
            instance.handle = self._create(instance.template, instance.owner, like=instance.handle)

    def destroy_instance(self, instance_id: str) -> bool:
        backend = self._opened()
        with self._lock:
            instance = self._instances.pop(instance_id, None)
        if instance is None:
            return False
        # An instance ends with its run, so that nobody has to wait for another request.
        return instance.ended or backend.destroy(instance.handle)

    def submit_destroy_instance(self, instance_id: str) -> Future[bool]:
        with self._lock:
            instance = self._instances.get(instance_id)
        if instance is None or instance.ended:
            return carried_out(lambda: self.destroy_instance(instance_id))
        return super().submit_destroy_instance(instance_id)

    def health_check(self) -> Health:
        if self._backend is None:
            return Health(False, self._reason)
        try:
            stats = self._backend.stats()
        except SandboxError as error:
            return Health(False, error.message, answered=error.answered)
        self._languages = list(stats.get("languages", []))
        problem = str(stats.get("problem", ""))
        return Health(bool(stats.get("healthy")), problem, stats, answered="proof")

    def get_supported_languages(self) -> list[str]:
        return list(self._languages)

    def close(self) -> None:
        if self._backend is not None:
            self._backend.close()
        self._backend, self._reason = None, "closed"

    def _create(self, template: str, owner: str, *, like: Handle | None = None) -> Handle:
        """A new instance; in place of `like`, isolated as that was, for the caller relies on it."""
        backend = self._opened()
        handle = backend.create(template, owner)
        if like and (handle.runtime, handle.sharing) != (like.runtime, like.sharing):
            backend.destroy(handle)
            raise IsolationUnmet(
                f"The service runs under {handle.runtime} now, and ran under {like.runtime} before."
            )
        # Another installation may have pushed laxer settings to the same service.
        if self._config["require_gvisor"] and handle.runtime != "gvisor":
            backend.destroy(handle)
            raise ProviderUnavailable(
                f"require_gvisor is set, but the service runs under {handle.runtime}."
            )
        return handle

    def _opened(self) -> Backend:
        if self._backend is None:
            raise NotInitialized(f"The self_managed provider is {self._reason}.")
        return self._backend


def _is_docker_service(backend: Backend) -> bool:
    """Whether a service answers, and with containers: sandboxes of another kind are no stand-in."""
    try:
        return bool(backend.stats().get("launcher") == "docker")
    except InvalidConfiguration:
        raise
    except SandboxError:
        return False
