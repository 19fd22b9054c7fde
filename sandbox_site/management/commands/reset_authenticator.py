from __future__ import annotations

from django.contrib.auth.models import User
from django.core.management.base import CommandError
from django_otp.plugins.otp_totp.models import TOTPDevice

from providers.checks import BEFORE_WORK
from sandbox_site.accounts import authenticator_of
from sandbox_site.management.of_account import AccountCommand


class Command(AccountCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Remove the authenticator of an account and its recovery codes, so that it signs in with "
        "its password and sets up another. Entered in the ledger."
    )

    def change(self, user: User) -> str:
        if authenticator_of(user) is None:
            raise CommandError(f"{user.get_username()} has no authenticator.")
        TOTPDevice.objects.filter(user_id=user.pk).delete()
        return f"{user.get_username()} signs in without an authenticator now."
