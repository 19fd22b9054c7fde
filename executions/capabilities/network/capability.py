"""Networks as a capability: what a run or session may reach, its credentials, and attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.urls import URLPattern, path

from executions.capabilities.network import credential_changes, lists
from executions.capabilities.network.advice import advice_of
from executions.capabilities.network.attempts import store, store_of_run
from executions.capabilities.network.credential_changes import Holder
from executions.capabilities.network.credentials import ids_of
from executions.runs.advice import missed_by
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.network import NETWORK_CREDENTIALS, NETWORK_LISTS, NetworkRequest
from executions.runs.provider_calls import guard
from executions.runs.requests import ExecutionRequest
from executions.runs.routing import ensure_network
from executions.sessions.networks import NO_NETWORK
from executions.tenants.models import Tenant
from providers.base import SandboxProvider
from providers.credentials import Credential
from providers.manager import Lease
from providers.network import NETWORK, Layer, Network, NetworkPolicy
from providers.sandbox import Sandbox
from providers.values import Emit, Job, SandboxSpec

# A version that none has: what the sandbox of a session has is not known.
_UNKNOWN = 0


class _WithNetwork(RunPart):
    """A run or a session, the lists that hold for it, and its credentials."""

    def __init__(self, tenant_slug: str, inner: Layer | None) -> None:
        self._tenant_slug = tenant_slug
        self._inner = inner
        self._credentials: tuple[Credential, ...] | None = None

    @property
    def _network(self) -> Network | None:
        inner = () if self._inner is None else (self._inner,)
        return lists.network_for(self._tenant_slug, *inner)

    def check_provider(self, lease: Lease) -> None:
        ensure_network(lease, self._network)

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        network = self._network
        self._credentials = () if network is None else network.credentials
        return replace(spec, network=network)

    def metadata(self) -> Mapping[str, Any]:
        given = self._credentials
        if given is None:
            network = self._network
            given = () if network is None else network.credentials
        said: dict[str, Any] = {NETWORK_LISTS: lists.stated(self._tenant_slug, self._inner)}
        if given:
            said[NETWORK_CREDENTIALS] = [each.label for each in given]
        return said


class _Registered(RunPart):
    """A run that changes of its credentials have to reach."""

    _provider: SandboxProvider | None = None
    _holder: Holder | None = None

    def _register(self, versions: Mapping[str, int]) -> None:
        if self._provider is None or not versions:
            return
        self._holder = Holder(self._provider, versions)
        credential_changes.register(self._holder)

    def close(self) -> None:
        if self._holder is None:
            return
        credential_changes.unregister(self._holder)
        self._holder = None


class _RunWithNetwork(_Registered, _WithNetwork):
    async def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> None:
        # The lists may be narrower than when it was queued.
        if self._inner is not None:
            lists.ensure_within(self._tenant_slug, self._inner.policy)

    def check_provider(self, lease: Lease) -> None:
        super().check_provider(lease)
        self._provider = lease.provider

    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        self._register({each.id: each.version for each in self._credentials or ()})
        return job, emit


class _Cell(_Registered):
    """A run in a session, whose sandbox has the session's network."""

    def __init__(self, tenant_slug: str) -> None:
        self._tenant_slug = tenant_slug

    def check_provider(self, lease: Lease) -> None:
        # It promises no network for the sandbox of a session that has none.
        if guard(lease.provider_id, lambda: lease.provider.network) != NO_NETWORK:
            self._provider = lease.provider

    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        if self._provider is not None:
            # Its sandbox may be older than the last change.
            self._register(dict.fromkeys(ids_of(self._tenant_slug), _UNKNOWN))
        return job, emit


class NetworkLists(Extension):
    pages = ("executions.capabilities.network.admin",)
    tasks = {"executions.tasks.follow_credential_sources": 1}
    fields = ("network",)
    metadata_keys = (NETWORK_LISTS, NETWORK_CREDENTIALS)

    def urls(self) -> Sequence[URLPattern]:
        from executions.capabilities.network.api import AttemptsView, SessionNetworkView

        of_session = "api/v1/sessions/<uuid:session_id>/network"
        return (
            path(of_session, SessionNetworkView.as_view(), name="session-network"),
            path("api/v1/network/attempts", AttemptsView.as_view(), name="network-attempts"),
        )

    def ensure_accepted(self, request: ExecutionRequest, tenant: Tenant) -> None:
        if request.network is not None:
            lists.ensure_within(tenant.slug, request.network.policy)

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        if execution.session_id is not None:
            return _Cell(execution.tenant_slug)
        original = execution.replay_of
        slug = execution.tenant_slug if original is None else original.tenant_slug
        if request.network is None:
            return _RunWithNetwork(slug, None) if lists.is_by_default(slug) else None
        policy = request.network.policy
        return None if policy.mode == "none" else _RunWithNetwork(slug, Layer("run", policy))

    def session_network(
        self, tenant_slug: str, asked: NetworkRequest | None
    ) -> NetworkPolicy | None:
        if asked is None:
            return NetworkPolicy("open") if lists.is_by_default(tenant_slug) else None
        policy = asked.policy
        lists.ensure_within(tenant_slug, policy)
        return None if policy.mode == "none" else policy

    def begin_session(
        self,
        tenant_slug: str,
        network: NetworkPolicy | None = None,
        template: UUID | None = None,
    ) -> RunPart | None:
        return None if network is None else _WithNetwork(tenant_slug, Layer("session", network))

    def on_attempts(
        self,
        session_id: UUID,
        tenant_id: int | None,
        tenant_slug: str,
        attempts: Sequence[Mapping[str, Any]],
    ) -> None:
        store(attempts, tenant_id, tenant_slug, session_id=session_id)

    def advice(self, execution: Execution) -> Sequence[str]:
        if NETWORK not in execution.meta and missed_by(execution) is None:
            return ()
        return advice_of(execution)

    def before_seal(self, ended: Execution, *, had_code: bool) -> None:
        if NETWORK in ended.meta:
            store_of_run(ended)


CAPABILITY = NetworkLists()
