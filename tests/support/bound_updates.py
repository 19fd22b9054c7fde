"""No code of ours changes bound rows in bulk past the ledger, in any test.

`save` and `delete` are compared and entered by signals. An UPDATE or an INSERT of many rows sends
none: who writes one looks at the rows first, with `look_at`, or enters the new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from django.db.models import Model, QuerySet

from executions.ledger.bindings import BINDINGS, columns_of
from tests.support.processes import ROOT

_OURS = tuple(f"{ROOT / name}/" for name in ("executions", "providers", "sandbox_site"))
# It tells of its rows itself.
_ANNOUNCED = "AnnouncedQuerySet.update"
# It writes what is encrypted anew, of which the ledger has the plain text.
_KNOWN = "providers/services/rotation.py"


def _writer() -> FrameType | None:
    """Whoever called Django, if that is code of ours."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and "/django/" in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(_OURS):
        return None
    file = frame.f_code.co_filename
    is_known = frame.f_code.co_qualname == _ANNOUNCED or file.endswith(_KNOWN)
    # A migration changes what takes stock afterwards.
    return None if is_known or "/migrations/" in file else frame


def _require(frame: FrameType | None, name: str, model: type[Model]) -> None:
    if frame is not None and name not in frame.f_code.co_names:
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        raise AssertionError(f"{place} writes {model._meta.label_lower} without {name}")


@pytest.fixture(autouse=True, scope="session")
def _bound_rows_are_looked_at() -> Iterator[None]:
    update, bulk_create = QuerySet.update, QuerySet.bulk_create

    def looked_at(rows: QuerySet[Any], /, **values: Any) -> int:
        options: Any = rows.model._meta
        if options.label_lower in BINDINGS:
            written = {options.get_field(name).attname for name in values}
            if not written.isdisjoint(columns_of(rows.model)):
                _require(_writer(), "look_at", rows.model)
        return update(rows, **values)

    def entered(rows: QuerySet[Any], /, *args: Any, **options: Any) -> list[Any]:
        if rows.model._meta.label_lower in BINDINGS:
            _require(_writer(), "enter_row", rows.model)
        return bulk_create(rows, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(QuerySet, "update", looked_at)
        patch.setattr(QuerySet, "bulk_create", entered)
        yield
