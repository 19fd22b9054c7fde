"""The sandbox of a session, as the provider of its runs, and the validation of its answers."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from uuid import UUID
from weakref import WeakKeyDictionary

from django.conf import settings

from executions.runs import extensions
from executions.runs.extensions import START_SECONDS, RunParts
from executions.runs.network import NETWORK_KEYS, checked_attempts
from executions.runs.provider_calls import CREATE_SECONDS, Route, Step, borrow_lease, call_provider
from executions.runs.results import TEMPLATE, BlockedByPolicy
from executions.runs.routing import ensure_network
from executions.sessions.models import Session
from providers.base import Health, SandboxProvider
from providers.credentials import Credential
from providers.errors import (
    CreationFailed,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
    before_the_code,
)
from providers.leases import lease_of, lease_of_version, lease_to_wake, wakes_in_force
from providers.manager import Lease
from providers.network import Attempts, Network
from providers.sandbox import KeptSandbox, Process, Sandbox
from providers.values import Emit, ExecutionResult, InputFile, Job, SandboxSpec
from providers.waiting import RETRY_AFTER_SECONDS, submit

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARING = "session"
# For how long a sandbox stays at its provider when nobody of ours says so again: a new one, known
# only to who opens it, and a session's. And after what part of it who uses one does.
NEW_SECONDS = 60.0
LEASE_SECONDS = 600.0
RENEW_SECONDS = 60.0
OPERATION_SECONDS = 70.0

# Reentrant: a stream that nobody reads on is given back by whoever's thread collects the garbage,
# and that may hold it already.
_lock = threading.RLock()
_attached: WeakKeyDictionary[SandboxProvider, dict[UUID, KeptSandbox]] = WeakKeyDictionary()
_renewed: dict[UUID, float] = {}


class _Shares:
    """What each tenant has of the threads that wait: at most one of so many parts."""

    def __init__(self, parts: int, told: str) -> None:
        self._parts = parts
        self._told = told
        self._taken: Counter[str] = Counter()

    def take(self, slug: str) -> None:
        """Raises RateLimited for one more than the tenant may have."""
        share = max(1, settings.PROVIDER_WAITS // self._parts)
        with _lock:
            if self._taken[slug] >= share:
                raise RateLimited(f"{share} {self._told}", retry_after=RETRY_AFTER_SECONDS)
            self._taken[slug] += 1

    def give_back(self, slug: str) -> None:
        with _lock:
            self._taken[slug] -= 1
            if not self._taken[slug]:
                del self._taken[slug]


# A sandbox can let its callers wait.
_waited_for = _Shares(4, "calls to your sessions are already waiting.")
# And files are sent at the pace of whoever reads them.
_streams = _Shares(8, "files of your sessions are already being sent.")


class SandboxRunner(Protocol):
    """What is run in place of code in a context."""

    def submit(self, kept: KeptSandbox, job: Job, emit: Emit | None) -> Future[ExecutionResult]: ...

    def stop(self, kept: KeptSandbox) -> bool:
        """End it, where it was given up. Whether it ran."""


async def call_sandbox(
    session: Session,
    call: Callable[[KeptSandbox], Any],
    check: Callable[[Any], T],
    seconds: float = OPERATION_SECONDS,
) -> T:
    """What the session's sandbox answers, after `check`.

    Raises SandboxError, and KeptSandboxLost for a sandbox that is gone.
    """
    with ExitStack() as held:
        lease = await borrow_lease(Step(lender_of(session)), held)
        ref, provider = _ref(session), lease.provider
        return await call_provider(
            lease.provider_id,
            lambda: _submit(session, lambda: call(_attach_before_use(provider, session.pk, ref))),
            check,
            seconds,
            owner=session.tenant_slug,
            may_refuse=True,
        )


def _submit(session: Session, call: Callable[[], Any]) -> Future[Any]:
    """One of the threads that everybody waits in. Raises RateLimited beyond the tenant's share."""
    slug = session.tenant_slug
    _waited_for.take(slug)
    try:
        submitted = submit(call, may_refuse=True)
    except BaseException:
        _waited_for.give_back(slug)
        raise
    submitted.add_done_callback(lambda _: _waited_for.give_back(slug))
    return submitted


@contextmanager
def stream_slot(tenant_slug: str) -> Iterator[None]:
    """Hold a slot for one file or archive that is sent to the tenant. Raises RateLimited beyond its
    share.

    A sandbox may let each of them wait for as long as it likes, and each is asked again and again.
    """
    _streams.take(tenant_slug)
    try:
        yield
    finally:
        _streams.give_back(tenant_slug)


@contextmanager
def borrow_sandbox(session: Session) -> Iterator[KeptSandbox]:
    """Lend the session's sandbox to a caller that waits in its own thread. Raises SandboxError."""
    with lender_of(session)() as lease:
        yield attach(lease.provider, session.pk, _ref(session))


def attach(provider: SandboxProvider, session_id: UUID, ref: str) -> KeptSandbox:
    """Return the sandbox, which this process keeps at hand. Raises KeptSandboxLost."""
    with _lock:
        known = _attached.setdefault(provider, {}).get(session_id)
    # Since it was woken it has another one.
    if known is None or known.ref != ref:
        known = provider.attach(ref)
        with _lock:
            _forget_unused()
            _attached.setdefault(provider, {})[session_id] = known
    if time.monotonic() - _renewed.get(session_id, -LEASE_SECONDS) > RENEW_SECONDS:
        _renewed[session_id] = time.monotonic()
        try:
            known.renew(LEASE_SECONDS)
        except SandboxError:
            # Who attaches anew is told for certain whether it is there.
            with _lock:
                _attached[provider].pop(session_id, None)
            raise
    return known


def _attach_before_use(provider: SandboxProvider, session_id: UUID, ref: str) -> KeptSandbox:
    """As `attach`, for who then asks for something: what fails here proves that nothing began."""
    with before_the_code():
        return attach(provider, session_id, ref)


def _forget_unused() -> None:
    """Let go of what nobody here has used for a lease: another process may have closed it."""
    until = time.monotonic() - LEASE_SECONDS
    unused = [session_id for session_id, renewed in list(_renewed.items()) if renewed < until]
    for session_id in unused:
        _renewed.pop(session_id, None)
        for sandboxes in _attached.values():
            sandboxes.pop(session_id, None)


def forget(session: Session) -> None:
    """Let go of a sandbox that is no longer there."""
    with _lock:
        _renewed.pop(session.pk, None)
        for sandboxes in _attached.values():
            sandboxes.pop(session.pk, None)


def route_in(session: Session, context: str, runs: SandboxRunner | None) -> Route:
    """Return the route to the session's sandbox. `runs` is what runs, if not code in `context`."""

    @contextmanager
    def route(*, wait: bool = True) -> Iterator[Lease]:
        with lender_of(session)(wait=wait) as lease:
            place = _SessionProvider(lease.provider, session, context, runs)
            yield Lease(place, lease.provider_id, lease.config_version)

    return route


async def open_sandbox(lease: Lease, session: Session) -> KeptSandbox:
    """Open a new sandbox for a session, which nobody knows of yet. Raises SandboxError."""
    parts = parts_of(session)
    wanted = SandboxSpec(
        session.image,
        kept=True,
        environment=dict(session.env or {}),
        seconds=NEW_SECONDS,
    )
    spec = parts.specify(wanted, seconds=NEW_SECONDS)
    ensure_network(lease, spec.network)
    with parts.translate_errors():
        return await call_provider(
            lease.provider_id,
            lambda: lease.provider.submit_open(spec, session.tenant_slug),
            _check_sandbox,
            CREATE_SECONDS,
            owner=session.tenant_slug,
            may_refuse=True,
            too_late=lambda late: late.submit_close(),
        )


async def apply_network(session: Session, seconds: float = OPERATION_SECONDS) -> None:
    """Give the session's sandbox the network that is in force for it now. Raises SandboxError.

    Where a policy forbids any by now, it gets none.
    """
    try:
        network = network_in_force(session)
    except BlockedByPolicy:
        network = None
    await call_sandbox(session, lambda kept: kept.change_network(network), lambda _: None, seconds)


def network_in_force(session: Session) -> Network | None:
    """The session's list within those around it, None for no network. Raises BlockedByPolicy."""
    parts = parts_of(session)
    return parts.specify(SandboxSpec(session.language), seconds=NEW_SECONDS).network


def session_metadata(session: Session) -> Mapping[str, Any]:
    """What the metadata of a run in the session says of its template, and of the lists that hold
    for it."""
    names = NETWORK_KEYS if session.network is not None else frozenset()
    if session.template_version is not None:
        names |= {TEMPLATE}
    if not names:
        return {}
    said = parts_of(session).metadata()
    return {name: value for name, value in said.items() if name in names}


def parts_of(session: Session) -> RunParts:
    """Return the parts of all extensions in the session, as it is now."""
    return extensions.begin_session(
        session.tenant_slug, session.network_policy, session.template_version
    )


async def collect_attempts(session: Session, seconds: float = OPERATION_SECONDS) -> None:
    """Store what its sandbox has tried to reach since that was last told. What fails is logged."""
    if session.network is None:
        return
    try:
        found = await call_sandbox(
            session, lambda kept: kept.take_attempts(), _check_attempts, seconds
        )
    except SandboxError as error:
        logger.warning("attempts of session %s are not known: %s", session.pk, error.message)
        return
    store_attempts(session, found)


def store_attempts(session: Session, attempts: Sequence[Mapping[str, Any]]) -> None:
    """Store attempts to reach hosts that are of the session and of no run."""
    if attempts:
        for each in extensions.installed():
            each.on_attempts(session.pk, session.tenant_id, session.tenant_slug, attempts)


def _check_attempts(answer: Any) -> list[dict[str, Any]]:
    if not isinstance(answer, Attempts):
        raise ProviderUnavailable("The provider did not return attempts.")
    checked = checked_attempts(answer.to_json())
    return checked["attempts"] if checked else []


async def put_files(
    session: Session, lease: Lease, sandbox: KeptSandbox, files: Sequence[InputFile]
) -> None:
    """Put files into the workspace of a new sandbox. Raises SandboxError."""

    def write() -> None:
        for file in files:
            sandbox.files.write(file.path, [file.content])

    await call_provider(
        lease.provider_id,
        lambda: submit(write, may_refuse=True),
        lambda answer: answer,
        OPERATION_SECONDS,
        owner=session.tenant_slug,
        may_refuse=True,
    )


async def start_session(
    session: Session, lease: Lease, sandbox: KeptSandbox, parts: RunParts
) -> None:
    """Start what runs in the session's new sandbox. Raises SandboxError."""
    if not parts.starts_sessions:
        return
    await call_provider(
        lease.provider_id,
        lambda: submit(lambda: parts.start_session(sandbox), may_refuse=True),
        lambda answer: answer,
        START_SECONDS + OPERATION_SECONDS,
        owner=session.tenant_slug,
        may_refuse=True,
    )


async def extend_lease(lease: Lease, session: Session, sandbox: KeptSandbox) -> None:
    """Extend the lease of a new sandbox to that of an open session.

    One for which that cannot be said just now is spoken for by who uses it, or by the schedule.
    """
    try:
        await call_provider(
            lease.provider_id,
            lambda: submit(lambda: sandbox.renew(LEASE_SECONDS), may_refuse=True),
            lambda answer: answer,
            OPERATION_SECONDS,
            owner=session.tenant_slug,
            may_refuse=True,
        )
    except SandboxError as error:
        logger.warning("session %s could not be renewed: %s", session.pk, error.message)


def _check_sandbox(answer: Any) -> KeptSandbox:
    if (
        not isinstance(answer, KeptSandbox)
        or not isinstance(answer.ref, str)
        or not answer.ref
        or not isinstance(answer.metadata, dict)
    ):
        raise CreationFailed("The provider did not return a persistent sandbox.")
    return answer


def lender_of(session: Session) -> Any:
    """The route to the provider of a session, as its configuration was when it was opened."""
    provider_id, version = session.provider, session.config_version or 0
    return lambda *, wait=True: lease_of_version(provider_id, version, wait=wait)


def waker_of(session: Session) -> Any:
    """The route to the provider that opens the sandbox of a session that wakes."""
    provider_id, version = session.provider, session.config_version or 0
    return lambda *, wait=True: lease_to_wake(provider_id, version, wait=wait)


def is_gone(session: Session, *, wait: bool) -> bool:
    """Whether the host of its sandbox was removed from the configuration; False where that is not
    known. With `wait` a provider that is still starting is waited for."""
    try:
        if not wakes_in_force(session.provider):
            return False
        with lease_of(session.provider, wait=wait) as lease:
            return lease.provider.standing_of(_ref(session)) == "gone"
    except SandboxError as error:
        logger.warning("the hosts of %s are not known: %s", session.provider, error.message)
        return False


def _ref(session: Session) -> str:
    return str(session.ref)


class _SessionProvider(SandboxProvider):
    """A provider that has this one sandbox and opens no other."""

    id = "session"
    name = "Session"
    knows_at_once = True

    def __init__(
        self,
        provider: SandboxProvider,
        session: Session,
        context: str,
        runs: SandboxRunner | None,
    ) -> None:
        self._provider = provider
        self._session = session
        self._context = context
        self._runs = runs

    @property
    def capabilities(self) -> frozenset[str]:  # type: ignore[override]
        return self._provider.capabilities

    @property
    def isolation(self) -> str:
        return self._session.isolation

    @property
    def sharing(self) -> str:
        return SHARING

    @property
    def network(self) -> str:
        return "" if self._session.network is not None else self._provider.network

    @property
    def max_timeout(self) -> float | None:
        return self._provider.max_timeout

    def initialize(self, config: Mapping[str, Any]) -> bool:
        return True

    def change_credentials(self, changes: Mapping[str, Credential | None]) -> None:
        self._provider.change_credentials(changes)

    def health_check(self) -> Health:
        return self._provider.health_check()

    def get_supported_languages(self) -> list[str]:
        return self._provider.get_supported_languages()

    def open(self, spec: SandboxSpec, owner: str) -> Sandbox:
        session = self._session
        kept = attach(self._provider, session.pk, _ref(session))
        metadata = {
            "runtime": session.runtime,
            "isolation": session.isolation,
            "sharing": SHARING,
        }
        return _Cell(kept, metadata, self._context, self._runs)


class _Cell(Sandbox):
    """One run's view of a sandbox that stays: what ends it ends the run and nothing else."""

    def __init__(
        self,
        kept: KeptSandbox,
        metadata: dict[str, Any],
        context: str,
        runs: SandboxRunner | None,
    ) -> None:
        self.ref = context or "command"
        self.metadata = metadata
        self._kept = kept
        self._context = context
        self._runs = runs
        self._run = secrets.token_hex(8)
        self._running: Future[ExecutionResult] | None = None

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        return self.submit_run(job, emit).result()

    def submit_run(self, job: Job, emit: Emit | None = None) -> Future[ExecutionResult]:
        job = replace(job, context=self._context, run=self._run)
        if self._runs is not None:
            self._running = self._runs.submit(self._kept, job, emit)
        else:
            self._running = self._kept.submit_run(job, emit)
        return self._running

    def answer(self, call: int, answer: bytes) -> bool:
        """Answer a call that the run makes of a tool."""
        return self._kept.answer(self._run, call, answer)

    def close(self) -> bool:
        """Stop what still runs: it was given up, cancelled, or its record is no longer ours."""
        if self._running is None or (self._running.done() and not self._running.cancelled()):
            return False
        if self._runs is not None:
            return self._runs.stop(self._kept)
        return self._kept.interrupt(self._context, self._run)


MOST_PID = 2**53
MOST_PROCESSES = 1000


def check_pid(answer: Any) -> int:
    """Return the number of what is said to be a process. Raises ProviderUnavailable."""
    if not isinstance(answer, Process) or type(answer.pid) is not int:
        raise ProviderUnavailable("The provider did not return a process.")
    if not 0 < answer.pid < MOST_PID:
        raise ProviderUnavailable("The provider returned a process without a number.")
    return answer.pid


def check_processes(answer: Any) -> list[Process]:
    """Return the processes there are said to be. Raises ProviderUnavailable."""
    if not isinstance(answer, list | tuple):
        raise ProviderUnavailable("The provider did not return a list.")
    if len(answer) > MOST_PROCESSES:
        raise ProviderUnavailable("The provider returned more processes than possible.")
    for each in answer:
        check_pid(each)
        if each.exit_code is not None and type(each.exit_code) is not int:
            raise ProviderUnavailable("The provider did not return a process.")
    return list(answer)
