"""Builds of templates: requested, approved, carried out by one process, cancelled, and removed.

A build resolves its packages in an execution of the tenant, and of the internal tenant for the
installation. No package's code runs outside of it: what the lock names is fetched, checked and
unpacked by `TemplateStore`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import Error as DatabaseFailure
from django.db import IntegrityError, transaction
from django.db.models import F, Max, QuerySet, Sum
from django.db.models.functions import Now
from django.utils import timezone
from django_q.tasks import async_task

from executions.capabilities.templates import advisories
from executions.capabilities.templates.downloads import fetcher, network_of_build
from executions.capabilities.templates.models import (
    MOST_LOG_CHARACTERS,
    Template,
    TemplateDraft,
    TemplateVersion,
)
from executions.capabilities.templates.names import (
    TAG,
    ensure_allowed,
    ensure_as_entered,
    store,
)
from executions.capabilities.templates.output import Lines
from executions.kernel.audit import acting_as
from executions.kernel.background import run_once_in_background
from executions.kernel.claims import by_claim, claim, is_free
from executions.kernel.coroutines import run_sync
from executions.kernel.declarations import refuse
from executions.kernel.text import storable, uuid7
from executions.ledger.append import enter_row, look_at
from executions.runs.event_log import EventLog
from executions.runs.models import Artifact, Execution
from executions.runs.network import NetworkRequest
from executions.runs.requests import CONFLICT, Caller, Conflict, ExecutionRequest, run_limits
from executions.runs.service import HasEnded, cancel, execute
from executions.sessions.models import Session, Snapshot
from executions.tenants.models import Tenant
from executions.tenants.quotas import tenant_lock
from executions.tenants.service import internal_tenant
from providers.errors import InvalidConfiguration, RateLimited, SandboxError
from providers.guarded import two_person_rule
from providers.templates import base as bases
from providers.templates.base import Base
from providers.templates.declaration import Declaration, check_name
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

TASK = "executions.tasks.build_templates"
MOST_LOCK_BYTES = 1 << 20
# Of one template. What nothing uses is removed after some days.
MOST_VERSIONS = 100
MOST_TAGS = 100
# How long a process may be silent: while the packages are resolved, and after that.
_RESOLVING = timedelta(minutes=15)
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


class NoActiveBuild(Conflict):
    """There is nothing left to be cancelled or approved."""

    entry = CONFLICT


def create(
    tenant: Tenant | None, name: str, declaration: Declaration, by: str, description: str = ""
) -> TemplateVersion:
    """Create a template and request its first build. `by` is who wants it.

    Raises InvalidConfiguration for a name that is none, Conflict for one that is taken, RateLimited
    beyond the tenant's bounds.
    """
    with _lock_of(tenant):
        template = add_template(tenant, name, by, description)
        version = _add_version(template, declaration, by, None)
    _start(version)
    return version


def add_template(tenant: Tenant | None, name: str, by: str, description: str = "") -> Template:
    """Create a template without a version. Raises as `create` does."""
    template = Template(tenant=tenant, name=name, description=description, created_by=by)
    check_name(name)
    try:
        template.full_clean(validate_unique=False, validate_constraints=False)
    except ValidationError as error:
        field, said = next(iter(error.message_dict.items()))
        refuse(field, " ".join(said))
    try:
        with _lock_of(tenant):
            _ensure_one_more(tenant)
            template.save(force_insert=True)
    except IntegrityError as error:
        raise Conflict(f"name: There is a template {name} already.", field="name") from error
    return template


def request_build(
    template: Template,
    by: str,
    declaration: Declaration | None = None,
    *,
    refresh: bool = False,
    version_id: UUID | None = None,
) -> TemplateVersion:
    """Request the next version of a template: of the newest declaration without another one.

    The same declaration keeps its lock, unless `refresh` asks for the newest packages. The version
    has the id that is given. Raises Conflict while a build is under way, RateLimited beyond the
    tenant's bounds.
    """
    former = template.versions.defer("log").order_by("-number").first()
    if declaration is None:
        if former is None:
            refuse("declaration", "The template has none yet. Send one.")
        declaration = former.declared
    try:
        with _lock_of(template.tenant):
            if not Template.objects.filter(pk=template.pk, removed_at=None).exists():
                raise NoActiveBuild("The template was removed.")
            _ensure_room(template.tenant)
            known = None if refresh else _lock_known(template, declaration)
            version = _add_version(template, declaration, by, known, version_id)
    except IntegrityError as error:
        raise Conflict(
            "A build of the template is under way. Wait for it, or cancel it."
        ) from error
    _start(version)
    return version


def request(
    tenant: Tenant | None,
    name: str,
    declaration: Declaration,
    by: str,
    description: str = "",
    *,
    refresh: bool = False,
) -> TemplateVersion:
    """Request the next version of a template, and create the template where it is not there.

    Raises what `create` and `request_build` do.
    """
    template = Template.objects.filter(tenant=tenant, name=name, removed_at=None).first()
    if template is None:
        return create(tenant, name, declaration, by, description)
    return request_build(template, by, declaration, refresh=refresh)


def build_now(
    tenant: Tenant | None,
    name: str,
    declaration: Declaration,
    by: str,
    description: str = "",
    *,
    refresh: bool = False,
) -> TemplateVersion:
    """Build the next version of a template here, and create the template where it is not there.

    Raises what `create` and `request_build` do; how the build ended is in its row.
    """
    version = request(tenant, name, declaration, by, description, refresh=refresh)
    build_one(version.pk)
    version.refresh_from_db()
    return version


def needs_approval(template: Template) -> bool:
    """Whether a second administrator has to approve its builds."""
    return template.tenant_id is None and two_person_rule()


def _add_version(
    template: Template,
    declaration: Declaration,
    by: str,
    known: TemplateVersion | None,
    version_id: UUID | None = None,
) -> TemplateVersion:
    """Add the next version, in the caller's transaction, with the lock of one that is known.

    Raises IntegrityError where one is under way, RateLimited for one too many, and
    InvalidConfiguration for a base that the tenant may not name.
    """
    ensure_allowed(declaration, is_tenants=template.tenant_id is not None)
    if template.versions.count() >= MOST_VERSIONS:
        raise RateLimited(
            f"The template has {MOST_VERSIONS} versions. Remove it, or wait until old ones are "
            "removed.",
            field="templates",
        )
    last = template.versions.aggregate(last=Max("number"))["last"] or 0
    version = TemplateVersion(
        id=version_id or uuid7(),
        template=template,
        number=last + 1,
        declaration=declaration.to_json(),
        lock=known and known.lock,
        base=known.base if known else {},
        state=State.PENDING if needs_approval(template) else State.QUEUED,
        requested_by=by,
    )
    version.save(force_insert=True)
    return version


def _lock_known(template: Template, declaration: Declaration) -> TemplateVersion | None:
    """The newest version that is ready, where that was declared alike."""
    former = template.versions.filter(state=State.READY).defer("log").order_by("-number").first()
    if former is None or former.declaration != declaration.to_json():
        return None
    ensure_as_entered(former)
    return former


def _lock_of(tenant: Tenant | None) -> AbstractContextManager[Any]:
    return transaction.atomic() if tenant is None else tenant_lock(tenant.slug)


def _ensure_one_more(tenant: Tenant | None) -> None:
    """Raises RateLimited for a tenant with as many templates as it may have."""
    if tenant is None:
        return
    most = settings.TEMPLATES_PER_TENANT
    has = Template.objects.filter(tenant=tenant, removed_at=None).count()
    if has >= most:
        raise RateLimited(
            f"The tenant has {has} templates, and the limit is {most}. Remove one.",
            field="templates",
        )
    _ensure_room(tenant)


def _ensure_room(tenant: Tenant | None, built: Built | None = None) -> None:
    """Raises RateLimited for a tenant whose templates take more than they may."""
    if tenant is None:
        return
    versions = TemplateVersion.objects.filter(template__tenant=tenant).exclude(digest="")
    files = versions.order_by().values("digest", "size_bytes").distinct()
    used = files.aggregate(used=Sum("size_bytes"))["used"] or 0
    if built is not None and not versions.filter(digest=built.digest).exists():
        used += built.size_bytes
    most = settings.TEMPLATES_MB_PER_TENANT << 20
    if used > most or (built is None and used >= most):
        raise RateLimited(
            f"The templates of the tenant take {used >> 20} MiB, and the limit is {most >> 20} "
            "MiB. Remove one.",
            field="template_bytes",
        )


def _start(version: TemplateVersion) -> None:
    """Have it built: here where that takes no network and nothing to be unpacked, else by a
    worker."""
    if version.state != State.QUEUED:
        return
    declared = version.declared
    if bases.Base(declared.base).kind:
        # What it is now is found out first.
        is_at_hand = False
    elif declared.packages or declared.run:
        is_at_hand = version.lock is not None and bool(store().find(declared, version.locked))
    else:
        is_at_hand = True
    if is_at_hand:
        build_one(version.pk)
        version.refresh_from_db()
        return
    async_task(TASK)


async def cancel_build(version: TemplateVersion, by: str) -> TemplateVersion:
    """Cancel a build, and the execution that resolves its packages. Raises NoActiveBuild."""
    rows = TemplateVersion.objects.filter(pk=version.pk, state__in=TemplateVersion.ACTIVE)
    if not _end(rows, State.CANCELLED, f"Cancelled by {by}."):
        raise NoActiveBuild("The build has ended.")
    version.refresh_from_db()
    resolved_by = version.execution_id
    execution = None
    if resolved_by is not None:
        execution = Execution.objects.filter(pk=resolved_by, finished_at=None).first()
    if execution is not None:
        try:
            await cancel(execution, by)
        except HasEnded:
            logger.info("the execution of template version %s has ended", version.pk)
    return version


def approve(version: TemplateVersion, by: str) -> None:
    """Approve a build that waits. Raises Conflict for whoever requested it, and NoActiveBuild."""
    if version.requested_by == by:
        raise Conflict("Another administrator has to approve it.")
    with transaction.atomic():
        before = look_at(TemplateVersion, version.pk)
        rows = TemplateVersion.objects.filter(pk=version.pk, state=State.PENDING)
        if not rows.update(state=State.QUEUED, approved_by=by):
            raise NoActiveBuild("It does not wait for an approval.")
        version.refresh_from_db()
        enter_row(version, "approved", before)
    _start(version)


async def remove(template: Template, by: str) -> None:
    """Remove a template: its name means nothing from now on. Sessions that have it keep it.

    Raises Conflict where it was removed already.
    """
    with transaction.atomic():
        before = look_at(Template, template.pk)
        rows = Template.objects.filter(pk=template.pk, removed_at=None)
        if not rows.update(removed_at=timezone.now()):
            raise Conflict("The template was removed already.")
        template.refresh_from_db()
        enter_row(template, "removed", before, {"by": by})
    for version in template.versions.filter(state__in=TemplateVersion.ACTIVE).defer("log"):
        try:
            await cancel_build(version, by)
        except NoActiveBuild:
            continue


def _end(rows: QuerySet[TemplateVersion], state: str, problem: str, **values: Any) -> bool:
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


def build_in_background() -> None:
    """Have a thread of this process build what waits. Safe to call at any time."""
    run_once_in_background("templates", build_waiting)


def build_waiting() -> int:
    """Build what waits, one after another. Return how many were built."""
    fail_abandoned()
    built = 0
    # What is requested meanwhile, too. A version does not wait any more once it was tried.
    while (pk := _waiting().values_list("pk", flat=True).first()) is not None:
        built += build_one(pk)
    return built


def fail_abandoned() -> int:
    """Fail what a process has begun and not ended: it was killed. Return how many."""
    return sum(
        _end(_abandoned().filter(pk=pk), State.FAILED, "Its process has ended. Build it again.")
        for pk in list(_abandoned().values_list("pk", flat=True))
    )


def _waiting() -> QuerySet[TemplateVersion]:
    return TemplateVersion.objects.filter(is_free(), state=State.QUEUED).order_by("pk")


def _abandoned() -> QuerySet[TemplateVersion]:
    return TemplateVersion.objects.filter(is_free(), state__in=TemplateVersion.UNDER_WAY)


def build_one(pk: UUID) -> bool:
    """Build it, if no other process does. What is wrong is in its row."""
    version = claim(
        _waiting().filter(pk=pk), _RESOLVING, state=State.RESOLVING, tries=F("tries") + 1
    )
    if version is None:
        return False
    build = _Build(version)
    try:
        with acting_as(lambda: version.requested_by):
            build.run()
    except Superseded:
        logger.info("template version %s was cancelled, or another process builds it", pk)
        return False
    except SandboxError as error:
        build.fail(error.message)
        return False
    except Exception:
        logger.exception("template version %s could not be built", pk)
        build.fail("It failed inside the service. The log has the details.")
        return False
    return True


@dataclass(frozen=True)
class _Jobs:
    """What resolves a declaration: packages of Python and npm, and those of Debian."""

    packages: ResolveJob
    apt: ResolveJob | None

    @property
    def rules(self) -> tuple[str, ...]:
        """Return the network rules that the files of both need."""
        return tuple(dict.fromkeys((*self.packages.rules, *(self.apt.rules if self.apt else ()))))


class _Build:
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
            left = self._run_commands(declaration, first.digest)
            with left.file.open("rb") as workspace:
                return files.build(declaration, lock, fetch, self.tell, workspace, base)
        finally:
            self._remove_unused(first.digest)

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
        _end(by_claim(self.version), State.FAILED, problem, log=self._log)

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
        with _lock_of(self.template.tenant):
            _ensure_room(self.template.tenant, built)
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


def assign_tags(version: TemplateVersion, tags: Sequence[str], by: str) -> None:
    """Have each of the tags mean this version from now on, in its template. Raises
    InvalidConfiguration for what cannot be a tag."""
    for tag in tags:
        if not TAG.fullmatch(tag):
            refuse("tags", "Use letters, digits, and . _ - between them, 63 at most.")
    _change_tags(version.template, dict.fromkeys(tags, version.number), by)


def remove_tags(template: Template, tags: Sequence[str], by: str) -> None:
    """Have the tags mean nothing."""
    _change_tags(template, dict.fromkeys(tags), by)


def _change_tags(template: Template, changes: Mapping[str, int | None], by: str) -> None:
    if not changes:
        return
    with transaction.atomic():
        now = Template.objects.select_for_update().get(pk=template.pk)
        tags = {name: number for name, number in {**now.tags, **changes}.items() if number}
        if len(tags) > MOST_TAGS:
            refuse("tags", f"A template has at most {MOST_TAGS} tags.")
        before = look_at(Template, template.pk)
        Template.objects.filter(pk=template.pk).update(tags=tags)
        template.refresh_from_db()
        enter_row(template, "tagged", before, {"by": by})


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


_AT_ONCE = 100


def remove_unused() -> int:
    """Remove versions that ended some days ago and that nothing uses, and files of no version.

    Used is the newest that is ready, and what an open session has. Return how many were removed.
    """
    before = timezone.now() - timedelta(days=settings.TEMPLATE_KEEP_DAYS)
    old = TemplateVersion.objects.filter(ended_at__lt=before).order_by("pk")
    removed = sum(_remove_if_unused(pk) for pk in list(old.values_list("pk", flat=True)))
    for template in Template.objects.filter(removed_at__lt=before, versions=None)[:_AT_ONCE]:
        template.delete()
    _remove_files()
    return removed


def _remove_if_unused(pk: UUID) -> bool:
    with transaction.atomic():
        rows = TemplateVersion.objects.select_for_update(of=("self",)).filter(pk=pk)
        version = rows.select_related("template").defer("log").first()
        if version is None or _is_used(pk):
            return False
        ready = version.template.versions.filter(state=State.READY)
        newest = ready.order_by("-number").values_list("pk", flat=True).first()
        if version.template.removed_at is None and newest == pk:
            return False
        version.delete()
    return True


def _is_used(version_id: UUID) -> bool:
    """Whether an open session has it, or one that snapshots were taken of."""
    sessions = Session.objects.filter(template_version=version_id)
    if sessions.filter(closed_at=None).exists():
        return True
    return Snapshot.objects.filter(source__in=sessions.values("pk")).exists()


def _remove_files() -> None:
    """Remove the files that no version names. Not while something is built, which may be about to
    name them."""
    files = store()
    for digest in files.digests():
        if TemplateVersion.objects.filter(state__in=TemplateVersion.UNDER_WAY).exists():
            return
        if not TemplateVersion.objects.filter(digest=digest).exists():
            files.remove(digest)


def problems() -> Iterator[tuple[TemplateVersion, str]]:
    """Compare the files of each version that is ready with its digest. What is wrong is told."""
    ready = TemplateVersion.objects.filter(state=State.READY).select_related("template")
    for version in ready.defer("log", "declaration", "lock").order_by("pk").iterator():
        if problem := store().verify(version.digest):
            yield version, problem
