from __future__ import annotations

from typing import Any, TypeVar

from django.db import models, transaction

from providers.signals import rows_update, rows_updated

Row = TypeVar("Row", bound=models.Model)


class AnnouncedQuerySet(models.QuerySet[Row]):
    """Rows whose conditional UPDATEs are told of, as their saving and deleting are by Django."""

    def update(self, **values: Any) -> int:
        with transaction.atomic(using=self.db, savepoint=False):
            pks = list(self.order_by().select_for_update().values_list("pk", flat=True))
            if not pks:
                return 0
            before: dict[Any, Any] = {}
            rows_update.send(sender=self.model, pks=pks, before=before)
            changed = super().update(**values)
            if changed:
                rows_updated.send(sender=self.model, pks=pks, before=before)
        return changed
