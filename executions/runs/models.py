"""Executions, with their artifacts, events and late results, and the processes that run them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from django.core.files.storage import Storage, storages
from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from executions.kernel.storage import ARTIFACTS
from executions.kernel.text import uuid7
from executions.tenants.models import ApiKey, Tenant
from providers.fields import EncryptedJSONField

if TYPE_CHECKING:
    from executions.ledger.models import LedgerEntry


class Process(models.Model):
    """A process that may run executions, and its sign of life: `beat` grows while it lives.

    Whether it lives is decided by who watches `beat`, and by no clock
    (`executions.runs.orphaned_runs`). The times are the database's, and for people to read.
    """

    class Kind(models.TextChoices):
        WEB = "web", "Web"
        WORKER = "worker", "Worker"
        COMMAND = "command", "Command"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    instance = models.CharField(max_length=100)
    kind = models.CharField(max_length=8, choices=Kind.choices)
    pid = models.PositiveBigIntegerField("process id")
    tag = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        editable=False,
        help_text="Marks its sandboxes at remote services.",
    )
    beat = models.PositiveBigIntegerField(default=0)
    figures = models.JSONField(
        null=True, editable=False, help_text="Metrics of its pools and host at the last heartbeat."
    )
    started_at = models.DateTimeField(db_default=Now())
    renewed_at = models.DateTimeField("last heartbeat", db_default=Now())
    draining = models.BooleanField(
        default=False, help_text="Finishes running work and starts nothing new."
    )
    ended_at = models.DateTimeField(null=True, help_text="When it stopped, or was found dead.")

    class Meta:
        verbose_name_plural = "processes"
        ordering = ("-id",)
        indexes = (
            # Read by every process once a second.
            models.Index(fields=("id",), name="process_alive", condition=Q(ended_at=None)),
        )
        constraints = (
            models.CheckConstraint(
                condition=Q(kind__in=("web", "worker", "command")), name="process_kind_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind}, instance {self.instance}, pid {self.pid}"


class Execution(models.Model):
    """One attempt to run code: its caller, its request, where it ran and its result.

    The row is written before anything runs. Tenant and key are kept as text too, because the
    record outlives them. Arguments and result are JSON text and not JSON columns: some
    databases refuse a NUL inside a JSON string, and the caller's own text is what was run.
    """

    class Status(models.TextChoices):
        QUEUED = "queued", "Queued"
        RUNNING = "running", "Running"
        SUCCEEDED = "succeeded", "Succeeded"
        FAILED = "failed", "Failed"
        TIMED_OUT = "timed_out", "Timed out"
        OUT_OF_MEMORY = "out_of_memory", "Out of memory"
        BLOCKED = "blocked", "Blocked"
        CANCELLED = "cancelled", "Cancelled"
        ERROR = "error", "Error"

    class Mode(models.TextChoices):
        SYNC = "sync", "Synchronous"
        ASYNC = "async", "Asynchronous"

    class Priority(models.IntegerChoices):
        HIGH = 0, "high"
        NORMAL = 1, "normal"
        LOW = 2, "low"

    # Where it was ended just now; elsewhere it is looked up by `executions.ledger`.
    ledger_entry: LedgerEntry | None = None

    OPEN = (Status.QUEUED, Status.RUNNING)
    WITH_ERROR = (Status.TIMED_OUT, Status.OUT_OF_MEMORY, Status.BLOCKED, Status.ERROR)

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)

    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="executions", db_index=False
    )
    tenant_slug = models.CharField(max_length=64)
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.SET_NULL, null=True, related_name="executions"
    )
    api_key_name = models.CharField(max_length=100, blank=True)
    api_key_prefix = models.CharField(max_length=16, blank=True)
    subject = models.CharField(
        max_length=255, blank=True, help_text="The end user for whom the caller ran the code."
    )
    # What the caller says of who asked. Null and not empty: no row is rewritten for a new column,
    # and what nobody says is in no index.
    agent = models.CharField(max_length=255, null=True)  # noqa: DJ001
    model = models.CharField(max_length=255, null=True)  # noqa: DJ001
    conversation = models.CharField(max_length=255, null=True)  # noqa: DJ001
    on_behalf_of = models.CharField(  # noqa: DJ001
        max_length=255, null=True, help_text="The person; emptied when the code is erased."
    )
    traceparent = models.CharField(  # noqa: DJ001
        max_length=55, null=True, help_text="W3C trace context of the request."
    )
    trace_id = models.CharField(  # noqa: DJ001
        max_length=32, null=True, help_text="The trace id in traceparent, for searching."
    )
    request_id = models.CharField(max_length=128, blank=True)
    client_address = models.CharField(max_length=64, blank=True)
    # Null and not empty: the planner then sees that its index serves the lookup of a key.
    idempotency_key = models.CharField(max_length=255, null=True)  # noqa: DJ001
    request_hash = models.CharField(
        max_length=64,
        blank=True,
        help_text="Hash that a repeated idempotency key is compared with.",
    )

    language = models.CharField(max_length=32)
    entrypoint = models.CharField(max_length=16)
    mode = models.CharField(max_length=8, choices=Mode.choices, default=Mode.SYNC)
    priority = models.SmallIntegerField(
        choices=Priority.choices,
        default=Priority.NORMAL,
        db_default=Priority.NORMAL,
        help_text="Order in the queue, within the tenant.",
    )
    code = models.TextField(blank=True)
    code_hash = models.CharField(max_length=71)
    arguments = models.TextField(blank=True, help_text="JSON; empty if there are none.")
    input_files = models.JSONField(
        default=list, help_text="Path, size and hash of each input file."
    )
    timeout = models.FloatField(help_text="Seconds.")
    replay_of = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, related_name="replays", db_index=False
    )
    schedule_id = models.UUIDField(
        "schedule", null=True, help_text="Schedule that started it (may have been deleted)."
    )
    pending = EncryptedJSONField(
        null=True, editable=False, help_text="Request data of a queued execution."
    )

    session = models.ForeignKey(
        "executions.Session",
        on_delete=models.PROTECT,
        null=True,
        related_name="executions",
        db_index=False,
    )
    turn = models.PositiveBigIntegerField(null=True, help_text="Position in the session.")
    context = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Interpreter of the session.",
    )
    context_kept = models.BooleanField(
        null=True, help_text="Whether the context kept its state. Null outside sessions."
    )
    pid = models.PositiveBigIntegerField(null=True, help_text="Process in the session.")
    background = models.BooleanField(
        default=False,
        db_default=False,
        help_text="Background process. It ends with its session at the latest.",
    )

    status = models.CharField(max_length=16, choices=Status.choices)
    process = models.ForeignKey(
        Process,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="executions",
        db_index=False,
        help_text="Process that runs it. Null while queued and after the end.",
    )
    provider = models.CharField(max_length=64, blank=True)
    config_version = models.PositiveIntegerField(null=True)
    runtime = models.CharField(max_length=64, blank=True, help_text="Runtime that isolated it.")
    isolation = models.CharField(
        max_length=16, blank=True, help_text="Strength: microvm, gvisor, namespaces or none."
    )
    sharing = models.CharField(
        max_length=16,
        blank=True,
        help_text="Sandbox sharing: execution, tenant, tenant-kernel or session.",
    )
    has_result = models.BooleanField(default=False)
    result = models.TextField(blank=True, help_text="JSON; empty if there is none.")
    outputs = models.TextField(
        blank=True, help_text="JSON list of MIME bundles; empty if there are none."
    )
    exception = models.TextField(
        blank=True,
        default="",
        db_default="",
        help_text="JSON of the exception as the program reported it: type, message, traceback.",
    )
    stdout = models.TextField(blank=True)
    stderr = models.TextField(blank=True)
    stdout_truncated = models.BooleanField(default=False)
    stderr_truncated = models.BooleanField(default=False)
    output_order = models.JSONField(
        null=True, help_text="Order of the pieces of stdout and stderr."
    )
    exit_code = models.IntegerField(null=True)
    artifact_count = models.PositiveSmallIntegerField(default=0)
    error_code = models.CharField(max_length=8, blank=True)
    error_message = models.TextField(blank=True)
    error_field = models.CharField(max_length=100, blank=True)
    retryable = models.BooleanField(
        default=False,
        help_text="No code ran. The same request can be retried with the same idempotency key.",
    )
    meta = models.JSONField(
        default=dict, help_text="Limits, peak memory, CPU time and image, if known."
    )

    # Null and not empty: no row is rewritten for it, and the index has only those with some.
    observed = models.CharField(  # noqa: DJ001
        max_length=64,
        null=True,
        help_text="Kinds of its security events, as in `meta`, for searching.",
    )
    hops = models.JSONField(
        default=list,
        help_text="The providers that were tried or skipped, and why.",
    )
    cost = models.DecimalField(
        max_digits=14,
        decimal_places=8,
        null=True,
        help_text="Estimated from the provider's price; null without a price.",
    )

    # TimingsShape says of each what it is.
    received_ms = models.FloatField(null=True)
    queue_ms = models.FloatField(null=True)
    start_ms = models.FloatField(null=True)
    run_ms = models.FloatField(null=True)
    closed_ms = models.FloatField(null=True)
    total_ms = models.FloatField(null=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    run_at = models.DateTimeField(null=True, help_text="Earliest start; null if not requested.")
    started_at = models.DateTimeField(null=True)
    deadline = models.DateTimeField(
        help_text="After this time a queued execution does not start, and a running one without a "
        "process is lost."
    )
    finished_at = models.DateTimeField(null=True)

    # Whether something earlier held its context when it took its turn, as far as is known here.
    is_held: bool = True
    # Whether the files of its session were saved before it is answered, as far as is known here.
    files_saved: bool | None = None
    # The paths that the save after it has found to be new or changed.
    changed_files: Sequence[str] = ()

    class Meta:
        ordering = ("-id",)
        permissions = (
            ("export_execution", "Can export executions"),
            ("replay_execution", "Can replay executions"),
            ("cancel_execution", "Can cancel executions"),
            ("use_playground", "Can run code in the playground"),
        )
        indexes = [
            models.Index(fields=("tenant", "-id"), name="execution_tenant_id"),
            models.Index(fields=("tenant_slug", "-id"), name="execution_tenant_slug"),
            models.Index(fields=("status", "-id"), name="execution_status"),
            models.Index(fields=("provider", "-id"), name="execution_provider"),
            models.Index(fields=("language", "-id"), name="execution_language"),
            models.Index(fields=("error_code", "-id"), name="execution_error_code"),
            models.Index(fields=("api_key_prefix", "-id"), name="execution_key"),
            models.Index(
                fields=("exit_code", "-id"),
                name="execution_exit_code",
                condition=Q(exit_code__isnull=False),
            ),
            models.Index(fields=("code_hash",), name="execution_code_hash"),
            models.Index(
                fields=("replay_of",),
                name="execution_replay_of",
                condition=Q(replay_of__isnull=False),
            ),
            models.Index(
                fields=("-id",),
                name="execution_of_thread",
                condition=Q(conversation__isnull=False),
            ),
            models.Index(
                fields=("-id",), name="execution_replays", condition=Q(replay_of__isnull=False)
            ),
            # Those that run: what an ended process leaves open is found in it.
            models.Index(
                fields=("process",),
                name="execution_process",
                condition=Q(process__isnull=False),
            ),
            models.Index(
                fields=("session", "-id"),
                name="execution_session",
                condition=Q(session__isnull=False),
            ),
            *(
                models.Index(
                    fields=(name, "tenant", "-id"),
                    name=f"execution_{name}",
                    condition=Q(**{f"{name}__isnull": False}),
                )
                for name in ("agent", "model", "conversation", "on_behalf_of", "trace_id")
            ),
            models.Index(
                fields=("run_at",), name="execution_run_at", condition=Q(run_at__isnull=False)
            ),
            models.Index(
                fields=("-id",), name="execution_observed", condition=Q(observed__isnull=False)
            ),
            models.Index(
                fields=("schedule_id", "tenant", "-id"),
                name="execution_schedule",
                condition=Q(schedule_id__isnull=False),
            ),
            # Who is next in a session, and what is left of one that ended.
            models.Index(
                fields=("session", "context", "turn"),
                name="execution_open_of_session",
                condition=Q(session__isnull=False, finished_at=None),
            ),
            # Bounds and the workers' queue are counted from it, within every execution, and of a
            # tenant's queued ones without a time the next one is its first.
            models.Index(
                # The last two so that no row is read for them, behind all of its text.
                fields=(
                    *("tenant_slug", "status", "run_at", "priority", "id"),
                    *("finished_at", "timeout"),
                ),
                name="execution_open_by_time",
                condition=Q(finished_at=None),
            ),
            models.Index(
                # With all that is asked of it: SQLite then takes no other one of the open rows.
                fields=("tenant_slug", "background", "finished_at"),
                name="execution_in_background",
                condition=Q(background=True, finished_at=None),
            ),
        ]
        constraints = [
            models.UniqueConstraint(
                fields=("tenant", "idempotency_key"),
                condition=Q(idempotency_key__isnull=False, retryable=False),
                name="execution_idempotency_key_once_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(
                    status__in=(
                        "queued",
                        "running",
                        "succeeded",
                        "failed",
                        "timed_out",
                        "out_of_memory",
                        "blocked",
                        "cancelled",
                        "error",
                    )
                ),
                name="execution_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(mode__in=("sync", "async")), name="execution_mode_is_known"
            ),
            models.CheckConstraint(
                condition=Q(status__in=("queued", "running"), finished_at=None)
                | Q(~Q(status__in=("queued", "running")), finished_at__isnull=False),
                name="execution_finished_exactly_when_ended",
            ),
            models.CheckConstraint(
                condition=~Q(status__in=("timed_out", "out_of_memory", "blocked", "error"))
                | ~Q(error_code=""),
                name="execution_error_has_a_code",
            ),
            models.CheckConstraint(
                condition=Q(finished_at=None) | Q(pending__isnull=True),
                name="execution_keeps_no_request_once_ended",
            ),
            models.CheckConstraint(
                condition=Q(retryable=False) | Q(status="error"),
                name="execution_retryable_is_an_error",
            ),
        ]

    def __str__(self) -> str:
        return str(self.pk)

    @property
    def is_open(self) -> bool:
        return self.status in self.OPEN


def artifact_storage() -> Storage:
    """Where artifacts are kept. A callable, so that migrations do not fix the place."""
    return storages[ARTIFACTS]


class Artifact(models.Model):
    """A file an execution left behind. Its name never decides where it is stored."""

    # The constraint's index begins with it; so do those of events and signals.
    execution = models.ForeignKey(
        Execution, on_delete=models.CASCADE, related_name="artifacts", db_index=False
    )
    name = models.CharField(max_length=512)
    mime_type = models.CharField(max_length=127)
    size_bytes = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    file = models.FileField(storage=artifact_storage, max_length=255)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)
        constraints = [
            models.UniqueConstraint(fields=("execution", "name"), name="artifact_name_is_unique")
        ]

    def __str__(self) -> str:
        return self.name


class ExecutionEvent(models.Model):
    """Some events of a run one after the other, for those who follow it from another process.

    They are the record's texts once more, and removed a minute after its end.
    """

    execution = models.ForeignKey(
        Execution, on_delete=models.CASCADE, related_name="events", db_index=False
    )
    first = models.PositiveIntegerField()
    last = models.PositiveIntegerField()
    bodies = models.TextField(help_text="JSON list of the events sent to clients.")

    class Meta:
        ordering = ("execution", "first")
        constraints = (
            models.UniqueConstraint(fields=("execution", "first"), name="execution_event_once"),
            models.CheckConstraint(
                condition=Q(last__gte=F("first")), name="execution_event_has_some"
            ),
        )

    def __str__(self) -> str:
        return f"{self.execution_id}: {self.first} to {self.last}"


class LateResult(models.Model):
    """What came of a run whose record had been closed before it could be written.

    The record had been closed as lost, and stays so: its receipt was given. This is beside it, and
    entered in the ledger by itself. Artifacts are named here; their bytes were not kept.
    """

    execution = models.OneToOneField(
        Execution, on_delete=models.CASCADE, related_name="late_result"
    )
    status = models.CharField(max_length=16, choices=Execution.Status.choices)
    exit_code = models.IntegerField(null=True)
    error_code = models.CharField(max_length=8, blank=True)
    error_message = models.TextField(blank=True)
    has_result = models.BooleanField(default=False)
    result = models.TextField(blank=True, help_text="JSON; empty if there is none.")
    outputs = models.TextField(
        blank=True, help_text="JSON list of MIME bundles; empty if there are none."
    )
    stdout = models.TextField(blank=True)
    stderr = models.TextField(blank=True)
    stdout_truncated = models.BooleanField(default=False)
    stderr_truncated = models.BooleanField(default=False)
    artifacts = models.JSONField(default=list, help_text="Name, type, size and hash of each.")
    cost = models.DecimalField(max_digits=14, decimal_places=8, null=True)
    finished_at = models.DateTimeField(help_text="When the code ended.")
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return f"{self.execution_id}: {self.status}"


class Approval(models.Model):
    """A run that a policy holds in the queue until a person approves it.

    It is bound to the hash of the code and to that of the whole request: nothing else runs by it.
    """

    class Status(models.TextChoices):
        WAITING = "waiting", "Waiting"
        APPROVED = "approved", "Approved"
        REJECTED = "rejected", "Rejected"

    execution = models.OneToOneField(Execution, on_delete=models.CASCADE, related_name="approval")
    tenant_slug = models.CharField("tenant", max_length=64)
    code_hash = models.CharField(max_length=71)
    request_hash = models.CharField(
        max_length=64, help_text="Hash of code, arguments, files and target."
    )
    findings = models.JSONField(default=list, help_text="Findings of the policy.")
    status = models.CharField(max_length=8, choices=Status.choices, default=Status.WAITING)
    asked_at = models.DateTimeField("requested at", default=timezone.now, editable=False)
    decided_at = models.DateTimeField(null=True)
    decided_by = models.CharField(max_length=200, blank=True)

    class Meta:
        ordering = ("-pk",)
        permissions = (("decide_approval", "Can approve and reject code"),)
        indexes = (models.Index(fields=("status", "-id"), name="approval_status"),)
        constraints = (
            models.CheckConstraint(
                condition=Q(status__in=("waiting", "approved", "rejected")),
                name="approval_status_is_known",
            ),
            models.CheckConstraint(
                condition=Q(status="waiting", decided_at=None, decided_by="")
                | (~Q(status="waiting") & Q(decided_at__isnull=False) & ~Q(decided_by="")),
                name="approval_decided_by_somebody",
            ),
        )

    def __str__(self) -> str:
        return f"{self.execution_id} of {self.tenant_slug}"


class RunSignal(models.Model):
    """What somebody wants of a run that another process has: it looks once a second.

    Who asked for the end of one is entered in the ledger; a row goes once its execution has ended.
    """

    class Kind(models.TextChoices):
        CANCEL = "cancel", "Cancel"
        FOLLOW = "follow", "Store events for other processes"

    execution = models.ForeignKey(
        Execution, on_delete=models.CASCADE, related_name="signals", db_index=False
    )
    kind = models.CharField(max_length=8, choices=Kind.choices)
    asked_by = models.CharField(max_length=200)
    asked_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        ordering = ("pk",)
        constraints = (
            models.UniqueConstraint(fields=("execution", "kind"), name="run_signal_once"),
            models.CheckConstraint(
                condition=Q(kind__in=("cancel", "follow")), name="run_signal_kind_is_known"
            ),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.execution_id}"


def hour_of(moment: datetime) -> datetime:
    """When its hour began, by UTC."""
    return timezone.localtime(moment, timezone.get_fixed_timezone(0)).replace(
        minute=0, second=0, microsecond=0
    )
