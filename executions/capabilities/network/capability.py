"""Network lists as a capability: what a run or session may reach, and what became of attempts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.urls import URLPattern, path

from executions.capabilities.network import lists
from executions.capabilities.network.attempts import store, store_of_run
from executions.runs.event_log import EventLog
from executions.runs.extensions import Extension, RunPart, Waiting
from executions.runs.models import Execution
from executions.runs.network import NETWORK_LISTS, NetworkRequest
from executions.runs.requests import ExecutionRequest
from executions.runs.routing import ensure_network
from executions.tenants.models import Tenant
from providers.manager import Lease
from providers.network import NETWORK, Layer, Network, NetworkPolicy
from providers.values import SandboxSpec


class _WithNetwork(RunPart):
    """A run or a session, and the lists that hold for it."""

    def __init__(self, tenant_slug: str, inner: Layer | None) -> None:
        self._tenant_slug = tenant_slug
        self._inner = inner

    @property
    def _network(self) -> Network | None:
        inner = () if self._inner is None else (self._inner,)
        return lists.network_for(self._tenant_slug, *inner)

    def check_provider(self, lease: Lease) -> None:
        ensure_network(lease, self._network)

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        return replace(spec, network=self._network)

    def metadata(self) -> Mapping[str, Any]:
        return {NETWORK_LISTS: lists.stated(self._tenant_slug, self._inner)}


class _RunWithNetwork(_WithNetwork):
    async def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> None:
        # The lists may be narrower than when it was queued.
        if self._inner is not None:
            lists.ensure_within(self._tenant_slug, self._inner.policy)


class NetworkLists(Extension):
    pages = ("executions.capabilities.network.admin",)
    fields = ("network",)
    metadata_keys = (NETWORK_LISTS,)

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
            return None
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
        self, tenant_slug: str, network: NetworkPolicy | None = None
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

    def before_seal(self, ended: Execution, *, had_code: bool) -> None:
        if NETWORK in ended.meta:
            store_of_run(ended)


CAPABILITY = NetworkLists()
