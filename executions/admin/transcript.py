"""What was run in a session, in the order of its turns, as in a notebook."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.paginator import Page, Paginator
from django.db.models import Case, F, TextField, Value, When
from django.db.models.functions import Length
from django.utils.safestring import SafeString

from executions.admin.display import code_block, outputs_block, text_block
from executions.kernel.page_time import PageTime
from executions.runs.models import Execution
from executions.runs.results import MOST_VALUES, values_in
from providers.hidden_characters import visible

CELLS_PER_PAGE = 20
# Of each text of a cell; the execution's own page shows more.
MOST_CHARACTERS = 8_000
# Plots are kept within their execution, and decoded to be shown.
MOST_OUTPUT_CHARACTERS = 2_000_000

_UNSHOWN = ("pending", "arguments", "result", "meta", "hops", "input_files", "output_order")


@dataclass(frozen=True)
class Transcript:
    page: Page[Any]
    pages: list[int | str]

    def cells(self) -> Iterator[Cell]:
        time, left = PageTime(), MOST_VALUES
        for execution in self.page:
            values = values_in(execution.small_outputs)
            yield Cell(execution, time, has_room=values <= left)
            left -= values if values <= left else 0


class Cell:
    """One execution as a part of the page. All of it is hostile, and drawn by `display`."""

    def __init__(self, execution: Any, page: PageTime, *, has_room: bool) -> None:
        self._page = page
        self.execution: Execution = execution
        is_large = execution.outputs_size > MOST_OUTPUT_CHARACTERS
        self.has_large_outputs: bool = is_large or not has_room
        execution.outputs = execution.small_outputs if has_room else ""

    @property
    def kind(self) -> str:
        execution = self.execution
        if execution.context:
            return visible(execution.context)
        return "background command" if execution.background else "command"

    @property
    def badge(self) -> str:
        if self.execution.status == Execution.Status.SUCCEEDED:
            return "good"
        return "warn" if self.execution.is_open else "bad"

    @property
    def code(self) -> SafeString | str:
        return code_block(self.execution, self._page, MOST_CHARACTERS)

    @property
    def stdout(self) -> SafeString | str:
        return self._text("stdout", self.execution.stdout_truncated)

    @property
    def stderr(self) -> SafeString | str:
        return self._text("stderr", self.execution.stderr_truncated)

    @property
    def outputs(self) -> SafeString | str:
        return outputs_block(self.execution, MOST_CHARACTERS)

    @property
    def error(self) -> str:
        execution = self.execution
        return visible(" ".join(filter(None, (execution.error_code, execution.error_message))))

    def _text(self, name: str, truncated: bool) -> SafeString | str:
        return text_block(self.execution, name, truncated=truncated, most=MOST_CHARACTERS)


def transcript_of(session_id: str, number: str) -> Transcript | None:
    """A page of it, the last one unless a `number` is given; None for what is no session's id."""
    try:
        pk = UUID(session_id)
    except ValueError:
        return None
    rows = (
        Execution.objects.filter(session=pk)
        .defer(*_UNSHOWN, "outputs")
        .annotate(outputs_size=Length("outputs"))
        .annotate(
            small_outputs=Case(
                When(outputs_size__lte=MOST_OUTPUT_CHARACTERS, then=F("outputs")),
                default=Value(""),
                output_field=TextField(),
            )
        )
        .order_by("turn", "id")
    )
    paginator = Paginator(rows, CELLS_PER_PAGE)
    page = paginator.get_page(number or paginator.num_pages)
    return Transcript(page, list(paginator.get_elided_page_range(page.number)))
