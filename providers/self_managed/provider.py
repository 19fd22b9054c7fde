"""Runs code in the warm containers of a pool service."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from django.conf import settings

from providers.base import OF_OUR_GUEST, Health, SandboxProvider
from providers.credentials import Credential
from providers.errors import (
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.isolation import NAMESPACES, IsolationUnmet, meets, of_runtime
from providers.remote import receiver
from providers.runtime.pool.requests import check_spec
from providers.runtime.pool.settings import CONNECTION
from providers.runtime.service.settings import FIELDS, ServiceSettings, check_config
from providers.sandbox import KeptSandbox, Sandbox
from providers.schema import ConfigField, lines_of
from providers.self_managed.client import Handle, NotSent, PoolClient
from providers.self_managed.hosts import Hosts, check_list
from providers.templates.base import known_bases
from providers.templates.store import TemplateStore
from providers.values import Emit, ExecutionResult, Job, SandboxLimits, SandboxSpec
from providers.waiting import carried_out

# Where `manage.py pool` listens unless it is told otherwise.
DEFAULT_ENDPOINT = f"http://127.0.0.1:{settings.POOL_PORT}"


class Backend(Protocol):
    """Where the containers are: services, or a pool in this process."""

    def push(self) -> dict[str, Any]: ...
    def create(self, spec: SandboxSpec, owner: str) -> Handle: ...
    def run(self, handle: Handle, job: Job, emit: Emit | None = None) -> ExecutionResult: ...
    def destroy(self, handle: Handle) -> bool: ...
    def stats(self) -> dict[str, Any]: ...
    @property
    def is_full(self) -> bool: ...
    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None: ...
    def close(self) -> None: ...


class SelfManagedProvider(SandboxProvider):
    id = "self_managed"
    name = "Self-managed"
    description = "Containers of a pool service on your own machines, with gVisor or runc."
    icon = "dns"
    tags = ("self-hosted", "docker", "gvisor")
    capabilities = OF_OUR_GUEST
    workspace_bytes = SandboxLimits().workspace_bytes
    alone_at = "endpoint"
    wakes_in_force = True
    config_fields = {
        "endpoint": ConfigField(
            "string",
            "API Endpoint",
            required=True,
            placeholder=DEFAULT_ENDPOINT,
            default=DEFAULT_ENDPOINT,
            max=5000,
            several=True,
            address=True,
            description="Address of the pool service (python manage.py pool). With several hosts, "
            "one address in each line; all have the same token.",
            group=CONNECTION,
        ),
        "drained": ConfigField(
            "string",
            "Drained hosts",
            max=5000,
            several=True,
            address=False,
            description="Those of the addresses that take no new sandboxes. Their idle sessions "
            "move to the other hosts.",
            group=CONNECTION,
        ),
        "token": ConfigField(
            "string",
            "Token",
            secret=True,
            max=500,
            description="POOL_TOKEN of the service. Required if other machines can reach it.",
            group=CONNECTION,
        ),
        **receiver.FIELDS,
        **FIELDS,
        "region": ConfigField(
            "string",
            "Region",
            max=64,
            description="For routes with a region.",
            group=CONNECTION,
        ),
        "max_retries": ConfigField(
            "integer",
            "Max retries",
            default=3,
            min=0,
            max=10,
            description="Only for runs that did not start.",
            group=CONNECTION,
        ),
        "without_service": ConfigField(
            "string",
            "If the pool service is down",
            default="fail",
            options=("fail", "in_process"),
            description="fail: return SB003. in_process: run the pool in this process, which needs "
            "access to Docker.",
            group=CONNECTION,
        ),
    }

    def __init__(self) -> None:
        self._backend: Backend | None = None
        self._config: Mapping[str, Any] = {}
        self._languages: list[str] = []
        self._limits = SandboxLimits()
        self._has_network = self._has_templates = False
        self._template_bases = frozenset[str]()
        self._reason = "not initialized"

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        addresses = lines_of(config["endpoint"])
        if not all(map(_is_url, addresses)):
            return False, f"endpoint: Must be an address such as {DEFAULT_ENDPOINT}."
        check_list(config["endpoint"], config["drained"])
        if config["token"] and not config["token"].isascii():
            return False, "token: Must be ASCII."
        receiver.check_trust(config, addresses)
        check_config(config)
        return True, None

    @property
    def network(self) -> str:
        return "none"

    @property
    def holds_network(self) -> bool:
        return self._has_network

    @property
    def holds_templates(self) -> bool:
        return self._has_templates

    @property
    def template_bases(self) -> frozenset[str]:
        return self._template_bases

    def initialize(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, apart=False)

    def initialize_apart(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, apart=True)

    def initialize_to_attach(self, config: Mapping[str, Any]) -> bool:
        return self._open(config, apart=False, to_attach=True)

    def _open(self, config: Mapping[str, Any], *, apart: bool, to_attach: bool = False) -> bool:
        pushed = {name: config[name] for name in FIELDS}
        if not meets(NAMESPACES, settings.MINIMUM_ISOLATION):
            # The service has other clients too, such as RAGFlow's.
            pushed["require_gvisor"] = True
        trusted, store = receiver.Receiver.of(config), TemplateStore(settings.DATA_DIR)

        def connect(address: str, start_retries: int | None) -> PoolClient:
            return PoolClient(
                address,
                config["token"] or "",
                config["max_retries"],
                pushed,
                apart,
                trusted,
                store=store,
                start_retries=start_retries,
            )

        backend: Backend = Hosts.of(config, connect)
        if config["without_service"] == "in_process" and not _is_docker_service(backend):
            from providers.self_managed.in_process import InProcessPool

            backend.close()
            backend = InProcessPool(pushed, settings.DATA_DIR, apart=apart)
        try:
            stats = backend.stats() if to_attach else backend.push()
        except BaseException:
            backend.close()
            raise
        self._languages = list(stats.get("languages", []))
        self._has_network = stats.get("network") is True
        self._has_templates = stats.get("has_templates") is True
        self._template_bases = known_bases(stats.get("template_bases"))
        self._backend, self._config = backend, config
        self._limits = ServiceSettings.from_config(pushed).limits
        return True

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        if spec.kept:
            return self._keep(spec, owner)
        check_spec(spec, self._limits)
        return PoolSandbox(self, spec, owner, self.take(spec, owner))

    @property
    def max_timeout(self) -> float | None:
        return float(self._config["timeout"]) if self._config else None

    def attach(self, ref: str) -> KeptSandbox:
        return self._service().attach(ref)

    def standing_of(self, ref: str) -> Literal["stays", "moves", "gone"]:
        return self._service().standing_of(ref)

    def _keep(self, spec: SandboxSpec, owner: str) -> KeptSandbox:
        sandbox = self._service().keep(spec, owner)
        if self._config["require_gvisor"] and sandbox.metadata["runtime"] != "gvisor":
            sandbox.close()
            raise _not_gvisor(sandbox.metadata["runtime"])
        return sandbox

    def _service(self) -> Hosts:
        """Raises InvalidConfiguration where sandboxes would end with this process."""
        backend = self.backend()
        if not isinstance(backend, Hosts) or backend.apart:
            raise InvalidConfiguration(
                "kept: Persistent sandboxes need the pool service. Start it, and clear "
                "without_service.",
                field="kept",
            )
        return backend

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self.backend().change_credentials(changes)

    def is_full(self) -> bool:
        """As the services have it, a quarter of a second ago at most."""
        return self.backend().is_full

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

    @property
    def max_retries(self) -> int:
        return int(self._config["max_retries"])

    def take(self, spec: SandboxSpec, owner: str, *, like: Handle | None = None) -> Handle:
        """A new instance; in place of `like`, isolated as that was, for the caller relies on it."""
        backend = self.backend()
        handle = backend.create(spec, owner)
        if like and (handle.runtime, handle.sharing) != (like.runtime, like.sharing):
            backend.destroy(handle)
            raise IsolationUnmet(
                f"The service runs under {handle.runtime} now, and ran under {like.runtime} before."
            )
        # Another installation may have pushed laxer settings to the same service.
        if self._config["require_gvisor"] and handle.runtime != "gvisor":
            backend.destroy(handle)
            raise _not_gvisor(handle.runtime)
        return handle

    def backend(self) -> Backend:
        if self._backend is None:
            raise NotInitialized(f"The self_managed provider is {self._reason}.")
        return self._backend


class PoolSandbox(Sandbox):
    """An instance of the service's. Another one takes its place if it was lost unused."""

    def __init__(
        self, provider: SelfManagedProvider, spec: SandboxSpec, owner: str, handle: Handle
    ) -> None:
        self.ref = handle.instance_id
        self.metadata = {
            "runtime": handle.runtime,
            "isolation": of_runtime(handle.runtime),
            "sharing": handle.sharing,
        }
        self._provider, self._spec, self._owner = provider, spec, owner
        self._handle = handle
        # An instance ends with its run, so that nobody has to wait for another request.
        self._ended = self._closed = False

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        with before_the_code():
            if self._closed:
                raise ProviderUnavailable(f"There is no sandbox {self.ref!r}.")
            self._provider.check_timeout(job)
            backend = self._provider.backend()
        left = self._provider.max_retries
        while True:
            try:
                result = backend.run(self._handle, job, emit)
                self._ended = True
                return result
            except (ProviderUnavailable, NotSent) as error:
                # Where it may have begun to run, the service has ended it, or has itself ended.
                self._ended = not error.nothing_ran
                if not (error.nothing_ran and error.may_retry) or left == 0:
                    raise
            # The service itself has said that nothing ran: the instance is gone, unused.
            left -= 1
            with before_the_code():
                self._handle = self._provider.take(self._spec, self._owner, like=self._handle)

    def close(self) -> bool:
        if self._closed:
            return False
        self._closed = True
        return self._ended or self._provider.backend().destroy(self._handle)

    def submit_close(self) -> Future[bool]:
        return carried_out(self.close) if self._ended or self._closed else super().submit_close()


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        is_web = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False
    return is_web and not (url.query or url.fragment or "@" in url.netloc)


def _not_gvisor(runtime: str) -> ProviderUnavailable:
    return ProviderUnavailable(f"require_gvisor is set, but the service runs under {runtime}.")


def _is_docker_service(backend: Backend) -> bool:
    """Whether a service answers, and with containers: sandboxes of another kind are no stand-in."""
    try:
        return bool(backend.stats().get("launcher") == "docker")
    except InvalidConfiguration:
        raise
    except SandboxError:
        return False
