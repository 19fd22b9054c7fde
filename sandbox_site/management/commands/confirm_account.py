from __future__ import annotations

from django.contrib.auth.models import User
from django.utils import timezone

from executions.ledger.append import append
from providers.checks import BEFORE_WORK
from providers.models import AccountHold
from sandbox_site.management.of_account import AccountCommand


class Command(AccountCommand):
    requires_system_checks = BEFORE_WORK
    help = (
        "Confirm that an account belongs to a separate person, even if another person created it "
        "or set its password. It then counts as a second person for two-person approval. The "
        "confirmation is entered in the ledger."
    )

    def change(self, user: User) -> str:
        holds = list(AccountHold.objects.filter(account_id=user.pk, released_at=None))
        for hold in holds:
            hold.released_at = timezone.now()
            hold.save(update_fields=["released_at"])
        name = user.get_username()
        append("user", name, {"action": "confirmed as a person of its own", "holds": len(holds)})
        return f"{name} counts as a separate person."
