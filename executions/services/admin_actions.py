"""The admin's own log, for actions that are taken outside its forms."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.contenttypes.models import ContentType

from providers.models import ProviderConfig


def log_action(user: Any, provider_id: str, message: str) -> None:
    """Note what a signed-in user did to a provider. What a key does has no user to note it of."""
    if user is None or not user.is_authenticated:
        return
    pk = ProviderConfig.objects.filter(provider_id=provider_id).values_list("pk", flat=True).first()
    LogEntry.objects.create(
        user_id=user.pk,
        content_type_id=ContentType.objects.get_for_model(ProviderConfig).pk,
        object_id=None if pk is None else str(pk),
        object_repr=provider_id,
        action_flag=CHANGE,
        change_message=message,
    )
