from __future__ import annotations

from django.db import models
from django.utils import timezone


class AccountHold(models.Model):
    """One account had another in its hands: made it, let it in, set its password or authenticator.

    Whoever did that may be the person behind both, so the two do not count as two persons under the
    two-person rule, until somebody on the server confirms the account. The columns are ids and no
    relations, so that removing an account removes no trace.
    """

    account_id = models.BigIntegerField(db_index=True)
    holder_id = models.BigIntegerField()
    created_at = models.DateTimeField(default=timezone.now)
    released_at = models.DateTimeField(null=True)

    def __str__(self) -> str:
        return f"account {self.account_id} accessible to {self.holder_id}"
