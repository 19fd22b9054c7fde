from __future__ import annotations

from django.db import models

from executions.models.tenant import Tenant


class RequestWindow(models.Model):
    """The minute in which a tenant's API requests are counted, and how many it has had in it.

    A row for each tenant, changed by one statement: whoever finds less than the bound in it has
    taken a place, whichever process of whichever host it is.
    """

    tenant = models.OneToOneField(
        Tenant, on_delete=models.CASCADE, primary_key=True, related_name="request_window"
    )
    started = models.BigIntegerField(help_text="Unix time, from the database's clock.")
    taken = models.BigIntegerField()

    def __str__(self) -> str:
        return f"{self.taken} since {self.started}"
