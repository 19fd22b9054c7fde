from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction
from django.utils import timezone

from executions.services.ledger import append
from providers.models import AccountHold


class Command(BaseCommand):
    help = (
        "Say that an account is used by a person of its own, whoever made it or set its password. "
        "It then counts as a second person under the two-person rule. Entered in the ledger."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the name the account signs in with")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["name"]
        user = get_user_model()._default_manager.filter(username=name).first()
        if user is None:
            raise CommandError(f"There is no account {name!r}.")
        with transaction.atomic():
            holds = list(AccountHold.objects.filter(account_id=user.pk, released_at=None))
            for hold in holds:
                hold.released_at = timezone.now()
                hold.save(update_fields=["released_at"])
            content = {"action": "confirmed as a person of its own", "holds": len(holds)}
            append("user", name, content)
        self.stdout.write(f"{name} counts as a person of its own.")
