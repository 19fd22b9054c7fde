"""django-q's `qcluster`, which does our tasks alone and whose processes cannot outlive it."""

from typing import Any

from django.core.checks import Tags
from django.core.management.base import CommandError
from django.db import connection
from django_q.management.commands import qcluster

from sandbox_site import installation
from sandbox_site.cluster import Cluster
from sandbox_site.processes import descendants_die_with_parents
from sandbox_site.worker import restrict


class Command(qcluster.Command):  # type: ignore[misc]
    # The others are of pages, which no task has.
    requires_system_checks = [Tags.security]

    def handle(self, *args: Any, **options: Any) -> None:
        _join()
        descendants_die_with_parents()
        restrict()
        qcluster.Cluster = Cluster
        super().handle(*args, **options)


def _join() -> None:
    try:
        installation.join()
    except installation.DoesNotFit as error:
        raise CommandError(str(error)) from None
    finally:
        # The processes of the cluster are forked, and must not share it.
        connection.close()
