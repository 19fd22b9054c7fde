"""Long texts of an execution, each in a box that scrolls by itself, with its own tools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from executions.admin.display import coloured
from executions.kernel.page_time import PageTime
from executions.kernel.presentation import shown
from executions.runs.event_log import STREAMS
from executions.runs.event_stream import in_order
from executions.runs.models import Execution

# What is shown in its order. A page of more would be slow, and nobody reads it so.
_MAX_PIECES = 500
_MAX_IN_ORDER = 50_000
# A line takes a hundred bytes of page for its number.
_MAX_NUMBERED = 5_000
_DROPPED = "Truncated: the rest exceeded the limit."


@dataclass(frozen=True)
class Box:
    """`name` is its element's id, `texts` are what of the execution can be downloaded whole."""

    execution_id: UUID
    name: str
    title: str
    body: SafeString
    notes: Sequence[str]
    texts: Sequence[str]
    kind: str = ""
    wraps: bool = True

    @property
    def downloads(self) -> list[tuple[str, str]]:
        """What each is called, and its address."""
        return [
            (
                name if len(self.texts) > 1 else "",
                reverse("admin:executions_text", args=[self.execution_id, name]),
            )
            for name in self.texts
        ]


def code_box(execution: Execution, page: PageTime) -> Box | None:
    """The code with its lines numbered; None where it is not kept."""
    if not execution.code:
        return None
    text = shown(execution.code)
    plain = text.text.removesuffix("\n")
    count = plain.count("\n") + 1
    body, without_colours = coloured(plain, execution.language, page)
    if count <= _MAX_NUMBERED:
        body = _numbered(body, count)
    notes = _notes(text.note, without_colours)
    return Box(execution.pk, "code", "Code", body, notes, ("code",), "hl code", wraps=False)


def text_box(execution: Execution, name: str, title: str = "") -> Box | None:
    """A text as it was; None where there is none."""
    whole: str = getattr(execution, name)
    if not whole:
        return None
    text = shown(whole)
    dropped = _DROPPED if getattr(execution, f"{name}_truncated", False) else ""
    body = format_html("{}", text.text)
    kind = f"stream-{name}" if name in STREAMS else ""
    notes = _notes(text.note, dropped)
    return Box(execution.pk, name, title or name, body, notes, (name,), kind)


def output_boxes(execution: Execution) -> list[Box]:
    """stdout and stderr as they came, in one box where the record knows their order."""
    boxes = [box for name in STREAMS if (box := text_box(execution, name))]
    if len(boxes) < len(STREAMS) or not execution.output_order:
        return boxes
    is_short = len(execution.stdout) + len(execution.stderr) <= _MAX_IN_ORDER
    if is_short and len(execution.output_order) <= _MAX_PIECES:
        pieces = list(in_order(execution))
        if len(pieces) <= _MAX_PIECES:
            notes = [note for box in boxes for note in box.notes]
            body = _interleaved(pieces)
            return [Box(execution.pk, "output", "Output", body, notes, STREAMS, "streams")]
    note = "Too long to show in order. stdout and stderr are shown separately."
    return [replace(box, notes=(note, *box.notes)) for box in boxes]


def _interleaved(pieces: Sequence[tuple[str, bytes]]) -> SafeString:
    return format_html_join(
        "",
        '<span class="from-{}"><span class="stream-name">{}: </span>{}</span>',
        ((stream, stream, shown(data.decode("utf-8", "replace")).text) for stream, data in pieces),
    )


def _numbered(body: SafeString, count: int) -> SafeString:
    """Lines that can be linked to. Pygments ends what it opens in each line."""
    lines = body.split("\n")
    lines += [""] * (count - len(lines))
    # The lines are escaped already, by whoever coloured them.
    return mark_safe(  # noqa: S308
        "".join(
            f'<span class="line" id="L{number}"><a href="#L{number}" tabindex="-1">{number}</a>'
            f"<span>{line}\n</span></span>"
            for number, line in enumerate(lines[:count], 1)
        )
    )


def _notes(*notes: str) -> tuple[str, ...]:
    return tuple(note for note in notes if note)
