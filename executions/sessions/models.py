"""The rows of sessions, of their snapshots, and of their files in storage."""

from __future__ import annotations

import json
import logging
from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.core.files.storage import Storage, storages
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from executions.kernel.storage import WORKSPACES
from executions.kernel.text import uuid7
from executions.runs.models import Process
from executions.tenants.models import ApiKey, Tenant
from providers import aes_gcm, key_ring
from providers.fields import EncryptedJSONField, EncryptedTextField
from providers.network import NetworkPolicy

logger = logging.getLogger(__name__)

_SEAL = "seal"
_SEALED_FOR = "executions_session.network"


class Session(models.Model):
    """A persistent sandbox of one caller, reachable through every process of the service.

    This row is the truth about it; the provider only has the sandbox. Tenant and key are kept as
    text too, because the record outlives them. Times are the database's, by which its ages are
    measured as well.
    """

    class State(models.TextChoices):
        OPEN = "open", "Open"
        ASLEEP = "asleep", "Asleep"
        CLOSED = "closed", "Closed"
        LOST = "lost", "Lost"

    LIVING = (State.OPEN, State.ASLEEP)

    class Saves(models.TextChoices):
        ANSWER = "answer", "Before the response"
        BACKGROUND = "background", "After the response"
        NEVER = "never", "Never"

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)

    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="sessions", db_index=False
    )
    tenant_slug = models.CharField(max_length=64)
    api_key = models.ForeignKey(
        ApiKey, on_delete=models.SET_NULL, null=True, related_name="sessions", db_index=False
    )
    api_key_name = models.CharField(max_length=100, blank=True)
    api_key_prefix = models.CharField(max_length=16, blank=True)
    subject = models.CharField(
        max_length=255, blank=True, help_text="The end user for whom the caller opened it."
    )
    name = models.CharField(max_length=128, blank=True, help_text="Unique while open.")
    metadata = models.JSONField(default=dict, help_text="Set by the caller.")

    language = models.CharField(max_length=32)
    template = models.CharField(
        max_length=80, blank=True, help_text="Its template as name@version, or a provider's image."
    )
    template_version = models.UUIDField(
        null=True, editable=False, help_text="The version of a template that it has."
    )
    env = EncryptedJSONField(null=True, editable=False, help_text="Environment variables.")

    network = models.JSONField(
        null=True,
        editable=False,
        help_text="Its list, within those of installation and tenant. Null: no network.",
    )

    provider = models.CharField(max_length=64, blank=True)
    config_version = models.PositiveIntegerField(
        null=True, help_text="Version of the provider configuration it uses."
    )
    ref = EncryptedTextField(
        null=True,
        editable=False,
        help_text="The provider's name for the sandbox. Null while the session opens or sleeps.",
    )
    runtime = models.CharField(max_length=64, blank=True, help_text="Runtime that isolates it.")
    isolation = models.CharField(max_length=16, blank=True)
    sharing = models.CharField(max_length=16, blank=True)

    state = models.CharField(max_length=8, choices=State.choices, default=State.OPEN)
    contexts = models.JSONField(
        default=list, help_text="Interpreters: id, language and working directory of each."
    )
    turns = models.PositiveBigIntegerField(default=0, help_text="Number of executions requested.")
    conversation = models.CharField(
        max_length=64,
        blank=True,
        default="",
        db_default="",
        help_text="Hash of the caller's conversation id. Unique while open.",
    )
    saves = models.CharField(
        max_length=10,
        choices=Saves.choices,
        default=Saves.BACKGROUND,
        db_default=Saves.BACKGROUND,
        help_text="When files are saved.",
    )
    touched = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Number of starts and ends in the session."
    )
    unsaved_since = models.DateTimeField(
        null=True, editable=False, help_text="Files may have unsaved changes since this time."
    )
    wakes = models.PositiveIntegerField(
        default=0, db_default=0, help_text="Number of wake-ups; each gets a new sandbox."
    )
    woken_at = models.DateTimeField(null=True, editable=False)
    woken_turn = models.PositiveBigIntegerField(
        null=True, help_text="First execution after the last wake-up."
    )
    waking_since = models.DateTimeField(
        null=True, editable=False, help_text="Wake-up in progress since."
    )
    process = models.ForeignKey(
        Process,
        on_delete=models.SET_NULL,
        null=True,
        editable=False,
        related_name="sessions",
        db_index=False,
        help_text="Process that opens or wakes it.",
    )
    attachment = models.UUIDField(
        null=True, editable=False, help_text="Latest connection of an executor's client."
    )
    idle_seconds = models.PositiveIntegerField(
        default=600,
        help_text="Idle timeout in seconds. Then it sleeps, or closes if files are not saved.",
    )
    max_seconds = models.PositiveIntegerField(
        default=1800, help_text="Maximum lifetime in seconds."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    used_at = models.DateTimeField(db_default=Now(), editable=False)
    closed_at = models.DateTimeField(null=True, editable=False)
    closed_because = models.CharField(max_length=255, blank=True)
    released_at = models.DateTimeField(
        null=True,
        editable=False,
        help_text="When the provider confirmed that the sandbox is gone.",
    )

    class Meta:
        ordering = ("-id",)
        permissions = (("operate_session", "Can close, reset and extend sessions"),)
        indexes = (
            models.Index(fields=("tenant", "-id"), name="session_tenant_id"),
            # Caps, ages and leases are counted from it.
            models.Index(
                fields=("tenant_slug", "used_at"),
                name="session_living",
                condition=Q(closed_at=None),
            ),
            # Those before the open one: what is kept of them is the conversation's.
            models.Index(
                fields=("tenant", "conversation", "-id"),
                name="session_of_conversation",
                condition=~Q(conversation=""),
            ),
            # What an ended process has begun is found in it.
            models.Index(
                fields=("process",),
                name="session_process",
                condition=Q(process__isnull=False),
            ),
            models.Index(
                fields=("unsaved_since",),
                name="session_to_save",
                condition=Q(closed_at=None, unsaved_since__isnull=False),
            ),
            # What a version of a template is still needed for is found in it.
            models.Index(
                fields=("template_version",),
                name="session_of_template",
                condition=Q(closed_at=None, template_version__isnull=False),
            ),
            models.Index(
                fields=("id",),
                name="session_to_release",
                condition=Q(closed_at__isnull=False, released_at=None),
            ),
        )
        constraints = (
            models.UniqueConstraint(
                fields=("tenant", "name"),
                condition=Q(closed_at=None) & ~Q(name=""),
                name="session_name_once_per_tenant_while_open",
            ),
            models.UniqueConstraint(
                fields=("tenant", "conversation"),
                condition=Q(closed_at=None) & ~Q(conversation=""),
                name="session_conversation_once_per_tenant",
            ),
            models.CheckConstraint(
                condition=Q(saves__in=("answer", "background", "never")),
                name="session_saves_is_known",
            ),
            models.CheckConstraint(
                condition=Q(state__in=("open", "asleep"), closed_at=None)
                | Q(state__in=("closed", "lost"), closed_at__isnull=False),
                name="session_state_is_known_and_closed_has_a_time",
            ),
            models.CheckConstraint(
                condition=Q(idle_seconds__gt=0, max_seconds__gt=0),
                name="session_ages_are_positive",
            ),
        )

    def __str__(self) -> str:
        # Not the name, which its caller chose: pages show this as it is.
        return str(self.pk)

    @property
    def network_policy(self) -> NetworkPolicy | None:
        """Its own list; None for no network. Headers that were not sealed for it are left out."""
        if self.network is None:
            return None
        said = {name: value for name, value in self.network.items() if name != _SEAL}
        policy = NetworkPolicy.from_json(said)
        if not policy.headers or self._has_sealed(said, str(self.network.get(_SEAL))):
            return policy
        logger.error(
            "The headers of the network of session %s are not set. Find out who can write to the "
            "database, and set its network again.",
            self.pk,
        )
        return replace(policy, headers=())

    def network_json(self, policy: NetworkPolicy | None) -> dict[str, Any] | None:
        """What `network` has of a list of this session. Its headers say where secrets go, so who
        writes to the database must not be able to add one."""
        if policy is None:
            return None
        said = policy.to_json()
        if not policy.headers:
            return said
        seal = aes_gcm.seal(key_ring.fernet_keys(), _SEALED_FOR, self._bound(said))
        return {**said, _SEAL: b64encode(seal).decode()}

    def _has_sealed(self, said: Mapping[str, Any], seal: str) -> bool:
        try:
            token = b64decode(seal)
            plain = key_ring.opened(lambda keys: aes_gcm.unseal(keys, _SEALED_FOR, token))
        except (aes_gcm.NotOpened, ValueError):
            return False
        return plain == self._bound(said)

    def _bound(self, said: Mapping[str, Any]) -> bytes:
        bound = {"session": str(self.pk), "tenant": self.tenant_slug, **said}
        return json.dumps(bound, sort_keys=True).encode()

    @property
    def image(self) -> str:
        """Return what it is opened of at its provider: a named image, or else its language."""
        named = self.template if self.template_version is None else ""
        return named or self.language

    @property
    def is_living(self) -> bool:
        return self.state in self.LIVING


def workspace_storage() -> Storage:
    """Where blobs are kept. A callable, so that migrations do not fix the place."""
    return storages[WORKSPACES]


class Blob(models.Model):
    """The bytes of one content, kept once per tenant however many files have it.

    Its name in storage is used once, so that a removal never meets another upload. A row that names
    it keeps it: the database refuses to let it go.
    """

    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="blobs", db_index=False
    )
    sha256 = models.CharField(max_length=64)
    size = models.PositiveBigIntegerField(help_text="Bytes.")
    file = models.FileField(storage=workspace_storage, max_length=255, unique=True)
    kept_until = models.DateTimeField(
        help_text="Kept until this time even if no row references it."
    )

    class Meta:
        ordering = ("pk",)
        indexes = (models.Index(fields=("kept_until",), name="blob_kept_until"),)
        constraints = (
            models.UniqueConstraint(fields=("tenant", "sha256"), name="blob_once_per_tenant"),
        )

    def __str__(self) -> str:
        return self.sha256


class LooseFile(models.Model):
    """A file in storage that is no blob: it is being written, or it is to be removed.

    Its row is there before the file is, and until it is gone: nothing is left in storage that no
    row knows of, whenever a process dies.
    """

    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="+", db_index=False
    )
    file = models.CharField(max_length=255, unique=True)
    size = models.PositiveBigIntegerField(help_text="Bytes.")
    due_at = models.DateTimeField(db_index=True, help_text="Deleted after this time.")

    class Meta:
        ordering = ("pk",)

    def __str__(self) -> str:
        return self.file


class StoredTotal(models.Model):
    """What a tenant's workspaces take: changed in the transactions that change what is counted."""

    tenant = models.OneToOneField(
        Tenant, on_delete=models.CASCADE, primary_key=True, related_name="stored_total"
    )
    bytes = models.BigIntegerField(default=0, help_text="Bytes of blobs and loose files.")
    files = models.BigIntegerField(default=0, help_text="Workspace rows, including directories.")
    names = models.BigIntegerField(
        default=0, db_default=0, help_text="Characters of paths and symlink targets."
    )

    def __str__(self) -> str:
        return str(self.pk)


class Workspace(models.Model):
    """The files of one session as they were saved last.

    Of two who save at once the one whose UPDATE finds the `version` it has seen wins; the other
    looks again.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant = models.ForeignKey(Tenant, on_delete=models.CASCADE, related_name="workspaces")
    session = models.OneToOneField(
        Session, on_delete=models.CASCADE, null=True, related_name="workspace"
    )
    former = models.UUIDField(
        null=True,
        editable=False,
        help_text="Ended session that gets it back if the next one never opens.",
    )
    version = models.PositiveBigIntegerField(default=0, db_default=0)
    mark = models.CharField(
        max_length=255,
        blank=True,
        default="",
        db_default="",
        help_text="Change cursor of the sandbox; empty: all files.",
    )
    missed = models.JSONField(
        default=list, help_text="Paths that could not be read at the last save."
    )
    seen_turns = models.PositiveBigIntegerField(
        default=0,
        db_default=0,
        help_text="Turns of the session at the last file scan.",
    )
    open_turns = models.JSONField(default=list, help_text="Turns that were still running then.")
    lost_turns = models.JSONField(
        null=True,
        help_text="First and last turn that was never saved.",
    )
    files = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Number of entries, including directories."
    )
    bytes = models.PositiveBigIntegerField(default=0, db_default=0)
    names = models.PositiveBigIntegerField(
        default=0, db_default=0, help_text="Characters of paths and symlink targets."
    )
    saved_at = models.DateTimeField(null=True, help_text="Last complete save.")
    problem = models.CharField(
        max_length=500, blank=True, default="", db_default="", help_text="Why a later save failed."
    )
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return str(self.pk)


class WorkspaceFile(models.Model):
    """Something that stands under a path of a workspace.

    `path` and `target` are texts that stand for bytes: `kernel.text` turns one into
    the other. `key` is the hash of those bytes, because a path may be longer than any index takes.
    """

    class Type(models.TextChoices):
        FILE = "file", "File"
        DIRECTORY = "directory", "Folder"
        SYMLINK = "symlink", "Symlink"

    workspace = models.ForeignKey(
        Workspace, on_delete=models.CASCADE, related_name="rows", db_index=False
    )
    key = models.CharField(max_length=64)
    path = models.TextField()
    type = models.CharField(max_length=9, choices=Type.choices)
    blob = models.ForeignKey(Blob, on_delete=models.PROTECT, null=True, related_name="rows")
    size = models.PositiveBigIntegerField(default=0, help_text="Bytes.")
    mode = models.PositiveIntegerField()
    modified = models.FloatField(help_text="Unix time, from the sandbox's clock.")
    target = models.TextField(blank=True, default="", help_text="Symlink target.")

    class Meta:
        ordering = ("pk",)
        constraints = (
            models.UniqueConstraint(fields=("workspace", "key"), name="workspace_path_once"),
            models.CheckConstraint(
                condition=Q(type="file", blob__isnull=False)
                | Q(type__in=("directory", "symlink"), blob=None, size=0),
                name="workspace_file_has_bytes_and_nothing_else_has",
            ),
        )

    def __str__(self) -> str:
        return self.key

    @property
    def names(self) -> int:
        """Characters that the database keeps of it."""
        return len(self.path) + len(self.target)


class Snapshot(models.Model):
    """The files of a session as they were once, under which others begin. It stays as it is.

    Tenant and key are kept as text too, because the record outlives them.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    tenant = models.ForeignKey(
        Tenant, on_delete=models.SET_NULL, null=True, related_name="snapshots", db_index=False
    )
    tenant_slug = models.CharField(max_length=64)
    api_key_name = models.CharField(max_length=100, blank=True)
    api_key_prefix = models.CharField(max_length=16, blank=True)
    name = models.CharField(max_length=128, blank=True)
    # No relation: it is left alone by all that becomes of its source.
    source = models.UUIDField(help_text="Session the files come from.")
    workspace = models.OneToOneField(
        Workspace, on_delete=models.SET_NULL, null=True, related_name="snapshot"
    )
    files = models.PositiveBigIntegerField(help_text="Number of entries, including directories.")
    bytes = models.PositiveBigIntegerField()
    created_at = models.DateTimeField(db_default=Now(), editable=False)

    class Meta:
        ordering = ("-id",)
        indexes = (models.Index(fields=("tenant", "-id"), name="snapshot_tenant_id"),)

    def __str__(self) -> str:
        # Not the name, which its caller chose: pages show this as it is.
        return str(self.pk)
