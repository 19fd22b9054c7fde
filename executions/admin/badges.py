"""The state of a run in one word and one colour."""

from __future__ import annotations

from django.utils.html import format_html
from django.utils.safestring import SafeString

from executions.runs.models import Execution

_S = Execution.Status
_TONES = {
    **dict.fromkeys((_S.SUCCEEDED,), "good"),
    **dict.fromkeys((_S.FAILED, _S.ERROR, _S.OUT_OF_MEMORY, _S.BLOCKED), "bad"),
    **dict.fromkeys((_S.TIMED_OUT, _S.RUNNING), "warn"),
}


def tone_of(execution: Execution) -> str:
    return _TONES.get(Execution.Status(execution.status), "quiet")


def status_badge(execution: Execution) -> SafeString:
    return format_html(
        '<span class="badge badge-{}">{}</span>', tone_of(execution), execution.get_status_display()
    )
