"""Builds that clients announce before they declare them, and the files that they upload."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from uuid import UUID

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from executions.capabilities.templates import builds
from executions.capabilities.templates.models import (
    Template,
    TemplateDraft,
    TemplateUpload,
    TemplateVersion,
)
from executions.capabilities.templates.names import TAG
from executions.kernel.declarations import refuse
from executions.tenants.models import Tenant
from providers.errors import RateLimited
from providers.templates.declaration import FILES_BYTES, Declaration

# Of an archive, which comes without a key.
MOST_UPLOAD_BYTES = FILES_BYTES // 2
_MOST_UPLOADS = _MOST_DRAFTS = 100
_KEPT = timedelta(days=1)


def announce(tenant: Tenant, name: str, tags: Sequence[str], by: str) -> TemplateDraft:
    """Announce a build of the tenant's template of this name, which is made where there is none.

    Raises InvalidConfiguration and RateLimited.
    """
    if not all(TAG.fullmatch(tag) for tag in tags):
        refuse("tags", "Use letters, digits, and . _ - between them, 63 at most.")
    template = Template.objects.filter(tenant=tenant, name=name, removed_at=None).first()
    if template is None:
        template = builds.add_template(tenant, name, by)
    if template.drafts.count() >= _MOST_DRAFTS:
        raise RateLimited("Too many builds of the template were announced.", field="templates")
    return TemplateDraft.objects.create(template=template, tags=list(tags))


def drafts_of(tenant: Tenant) -> QuerySet[TemplateDraft]:
    """Return the builds that a tenant has announced."""
    rows = TemplateDraft.objects.filter(template__tenant=tenant, template__removed_at=None)
    return rows.select_related("template__tenant")


def draft_of(tenant: Tenant, build_id: UUID) -> TemplateDraft | None:
    """Return the build that a tenant has announced, None where there is none."""
    return drafts_of(tenant).filter(pk=build_id).first()


def start(
    draft: TemplateDraft, declared: Declaration, by: str, *, refresh: bool
) -> TemplateVersion:
    """Build what was announced. Raises as `builds.request_build` does."""
    return builds.request_build(draft.template, by, declared, refresh=refresh, version_id=draft.pk)


def template_of_link(template_id: str) -> Template | None:
    """Return the template that a signed link names, None where it was removed."""
    return Template.objects.filter(pk=template_id, removed_at=None).first()


def upload_of(template: Template, digest: str) -> bytes | None:
    """Return the archive that was uploaded for a hash, None where there is none."""
    found = template.uploads.filter(hash=digest).values_list("content", flat=True).first()
    return None if found is None else bytes(found)


def store_upload(template: Template, digest: str, content: bytes) -> None:
    """Store an archive by its hash. Raises RateLimited beyond the template's bound."""
    with transaction.atomic():
        # One at a time, or the bound would be passed.
        Template.objects.select_for_update().get(pk=template.pk)
        others = template.uploads.exclude(hash=digest)
        if others.count() >= _MOST_UPLOADS:
            raise RateLimited("Too many files were uploaded for the template.", field="templates")
        TemplateUpload.objects.update_or_create(
            template=template,
            hash=digest,
            defaults={"content": content, "created_at": timezone.now()},
        )


def remove_old() -> None:
    """Remove what was announced or uploaded a day ago."""
    before = timezone.now() - _KEPT
    TemplateDraft.objects.filter(created_at__lt=before).delete()
    TemplateUpload.objects.filter(created_at__lt=before).delete()
