"""Templates as a capability: what a run or session has of one, and the record of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from django.conf import settings
from django.urls import URLPattern, path

from executions.capabilities.network.credentials import within
from executions.capabilities.templates import defaults, names
from executions.capabilities.templates.build import COMMANDS
from executions.capabilities.templates.names import Chosen
from executions.kernel.declarations import refuse
from executions.runs.advice import missed_by
from executions.runs.event_log import EventLog
from executions.runs.extensions import (
    START_SECONDS,
    Extension,
    RunPart,
    RunParts,
    SessionTemplate,
)
from executions.runs.models import Execution
from executions.runs.requests import ExecutionRequest
from executions.runs.results import TEMPLATE
from executions.runs.routing import ProviderIncompatible
from executions.sessions.models import Session
from executions.tenants.models import Tenant
from executions.tenants.service import INTERNAL
from providers.base import ENVIRONMENT, FILES, PROCESSES
from providers.manager import Lease
from providers.network import Layer, Network, NetworkPolicy
from providers.sandbox import KeptSandbox, Sandbox
from providers.templates import base as bases
from providers.templates.declaration import Limits
from providers.templates.resolve import NPM, PYPI, registry_variables
from providers.values import Command, Emit, InputFile, Job, SandboxSpec

# How often a start command is looked at, and how long a look may take.
_READY_SECONDS, _CHECK_SECONDS = 0.25, 10.0

_OF_THE_REQUEST = ("run", "session")


class _WithTemplate(RunPart):
    """A run or a session with a version of a template. What the caller gives wins."""

    def __init__(self, chosen: Chosen, *, names_timeout: bool = False) -> None:
        self._chosen = chosen
        self._declaration = chosen.declaration
        self._names_timeout = names_timeout

    def limit_seconds(self, seconds: float) -> float:
        limits: Limits = self._declaration.limits
        return limits.apply(seconds, is_named=self._names_timeout)

    def check_provider(self, lease: Lease) -> None:
        provider, name = lease.provider, lease.provider_id
        # The provider's own stands for those that an administrator has named.
        has_own = self._chosen.is_shared and provider.has_own_template(self._chosen.name)
        if self._chosen.id == defaults.ID and not has_own:
            digest = defaults.ensure_default(name, provider.get_packages())
            self._chosen = replace(self._chosen, digest=digest)
        if self._chosen.has_packages and not (provider.holds_templates or has_own):
            raise ProviderIncompatible(f"{name} does not hold templates.", field="template")
        _ensure_bases(lease, self._declaration.needs, self._declaration.base, "template")
        has_files = self._declaration.files or self._declaration.run
        for given, needed in ((has_files, FILES), (self._variables, ENVIRONMENT)):
            if given and needed not in provider.capabilities:
                raise ProviderIncompatible(
                    f"{name} does not support what the template declares: {needed}.",
                    field="template",
                )

    @property
    def _variables(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self._declaration.environment
        return found

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        digest = self._chosen.digest if self._chosen.has_packages else ""
        name = self._chosen.name if self._chosen.is_shared else ""
        network = self._within(spec.network)
        return replace(spec, digest=digest, template_name=name, network=network)

    def _within(self, network: Network | None) -> Network | None:
        """The network with the template's own list, which takes away alone."""
        policy = self._declaration.network
        if network is None or policy is None:
            return network
        layers = list(network.layers)
        inner = len(layers) - (layers[-1].name in _OF_THE_REQUEST)
        layers.insert(inner, Layer("template", policy))
        narrowed = replace(network, layers=tuple(layers))
        if narrowed.is_closed:
            return None
        return replace(narrowed, credentials=within(network.credentials, narrowed.layers))

    def metadata(self) -> Mapping[str, Any]:
        return {TEMPLATE: self._chosen.to_json()}


class _Run(_WithTemplate):
    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        declared = self._declaration
        environment = {**declared.environment, **job.environment}
        files = (*_beside(self._chosen.files, job.files), *job.files)
        return replace(job, environment=environment, files=files), emit


class _RunInSession(RunPart):
    """A run in a session, which has what its template gives, and the limits of that."""

    def __init__(self, limits: Limits, *, names_timeout: bool) -> None:
        self._limits = limits
        self._names_timeout = names_timeout

    def limit_seconds(self, seconds: float) -> float:
        return self._limits.apply(seconds, is_named=self._names_timeout)


def _in_session(session: Session, request: ExecutionRequest) -> RunPart | None:
    if session.template_version is None:
        return None
    limits = names.chosen_by_id(session.template_version).declaration.limits
    return _RunInSession(limits, names_timeout=request.timeout is not None)


class _Mirror(RunPart):
    """Programs that reach a network find the registries that the installation names."""

    _has_network = False

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        self._has_network = spec.network is not None
        if not (self._has_network and spec.kept):
            return spec
        return replace(spec, environment={**self._variables, **spec.environment})

    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        if self._has_network:
            job = replace(job, environment={**self._variables, **job.environment})
        return job, emit


def _with_mirror(part: RunPart | None) -> RunPart | None:
    chosen = (settings.PACKAGE_INDEX_URL, settings.NPM_REGISTRY_URL)
    if chosen == (PYPI, NPM):
        return part
    variables = registry_variables(*chosen)
    return RunParts([each for each in (part, _Mirror(variables)) if each is not None])


class _Commands(RunPart):
    """The run of a build's commands, with the packages that it has so far."""

    def __init__(self, digest: str) -> None:
        self._digest = digest

    def check_provider(self, lease: Lease) -> None:
        if not lease.provider.holds_templates:
            raise ProviderIncompatible(f"{lease.provider_id} does not hold templates.", field="run")
        folder = names.store().path(self._digest)
        _ensure_bases(lease, bases.needs(folder), bases.read(folder).name, "base")

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        return replace(spec, digest=self._digest)


def _ensure_bases(lease: Lease, needs: frozenset[str], base: str, field: str) -> None:
    """Raises ProviderIncompatible for a provider that cannot give the base of a template."""
    lacking = needs - lease.provider.template_bases
    if "apt" in lacking:
        raise ProviderIncompatible(
            f"{lease.provider_id} has no apt packages: they need Docker.", field=field
        )
    if lacking:
        raise ProviderIncompatible(
            f"{lease.provider_id} has no templates whose base is {base}.", field=field
        )


class _Session(_WithTemplate):
    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        spec = super().specify(spec, seconds=seconds)
        return replace(spec, environment={**self._variables, **spec.environment})

    def check_provider(self, lease: Lease) -> None:
        super().check_provider(lease)
        if self.starts_sessions and PROCESSES not in lease.provider.capabilities:
            raise ProviderIncompatible(
                f"{lease.provider_id} does not support the start command of the template.",
                field="template",
            )

    @property
    def starts_sessions(self) -> bool:
        return bool(self._declaration.start)

    def start_session(self, sandbox: KeptSandbox) -> None:
        """Start the template's command, and wait until it is ready."""
        deadline = time.monotonic() + START_SECONDS
        process = sandbox.processes.start(Command(shell=self._declaration.start))
        while self._declared_ready and not _succeeds(sandbox, self._declared_ready):
            now = next((each for each in sandbox.processes.list() if each.pid == process.pid), None)
            if now is None or now.exit_code is not None:
                refuse("template", f"The start command of {self._chosen.label} has ended.")
            if time.monotonic() > deadline:
                refuse(
                    "template",
                    f"The start command of {self._chosen.label} was not ready in "
                    f"{START_SECONDS:g} s.",
                )
            time.sleep(_READY_SECONDS)

    @property
    def _declared_ready(self) -> str:
        ready: str = self._declaration.ready
        return ready

    def session_files(self) -> Sequence[InputFile]:
        return _beside(self._chosen.files, ())


def _succeeds(sandbox: KeptSandbox, command: str) -> bool:
    """Run a command of the template's; tell whether it ends with 0."""
    check = sandbox.processes.start(Command(shell=command, timeout=_CHECK_SECONDS))
    return sandbox.processes.follow(check.pid, lambda event: None).exit_code == 0


def _beside(files: Mapping[str, bytes], given: Sequence[InputFile]) -> list[InputFile]:
    """The files of a template, without those that stand where the caller's do."""
    taken = [file.path for file in given]
    return [
        InputFile(path, content)
        for path, content in files.items()
        if not any(_collide(path, other) for other in taken)
    ]


def _collide(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


class Templates(Extension):
    pages = ("executions.capabilities.templates.admin",)
    tasks = {
        "executions.tasks.build_templates": 1,
        "executions.tasks.remove_unused_templates": 24 * 60,
    }
    fields = ("template",)
    metadata_keys = (TEMPLATE,)

    def urls(self) -> Sequence[URLPattern]:
        from executions.capabilities.templates.api import (
            BuildsView,
            CancelView,
            LogView,
            PartsView,
            SessionTemplateView,
            TemplatesView,
            TemplateView,
            VersionView,
        )

        one = "api/v1/templates/<str:template>"
        version = f"{one}/versions/<int:number>"
        return (
            path("api/v1/templates", TemplatesView.as_view(), name="templates"),
            path(one, TemplateView.as_view(), name="template"),
            path(
                "api/v1/sessions/<uuid:session_id>/template",
                SessionTemplateView.as_view(),
                name="session-template",
            ),
            path(f"{one}/builds", BuildsView.as_view(), name="template-builds"),
            path(version, VersionView.as_view(), name="template-version"),
            path(f"{version}/log", LogView.as_view(), name="template-version-log"),
            path(f"{version}/sbom", PartsView.as_view(), name="template-version-sbom"),
            path(f"{version}/cancel", CancelView.as_view(), name="template-version-cancel"),
        )

    def ensure_accepted(self, request: ExecutionRequest, tenant: Tenant) -> None:
        # What this process runs again is of another tenant, whose names hold when it begins.
        if request.template and tenant.slug != INTERNAL:
            names.choose(tenant.slug, request.template)

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        if execution.pk in COMMANDS:
            return _Commands(COMMANDS[execution.pk])
        if execution.session is not None:
            return _in_session(execution.session, request)
        if not request.template:
            return _with_mirror(None)
        original = execution.replay_of
        slug = execution.tenant_slug if original is None else original.tenant_slug
        chosen = names.choose(slug, request.template)
        return _with_mirror(_Run(chosen, names_timeout=request.timeout is not None))

    def advice(self, execution: Execution) -> Sequence[str]:
        missed = missed_by(execution)
        if missed is None or not missed.module:
            return ()
        found = names.names_with(execution.tenant_slug, missed.installer, missed.module)
        if not found:
            return ()
        kind = "templates" if len(found) > 1 else "template"
        return (f"The {kind} {', '.join(found)} has it: name it in the field template.",)

    def session_template(self, tenant_slug: str, asked: str) -> SessionTemplate | None:
        found = names.find(tenant_slug, asked)
        return None if found is None else SessionTemplate(found.label, found.id)

    def template_names(self, tenant_slug: str) -> Sequence[str]:
        return names.names_for(tenant_slug)

    def begin_session(
        self,
        tenant_slug: str,
        network: NetworkPolicy | None = None,
        template: UUID | None = None,
    ) -> RunPart | None:
        return _with_mirror(None if template is None else _Session(names.chosen_by_id(template)))


CAPABILITY = Templates()
