"""What was seen of a run, as the API describes it."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from providers.observations import KINDS, WITNESSES


class ObservationSerializer(serializers.Serializer[Any]):
    kind = serializers.ChoiceField(
        tuple(KINDS), help_text="; ".join(f"{kind}: {what}" for kind, what in KINDS.items())
    )
    seen_by = serializers.ChoiceField(
        WITNESSES,
        help_text="Who saw it: the host, outside the sandbox, or the supervisor, inside it.",
    )
    count = serializers.IntegerField()
