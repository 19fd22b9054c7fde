"""Parts of a record as HTML. What they show is hostile; no style or script is inline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

from django.db.models import Model
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from executions.kernel.presentation import MAX_CHARACTERS, PageTime, Shown, in_time, shown
from executions.kernel.storage import ARTIFACTS, file_store
from executions.ledger.erasures import Erasures
from executions.ledger.trust import trusted_keys
from executions.ledger.verification import verify_entry
from executions.runs.ledger_checks import alteration_of
from executions.runs.models import Artifact, Execution
from executions.runs.record import late_result_of
from executions.runs.results import (
    MOST_VALUES,
    SIGNATURE_BYTES,
    image_type,
    rich_outputs,
    values_in,
)
from executions.sessions.storage.browse import preview_of_start
from providers.hidden_characters import visible
from providers.languages import language_of

# What reading artifacts for a page may take; `verify_ledger` reads all of them.
_COMPARED_BYTES = 16 * 2**20
_PLAIN = "Too long for syntax highlighting."
_PHASES = ("received", "queue", "start", "run", "closed")


P = ParamSpec("P")
Row = TypeVar("Row", bound=Model)


def once(draw: Callable[Concatenate[Row, P], str]) -> Callable[Concatenate[Row, P], str]:
    """Draw a part of a row once per request: a theme may ask for the same field several times."""

    @wraps(draw)
    def drawn(row: Row, *args: P.args, **kwargs: P.kwargs) -> str:
        kept = row.__dict__.setdefault("_drawn", {})
        key = (draw.__name__, args, tuple(kwargs.items()))
        if key not in kept:
            kept[key] = draw(row, *args, **kwargs)
        return cast("str", kept[key])

    return cast("Callable[Concatenate[Row, P], str]", drawn)


@once
def code_block(
    execution: Execution, page: PageTime, most: int = MAX_CHARACTERS
) -> SafeString | str:
    """Code in colours. With fewer characters, a download is offered only of what is not whole."""
    if not execution.code:
        return "Code is not stored. See the code hash."
    text = shown(execution.code, most)
    body, plain = coloured(text.text, execution.language, page)
    return format_html(
        '<pre class="record hl">{}</pre>{}{}',
        body,
        _paragraph(plain),
        _notes(execution, "code", text, brief=most < MAX_CHARACTERS),
    )


def coloured(text: str, language: str, page: PageTime) -> tuple[SafeString, str]:
    """The text, escaped, in the colours of a language, and "". Where it has no colours it comes
    with a note that says why; with none in a language that nobody knows."""
    html = page.coloured(text, language)
    if html is None:
        return format_html("{}", text), _PLAIN if text and language_of(language) else ""
    # Pygments escapes: https://pygments.org/docs/formatters/#HtmlFormatter
    return mark_safe(html), ""  # noqa: S308


@once
def text_block(
    execution: Execution, name: str, *, truncated: bool = False, most: int = MAX_CHARACTERS
) -> SafeString | str:
    """Text as it was, set apart; empty where there is none."""
    whole: str = getattr(execution, name)
    if not whole:
        return ""
    text = shown(whole, most)
    return format_html(
        '<pre class="record">{}</pre>{}',
        text.text,
        _notes(execution, name, text, truncated, brief=most < MAX_CHARACTERS),
    )


@once
def outputs_block(execution: Execution, most: int = MAX_CHARACTERS) -> SafeString | str:
    """Plots as pictures, everything else the program showed as text."""
    drawn = []
    left = most
    for number, output in enumerate(rich_outputs(execution)):
        if output.image:
            url = reverse("admin:executions_output_image", args=[execution.pk, number])
            part = format_html(
                '<img class="artifact-image" src="{}" alt="output {}" loading="lazy">',
                url,
                number + 1,
            )
        else:
            text = shown(output.text, left)
            left = max(0, left - len(text.text))
            part = format_html('<pre class="record">{}</pre>{}', text.text, _paragraph(text.note))
        drawn.append((visible(output.mime_type), part))
    if values_in(execution.outputs) > MOST_VALUES:
        note = Shown("", len(execution.outputs))
        return _notes(execution, "outputs", note, brief=most < MAX_CHARACTERS)
    if not drawn:
        return ""
    return format_html(
        "{}{}",
        format_html_join("", '<p class="record-note">{}</p>{}', drawn),
        _notes(execution, "outputs", Shown(""), brief=most < MAX_CHARACTERS),
    )


@once
def late_result_block(execution: Execution) -> SafeString | str:
    """What came of a run that had been closed as lost; empty where nothing did."""
    late = late_result_of(execution)
    if late is None:
        return ""
    texts = format_html_join(
        "",
        '<p class="record-note">{}</p><pre class="record">{}</pre>',
        (
            (name, shown(getattr(late, name)).text)
            for name in ("result", "outputs", "stdout", "stderr")
            if getattr(late, name)
        ),
    )
    facts = [f"{late.status}, ended {late.finished_at:%Y-%m-%d %H:%M:%S %Z}"]
    facts += [f"exit code {late.exit_code}"] * (late.exit_code is not None)
    facts += [f"{late.error_code}: {visible(late.error_message)}"] * bool(late.error_code)
    facts += [f"file {visible(file['name'])}, {file['hash']}" for file in late.artifacts]
    return format_html("{}{}", format_html_join("", "<p>{}</p>", ((f,) for f in facts)), texts)


@once
def timeline(execution: Execution) -> SafeString | str:
    """How long each phase took, drawn to scale and in figures."""
    total = execution.total_ms
    if not total:
        return ""
    bars, offset = [], 0.0
    for name in _PHASES:
        took: float | None = getattr(execution, f"{name}_ms")
        if took is None:
            continue
        width = min(took, max(0.0, total - offset)) / total * 100
        bars.append((name, f"{offset / total * 100:.3f}", f"{width:.3f}", name, in_time(took)))
        offset += took
    drawn = format_html_join(
        "",
        '<rect class="phase-{}" x="{}" y="0" width="{}" height="4"><title>{} {}</title></rect>',
        bars,
    )
    figures = [*((name, took) for *_, name, took in bars), ("total", in_time(total))]
    return format_html(
        '<svg class="timeline" viewBox="0 0 100 4" preserveAspectRatio="none" role="img"'
        ' aria-label="phases, to scale">{}</svg><dl class="phases">{}</dl>',
        drawn,
        format_html_join(
            "",
            '<div><dt class="phase-{}">{}</dt> <dd>{}</dd></div>',
            ((n, n, f) for n, f in figures),
        ),
    )


@once
def receipt(execution: Execution) -> SafeString | str:
    """Whether the ledger's entry of this execution holds, and what of the record does not fit."""
    entry = execution.ledger_entry
    if entry is None:
        return "Not yet." if execution.is_open else "None. The execution is not in the ledger."
    keys = trusted_keys()
    whole = sum(artifact.size_bytes for artifact in execution.artifacts.all())
    problem = verify_entry(entry, keys) or alteration_of(
        execution,
        entry.stated,
        Erasures(keys),
        artifact_bytes=whole <= _COMPARED_BYTES,
    )
    link = format_html(
        '<a href="{}">download</a>', reverse("admin:executions_receipt", args=[execution.pk])
    )
    if problem:
        return format_html(
            '<strong class="receipt-bad">NOT VALID</strong>: {}. Entry {}, {}.',
            problem,
            entry.sequence,
            link,
        )
    return format_html(
        '<strong class="receipt-good">valid</strong>, entry {} of the ledger, signed with key {},'
        " {}.{}",
        entry.sequence,
        entry.key_id,
        link,
        "" if whole <= _COMPARED_BYTES else " The content of its artifacts was not compared.",
    )


@once
def artifact_preview(artifact: Artifact) -> SafeString | str:
    """A picture, or the start of a text; empty for anything else."""
    if not artifact.file:
        return "erased"
    name = visible(artifact.name)
    if artifact_image_type(artifact):
        url = reverse("admin:executions_artifact_image", args=[artifact.execution_id, artifact.pk])
        return format_html(
            '<a href="{}"><img class="artifact-image" src="{}" alt="{}" loading="lazy"></a>',
            url,
            url,
            name,
        )
    preview = preview_of_start(
        _start(artifact, _MAX_TEXT_BYTES), artifact.size_bytes, artifact.name
    )
    if preview.table:
        drawn = _table(preview.table[: _MOST_ROWS + 1])
    elif preview.text and preview.text.text:
        drawn = format_html('<pre class="record">{}</pre>', preview.text.text)
    else:
        return ""
    is_cut = preview.is_cut or len(preview.table) > _MOST_ROWS + 1
    return format_html(
        '<div class="begun" tabindex="0" role="region" aria-label="The beginning of {}">{}</div>{}',
        name,
        drawn,
        format_html('<p class="record-note">{}</p>', "Beginning only.") if is_cut else "",
    )


def _table(rows: Sequence[Sequence[str]]) -> SafeString:
    head, *body = rows
    return format_html(
        "<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>",
        format_html_join("", '<th scope="col">{}</th>', ((cell,) for cell in head)),
        format_html_join(
            "",
            "<tr>{}</tr>",
            ((format_html_join("", "<td>{}</td>", ((cell,) for cell in row)),) for row in body),
        ),
    )


_MAX_IMAGE_BYTES = 10_000_000
_MAX_TEXT_BYTES = 8_000
_MOST_ROWS = 10


def artifact_image_type(artifact: Artifact) -> str:
    """The MIME type under which a browser may draw it: by its content, "" when it is none."""
    if not 0 < artifact.size_bytes <= _MAX_IMAGE_BYTES:
        return ""
    return image_type(_start(artifact, SIGNATURE_BYTES))


def _start(artifact: Artifact, size: int) -> bytes:
    try:
        return file_store(ARTIFACTS).start(str(artifact.file.name), size)
    except OSError:
        return b""


def _paragraph(note: str) -> SafeString | str:
    return format_html('<p class="record-note">{}</p>', note) if note else ""


def _notes(
    execution: Execution, name: str, text: Shown, truncated: bool = False, *, brief: bool
) -> SafeString:
    notes = [text.note] if text.note else []
    if truncated:
        notes.append("Truncated: the rest exceeded the limit.")
    if brief and not notes:
        return SafeString()
    url = reverse("admin:executions_text", args=[execution.pk, name])
    return format_html(
        '<p class="record-note">{} <a href="{}">Download as it was</a></p>', " ".join(notes), url
    )
