"""providers' `rotate_keys`, and the mark of SECRET_KEY with it."""

from __future__ import annotations

from typing import Any

from providers.management.commands import rotate_keys
from sandbox_site import installation


class Command(rotate_keys.Command):
    def handle(self, *args: Any, **options: Any) -> None:
        super().handle(*args, **options)
        if not options["dry_run"]:
            installation.rotate_secret_key()
