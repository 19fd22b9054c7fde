from __future__ import annotations

from typing import Any

from django.contrib.auth import get_user_model
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import transaction
from django_otp.plugins.otp_totp.models import TOTPDevice


class Command(BaseCommand):
    help = (
        "Remove the authenticator of an account and its recovery codes, so that it signs in with "
        "its password and sets up another. Entered in the ledger."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("name", help="the name the account signs in with")

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["name"]
        user = get_user_model()._default_manager.filter(username=name).first()
        if user is None:
            raise CommandError(f"There is no account {name!r}.")
        with transaction.atomic():
            removed = TOTPDevice.objects.filter(user_id=user.pk, confirmed=True)
            if not removed.exists():
                raise CommandError(f"{name} has no authenticator.")
            TOTPDevice.objects.filter(user_id=user.pk).delete()
        self.stdout.write(f"{name} signs in without an authenticator now.")
