"""The worker processes, in the place of django-q's command of this name."""

from typing import Any

from django.conf import settings
from django.core.checks import Tags
from django.core.management.base import BaseCommand, CommandError
from django.db import connection

from executions.kernel.own_process import descendants_die_with_parents
from executions.kernel.postgresql import expect_answers_within
from executions.runs.worker import ANSWER_SECONDS
from sandbox_site import installation
from sandbox_site.cluster import Cluster


class Command(BaseCommand):
    help = "Run the workers, which run what is queued and do the tasks of the schedule."
    # The others are of pages, which no task has.
    requires_system_checks = [Tags.security]

    def handle(self, *args: Any, **options: Any) -> None:
        _join()
        descendants_die_with_parents()
        # A database that does not answer would keep this process from replacing workers.
        expect_answers_within(ANSWER_SECONDS)
        Cluster(settings.Q_CLUSTER["workers"]).run()


def _join() -> None:
    try:
        installation.join()
    except installation.DoesNotFit as error:
        raise CommandError(str(error)) from None
    finally:
        # The workers are forked, and must not share it.
        connection.close()
