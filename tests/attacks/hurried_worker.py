"""`manage.py qcluster`, which queues what is due with every round of its guard.

It does so every thirty seconds, for which a test would only wait.
"""

from __future__ import annotations

import os

import django
from django.core.management import call_command


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "sandbox_site.settings")
    django.setup()
    from sandbox_site import cluster

    cluster.SCHEDULE_SECONDS = 0.0
    call_command("qcluster")


if __name__ == "__main__":
    main()
