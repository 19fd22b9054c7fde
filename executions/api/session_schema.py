"""The shapes of sessions, for the API's description. Requests are declared in services."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from executions.api.schema import JsonObject
from executions.models import Session


class ContextSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    language = serializers.CharField()
    cwd = serializers.CharField(allow_blank=True, help_text="Below the workspace.")


class ContextPageSerializer(serializers.Serializer[Any]):
    results = ContextSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class SavedFilesSerializer(serializers.Serializer[Any]):
    """What is in storage of a session's files."""

    count = serializers.IntegerField(help_text="Files, folders and links.")
    bytes = serializers.IntegerField()
    saved_at = serializers.DateTimeField(allow_null=True)
    unsaved_since = serializers.DateTimeField(
        allow_null=True, help_text="Null where all that is in its sandbox is saved."
    )
    problem = serializers.CharField(allow_null=True, help_text="Why it is not.")


class SessionSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    name = serializers.CharField(allow_null=True)
    state = serializers.ChoiceField(Session.State.values)
    provider = serializers.CharField()
    runtime = serializers.CharField()
    isolation = serializers.CharField()
    sharing = serializers.CharField()
    language = serializers.CharField()
    template = serializers.CharField(allow_null=True)
    metadata = JsonObject()
    idle_seconds = serializers.IntegerField()
    max_seconds = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    used_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(help_text="The earlier of both ages.")
    closed_at = serializers.DateTimeField(allow_null=True)
    closed_because = serializers.CharField(allow_null=True)
    contexts = ContextSerializer(many=True)
    saves = serializers.ChoiceField(Session.Saves.values)
    files = SavedFilesSerializer()
    woken_at = serializers.DateTimeField(
        allow_null=True, help_text="Its files were restored then; variables were not."
    )


class SessionPageSerializer(serializers.Serializer[Any]):
    results = SessionSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class InterruptedSerializer(serializers.Serializer[Any]):
    interrupted = serializers.BooleanField(help_text="False when nothing ran.")


class FileSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    type = serializers.ChoiceField(["file", "directory", "symlink", "other"])
    size_bytes = serializers.IntegerField()
    mode = serializers.IntegerField()
    modified_at = serializers.DateTimeField(allow_null=True)
    target = serializers.CharField(required=False, help_text="What a symbolic link says.")


class FilePageSerializer(serializers.Serializer[Any]):
    entries = FileSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class MadeSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    created = serializers.BooleanField(help_text="False when it was there.")


class UnpackedSerializer(serializers.Serializer[Any]):
    entries = serializers.IntegerField()


class ProcessSerializer(serializers.Serializer[Any]):
    pid = serializers.IntegerField()
    execution = serializers.CharField(allow_null=True)
    state = serializers.ChoiceField(["running", "exited"])
    exit_code = serializers.IntegerField(allow_null=True)


class ProcessPageSerializer(serializers.Serializer[Any]):
    results = ProcessSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class SignalledSerializer(serializers.Serializer[Any]):
    signalled = serializers.BooleanField(help_text="False when it had ended.")
