"""Builds of templates: requested, approved, carried out, cancelled, and removed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from uuid import UUID

from django.conf import settings
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction
from django.db.models import F, Max, QuerySet
from django.utils import timezone
from django_q.tasks import async_task

from executions.capabilities.templates.bounds import ensure_one_more, ensure_room, lock_of
from executions.capabilities.templates.build import Build, Superseded, end_build, needs_approval
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import ensure_allowed, ensure_as_entered, store
from executions.kernel.audit import acting_as
from executions.kernel.background import run_once_in_background
from executions.kernel.claims import claim, is_free
from executions.kernel.declarations import refuse
from executions.kernel.text import uuid7
from executions.ledger.append import enter_row, look_at
from executions.runs.models import Execution
from executions.runs.requests import CONFLICT, Conflict
from executions.runs.service import HasEnded, cancel
from executions.sessions.models import Session, Snapshot
from executions.tenants.models import Tenant
from providers.errors import RateLimited, SandboxError
from providers.templates import base as bases
from providers.templates.declaration import Declaration, check_name

logger = logging.getLogger(__name__)

TASK = "executions.tasks.build_templates"
# Of one template. What nothing uses is removed after some days.
MOST_VERSIONS = 100
# How long a process may be silent: while the packages are resolved, and after that.
_RESOLVING = timedelta(minutes=15)

State = TemplateVersion.State


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
    with lock_of(tenant):
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
        with lock_of(tenant):
            ensure_one_more(tenant)
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
        with lock_of(template.tenant):
            if not Template.objects.filter(pk=template.pk, removed_at=None).exists():
                raise NoActiveBuild("The template was removed.")
            ensure_room(template.tenant)
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
    if not end_build(rows, State.CANCELLED, f"Cancelled by {by}."):
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
        end_build(
            _abandoned().filter(pk=pk), State.FAILED, "Its process has ended. Build it again."
        )
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
    build = Build(version)
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
