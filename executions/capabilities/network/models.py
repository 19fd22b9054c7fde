"""Network lists, credentials for hosts, and the attempts to reach hosts."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone
from django.views.decorators.debug import sensitive_variables

from executions.capabilities.network.vault import read_place
from executions.kernel.public_suffixes import check_rules
from executions.kernel.text import uuid7
from executions.runs.models import Execution
from executions.tenants.models import Tenant
from providers.credentials import (
    MOST_CREDENTIALS,
    NAME,
    VARIABLE,
    check_placement,
    check_value,
    read_upstream,
)
from providers.fields import DecryptionError, EncryptedJSONField
from providers.network import Budget, NetworkPolicy, Rule, check_bound

_USUAL = Budget()
MIB = 1024 * 1024
# Of one credential.
MOST_BOUND = 50
CLAUDE_ADDRESS = "https://api.anthropic.com"
_ENVIRONMENT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class NetworkList(models.Model):
    """What the sandboxes of all tenants may reach, or those of one tenant; or the draft of that.

    A tenant's list narrows the installation's, whose `tenant_slug` is empty. Without that one
    nothing can be reached. A draft is not in force.
    """

    class Mode(models.TextChoices):
        NONE = "none", "none: no host"
        ALLOWLIST = "allowlist", "allowlist: the hosts of the rules"
        OPEN = "open", "open: all public hosts"

    tenant_slug = models.CharField("tenant", max_length=64, blank=True)
    draft = models.BooleanField(default=False, editable=False, help_text="A draft is not active.")
    name = models.CharField(max_length=100, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    mode = models.CharField(max_length=9, choices=Mode.choices, default=Mode.ALLOWLIST)
    rules = models.TextField(
        blank=True,
        default="",
        help_text="One rule per line: [METHODS ][scheme://]host[:ports][/path][ # reason], such as "
        "pypi.org, *.example.com:443 or GET,HEAD http://api.example.com/v1 # prices.",
    )
    log_only = models.BooleanField(
        "log only",
        default=False,
        db_default=False,
        help_text="Refuses nothing and records what it would have refused.",
    )
    by_default = models.BooleanField(
        "default network",
        default=False,
        db_default=False,
        help_text="Runs and sessions that name no network get this one. Otherwise they get none.",
    )
    connections = models.PositiveIntegerField(
        "connections at once",
        default=_USUAL.connections,
        validators=[MinValueValidator(1), MaxValueValidator(10_000)],
        help_text="Of one sandbox.",
    )
    connections_per_minute = models.PositiveIntegerField(
        default=_USUAL.connections_per_minute,
        validators=[MinValueValidator(1), MaxValueValidator(1_000_000)],
        help_text="Of one sandbox.",
    )
    mib = models.PositiveIntegerField(
        "traffic (MiB)",
        default=_USUAL.bytes // MIB,
        validators=[MinValueValidator(1), MaxValueValidator(1024 * 1024)],
        help_text="Of one sandbox, both ways together.",
    )

    class Meta:
        ordering = ("draft", "tenant_slug", "pk")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug",),
                condition=Q(draft=False),
                name="network_list_once_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(mode__in=("none", "allowlist", "open")),
                name="network_list_mode_is_known",
            ),
        )

    def __str__(self) -> str:
        state = ("draft" if self.draft else "", "" if self.tenant_slug else "installation")
        notes = ", ".join(filter(None, state))
        name = " ".join(filter(None, (self.tenant_slug, self.name)))
        if not name:
            return notes
        return f"{name} ({notes})" if notes else name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """In one transaction with what is entered in the ledger."""
        self.clean()
        with transaction.atomic(savepoint=False):
            super().save(*args, **kwargs)

    def clean(self) -> None:
        """Give the rules their one form. Raises ValidationError for what is no list, and for an
        unknown tenant."""
        try:
            policy = self.policy
            check_rules(policy.rules)
        except ValueError as error:
            raise ValidationError({"rules": str(error)}) from None
        self.rules = "\n".join(map(str, policy.rules))
        if self.tenant_slug and not Tenant.objects.filter(slug=self.tenant_slug).exists():
            raise ValidationError({"tenant_slug": "Must be the slug of a tenant, or empty."})

    @property
    def policy(self) -> NetworkPolicy:
        """Raises ValueError for rules that are none."""
        return NetworkPolicy.parse(self.mode, self.rules.splitlines(), log_only=self.log_only)

    @property
    def budget(self) -> Budget:
        return Budget(self.connections, self.connections_per_minute, self.mib * MIB)


class NetworkCredential(models.Model):
    """A secret that the network proxy puts into requests of sandboxes, and what it is bound to.

    The installation's has an empty `tenant_slug`. The value is sealed together with all that it is
    bound to: who writes to the database can neither bind it to another host nor give it to another
    tenant. One that is revoked has no value.
    """

    class Placement(models.TextChoices):
        BEARER = "bearer", "bearer: Authorization: Bearer VALUE"
        BASIC = "basic", "basic: Authorization: Basic, with the value as password"
        HEADER = "header", "header: a header of its own"
        QUERY = "query", "query: a parameter of the URL"
        SANDBOX = "sandbox", "sandbox: a header that the list of a sandbox names"
        CLAUDE = "claude", "claude: no sandbox, but the worker of an environment of Claude"

    tenant_slug = models.CharField("tenant", max_length=64, blank=True)
    name = models.CharField(
        max_length=63,
        help_text="Small letters, digits, _ and -. Code has the placeholder cfd-secret:NAME.",
    )
    placement = models.CharField(max_length=7, choices=Placement.choices, default=Placement.BEARER)
    field = models.CharField(
        max_length=200,
        blank=True,
        default="",
        help_text="The name of the header or of the parameter, the user name of basic, or the id "
        "of the environment of claude.",
    )
    rules = models.TextField(
        blank=True,
        help_text="One rule per line, each with https://, such as https://api.example.com or "
        "GET,POST https://api.example.com/v1 # prices. Other requests do not get the value.",
    )
    variable = models.CharField(
        max_length=100,
        blank=True,
        default="",
        help_text="The environment variable that has the placeholder in sandboxes, such as "
        "API_TOKEN.",
    )
    upstream = models.CharField(
        max_length=300,
        blank=True,
        default="",
        help_text="The address of a service, such as https://api.example.com/v1. Code can then "
        "reach it as http://NAME.sandbox, too, without TLS and without a key.",
    )
    source = models.CharField(
        max_length=500,
        blank=True,
        default="",
        help_text="Where Vault has the value: mount/path#key, such as secret/openai#api_key.",
    )
    value = EncryptedJSONField(null=True, blank=True, editable=False)
    version = models.PositiveIntegerField(default=1, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    changed_at = models.DateTimeField(default=timezone.now, editable=False)
    revoked_at = models.DateTimeField(null=True, blank=True, editable=False)

    class Meta:
        ordering = ("tenant_slug", "name")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug", "name"), name="network_credential_once_per_scope"
            ),
            models.CheckConstraint(
                condition=Q(
                    placement__in=("bearer", "basic", "header", "query", "sandbox", "claude")
                ),
                name="network_credential_placement_is_known",
            ),
            models.CheckConstraint(
                condition=Q(revoked_at__isnull=True, value__isnull=False)
                | Q(revoked_at__isnull=False, value__isnull=True),
                name="network_credential_has_a_value_until_revoked",
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} ({self.tenant_slug or 'installation'})"

    @sensitive_variables()
    def save(self, *args: Any, **kwargs: Any) -> None:
        """Seal what is new, in one transaction with what is entered in the ledger.

        Raises ValidationError.
        """
        self.clean()
        with transaction.atomic(savepoint=False):
            stored = self._stored(lock=True)
            new = self._new_value(stored)
            if stored is not None:
                self.version, self.changed_at = stored.version, stored.changed_at
                self.revoked_at = stored.revoked_at
            if new:
                self.version = 1 if stored is None else stored.version + 1
                self.changed_at = timezone.now()
                since = _text(None if stored is None else stored.revoked_at)
                self.revoked_at = None
                self.value = {
                    "of": self._binding(),
                    "since": since,
                    "salt": secrets.token_hex(16),
                    "value": new,
                }
            super().save(*args, **kwargs)

    @property
    def hosts(self) -> str:
        rules = (Rule.parse(line) for line in self.rules.splitlines())
        return ", ".join(dict.fromkeys(rule.host for rule in rules))

    def set_value(self, text: str) -> None:
        """Have `save` store this value as the next version. One that is revoked is active again."""
        self.value = {"value": text}

    @sensitive_variables()
    def open_value(self) -> str:
        """Return the value. Raises ValueError where it is not of this row as it stands."""
        sealed = self._sealed()
        if sealed is None or self.revoked_at is not None or not self._is_bound(sealed):
            raise ValueError(f"{self}: The value does not belong to this row.")
        return str(sealed["value"])

    @sensitive_variables()
    def clean(self) -> None:
        """Give the rules their one form. Raises ValidationError, by field."""
        checks: tuple[tuple[str, Callable[[], object]], ...] = (
            ("tenant_slug", self._check_tenant),
            ("name", self._check_name),
            ("placement", self._check_placement),
            ("field", self._check_field),
            ("rules", self._check_rules),
            ("variable", self._check_variable),
            ("upstream", self._check_upstream),
            ("source", lambda: self.source and read_place(self.source)),
        )
        wrong: dict[str, Any] = {}
        for name, check in checks:
            try:
                check()
            except ValueError as error:
                wrong[name] = str(error)
        if wrong:
            raise ValidationError(wrong)
        if self._new_value(self._stored()) and self._is_one_too_many():
            raise ValidationError(
                f"There are {MOST_CREDENTIALS} active credentials. Revoke one that is not used."
            )

    def validate_constraints(self, exclude: Any = None) -> None:
        # The database would be asked about the value in the clear. `clean` has looked at it.
        super().validate_constraints({*(exclude or ()), "value"})

    def _check_tenant(self) -> None:
        known = Tenant.objects.filter(slug=self.tenant_slug, removal_began_at=None)
        if self.tenant_slug and not known.exists():
            raise ValueError("Must be the slug of a tenant, or empty.")

    def _check_name(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ValueError("Must be small letters, digits, _ and -, at most 63.")

    def _check_placement(self) -> None:
        if self.placement == self.Placement.SANDBOX and not self.tenant_slug:
            raise ValueError("sandbox: Must be of a tenant, whose callers name it.")
        if self.placement == self.Placement.CLAUDE and not self.tenant_slug:
            raise ValueError("claude: Must be of a tenant, whose sandboxes the agents use.")

    def _check_field(self) -> None:
        if self.placement != self.Placement.CLAUDE:
            check_placement(self.placement, self.field)
        elif not _ENVIRONMENT_ID.fullmatch(self.field):
            raise ValueError("Must be the id of an environment, such as env_0123.")

    def _check_rules(self) -> None:
        rules = tuple(
            dict.fromkeys(Rule.parse(line) for line in self.rules.splitlines() if line.strip())
        )
        if self.placement == self.Placement.SANDBOX:
            if rules:
                raise ValueError("Must be empty: the list of a sandbox says where it goes.")
            return
        if self.placement == self.Placement.CLAUDE:
            self.rules = _read_address(rules)
            return
        if not 0 < len(rules) <= MOST_BOUND:
            raise ValueError(f"Must be 1 to {MOST_BOUND} rules.")
        check_bound(rules)
        check_rules(rules)
        self.rules = "\n".join(map(str, rules))

    def _check_variable(self) -> None:
        if self.variable and self.placement == self.Placement.CLAUDE:
            raise ValueError("Must be empty: no sandbox has a placeholder of this key.")
        if self.variable and not VARIABLE.fullmatch(self.variable):
            raise ValueError("Must be the name of a variable, such as API_TOKEN.")

    def _check_upstream(self) -> None:
        if not self.upstream:
            return
        if self.placement == self.Placement.CLAUDE:
            raise ValueError("Must be empty: no sandbox has a name for this server.")
        upstream = read_upstream(self.upstream)
        rules = (Rule.parse(line) for line in self.rules.splitlines())
        if not any(rule.covers_https(upstream.host, upstream.port) for rule in rules):
            raise ValueError("Must be of a host and port that the rules have.")

    def _is_one_too_many(self) -> bool:
        others = NetworkCredential.objects.filter(tenant_slug=self.tenant_slug, revoked_at=None)
        # What callers have created takes no room from what administrators bind.
        if self.placement == self.Placement.SANDBOX:
            others = others.filter(placement=self.Placement.SANDBOX)
        else:
            others = others.exclude(placement=self.Placement.SANDBOX)
        return others.exclude(pk=self.pk).count() >= MOST_CREDENTIALS

    def _stored(self, *, lock: bool = False) -> NetworkCredential | None:
        if self.pk is None:
            return None
        rows = NetworkCredential.objects.defer("value").filter(pk=self.pk)
        return (rows.select_for_update(no_key=True) if lock else rows).first()

    @sensitive_variables()
    def _new_value(self, stored: NetworkCredential | None) -> str:
        """The text that is to be sealed anew, "" where all stays as it is stored.

        Raises ValidationError.
        """
        if stored is not None:
            for name in ("tenant_slug", "name"):
                if getattr(self, name) != getattr(stored, name):
                    raise ValidationError(
                        {name: "A credential keeps its tenant and name. Add another one."}
                    )
        given = self._sealed()
        kept = None if stored is None else stored._sealed()
        if given is None:
            if stored is None or stored.revoked_at is None:
                raise ValidationError({"value": "Must have a value."})
            return ""
        text = str(given["value"])
        if "of" not in given:
            try:
                check_value(text)
            except ValueError as error:
                raise ValidationError({"value": str(error)}) from None
            return text
        if given != kept:
            # It was sealed for a change that waited for an approval.
            following = 1 if stored is None else stored.version + 1
            since = _text(None if stored is None else stored.revoked_at)
            if given["of"] != self._binding(following) or given.get("since") != since:
                raise ValidationError({"value": "It was set for something else. Enter it again."})
            return text
        if stored is None or not stored._is_bound(given):
            raise ValidationError(
                {"value": "The row was changed outside the service. Enter the value again."}
            )
        if self.source != stored.source:
            raise ValidationError(
                {"source": "The stored value is not from this source. Enter one, or fetch it."}
            )
        if self._binding(stored.version) == given["of"]:
            return ""
        if self._reaches_more(given["of"]):
            # Or who can change it could have it sent to a server of his own.
            raise ValidationError(
                {"value": "Enter the value again: it would go to another server."}
            )
        return text

    def _reaches_more(self, former: Mapping[str, Any]) -> bool:
        """Whether the value goes to a server that it did not go to before."""
        for apart in (self.Placement.SANDBOX, self.Placement.CLAUDE):
            if (self.placement == apart) != (former["placement"] == apart):
                return True
        known = [Rule.parse(line) for line in former["rules"].splitlines()]
        rules = (Rule.parse(line) for line in self.rules.splitlines())
        return not all(any(_is_within(rule, each) for each in known) for rule in rules)

    @sensitive_variables()
    def _sealed(self) -> dict[str, Any] | None:
        """What the column has, None where there is no value or no key opens it."""
        try:
            sealed: dict[str, Any] | None = self.value
        except DecryptionError:
            return None
        return sealed if sealed and isinstance(sealed.get("value"), str) else None

    def _is_bound(self, sealed: Mapping[str, Any]) -> bool:
        return sealed.get("of") == self._binding()

    def _binding(self, version: int | None = None) -> dict[str, Any]:
        return {
            "tenant": self.tenant_slug,
            "name": self.name,
            "placement": str(self.placement),
            "field": self.field,
            "rules": self.rules,
            "variable": self.variable,
            "upstream": self.upstream,
            "source": self.source,
            "version": self.version if version is None else version,
        }


def _read_address(rules: Sequence[Rule]) -> str:
    """The one server that gets the key of an environment. Raises ValueError."""
    rule, *others = rules or (Rule.parse(CLAUDE_ADDRESS),)
    is_one = not others and len(rule.ports) == 1 and not rule.host.startswith("*.")
    if not is_one or rule.scheme != "https" or rule.needs_requests:
        raise ValueError(f"Must be one server, such as {CLAUDE_ADDRESS}.")
    return str(rule)


def _is_within(rule: Rule, around: Rule) -> bool:
    """Whether each server of a rule is one of another rule."""
    is_below = around.host.startswith("*.") and rule.host.endswith(around.host[1:])
    return (is_below or rule.host == around.host) and set(rule.ports) <= set(around.ports)


def _text(moment: datetime | None) -> str:
    return "" if moment is None else moment.isoformat()


class NetworkAttempt(models.Model):
    """An attempt of a sandbox to reach a host. Between runs of a session it has no execution."""

    class Outcome(models.TextChoices):
        ALLOWED = "allowed", "Allowed"
        REFUSED = "refused", "Refused"
        FAILED = "failed", "Failed"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    execution = models.ForeignKey(
        Execution, on_delete=models.CASCADE, null=True, related_name="network_attempts"
    )
    session_id = models.UUIDField(null=True)
    tenant = models.ForeignKey(
        Tenant,
        on_delete=models.SET_NULL,
        null=True,
        related_name="network_attempts",
        db_index=False,
    )
    tenant_slug = models.CharField("tenant", max_length=64)
    at = models.DateTimeField("time")
    host = models.CharField(max_length=255)
    port = models.PositiveIntegerField()
    method = models.CharField(max_length=16, blank=True)
    path = models.CharField(max_length=256, blank=True)
    outcome = models.CharField(max_length=8, choices=Outcome.choices)
    why = models.CharField("reason", max_length=100, blank=True)
    layer = models.CharField(
        "list", max_length=16, blank=True, help_text="Whose list refused it, or would have."
    )
    rule = models.CharField(max_length=300, blank=True, help_text="The rule that allowed it.")
    credential = models.CharField(
        max_length=80, blank=True, help_text="Name and version of the credential that was put in."
    )
    noted = models.BooleanField(
        "log only", default=False, help_text="A list that only logs would have refused it."
    )
    sent = models.BigIntegerField("bytes sent", default=0)
    received = models.BigIntegerField("bytes received", default=0)
    seconds = models.FloatField(default=0.0)

    class Meta:
        ordering = ("-id",)
        default_permissions = ("view",)
        indexes = (
            models.Index(fields=("tenant", "-id"), name="network_attempt_tenant"),
            models.Index(fields=("host", "-id"), name="network_attempt_host"),
            models.Index(
                fields=("tenant_slug", "id"),
                name="network_attempt_of_no_run",
                condition=Q(execution__isnull=True),
            ),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(outcome__in=("allowed", "refused", "failed")),
                name="network_attempt_outcome_is_known",
            ),
        )

    def __str__(self) -> str:
        # Not the host, which a program chose: pages show this as it is.
        return str(self.pk)
