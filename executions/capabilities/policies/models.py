"""Policies, and the approvals that they require."""

from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from executions.tenants.models import Tenant, as_words
from providers import isolation
from providers.languages import normalize_language

_MODULE = re.compile(r"[^\W\d]\w{0,99}(\.[^\W\d]\w{0,99}){0,9}")
_CALL = re.compile(r"\.?[\w*]{1,100}(\.[\w*]{1,100}){0,9}(:write)?")
_MOST_WORDS = 1000


def check_modules(text: str) -> None:
    _check(text, _MODULE, "a module, such as os or os.path")


def check_calls(text: str) -> None:
    _check(text, _CALL, "a call, such as eval, os.exec*, open:write or .write_text")


def _check(text: str, form: re.Pattern[str], told: str) -> None:
    words = text.split()
    if len(words) > _MOST_WORDS:
        raise ValidationError(f"Must be at most {_MOST_WORDS} words.")
    if wrong := [word for word in words if not form.fullmatch(word)]:
        raise ValidationError(f"{wrong[0][:100]}: Must be {told}.")


def _words(
    label: str, help_text: str, check: Any = None, **more: Any
) -> models.TextField[Any, Any]:
    return models.TextField(
        label,
        blank=True,
        default="",
        validators=[check] if check else [],
        help_text=help_text,
        **more,
    )


class Policy(models.Model):
    """What a tenant may run, or whoever has no policy of its own; or the draft of one.

    A draft is in force for nobody. What it looks for in Python code is advice against mistakes:
    the boundary is the sandbox.
    """

    class Analysis(models.TextChoices):
        OFF = "off", "off"
        WARN = "warn", "warn: run it, and report findings in the response"
        ASK = "ask", "require approval: hold the run until a person approves it"
        BLOCK = "block", "block: reject the run (SB007)"

    class Imports(models.TextChoices):
        DENY = "deny", "deny the modules below"
        ALLOW = "allow", "allow only the modules below"

    tenant_slug = models.CharField(
        "tenant",
        max_length=64,
        blank=True,
    )
    draft = models.BooleanField(default=False, editable=False, help_text="A draft is not active.")
    name = models.CharField(max_length=100, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    languages = _words(
        "languages",
        "Allowed languages. Session commands count as bash and command.",
    )
    providers = _words("providers", "Allowed providers.")
    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="The strictest of installation, tenant, key, route and policy applies.",
    )
    max_timeout = models.FloatField(
        "max timeout (seconds)",
        null=True,
        blank=True,
        validators=[MinValueValidator(0.1), MaxValueValidator(86_400)],
        help_text="Requests for more are rejected. Also the limit for requests without a timeout.",
    )
    max_memory_mib = models.PositiveIntegerField(
        "max memory (MiB)",
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(1024 * 1024)],
        help_text="Providers that cannot guarantee this size are not used.",
    )
    network = models.CharField(
        max_length=8,
        blank=True,
        choices=(("none", "none: only sandboxes without network"),),
        help_text="Empty: as configured for the provider.",
    )

    analysis = models.CharField(
        "static analysis (Python)",
        max_length=8,
        choices=Analysis.choices,
        default=Analysis.OFF,
    )
    ask_always = models.BooleanField(
        "require approval for every run",
        default=False,
        db_default=False,
        help_text="For all languages.",
    )
    imports_mode = models.CharField("imports", max_length=8, blank=True, choices=Imports.choices)
    imports = _words("modules", "Submodules are included.", check_modules)
    imports_except = _words(
        "exceptions",
        "Allowed parts of denied modules, for example os.path.",
        check_modules,
    )
    calls = _words(
        "denied calls",
        "For example eval, os.exec*, open:write (opening for writing), .write_text (any method of "
        "that name).",
        check_calls,
    )

    class Meta:
        verbose_name_plural = "policies"
        ordering = ("draft", "tenant_slug", "pk")
        constraints = (
            models.UniqueConstraint(
                fields=("tenant_slug",), condition=Q(draft=False), name="policy_once_per_tenant"
            ),
            models.CheckConstraint(
                condition=Q(analysis__in=("off", "warn", "ask", "block")),
                name="policy_analysis_is_known",
            ),
            models.CheckConstraint(
                condition=Q(imports_mode__in=("", "deny", "allow")), name="policy_imports_is_known"
            ),
            models.CheckConstraint(
                condition=Q(network__in=("", "none")), name="policy_network_is_known"
            ),
            models.CheckConstraint(
                condition=Q(minimum_isolation__in=("", *isolation.LEVELS)),
                name="policy_minimum_isolation_is_known",
            ),
        )

    def __str__(self) -> str:
        state = ("draft" if self.draft else "", "" if self.tenant_slug else "default policy")
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
        """Give each list of words its one form. Raises ValidationError for an unknown tenant."""
        for name in ("providers", "imports", "imports_except", "calls"):
            setattr(self, name, as_words(getattr(self, name).split()))
        self.languages = as_words([normalize_language(each) for each in self.languages.split()])
        if self.tenant_slug and not Tenant.objects.filter(slug=self.tenant_slug).exists():
            raise ValidationError({"tenant_slug": "Must be the slug of a tenant, or empty."})
