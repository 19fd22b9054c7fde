"""The shapes of sessions, for the API's description. Requests are declared in services."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from executions.api.schema import JsonObject
from executions.sessions.models import Session


class ContextSerializer(serializers.Serializer[Any]):
    id = serializers.CharField()
    language = serializers.CharField()
    cwd = serializers.CharField(
        allow_blank=True, help_text="The working folder, relative to the workspace."
    )


class ContextPageSerializer(serializers.Serializer[Any]):
    results = ContextSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class SavedFilesSerializer(serializers.Serializer[Any]):
    """The files of a session in storage."""

    count = serializers.IntegerField(help_text="The number of files, folders and links.")
    bytes = serializers.IntegerField()
    saved_at = serializers.DateTimeField(allow_null=True)
    unsaved_since = serializers.DateTimeField(
        allow_null=True, help_text="Since when changes are unsaved; null if everything is saved."
    )
    problem = serializers.CharField(allow_null=True, help_text="Why the changes are not saved.")


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
    expires_at = serializers.DateTimeField(
        help_text="When its idle time or its total time ends, whichever is earlier."
    )
    closed_at = serializers.DateTimeField(allow_null=True)
    closed_because = serializers.CharField(
        allow_null=True, help_text="Why it was closed or lost; null while it is not."
    )
    contexts = ContextSerializer(many=True)
    saves = serializers.ChoiceField(
        Session.Saves.values,
        help_text="When its files are saved to storage: before the answer, after it, or never.",
    )
    files = SavedFilesSerializer()
    woken_at = serializers.DateTimeField(
        allow_null=True,
        help_text="When it was last resumed from storage. Its files were "
        "restored, its variables were lost.",
    )


class SessionPageSerializer(serializers.Serializer[Any]):
    results = SessionSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class InterruptedSerializer(serializers.Serializer[Any]):
    interrupted = serializers.BooleanField(help_text="False if nothing was running.")


class FileSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    type = serializers.ChoiceField(["file", "directory", "symlink", "other"])
    size_bytes = serializers.IntegerField()
    mode = serializers.IntegerField()
    modified_at = serializers.DateTimeField(allow_null=True)
    target = serializers.CharField(required=False, help_text="The target of a symbolic link.")


class FilePageSerializer(serializers.Serializer[Any]):
    entries = FileSerializer(many=True)
    next = serializers.URLField(allow_null=True)


class MadeSerializer(serializers.Serializer[Any]):
    path = serializers.CharField()
    created = serializers.BooleanField(help_text="False if the folder already existed.")


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
    signalled = serializers.BooleanField(help_text="False if the command had already ended.")
