"""One build, by the process that has claimed it.

It resolves its packages in an execution of the tenant, and of the internal tenant for the
installation. No package's code runs outside of it: what the lock names is fetched, checked and
unpacked by `TemplateStore`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.db import Error as DatabaseFailure
from django.db.models import F, QuerySet
from django.db.models.functions import Now
from django.utils import timezone

from executions.capabilities.templates import advisories
from executions.capabilities.templates.bounds import ensure_room, lock_of
from executions.capabilities.templates.downloads import fetcher, network_of_build
from executions.capabilities.templates.models import (
    MOST_LOG_CHARACTERS,
    Template,
    TemplateDraft,
    TemplateVersion,
)
from executions.capabilities.templates.names import (
    assign_tags,
    ensure_allowed,
    ensure_as_entered,
    store,
)
from executions.capabilities.templates.output import Lines
from executions.kernel.claims import by_claim
from executions.kernel.coroutines import run_sync
from executions.kernel.text import storable
from executions.ledger.append import enter_row, look_at
from executions.runs.event_log import EventLog
from executions.runs.models import Artifact, Execution
from executions.runs.network import NetworkRequest
from executions.runs.requests import Caller, ExecutionRequest, run_limits
from executions.runs.service import execute
from executions.tenants.service import internal_tenant
from providers.errors import InvalidConfiguration, RateLimited
from providers.guarded import two_person_rule
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.declaration import Declaration
from providers.templates.files import BuildFailed
from providers.templates.lock import Lock, LockedPackage
from providers.templates.resolve import (
    APT_LOCK,
    NPM_LOCK,
    PYTHON_LOCK,
    WORKSPACE_ARCHIVE,
    Facts,
    ResolveJob,
    apt_job,
    commands_for,
    facts_job,
    job_for,
    read_facts,
)
from providers.templates.source import built as built_of
from providers.templates.source import job_of, sources_of
from providers.templates.store import Built
from providers.templates.yanked import YANKED
from providers.templates.yanked import read as read_yanked

logger = logging.getLogger(__name__)
MOST_LOCK_BYTES = 1 << 20
_BUILDING = timedelta(minutes=5)
_SAY_EVERY = 1.0
_UNRESOLVED = "The packages could not be resolved"
_PAUSE_SECONDS = 5.0
_MOST_LINE = 1000

State = TemplateVersion.State

# The digest of the packages that each execution of this process has, which runs a build's commands.
COMMANDS: dict[UUID, str] = {}


class Superseded(Exception):
    """The build was cancelled, or another process has it by now."""


def needs_approval(template: Template) -> bool:
    """Whether a second administrator has to approve its builds."""
    return template.tenant_id is None and two_person_rule()


def end_build(rows: QuerySet[TemplateVersion], state: str, problem: str, **values: Any) -> bool:
    """End a build without a result. Its process, if it has one, learns that it lost it."""
    return bool(
        rows.update(
            state=state,
            problem=storable(problem)[:500],
            ended_at=timezone.now(),
            claimed_until=None,
            claims=F("claims") + 1,
            **values,
        )
    )


@dataclass(frozen=True)
class _Jobs:
    """What resolves a declaration: packages of Python and npm, and those of Debian."""

    packages: ResolveJob
    apt: ResolveJob | None

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the network rules that the files of both need."""
        return tuple(dict.fromkeys((*self.packages.rules, *(self.apt.rules if self.apt else ()))))


class Build:
    """One build, by the process that has claimed it."""

    def __init__(self, version: TemplateVersion) -> None:
        self.version = version
        self.template = version.template
        self._tenant = self.template.tenant or internal_tenant()
        self._log = version.log
        self._said_at = time.monotonic()
        # Until when a part may run and say nothing.
        self._silent_until = 0.0
        # The wheels that were built of sources, by their addresses in the lock.
        self._wheels: dict[str, Artifact] = {}

    def run(self) -> None:
        """Raises SandboxError with what is wrong, and Superseded."""
        ensure_as_entered(self.version)
        ensure_as_entered(self.template)
        if needs_approval(self.template) and not self.version.approved_by:
            raise BuildFailed("No second administrator has approved it.")
        declaration = self.version.declared
        if declaration.build and not settings.TEMPLATE_BUILDS_FROM_SOURCE:
            raise BuildFailed(
                "build: Packages are not built from their source here. An administrator can set "
                "TEMPLATE_BUILDS_FROM_SOURCE=yes."
            )
        ensure_allowed(declaration, is_tenants=self.template.tenant_id is not None)
        facts = self._look_at_base(declaration)
        jobs = self._jobs(declaration, facts)
        if self.version.lock is not None and self.version.based == facts.base:
            lock = self.version.locked
        else:
            lock = self._resolve(declaration, jobs, facts)
        # Before anything of them is fetched, or run with.
        for finding in advisories.check(lock):
            self.tell(f"Known to be bad: {finding}")
        self._put(state=State.BUILDING)
        lock = self._with_wheels(declaration, lock, facts.base)
        built = self._build(declaration, lock, jobs, facts.base)
        self._finish(lock, built, facts.base)

    def _look_at_base(self, declaration: Declaration) -> Facts:
        """Return what the base is now. Raises SandboxError."""
        base = bases.Base(declaration.base)
        if base.kind == "interpreter":
            bases.find_interpreter(base.name)
        if base.kind != "image":
            return Facts(base, has_apt=False, sources=())
        request = ExecutionRequest(
            facts_job().code,
            "python",
            usual_timeout=settings.TEMPLATE_BUILD_SECONDS,
            subject=f"template {self.version}"[:255],
        )
        digest = store().add_look(base.name)
        try:
            execution = self._execute(request, "The base cannot be read", digest)
        finally:
            store().remove(digest)
        image = str(execution.meta.get("image_digest") or "")
        facts = read_facts(base.name, image, execution.stdout)
        if not image:
            raise BuildFailed("The provider does not tell the digest of the image.")
        self.tell(f"Base {base.image_name}: {image}, Python {facts.base.python}, {facts.base.libc}")
        return facts

    def _jobs(self, declaration: Declaration, facts: Facts) -> _Jobs:
        job = job_for(
            declaration, settings.PACKAGE_INDEX_URL, settings.NPM_REGISTRY_URL, facts.base
        )
        return _Jobs(job, apt_job(declaration, facts) if declaration.apt else None)

    def _build(self, declaration: Declaration, lock: Lock, jobs: _Jobs, base: Base) -> Built:
        """Unpack the packages, and with them run the commands, where there are any."""
        files, fetch = store(), self._fetch_from(jobs)
        if not declaration.run or files.find(declaration, lock, base):
            built = files.build(declaration, lock, fetch, self.tell, base=base)
            if declaration.apt:
                self._try(built.digest)
            return built
        first = files.build(replace(declaration, run=()), lock, fetch, self.tell, base=base)
        try:
            if declaration.apt:
                self._try(first.digest)
            left = self._run_commands(declaration, first.digest)
            with left.file.open("rb") as workspace:
                built = files.build(declaration, lock, fetch, self.tell, workspace, base)
        finally:
            self._remove_unused(first.digest)
        if declaration.apt:
            self._try(built.digest)
        return built

    def _try(self, digest: str) -> None:
        """Have a sandbox with it, for which its packages are installed, where none had it before.

        Raises BuildFailed, and then nothing of it is left.
        """
        if TemplateVersion.objects.filter(digest=digest).exists():
            return
        request = ExecutionRequest("pass", "python", subject=f"template {self.version}"[:255])
        deadline = time.monotonic() + settings.TEMPLATE_BUILD_SECONDS
        try:
            while True:
                try:
                    self._execute(request, "The packages cannot be installed", digest)
                except BuildFailed as error:
                    cause = error.__cause__
                    if not isinstance(cause, RateLimited) or time.monotonic() > deadline:
                        raise
                    # They are being installed.
                    time.sleep(cause.retry_after or _PAUSE_SECONDS)
                else:
                    return
        except BaseException:
            self._remove_unused(digest)
            raise

    def _with_wheels(self, declaration: Declaration, lock: Lock, base: Base) -> Lock:
        """Return the lock with wheels in the place of sources, each built in a sandbox of its own.

        Raises BuildFailed.
        """
        sources = sources_of(lock)
        if not sources or store().find(declaration, lock, base):
            return lock
        made = {}
        for package in sources:
            job = job_of(package, settings.PACKAGE_INDEX_URL)
            execution = self._execute(self._request(job), f"{package.name} could not be built")
            made[package.name] = self._wheel_of(package, execution)
        return lock.replacing(made)

    def _wheel_of(self, package: LockedPackage, execution: Execution) -> LockedPackage:
        found = execution.artifacts.filter(name__endswith=".whl").first()
        if found is None:
            raise BuildFailed(f"{package.name}: The build left no wheel of at most 10 MiB.")
        digest = hashlib.sha256()
        with found.file.open("rb") as file:
            for piece in file.chunks():
                digest.update(piece)
        wheel = built_of(package, found.name, digest.hexdigest(), found.size_bytes)
        self._wheels[wheel.url] = found
        return wheel

    def _remove_unused(self, digest: str) -> None:
        """Remove what only the commands have used. Another build may be about to use it."""
        others = TemplateVersion.objects.filter(state__in=TemplateVersion.UNDER_WAY)
        if others.exclude(pk=self.version.pk).exists():
            return
        if not TemplateVersion.objects.filter(digest=digest).exists():
            store().remove(digest)

    def _run_commands(self, declaration: Declaration, digest: str) -> Artifact:
        """Run the commands in a sandbox with these packages; return the workspace that they leave.

        Raises BuildFailed.
        """
        job = commands_for(declaration)
        request = ExecutionRequest(
            job.code,
            "python",
            files=job.files,
            env=dict(declaration.environment),
            usual_timeout=settings.TEMPLATE_BUILD_SECONDS,
            subject=f"template {self.version}"[:255],
        )
        execution = self._execute(request, "The commands failed", digest)
        found = execution.artifacts.filter(name=WORKSPACE_ARCHIVE).first()
        if found is None:
            raise BuildFailed(
                "The commands left more in the workspace than a build can take: 10 MiB, packed."
            )
        return found

    def tell(self, line: str) -> None:
        """Add a line to the log. Raises Superseded where the build is no longer this process's."""
        self._note(line)
        self._keep_on()

    def _note(self, line: str) -> None:
        self._log += storable(line)[:_MOST_LINE] + "\n"
        if len(self._log) > MOST_LOG_CHARACTERS:
            self._log = "[...]\n" + self._log[-MOST_LOG_CHARACTERS // 2 :]

    def _tell_meanwhile(self, lines: Sequence[str]) -> None:
        """Add lines to the log while a part runs, whose end says what is wrong."""
        for line in lines:
            self._note(line)
        try:
            self._keep_on()
        except (Superseded, DatabaseFailure) as error:
            logger.info("the log of template version %s is not written: %r", self.version.pk, error)

    def fail(self, problem: str) -> None:
        end_build(by_claim(self.version), State.FAILED, problem, log=self._log)

    def _keep_on(self) -> None:
        if time.monotonic() - self._said_at >= _SAY_EVERY:
            self._put()

    def _put(self, **values: Any) -> None:
        self._said_at = time.monotonic()
        silent = max(0.0, self._silent_until - self._said_at)
        span = timedelta(seconds=silent) + _BUILDING
        if not by_claim(self.version).update(claimed_until=Now() + span, log=self._log, **values):
            raise Superseded

    def _fetch_from(self, jobs: _Jobs) -> Callable[[str, int], Iterator[bytes]]:
        """What fetches the files of the lock. The lists are asked once the first is wanted."""

        def fetch(address: str, most_bytes: int) -> Iterator[bytes]:
            if (wheel := self._wheels.get(address)) is not None:
                with wheel.file.open("rb") as file:
                    yield from file.chunks()
                return
            network = network_of_build(self._tenant.slug, jobs.rules)
            yield from fetcher(network, self._keep_on)(address, most_bytes)

        return fetch

    def _resolve(self, declaration: Declaration, jobs: _Jobs, facts: Facts) -> Lock:
        """Run the resolvers in sandboxes, and read what they wrote."""
        texts = {}
        if declaration.python or declaration.npm:
            wanted = (
                *([PYTHON_LOCK, YANKED] if declaration.python else ()),
                *([NPM_LOCK] if declaration.npm else ()),
            )
            request = self._request(jobs.packages)
            texts = _read_locks(self._execute(request, _UNRESOLVED), wanted)
        if jobs.apt is not None:
            digest = store().add_look(facts.base.name)
            try:
                execution = self._execute(self._request(jobs.apt), _UNRESOLVED, digest)
                texts |= _read_locks(execution, (APT_LOCK,))
            finally:
                store().remove(digest)
        libc = "musl" if facts.base.libc.startswith("musl") else "glibc"
        try:
            return Lock.parse(
                texts.get(PYTHON_LOCK, ""),
                texts.get(NPM_LOCK, ""),
                texts.get(APT_LOCK, ""),
                libc=libc,
                yanked=read_yanked(texts.get(YANKED, "{}")),
                build=declaration.build,
            )
        except InvalidConfiguration as error:
            raise BuildFailed(error.message) from None

    def _request(self, job: ResolveJob) -> ExecutionRequest:
        """What runs a job that reaches the index. Raises BuildFailed where it may not."""
        network_of_build(self._tenant.slug, job.rules)
        return ExecutionRequest(
            job.code,
            "python",
            files=job.files,
            usual_timeout=settings.TEMPLATE_BUILD_SECONDS,
            subject=f"template {self.version}"[:255],
            network=NetworkRequest(mode="allowlist", allow=list(job.rules)),
        )

    def _execute(self, request: ExecutionRequest, problem: str, digest: str = "") -> Execution:
        """Run a part of the build, with the packages of `digest`. Raises BuildFailed."""

        def note(execution: Execution) -> None:
            if not by_claim(self.version).update(execution_id=execution.pk):
                raise Superseded
            if digest:
                COMMANDS[execution.pk] = digest
                begun.append(execution.pk)

        begun: list[UUID] = []
        self._silent_until = time.monotonic() + settings.TEMPLATE_BUILD_SECONDS
        self._put()
        caller = Caller(self._tenant, request_id=f"template:{self.version.pk}")
        log = EventLog(run_limits())
        output = Lines(log, self._tell_meanwhile, _SAY_EVERY)
        try:
            outcome = run_sync(execute(request, caller, log=log, beside=note), output.wait)
        finally:
            self._silent_until = 0.0
            for pk in begun:
                COMMANDS.pop(pk, None)
        # The time that it took is not this process's silence.
        self._said_at = 0.0
        execution = outcome.execution
        for line in output.rest():
            self.tell(line)
        if outcome.error is not None:
            raise BuildFailed(f"{problem}: {outcome.error.message}") from outcome.error
        if execution.status != Execution.Status.SUCCEEDED:
            raise BuildFailed(f"{problem}. {_reason_of(execution)}".strip())
        return execution

    def _finish(self, lock: Lock, built: Built, base: Base) -> None:
        version = self.version
        said = {
            "template": self.template.name,
            "tenant": self.template.tenant.slug if self.template.tenant else None,
            "declaration_digest": self.version.declared.digest,
            "lock_digest": lock.digest,
            **({"base": base.name, "image": base.image} if base.kind else {}),
        }
        with lock_of(self.template.tenant):
            ensure_room(self.template.tenant, built)
            before = look_at(TemplateVersion, version.pk)
            won = by_claim(version).update(
                state=State.READY,
                lock=lock.to_json(),
                base=base.to_json() if base.kind else {},
                digest=built.digest,
                size_bytes=built.size_bytes,
                python=built.python,
                licences=dict(built.licences),
                log=self._log,
                ended_at=timezone.now(),
                claimed_until=None,
                claims=F("claims") + 1,
            )
            if not won:
                raise Superseded
            version.refresh_from_db()
            enter_row(version, "built", before, said)
            draft = TemplateDraft.objects.filter(pk=version.pk).first()
            if draft is not None:
                assign_tags(version, draft.tags, version.requested_by)
                draft.delete()


def _reason_of(execution: Execution) -> str:
    """Return why a part of a build did not succeed."""
    if execution.status == Execution.Status.TIMED_OUT:
        most = settings.TEMPLATE_BUILD_SECONDS
        return (
            f"It took more time than {most} s. An administrator can raise TEMPLATE_BUILD_SECONDS."
        )
    if execution.status == Execution.Status.OUT_OF_MEMORY:
        return "It took more memory than a sandbox has."
    return next(filter(None, reversed(execution.stderr.strip().splitlines())), "")


def _read_locks(execution: Execution, wanted: Sequence[str]) -> dict[str, str]:
    """Read the artifacts of a resolver, by name. Raises BuildFailed."""
    found = {each.name: each for each in execution.artifacts.all()}
    texts = {}
    for name in wanted:
        artifact = found.get(name)
        if artifact is None or artifact.size_bytes > MOST_LOCK_BYTES:
            raise BuildFailed(f"The resolver left no {name} of at most {MOST_LOCK_BYTES} bytes.")
        with artifact.file.open("rb") as file:
            texts[name] = file.read(MOST_LOCK_BYTES + 1).decode("utf-8", "replace")
    return texts
