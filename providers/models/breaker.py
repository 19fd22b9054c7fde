from __future__ import annotations

from django.db import models
from django.db.models import Q


class CircuitBreaker(models.Model):
    """Whether a provider is fit to be used, as all processes know it.

    Open after failures one after the other: then nothing is sent there until `retry_at`, when one
    caller tries. Changed by conditional updates alone; see `providers.services.breaker`.
    """

    class State(models.TextChoices):
        CLOSED = "closed", "In service"
        OPEN = "open", "Out of service"

    provider_id = models.CharField("provider", max_length=64, unique=True)
    state = models.CharField(max_length=8, choices=State.choices, default=State.CLOSED)
    failures = models.PositiveIntegerField(
        "consecutive failures", default=0, help_text="Since the last success."
    )
    failed_at = models.DateTimeField(null=True, help_text="Last failed request.")
    failed_checks = models.PositiveIntegerField(
        "failed health checks",
        default=0,
        db_default=0,
        help_text="Consecutive failed health checks.",
    )
    openings = models.PositiveIntegerField(
        default=0, help_text="Since it was last in service. Each one doubles the retry delay."
    )
    retry_at = models.DateTimeField("next retry at", null=True)
    error_code = models.CharField(max_length=8, blank=True)
    error_message = models.TextField(blank=True)
    latency_ms = models.FloatField(
        "latency (ms)", null=True, help_text="Time to get a sandbox, smoothed."
    )
    probed_at = models.DateTimeField("last probe at", null=True, help_text="Last test program.")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("provider_id",)
        constraints = (
            models.CheckConstraint(
                condition=Q(state="closed") | Q(state="open", retry_at__isnull=False),
                name="breaker_open_has_a_retry",
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id}: {self.get_state_display()}"
