"""The entries of the ledger, the verifications that the admin has asked for, and legal holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone


class LedgerEntry(models.Model):
    """One link of the ledger: a signed statement that names its place and the link before it.

    `statement` is the canonical JSON text that was signed, and the only thing that counts. The
    other columns repeat parts of it for looking entries up; `verify_ledger` compares them. Rows
    are only ever added, by `executions.ledger`.
    """

    sequence = models.BigIntegerField(primary_key=True)
    kind = models.CharField(max_length=32)
    # No foreign key: the entry outlives the row, and its absence must show.
    execution_id = models.UUIDField(null=True, unique=True)
    bound_row = models.CharField(  # noqa: DJ001
        max_length=100,
        null=True,
        editable=False,
        help_text="Row of the statement, as `model key`. Empty if the entry is about no row; null "
        "for an execution.",
    )
    # Before the statement: SQLite reads a row to the last column that is asked for.
    subject = models.CharField(
        max_length=200,
        editable=False,
        help_text="Subject of the statement, cut to 200 characters; of an execution its tenant.",
    )
    at = models.DateTimeField()
    statement = models.TextField()
    digest = models.CharField(max_length=64, help_text="SHA-256 of the statement.")
    key_id = models.CharField(max_length=16)
    signature = models.CharField(max_length=88, help_text="Ed25519, base64.")

    class Meta:
        verbose_name = "ledger entry"
        verbose_name_plural = "ledger entries"
        ordering = ("-sequence",)
        indexes = [
            models.Index(fields=("kind", "sequence"), name="ledger_kind"),
            models.Index(fields=("kind", "subject", "sequence"), name="ledger_subject"),
            models.Index(
                fields=("bound_row", "sequence"),
                condition=models.Q(bound_row__isnull=False),
                name="ledger_bound_row",
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=models.Q(sequence__gte=1), name="ledger_starts_at_one"
            ),
            models.CheckConstraint(
                condition=models.Q(kind="execution", execution_id__isnull=False)
                | (~models.Q(kind="execution") & models.Q(execution_id=None)),
                name="ledger_execution_has_its_id",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.sequence} {self.kind}"

    @property
    def stated(self) -> dict[str, Any]:
        """The statement, read."""
        stated: dict[str, Any] = json.loads(self.statement)
        return stated

    @property
    def receipt(self) -> dict[str, Any]:
        """The statement with its signature: all that is needed to check it elsewhere."""
        return {**self.stated, "signature": self.signature}


class LedgerCheck(models.Model):
    """One reading of the ledger: asked for, then read by a worker, then known to be intact or not.

    `active_key` is ONE until it is over and null afterwards, so that of two presses of the button,
    on whatever hosts, one counts. `process_id` is the lease of the process that reads.
    """

    class State(models.TextChoices):
        WAITING = "waiting", "Queued"
        RUNNING = "running", "Running"
        INTACT = "intact", "Verified: no problems found"
        NOT_INTACT = "not_intact", "Problems found"
        FAILED = "failed", "Aborted"

    ONE = "one"

    active_key = models.CharField(max_length=8, null=True, unique=True)  # noqa: DJ001
    state = models.CharField(max_length=12, choices=State.choices, default=State.WAITING)
    asked_by = models.CharField("requested by", max_length=150)
    asked_at = models.DateTimeField("requested at")
    process_id = models.UUIDField(null=True, editable=False)
    started_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    total = models.PositiveBigIntegerField(default=0, help_text="Entries at the start.")
    entries = models.PositiveBigIntegerField("entries checked", default=0)
    executions = models.PositiveBigIntegerField(default=0)
    rows = models.PositiveBigIntegerField("other rows", default=0)
    unproven = models.PositiveBigIntegerField("rows without an entry", default=0)
    checkpoints = models.PositiveBigIntegerField(default=0)
    findings = models.PositiveBigIntegerField(default=0)
    first_findings = models.JSONField(default=list, help_text="The first findings.")
    problem = models.CharField(
        "error", max_length=500, blank=True, help_text="Why the verification was aborted."
    )

    class Meta:
        verbose_name = "verification"
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (("request_ledgercheck", "Can run ledger verification"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(
                    state__in=("waiting", "running"),
                    active_key="one",
                    active_key__isnull=False,
                    finished_at=None,
                )
                | Q(
                    state__in=("intact", "not_intact", "failed"),
                    active_key=None,
                    finished_at__isnull=False,
                ),
                name="ledger_check_is_open_or_over",
            ),
        )

    def __str__(self) -> str:
        return f"Verification {self.pk}"

    @property
    def is_open(self) -> bool:
        return self.state in (self.State.WAITING, self.State.RUNNING)


class LegalHold(models.Model):
    """What must not be erased while this stands: all of a tenant's executions, or one of them.

    To change or to lift one always takes two administrators. `ledger.erasures` has the rules.
    """

    tenant_slug = models.SlugField("tenant", max_length=64, help_text="Slug of the tenant.")
    execution_id = models.UUIDField(
        "execution", null=True, blank=True, help_text="Empty: all executions of the tenant."
    )
    reason = models.CharField(max_length=500, help_text="The case, and who requested the hold.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("tenant_slug", "-created_at")
        constraints = (
            models.CheckConstraint(
                condition=~models.Q(tenant_slug="") & ~models.Q(reason=""),
                name="legal_hold_names_its_tenant_and_reason",
            ),
        )

    def __str__(self) -> str:
        return f"{self.tenant_slug}: {self.execution_id or 'everything'}"


# A ledger that was exchanged as a whole has one for every entry.
MOST_FINDINGS = 1000


@dataclass(frozen=True)
class Finding:
    """What is wrong, at which entry. `kind` is what was probably done."""

    kind: str
    sequence: int
    detail: str

    def __str__(self) -> str:
        return f"entry {self.sequence}: {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Mark:
    """A complete verification found nothing up to the entry `sequence`, whose statement has this
    digest. `rows` is one hash over what the entries up to it say of other rows than executions,
    `executions` one over which of them are of which execution, `at` when it ended. Both hashes are
    "" where a later verification found something: the mark is then not active. See
    `ledger.marks`."""

    sequence: int
    digest: str
    rows: str
    executions: str
    at: str
    key_id: str
    signature: str = ""

    @property
    def is_active(self) -> bool:
        """Whether a verification may begin behind it."""
        return bool(self.executions)

    @property
    def time(self) -> datetime:
        """`at` as a time."""
        return datetime.fromisoformat(self.at)


@dataclass
class Verification:
    """What was read, and what was found wrong with it, in the order of the entries.

    `rows` are those beside executions that were compared; `unproven` were never entered, and the
    ledger never took stock of them. Of more than a thousand findings the first thousand are kept,
    and `omitted` counts the others. `mark` is where it began, None where all entries were read.
    """

    entries: int = 0
    executions: int = 0
    rows: int = 0
    unproven: int = 0
    head: str = ""
    checkpoints: int = 0
    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0
    mark: Mark | None = None

    @property
    def is_intact(self) -> bool:
        return not self.findings

    def add(self, finding: Finding) -> None:
        if len(self.findings) < MOST_FINDINGS:
            self.findings.append(finding)
        else:
            self.omitted += 1

    def sort(self) -> None:
        self.findings.sort(key=lambda finding: finding.sequence)

    def outcome(self) -> dict[str, Any]:
        """The verification as JSON; `since_verified` only where it began at a mark."""
        said = asdict(self)
        del said["mark"]
        if self.mark is not None:
            said["since_verified"] = {"sequence": self.mark.sequence, "at": self.mark.at}
        return {"intact": self.is_intact, **said}
