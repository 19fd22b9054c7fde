from __future__ import annotations

import re
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import MaxValueValidator, MinValueValidator
from django.db import models, transaction
from django.db.models import Q
from django.utils import timezone

from executions.models.api_key import as_words
from executions.models.tenant import Tenant
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
        help_text=f"{help_text} Separated by spaces or lines.",
        **more,
    )


class Policy(models.Model):
    """What a tenant may run, or whoever has no policy of its own; or the draft of one.

    A draft is in force for nobody. What it looks for in Python code is advice against mistakes:
    the boundary is the sandbox.
    """

    class Analysis(models.TextChoices):
        OFF = "off", "off: code is not looked at"
        WARN = "warn", "warn: it runs, and what was found is told with the answer"
        ASK = "ask", "ask: it waits until somebody has approved it"
        BLOCK = "block", "block: it does not run (SB007)"

    class Imports(models.TextChoices):
        DENY = "deny", "deny: all but these"
        ALLOW = "allow", "allow: none but these"

    tenant_slug = models.CharField(
        "tenant",
        max_length=64,
        blank=True,
        help_text="A tenant's slug. Empty: every tenant without a policy of its own.",
    )
    draft = models.BooleanField(
        default=False, editable=False, help_text="In force for nobody, to be tried on what ran."
    )
    name = models.CharField(max_length=100, blank=True, help_text="For whoever reads the list.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    languages = _words(
        "languages",
        "Code in these alone; commands of sessions are bash and command. Empty is any.",
    )
    providers = _words("providers", "Only where one of these runs the code. Empty is any.")
    minimum_isolation = models.CharField(
        max_length=16,
        blank=True,
        choices=isolation.CHOICES,
        help_text="Nothing runs in a sandbox isolated less. It can only strengthen what deployment,"
        " tenant, key and route demand, and what the policy of all demands.",
    )
    max_timeout = models.FloatField(
        "longest timeout",
        null=True,
        blank=True,
        validators=[MinValueValidator(0.1), MaxValueValidator(86_400)],
        help_text="Seconds. Whoever asks for more is refused, whoever names none has this at most.",
    )
    max_memory_mib = models.PositiveIntegerField(
        "most memory",
        null=True,
        blank=True,
        validators=[MinValueValidator(1), MaxValueValidator(1024 * 1024)],
        help_text="MiB. Providers that cannot promise sandboxes of this size run nothing.",
    )
    network = models.CharField(
        max_length=8,
        blank=True,
        choices=(("none", "none: only where sandboxes have no network"),),
        help_text="Empty: as the provider has it.",
    )

    analysis = models.CharField(
        "look at Python code",
        max_length=8,
        choices=Analysis.choices,
        default=Analysis.OFF,
        help_text="Advice against mistakes, and no boundary: whoever wants to hide something from a"
        " look at the text does. What holds code back is the kernel, in the sandbox.",
    )
    ask_always = models.BooleanField(
        "approve every run",
        default=False,
        db_default=False,
        help_text="Every run waits until somebody has approved it, in whatever language.",
    )
    imports_mode = models.CharField("imports", max_length=8, blank=True, choices=Imports.choices)
    imports = _words("modules", "With what is in them.", check_modules)
    imports_except = _words(
        "but for",
        "Parts of denied modules that may be used all the same: os.path of os.",
        check_modules,
    )
    calls = _words(
        "calls",
        "Denied ones: eval, os.exec*, open:write for an open that may write, .write_text for a "
        "method of that name of anything.",
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
        whose = self.tenant_slug or "all others"
        return " ".join(filter(None, ("draft for" * self.draft, whose, self.name)))

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
