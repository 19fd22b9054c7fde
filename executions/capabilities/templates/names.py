"""Names and tags of templates: which version one means, and whether its row can be trusted.

A row that was changed in the database, past the service, serves nobody: each use compares the
version and its template with their last entries in the ledger.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import transaction
from django.db.models import Model, Prefetch, Q, QuerySet

from executions.capabilities.templates import defaults
from executions.capabilities.templates.models import Template, TemplateVersion
from executions.kernel.declarations import refuse
from executions.ledger.append import enter_row, is_altered, last_entry, look_at
from executions.ledger.bindings import row_hash
from executions.runs.routing import none_of_this_name
from executions.tenants.models import Tenant
from providers.templates.base import Base
from providers.templates.declaration import DEFAULT, NAME, Declaration
from providers.templates.store import TemplateStore

logger = logging.getLogger(__name__)

MOST_LISTED = 100
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
# What a program imports, without what could lead out of a folder.
_MODULE = re.compile(r"(@[\w.-]+/)?\w[\w.-]*")
# Tags that mean the newest version where they were not given to one.
_NEWEST = ("default", "latest")
_MOST_KEPT = 200
MOST_TAGS = 100


class Named(NamedTuple):
    """A name as a request has it; without number and tag it is the newest version that is ready."""

    name: str
    number: int | None = None
    tag: str = ""


@dataclass(frozen=True)
class Chosen:
    """A version that is ready, as the ledger has it. `is_shared` is one of the installation's. The
    default packages have no number.
    """

    id: UUID
    name: str
    number: int | None
    digest: str
    declaration: Declaration
    has_packages: bool
    is_shared: bool

    @property
    def files(self) -> Mapping[str, bytes]:
        """The files that its sandboxes begin with. Raises InvalidConfiguration."""
        if not self.declaration.run:
            return self.declaration.files
        found = store().workspace(self.digest)
        if found is None:
            refuse(
                "template", f"The files of {self.label} are not on this machine. Build it again."
            )
        return found

    @property
    def label(self) -> str:
        return self.name if self.number is None else f"{self.name}@{self.number}"

    def to_json(self) -> dict[str, Any]:
        """Return what the metadata of an execution says of it."""
        return {"name": self.name, "version": self.number, "digest": self.digest}


def store() -> TemplateStore:
    """Return the templates of this machine."""
    return TemplateStore(settings.DATA_DIR, settings.TEMPLATE_MAX_MB << 20)


def read_name(text: str) -> Named | None:
    """Return what `name`, `name@3` or `name:tag` says; None for what names no template of ours."""
    name, colon, tag = text.partition(":")
    if colon:
        is_read = NAME.fullmatch(name) and TAG.fullmatch(tag)
        return Named(name, tag=tag) if is_read else None
    name, at, number = text.partition("@")
    if not NAME.fullmatch(name) or (at and not _NUMBER.fullmatch(number)):
        return None
    return Named(name, int(number) if at else None)


def templates_for(tenant: Tenant) -> QuerySet[Template]:
    """Return the templates that the tenant's code may have, its own and the installation's."""
    return Template.objects.filter(_of(tenant.slug), removed_at=None)


def with_versions(templates: QuerySet[Template]) -> QuerySet[Template]:
    """Have what lists show of all versions read with the templates, the newest first."""
    shown = ("template", "number", "state", "problem", "digest", "base", "created_at", "ended_at")
    versions = TemplateVersion.objects.only(*shown).order_by("-number")
    return templates.prefetch_related(Prefetch("versions", versions))


def find(tenant_slug: str, text: str) -> Chosen | None:
    """Return the version that a name means: of the tenant's own template, else of the
    installation's. None where there is none that is ready.

    Raises InvalidConfiguration for one whose row was changed past the service.
    """
    named = read_name(text)
    if named is None:
        return None
    if named.name == DEFAULT:
        is_usual = named.number is None and named.tag in ("", *_NEWEST)
        return _default() if is_usual else None
    rows = _ready().filter(
        _of(tenant_slug, "template__"), template__name=named.name, template__removed_at=None
    )
    number = named.number
    if named.tag:
        templates = Template.objects.filter(_of(tenant_slug), name=named.name, removed_at=None)
        tagged = sorted(templates, key=lambda each: each.tenant_id is None)[:1]
        number = tagged[0].tags.get(named.tag) if tagged else None
        if number is None and named.tag not in _NEWEST:
            return None
    if number is not None:
        rows = rows.filter(number=number)
    found = list(rows.order_by("-number")[:MOST_LISTED])
    own = [row for row in found if row.template.tenant_id is not None]
    row = next(iter(own or found), None)
    return None if row is None else _trusted(row)


def choose(tenant_slug: str, text: str) -> Chosen:
    """Return the version that a name means. Raises InvalidConfiguration with field template."""
    found = find(tenant_slug, text)
    if found is None:
        refuse("template", none_of_this_name(text, names_for(tenant_slug)))
    return _allowed(found)


def chosen_by_id(version_id: UUID) -> Chosen:
    """Return a version that was chosen before, as it was then. Raises InvalidConfiguration where
    it is gone."""
    if version_id == defaults.ID:
        return _default()
    with _lock:
        found = _kept.get(version_id)
    if found is None:
        row = _ready().filter(pk=version_id).first()
        if row is None:
            refuse("template", "The version of the session was removed. Open another session.")
        found = _trusted(row)
    return _allowed(found)


def names_for(tenant_slug: str) -> list[str]:
    """Return the names that the tenant can use, in their order."""
    rows = _ready().filter(_of(tenant_slug, "template__"), template__removed_at=None)
    names = rows.order_by("template__name").values_list("template__name", flat=True).distinct()
    usual = [DEFAULT] if defaults.installed_packages() else []
    return [*usual, *names[:MOST_LISTED]]


MOST_ADVISED = 3
_MOST_LOOKED_AT = 20


def names_with(tenant_slug: str, installer: str, module: str) -> list[str]:
    """Return names of templates that the tenant can use and that have a module, a few of them.

    Only the files on this machine are looked at.
    """
    is_npm = installer == "npm"
    place = "node_modules/{}" if is_npm else "lib/python*/site-packages/{}"
    module = module if is_npm else module.partition(".")[0]
    if not _MODULE.fullmatch(module):
        return []
    found: list[str] = []
    for name in names_for(tenant_slug)[:_MOST_LOOKED_AT]:
        chosen = find(tenant_slug, name)
        if chosen is None or not chosen.has_packages:
            continue
        folder = store().path(chosen.digest)
        if any(next(folder.glob(place.format(each)), None) for each in (module, f"{module}.py")):
            found.append(name)
        if len(found) == MOST_ADVISED:
            break
    return found


def ensure_as_entered(row: Model) -> None:
    """Raise InvalidConfiguration for a row that is not as the ledger has it, and enter that."""
    label = row._meta.label_lower
    last = last_entry(label, str(row.pk))
    is_known = last is not None and not last.problem and last.altered_at is None and last.is_there
    if last is not None and is_known and row_hash(row, last.columns) == last.row_hash:
        return
    is_altered(type(row), row.pk)
    refuse(
        "template",
        "It was changed in the database, past the service, and is not used. An administrator can "
        "run manage.py verify_ledger, and build another version.",
    )


def ensure_allowed(declaration: Declaration, *, is_tenants: bool, field: str = "base") -> None:
    """Raise InvalidConfiguration where a tenant's template names an image that it may not have:
    images of a pool can hold what no tenant is to read."""
    base = Base(declaration.base)
    if is_tenants and base.kind == "image" and base.image_name not in settings.TEMPLATE_IMAGES:
        refuse(
            field,
            f"Tenants may not name the image {base.image_name[:100]}. An administrator can add it "
            "to TEMPLATE_IMAGES.",
        )


def _allowed(found: Chosen) -> Chosen:
    """The same, where the setting has not become narrower than when it was built."""
    ensure_allowed(found.declaration, is_tenants=not found.is_shared, field="template")
    return found


_kept: OrderedDict[UUID, Chosen] = OrderedDict()
_lock = Lock()


def _trusted(row: TemplateVersion) -> Chosen:
    ensure_as_entered(row)
    ensure_as_entered(row.template)
    found = Chosen(
        row.pk,
        row.template.name,
        row.number,
        row.digest,
        row.declared,
        bool(row.lock or row.declared.run or row.declared.base),
        row.template.tenant_id is None,
    )
    with _lock:
        _kept[found.id] = found
        while len(_kept) > _MOST_KEPT:
            _kept.popitem(last=False)
    return found


def _default() -> Chosen:
    known = defaults.default_packages()
    digest = known.digest if known is not None else ""
    return Chosen(
        defaults.ID, DEFAULT, None, digest, Declaration(), has_packages=False, is_shared=True
    )


def _ready() -> QuerySet[TemplateVersion]:
    ready = TemplateVersion.objects.filter(state=TemplateVersion.State.READY)
    return ready.select_related("template__tenant").defer("log")


def _of(tenant_slug: str, prefix: str = "") -> Q:
    return Q(**{f"{prefix}tenant": None}) | Q(**{f"{prefix}tenant__slug": tenant_slug})


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
