"""Tags of templates: names that mean one of its versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from django.db import transaction

from executions.capabilities.templates.models import Template, TemplateVersion
from executions.capabilities.templates.names import TAG
from executions.kernel.declarations import refuse
from executions.ledger.append import enter_row, look_at

MOST_TAGS = 100


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
