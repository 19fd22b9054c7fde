"""Which providers there are: configurations and their versions, routes, health and prices."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import models, transaction
from django.db.models import F, Q
from django.db.models.base import ModelBase
from django.utils import timezone

from providers import isolation, registry
from providers.errors import InvalidConfiguration
from providers.fields import EncryptedJSONField
from providers.hidden_characters import visible
from providers.signals import rows_update, rows_updated

__all__ = (
    "AccountHold",
    "CircuitBreaker",
    "ConfigVersion",
    "PendingChange",
    "ProviderCheckCount",
    "ProviderConfig",
    "ProviderHealth",
    "ProviderPrice",
    "Route",
    "RouteStep",
)


Row = TypeVar("Row", bound=models.Model)


class AnnouncedQuerySet(models.QuerySet[Row]):
    """Rows whose conditional UPDATEs are told of, as their saving and deleting are by Django."""

    def update(self, **values: Any) -> int:
        with transaction.atomic(using=self.db, savepoint=False):
            pks = list(self.order_by().select_for_update().values_list("pk", flat=True))
            if not pks:
                return 0
            before: dict[Any, Any] = {}
            rows_update.send(sender=self.model, pks=pks, before=before)
            changed = super().update(**values)
            if changed:
                rows_updated.send(sender=self.model, pks=pks, before=before)
        return changed


class _WithNaturalKey(AnnouncedQuerySet["ProviderConfig"]):
    def get_by_natural_key(self, provider_id: str) -> ProviderConfig:
        # Naming a provider needs none of its secrets, nor the key that they were encrypted with.
        return self.defer("config").get(provider_id=provider_id)


class ProviderConfig(models.Model):
    """One provider's configuration. At most one row is active: that provider runs the code.

    Change it through `providers.services`, which validates and refuses to overwrite somebody
    else's change. `version` counts the changes of `config`; every process loads the provider
    again when the active row or its version is another.
    """

    provider_id = models.CharField("provider", max_length=64, unique=True, editable=False)
    config = EncryptedJSONField(default=dict, editable=False)
    is_active = models.BooleanField("active", default=False, editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField("created", auto_now_add=True)
    updated_at = models.DateTimeField("updated", auto_now=True)

    objects = _WithNaturalKey.as_manager()

    class Meta:
        verbose_name = "provider"
        ordering = ("provider_id",)
        permissions = (
            ("activate_providerconfig", "Can choose the active provider"),
            ("test_providerconfig", "Can test the connection of a provider"),
        )
        constraints = (
            models.UniqueConstraint(
                fields=["is_active"],
                condition=Q(is_active=True),
                name="providers_one_active",
                violation_error_message="Another provider is active.",
            ),
        )

    def __str__(self) -> str:
        return self.provider_id

    def save(
        self,
        *,
        force_insert: bool | tuple[ModelBase, ...] = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Write the row. Writing `config` of an existing row takes a new version with it."""
        deferred = "config" in self.get_deferred_fields()
        writes_config = "config" in update_fields if update_fields is not None else not deferred
        bump = writes_config and not self._state.adding
        fields: Any = update_fields
        if bump:
            self.version = F("version") + 1
            fields = None if update_fields is None else {*update_fields, "version"}
        super().save(
            force_insert=force_insert,
            force_update=force_update,
            using=using,
            update_fields=fields,
        )
        if bump:
            self.refresh_from_db(fields=["version"])

    def natural_key(self) -> tuple[str]:
        return (self.provider_id,)


class ConfigVersion(models.Model):
    """One version of what is configured: never changed, and kept when its subject goes.

    `subject` is a provider's id, or `app.model:key` for a row that `providers.guarded` knows.
    `content` holds `config` and a random `salt`; `content_hash` is the SHA-256 of both and of the
    version's name, so that it proves the content and lets nobody guess a short secret from it.
    `diff` is against the version before, with secrets masked. Removing a provider is a version
    too, with an empty configuration.
    """

    subject = models.CharField("subject", max_length=64)
    shown_as = models.CharField(max_length=200, blank=True)
    version = models.PositiveIntegerField()
    content = EncryptedJSONField(editable=False)
    content_hash = models.CharField(max_length=71)
    author = models.CharField(max_length=200)
    approved_by = models.CharField(max_length=200, blank=True)
    reason = models.CharField(max_length=500, blank=True)
    diff = models.JSONField(default=list)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        verbose_name = "configuration version"
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(
                fields=("subject", "version"), name="providers_version_is_unique"
            ),
        )

    def __str__(self) -> str:
        return f"{visible(self.shown_as or self.subject)} version {self.version}"


class PendingChange(models.Model):
    """A change that waits for a second administrator, under the two-person rule.

    `subject` is named as in a version, without a key for a row that is to be made. Of a provider
    `config` is complete and validated, of a row it holds what differs; it is null where only
    `action` matters. Who asked for it can never decide in its favour, which the database enforces
    by the accounts' ids: names can be changed.
    """

    class Action(models.TextChoices):
        SAVE = "save", "Save"
        ACTIVATE = "activate", "Activate"
        SAVE_AND_ACTIVATE = "save_and_activate", "Save and activate"
        REMOVE = "remove", "Remove"

    class Status(models.TextChoices):
        WAITING = "waiting", "Waiting"
        APPROVED = "approved", "Approved"
        REJECTED = "rejected", "Rejected"

    subject = models.CharField("subject", max_length=64)
    shown_as = models.CharField(max_length=200, blank=True)
    action = models.CharField(max_length=20, choices=Action.choices)
    base_version = models.PositiveIntegerField()
    config = EncryptedJSONField(null=True, editable=False)
    diff = models.JSONField(default=list)
    author = models.CharField(max_length=200)
    author_id = models.BigIntegerField(null=True)
    reason = models.CharField(max_length=500, blank=True)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.WAITING)
    created_at = models.DateTimeField(default=timezone.now)
    decided_by = models.CharField(max_length=200, blank=True)
    decided_by_id = models.BigIntegerField(null=True)
    decided_at = models.DateTimeField(null=True)

    objects = AnnouncedQuerySet.as_manager()

    class Meta:
        verbose_name = "pending change"
        ordering = ("-id",)
        constraints = (
            models.CheckConstraint(
                condition=~Q(status="approved")
                | (~Q(decided_by_id=F("author_id")) & ~Q(decided_by="")),
                name="providers_approved_by_a_second_person",
            ),
            models.CheckConstraint(
                condition=Q(status__in=("waiting", "approved", "rejected")),
                name="providers_pending_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(status="waiting") | Q(config__isnull=True),
                name="providers_decided_change_keeps_no_config",
            ),
        )

    def __str__(self) -> str:
        return f"{self.get_action_display()} {visible(self.shown_as or self.subject)}"


class ProviderHealth(models.Model):
    """What the last background check of a configured provider found. One row each.

    `message` says why it is not healthy, or else who enforces what in its sandboxes.
    """

    provider_id = models.CharField("provider", max_length=64, primary_key=True)
    config_version = models.PositiveIntegerField()
    healthy = models.BooleanField()
    code = models.CharField(max_length=8, blank=True)
    message = models.CharField(max_length=500, blank=True)
    latency_ms = models.FloatField(help_text="Time to start the provider and check its health.")
    checked_at = models.DateTimeField()
    checks = models.PositiveBigIntegerField(default=0, db_default=0)
    good_checks = models.PositiveBigIntegerField(default=0, db_default=0)
    figures = models.JSONField(
        null=True, editable=False, help_text="Pool metrics as reported by the provider."
    )

    class Meta:
        verbose_name = "provider health"
        verbose_name_plural = "provider health"

    def __str__(self) -> str:
        return f"{self.provider_id}: {'healthy' if self.healthy else self.code or 'unhealthy'}"


class ProviderCheckCount(models.Model):
    """How many checks of a provider there were in one hour, and how many found it healthy."""

    provider_id = models.CharField("provider", max_length=64)
    hour = models.DateTimeField()
    checks = models.PositiveIntegerField(default=0)
    good_checks = models.PositiveIntegerField(default=0)

    class Meta:
        constraints = (
            models.UniqueConstraint(
                fields=("provider_id", "hour"), name="provider_check_count_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id} {self.hour:%Y-%m-%d %H}"


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


class ProviderPrice(models.Model):
    """What a run costs at a provider: each one, each second of it, and each second for each GB of
    its sandbox's memory. One without a price has that of the first configuration of its class;
    where that has none either, it costs nothing.
    """

    provider_id = models.CharField("provider", max_length=64, unique=True)
    per_second = models.DecimalField(
        max_digits=12,
        decimal_places=8,
        help_text="From the start of the sandbox. All prices and budgets use one currency.",
    )
    per_run = models.DecimalField(
        max_digits=12,
        decimal_places=8,
        blank=True,
        default=0,
        db_default=0,
        help_text="Added to every run.",
    )
    per_gb_second = models.DecimalField(
        "per GB-second",
        max_digits=12,
        decimal_places=8,
        blank=True,
        default=0,
        db_default=0,
        help_text="For services that bill by memory.",
    )
    memory_gb = models.DecimalField(
        "memory (GB)",
        max_digits=8,
        decimal_places=3,
        blank=True,
        default=0,
        db_default=0,
        help_text="Memory of one sandbox as billed.",
    )

    class Meta:
        verbose_name = "price"
        ordering = ("provider_id",)
        constraints = (
            models.CheckConstraint(condition=Q(per_second__gte=0), name="price_is_not_negative"),
            models.CheckConstraint(
                condition=Q(per_run__gte=0, per_gb_second__gte=0, memory_gb__gte=0),
                name="price_of_run_and_memory_is_not_negative",
            ),
        )

    def __str__(self) -> str:
        return f"{self.provider_id}: {self.per_second}"

    def clean(self) -> None:
        """Raises ValidationError for a provider that there is not: nothing would cost its price."""
        try:
            registry.get(self.provider_id)
        except InvalidConfiguration as error:
            raise ValidationError({"provider_id": error.message}) from None
        for name in ("per_run", "per_gb_second", "memory_gb"):
            if getattr(self, name) is None:
                setattr(self, name, Decimal(0))

    @property
    def of_second(self) -> Decimal:
        """What a second costs, memory included."""
        return self.per_second + self.per_gb_second * self.memory_gb


class Route(models.Model):
    """Which providers may run code, and in what order; the most specific one that fits is taken.

    Without a row that fits, the active provider runs everything. `owner` is the name providers are
    told of whom an instance is for: a tenant's slug.
    """

    class Strategy(models.TextChoices):
        PRIORITY = "priority", "In order"
        CHEAPEST = "cheapest", "Cheapest first"
        LATENCY = "latency", "Fastest first"
        WEIGHTED = "weighted", "Split by weight"

    owner = models.CharField("tenant", max_length=64, blank=True, help_text="Empty: all tenants.")
    language = models.CharField(max_length=32, blank=True, help_text="Empty: all languages.")
    strategy = models.CharField(max_length=16, choices=Strategy.choices, default=Strategy.PRIORITY)
    region = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Providers in this region come first; the others are the fallback.",
    )
    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Weaker sandboxes are not used on this route. The strictest of route, tenant and "
        "MINIMUM_ISOLATION applies.",
    )
    is_active = models.BooleanField("active", default=True)

    class Meta:
        ordering = ("owner", "language")
        constraints = (
            models.UniqueConstraint(
                fields=("owner", "language"),
                name="route_once_per_tenant_and_language",
                violation_error_message="There is already a route for this tenant and language.",
            ),
            models.CheckConstraint(
                condition=Q(strategy__in=("priority", "cheapest", "latency", "weighted")),
                name="route_strategy_is_known",
            ),
            models.CheckConstraint(
                condition=Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="route_minimum_isolation_is_known",
            ),
        )

    def __str__(self) -> str:
        return f"{self.owner or 'every tenant'}, {self.language or 'every language'}"


class RouteStep(models.Model):
    """A provider of a route. `weight` is its share of a split; 0 makes it a fallback only."""

    route = models.ForeignKey(Route, on_delete=models.CASCADE, related_name="steps")
    provider = models.ForeignKey(ProviderConfig, on_delete=models.CASCADE, related_name="+")
    position = models.PositiveSmallIntegerField(default=0)
    weight = models.PositiveIntegerField(default=1)

    class Meta:
        ordering = ("position", "pk")
        constraints = (
            models.UniqueConstraint(
                fields=("route", "provider"), name="route_names_a_provider_once"
            ),
        )

    def __str__(self) -> str:
        return f"{self.position}: {self.provider}"
