"""`manage.py qcluster`, whose scheduler looks with every round of its guard.

django-q has it look every thirty seconds, and by a number in the middle of a function. A test would
only wait for it. What looks is what the worker has put in the scheduler's place.
"""

from __future__ import annotations

import os
from typing import Any

import django
from django.core.management import call_command


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    from django_q import cluster

    stat = cluster.Stat

    def look_too(sentinel: Any, *rest: Any) -> Any:
        """In the place of what the guard makes at the end of each round."""
        cluster.scheduler(broker=sentinel.broker)
        return stat(sentinel, *rest)

    cluster.Stat = look_too
    call_command("qcluster")


if __name__ == "__main__":
    main()
