"""django-q's `qcluster`, which does our tasks alone and whose processes cannot outlive it."""

from typing import Any

from django_q.management.commands import qcluster

from sandbox_site.processes import descendants_die_with_parents
from sandbox_site.worker import restrict


class Command(qcluster.Command):  # type: ignore[misc]
    def handle(self, *args: Any, **options: Any) -> None:
        descendants_die_with_parents()
        restrict()
        super().handle(*args, **options)
