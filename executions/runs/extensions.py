"""What sessions and capabilities add to runs: hooks at fixed places on the path of a run.

The core imports no capability. A capability subclasses `Extension`, overrides the hooks it needs,
and is registered at start (`executions.apps`), in the order of INSTALLED_CAPABILITIES. Each hook
does nothing by default. For what concerns one run alone, `Extension.begin` returns a `RunPart`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.urls import URLPattern

from executions.kernel.declarations import refuse
from executions.runs.event_log import EventLog
from executions.runs.models import Execution, LateResult
from executions.runs.network import NetworkRequest
from executions.runs.provider_calls import Step
from executions.runs.requests import Caller, ExecutionRequest
from executions.runs.statistics import Increment
from executions.tenants.models import Tenant
from executions.tenants.quotas import Quota, Use
from providers.errors import SandboxError
from providers.manager import Lease
from providers.network import NetworkPolicy
from providers.sandbox import KeptSandbox, Sandbox
from providers.values import Emit, InputFile, Job, SandboxSpec

logger = logging.getLogger(__name__)

# The most that a session's own start may take.
START_SECONDS = 60.0

# Surrounds waiting for a future. It may cancel the future, and raise.
Waiting = Callable[[Future[Any]], AbstractContextManager[Any]]
OnInsert = Callable[[Execution], None]


class Placement(NamedTuple):
    """A request as it runs in its session, and the steps that lend the session's sandbox."""

    request: ExecutionRequest
    steps: Sequence[Step]


class Review(NamedTuple):
    """A request that somebody has to approve: how it is queued, and what is written with it."""

    request: ExecutionRequest
    on_insert: OnInsert


class SessionTemplate(NamedTuple):
    """The template of a session: its name with the version, and the version's id."""

    label: str
    version: UUID


class RunPart:
    """An extension's part in one run, or in the opening of one session."""

    async def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> None:
        """Wait for what has to come before the run. Raises SandboxError where it must not run."""

    def check_language(self, language: str) -> None:
        """Raises SandboxError for a session that must not be opened in this language."""

    def select(self, steps: Sequence[Step]) -> Sequence[Step]:
        """Return the steps that may be taken. Raises SandboxError where none is left."""
        return steps

    def check_provider(self, lease: Lease) -> None:
        """Raises SandboxError for a provider that must not run it."""

    def limit_seconds(self, seconds: float) -> float:
        """Return the timeout in force, at most `seconds`."""
        return seconds

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        """Return the sandbox to ask for. The run may take `seconds`."""
        return spec

    @property
    def starts_sessions(self) -> bool:
        """Whether `start_session` has something to do."""
        return False

    def start_session(self, sandbox: KeptSandbox) -> None:
        """Start what runs in a session's new sandbox, whose files are there. Raises SandboxError.

        It may take START_SECONDS.
        """

    def check_spec(self, spec: SandboxSpec) -> None:
        """Look at what all parts ask for together. Raises SandboxError for what must not be."""

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        """Surround the creation of a sandbox, whose errors may be due to `specify`."""
        yield

    def check_sandbox(self, lease: Lease, isolation: str) -> None:
        """Raises SandboxError for a sandbox of this isolation that must not run it."""

    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        """Return the job as it is sent, and the receiver of its events."""
        return job, emit

    def session_files(self) -> Sequence[InputFile]:
        """Return the files that a new session begins with."""
        return ()

    def close(self) -> None:
        """Give back what `prepare` took. Called once the run has ended."""

    def result_metadata(self) -> Mapping[str, Any]:
        """Return what the record's metadata says of a run with a result."""
        return {}

    def metadata(self) -> Mapping[str, Any]:
        """Return what the record's metadata says of the run, however it ended."""
        return {}


class RunParts(RunPart):
    """The parts of all extensions, one after another."""

    def __init__(self, parts: Sequence[RunPart] = ()) -> None:
        self._parts = parts

    async def admit(
        self, request: ExecutionRequest, execution: Execution, waiting: Waiting = nullcontext
    ) -> None:
        for part in self._parts:
            await part.admit(request, execution, waiting)

    def check_language(self, language: str) -> None:
        for part in self._parts:
            part.check_language(language)

    def select(self, steps: Sequence[Step]) -> Sequence[Step]:
        for part in self._parts:
            steps = part.select(steps)
        return steps

    def check_provider(self, lease: Lease) -> None:
        for part in self._parts:
            part.check_provider(lease)

    def limit_seconds(self, seconds: float) -> float:
        for part in self._parts:
            seconds = part.limit_seconds(seconds)
        return seconds

    def specify(self, spec: SandboxSpec, *, seconds: float) -> SandboxSpec:
        for part in self._parts:
            spec = part.specify(spec, seconds=seconds)
        self.check_spec(spec)
        return spec

    def check_spec(self, spec: SandboxSpec) -> None:
        for part in self._parts:
            part.check_spec(spec)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self._parts:
                stack.enter_context(part.translate_errors())
            yield

    def check_sandbox(self, lease: Lease, isolation: str) -> None:
        for part in self._parts:
            part.check_sandbox(lease, isolation)

    def prepare(self, job: Job, sandbox: Sandbox, emit: Emit | None) -> tuple[Job, Emit | None]:
        for part in self._parts:
            job, emit = part.prepare(job, sandbox, emit)
        return job, emit

    def session_files(self) -> Sequence[InputFile]:
        return [file for part in self._parts for file in part.session_files()]

    def start_session(self, sandbox: KeptSandbox) -> None:
        for part in self._parts:
            part.start_session(sandbox)

    @property
    def starts_sessions(self) -> bool:
        return any(part.starts_sessions for part in self._parts)

    def close(self) -> None:
        for part in self._parts:
            with _log_errors(part):
                part.close()

    def result_metadata(self) -> Mapping[str, Any]:
        return {
            name: value for part in self._parts for name, value in part.result_metadata().items()
        }

    def metadata(self) -> Mapping[str, Any]:
        return _merge(part.metadata() for part in self._parts)


class Extension:
    """What one package adds to runs. The hooks are in the order in which a run meets them."""

    # Modules whose import registers pages of the admin.
    pages: tuple[str, ...] = ()
    # Tasks of the workers by dotted name, and after how many minutes each is due again.
    tasks: Mapping[str, int] = {}
    # Fields of a request that nothing but this extension serves.
    fields: tuple[str, ...] = ()
    # Keys of a record's metadata that it alone sets: what a provider says under them is dropped.
    metadata_keys: tuple[str, ...] = ()

    def urls(self) -> Sequence[URLPattern]:
        """Return the endpoints of the API that it brings."""
        return ()

    def place(self, request: ExecutionRequest, caller: Caller) -> Placement | None:
        """Return where the request runs; None leaves that to the tenant's route."""
        return None

    def place_queued(self, request: ExecutionRequest) -> Sequence[Step] | None:
        """As `place`, of a request that was queued."""
        return None

    async def review(self, request: ExecutionRequest, caller: Caller) -> Review | None:
        """Return how the request waits for an approval; None where it needs none."""
        return None

    def ensure_allowance(self, tenant_slug: str) -> None:
        """Raises RateLimited for a tenant that may not begin anything now."""

    def ensure_accepted(self, request: ExecutionRequest, tenant: Tenant) -> None:
        """Raises InvalidConfiguration for a request that could not be served."""

    def first_metadata(self, tenant_slug: str) -> Mapping[str, Any]:
        """Return what a new record's metadata says of the tenant whose code it runs."""
        return {}

    def before_insert(self, execution: Execution) -> None:
        """Set columns of a new row, in its transaction. Raises SandboxError to refuse it."""

    def on_insert(self, execution: Execution, request: ExecutionRequest) -> None:
        """Write what belongs to a new row, in its transaction."""

    def after_insert(self, execution: Execution, began: float) -> None:
        """Note a new record. `began` is the `perf_counter` at which its request came."""

    def minimum_isolation(self, tenant_slug: str) -> Sequence[str]:
        """Return the isolations that runs of this tenant must have at least."""
        return ()

    def begin(
        self, execution: Execution, request: ExecutionRequest, log: EventLog | None
    ) -> RunPart | None:
        """Return the part in one run, which is about to be tried."""
        return None

    def session_network(
        self, tenant_slug: str, asked: NetworkRequest | None
    ) -> NetworkPolicy | None:
        """Return the list of a new session, or of one that asks for another network; None for no
        network. Raises InvalidConfiguration for what is not allowed."""
        return None

    def session_template(self, tenant_slug: str, asked: str) -> SessionTemplate | None:
        """Return the template that a name means for a new session, None for one that it does not
        know. Raises InvalidConfiguration for one that cannot be used."""
        return None

    def template_names(self, tenant_slug: str) -> Sequence[str]:
        """Return the names of the templates that the tenant can use."""
        return ()

    def begin_session(
        self,
        tenant_slug: str,
        network: NetworkPolicy | None = None,
        template: UUID | None = None,
    ) -> RunPart | None:
        """Return the part in the opening of a session or of its sandbox. `network` is the list of
        the session, and `template` the version of its template."""
        return None

    def on_attempts(
        self,
        session_id: UUID,
        tenant_id: int | None,
        tenant_slug: str,
        attempts: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store attempts of a session's sandbox that are of no run (see `runs.network`)."""

    def end_values(self, provider_id: str, timings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return columns that follow from where and how long it ran."""
        return {}

    def statistics(self, ended: Execution) -> Iterable[Increment]:
        """Return what it counts of an end, for the transaction of the end to add."""
        return ()

    def before_seal(self, ended: Execution, *, had_code: bool) -> None:
        """Write what must precede the ledger entry of an end, in its transaction. The record
        `had_code` until now."""

    def on_end(self, ended: Execution) -> None:
        """Write what follows the ledger entry of an end, in its transaction."""

    def on_late(self, execution: Execution, late: LateResult) -> None:
        """Count a result that came after its record was closed, in the result's transaction."""

    async def stop_process(self, execution: Execution) -> None:
        """End the process of a run in the background, and close its record where it ends."""

    def on_lost(self, execution: Execution) -> None:
        """Clean up after a run whose process died, once its record is closed."""

    def advice(self, execution: Execution) -> Sequence[str]:
        """Return advice for who has run an execution that ended, as of now (see `runs.advice`)."""
        return ()

    def after_end(self, execution: Execution) -> None:
        """Note an end that is committed."""

    def after_run(self, execution: Execution) -> None:
        """Let go of what the run held in this process, whether or not its record was closed."""

    def vouches_for(self, execution_id: UUID, event_type: str, said: Mapping[str, Any]) -> bool:
        """Return whether an event of its own, stored for other processes, may be passed on."""
        return False

    def usage(self, tenant: Tenant) -> Mapping[Quota, Use]:
        """Return the use of the quotas that it counts."""
        return {}

    def after_restore(self) -> int:
        """Stop what must not go on after a restore. Return how many. Raises LedgerUnavailable."""
        return 0

    def start_worker(self, goes_on: Callable[[], bool]) -> None:
        """Start threads of a queue worker; they end once `goes_on` returns False."""


_installed: list[Extension] = []


def register_installed(*last: Extension) -> None:
    """Register the `CAPABILITY` of each of INSTALLED_CAPABILITIES, and `last` behind them."""
    found = [
        import_module(f"{package}.capability").CAPABILITY
        for package in settings.INSTALLED_CAPABILITIES
    ]
    _installed[:] = [*found, *last]


def installed() -> Sequence[Extension]:
    """Return the extensions in their order."""
    return _installed


async def review(request: ExecutionRequest, caller: Caller) -> Review | None:
    """Return how the request waits for an approval; None where it needs none."""
    for each in _installed:
        if (found := (await each.review(request, caller))) is not None:
            return found
    return None


def begin(execution: Execution, request: ExecutionRequest, log: EventLog | None) -> RunParts:
    """Return the parts of all extensions in one run."""
    found = (each.begin(execution, request, log) for each in _installed)
    return RunParts([part for part in found if part is not None])


def begin_session(
    tenant_slug: str, network: NetworkPolicy | None = None, template: UUID | None = None
) -> RunParts:
    """Return the parts of all extensions in the opening of a session, whose list is `network`."""
    found = (each.begin_session(tenant_slug, network, template) for each in _installed)
    return RunParts([part for part in found if part is not None])


def session_template(tenant_slug: str, asked: str) -> SessionTemplate | None:
    """Return the template of a session; None for a name that only a provider may know. Raises
    InvalidConfiguration for one that cannot be used."""
    found = (each.session_template(tenant_slug, asked) for each in _installed)
    return next((template for template in found if template is not None), None)


def template_names(tenant_slug: str) -> list[str]:
    """Return the names of the templates that the tenant can use."""
    return [name for each in _installed for name in each.template_names(tenant_slug)]


def session_network(tenant_slug: str, asked: NetworkRequest | None) -> NetworkPolicy | None:
    """Return the list of a session. Raises InvalidConfiguration for what is not allowed."""
    if asked is not None and asked.policy.mode != "none":
        _ensure_field("network")
    found = (each.session_network(tenant_slug, asked) for each in _installed)
    return next((policy for policy in found if policy is not None), None)


def allowed_languages(tenant_slug: str, languages: Sequence[str]) -> list[str]:
    """Return those of the languages in which the tenant may open a session."""
    parts = begin_session(tenant_slug)

    def is_allowed(language: str) -> bool:
        try:
            parts.check_language(language)
        except SandboxError:
            return False
        return True

    return list(filter(is_allowed, languages))


def ensure_allowance(tenant_slug: str) -> None:
    """Raises RateLimited for a tenant that may not begin anything now."""
    for each in _installed:
        each.ensure_allowance(tenant_slug)


def ensure_served(request: ExecutionRequest) -> None:
    """Raises InvalidConfiguration for a field whose capability is not installed."""
    for name in ("webhook", "tools", "network", "template"):
        if getattr(request, name):
            _ensure_field(name)


def _ensure_field(name: str) -> None:
    if not any(name in each.fields for each in _installed):
        refuse(name, "Not supported here: its capability is not in INSTALLED_CAPABILITIES.")


def after_run(execution: Execution) -> None:
    """Call the hook of every extension, whatever another one raises."""
    for each in _installed:
        with _log_errors(each):
            each.after_run(execution)


def advise(execution: Execution) -> list[str]:
    """Return the advice of all extensions, whatever another one raises."""
    found: list[str] = []
    for each in _installed:
        with _log_errors(each):
            found += each.advice(execution)
    return found


@contextmanager
def _log_errors(part: object) -> Iterator[None]:
    try:
        yield
    except Exception:
        logger.exception("%s failed after a run", type(part).__name__)


def end_values(provider_id: str, timings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that extensions fill in at the end of a run."""
    return _merge(each.end_values(provider_id, timings) for each in _installed)


def _merge(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for mapping in mappings for name, value in mapping.items()}
