"""The page of one execution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from django.contrib.auth.models import AbstractBaseUser, AnonymousUser
from django.db.models import Model
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils import timezone
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe

from executions.admin.display import (
    artifact_preview,
    coloured,
    late_result_block,
    outputs_block,
    receipt,
    timeline,
)
from executions.admin.frame import tone_of
from executions.capabilities.schedules.models import Schedule
from executions.kernel.presentation import PageTime, in_time, shown
from executions.runs.advice import advice_of
from executions.runs.event_log import STREAMS
from executions.runs.event_stream import in_order
from executions.runs.models import Approval, Execution
from executions.runs.network import network_of
from executions.runs.requests import CLAIMS
from executions.runs.results import exception_of, in_words, omission_lines
from executions.sessions.models import Session
from executions.tenants.models import ApiKey, Tenant
from providers.hidden_characters import visible
from providers.models import ConfigVersion, ProviderConfig
from providers.timestamps import shown_moment

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


CANCEL = "executions.cancel_execution"
REPLAY = "executions.replay_execution"

# Of the line that says what went wrong.
_MOST_OF_ERROR = 500


class Fact(NamedTuple):
    name: str
    value: SafeString | str


class Facts(NamedTuple):
    title: str
    facts: Sequence[Fact]


class Record:
    """One execution for one reader: links lead only to what she may see."""

    def __init__(self, execution: Execution, user: AbstractBaseUser | AnonymousUser) -> None:
        self.execution = execution
        self._may: Any = user.has_perm  # type: ignore[union-attr]

    @property
    def may_cancel(self) -> bool:
        return self.execution.is_open and bool(self._may(CANCEL))

    @property
    def may_replay(self) -> bool:
        return bool(self._may(REPLAY))

    @property
    def tone(self) -> str:
        return tone_of(self.execution)

    @property
    def took(self) -> str:
        """How long it took from being asked for, or has taken by now."""
        execution = self.execution
        if execution.total_ms is not None:
            return in_time(execution.total_ms)
        return in_time(self.elapsed_ms) if execution.is_open else ""

    @cached_property
    def elapsed_ms(self) -> int:
        """Since it began to run, or to wait."""
        since = self.execution.started_at or self.execution.created_at
        return max(0, round((timezone.now() - since).total_seconds() * 1000))

    @property
    def created(self) -> SafeString | str:
        return _moment(self.execution.created_at)

    @property
    def error(self) -> str:
        """The line that says best what went wrong, made harmless."""
        execution = self.execution
        if message := _last_line(execution.error_message):
            return f"{execution.error_code}: {message}" if execution.error_code else message
        if execution.error_code:
            return execution.error_code
        if execution.status != "failed":
            return ""
        if self._exception:
            line = self._exception.partition("\n")[0]
            return visible(line[:_MOST_OF_ERROR]) + ("…" if line != self._exception else "")
        return _last_line(execution.stderr)

    @property
    def whole_error(self) -> str:
        """The error as it was told, where that is more than its last line."""
        text = self.execution.error_message.strip() or self._exception
        return shown(text).text if "\n" in text else ""

    @cached_property
    def _exception(self) -> str:
        """What ended the program, as a text; "" where the last line of stderr says more."""
        told = exception_of(self.execution)
        # Code without types of exceptions says what went wrong on stderr alone.
        if told is None or (told["type"] == "Error" and not told["traceback"]):
            return ""
        return f"{told['type']}: {told['message']}"

    @property
    def observations(self) -> list[str]:
        return [visible(line) for line in in_words(self.execution)]

    @property
    def approval(self) -> SafeString | str:
        """That it waits for somebody's approval, with the way to it; "" where it does not."""
        execution = self.execution
        if execution.status != Execution.Status.QUEUED:
            return ""
        waiting = Approval.objects.filter(execution=execution, status=Approval.Status.WAITING)
        if (pk := waiting.values_list("pk", flat=True).first()) is None:
            return ""
        said = "Pending approval."
        url = self._page_of(Approval, pk)
        return format_html('{} <a href="{}">Open approval</a>', said, url) if url else said

    @property
    def headlines(self) -> list[Fact]:
        execution = self.execution
        # Of gVisor both have the same name.
        tools = dict.fromkeys(filter(None, (execution.runtime, execution.isolation)))
        runtime = " · ".join(tools)
        version = self._to_version
        return _filled(
            ("Tenant", self._tenant),
            ("Provider", self._provider),
            (
                "Runtime",
                _link(version, runtime or "-") if version else runtime,
            ),
            ("Language", execution.language),
            ("Created", self.created),
            ("Scheduled for", _moment(execution.run_at if execution.status == "queued" else None)),
            ("Exit code", _text(execution.exit_code)),
            ("Session", self._session),
        )

    @cached_property
    def code(self) -> Box | None:
        return code_box(self.execution, PageTime())

    @property
    def given(self) -> list[Box]:
        """What went in beside the code."""
        return [box for box in (text_box(self.execution, "arguments", "Arguments"),) if box]

    @property
    def input_files(self) -> list[tuple[str, str, str]]:
        return [
            (
                visible(str(file.get("path", ""))),
                _size(file.get("size_bytes")),
                visible(str(file.get("hash", ""))),
            )
            for file in self.execution.input_files
        ]

    @cached_property
    def output(self) -> list[Box]:
        boxes = output_boxes(self.execution)
        result = text_box(self.execution, "result", "Result")
        return [*boxes, result] if result else boxes

    @property
    def outputs(self) -> SafeString | str:
        return outputs_block(self.execution)

    @property
    def artifacts(self) -> list[dict[str, Any]]:
        return [
            {
                "name": visible(artifact.name),
                "url": reverse("admin:executions_artifact", args=[self.execution.pk, artifact.pk]),
                "is_kept": bool(artifact.file),
                "preview": artifact_preview(artifact),
                "type": visible(artifact.mime_type),
                "size": _size(artifact.size_bytes),
                "sha256": visible(artifact.sha256),
            }
            for artifact in self.execution.artifacts.all()
        ]

    @property
    def skipped(self) -> list[str]:
        """What code has left or shown, and the record has not."""
        return [visible(line) for line in omission_lines(self.execution)]

    @property
    def advice(self) -> list[str]:
        """What helps where its program missed a package or was refused a host."""
        return [visible(line) for line in advice_of(self.execution)]

    @property
    def late_result(self) -> SafeString | str:
        return late_result_block(self.execution)

    @property
    def receipt(self) -> SafeString | str:
        return receipt(self.execution)

    @property
    def network(self) -> dict[str, Any] | None:
        """What the code tried to reach, with its texts made visible; None without a network."""
        found = network_of(self.execution)
        if found is None:
            return None
        attempts = [
            {name: visible(each) if isinstance(each, str) else each for name, each in one.items()}
            for one in found["attempts"]
        ]
        return {**found, "attempts": attempts}

    @property
    def hops(self) -> list[dict[str, str]]:
        return [
            {
                "provider": visible(str(hop["provider"])),
                "outcome": visible(str(hop["outcome"])),
                "code": visible(str(hop.get("code", ""))),
                "reason": visible(str(hop.get("reason", ""))),
                "took": in_time(hop["ms"]),
            }
            for hop in self.execution.hops
        ]

    @property
    def timeline(self) -> SafeString | str:
        return timeline(self.execution)

    @property
    def meta(self) -> str:
        meta = self.execution.meta
        return visible(json.dumps(meta, indent=2, ensure_ascii=False)) if meta else ""

    @property
    def facts(self) -> list[Facts]:
        """The record beyond the headlines."""
        execution = self.execution
        said = [(name, getattr(execution, name)) for name in (*CLAIMS, "traceparent")]
        who = _filled(
            ("Tenant", execution.tenant_slug),
            ("API key", self._key),
            ("Subject", execution.subject),
            *(
                (f"{name.replace('_', ' ').capitalize()} (reported by the caller)", value or "")
                for name, value in said
            ),
            ("Client address", execution.client_address),
            ("Request id", execution.request_id),
            ("Idempotency key", execution.idempotency_key or ""),
        )
        where = _filled(
            ("Provider", execution.provider),
            ("Configuration version", _text(execution.config_version)),
            ("Runtime", execution.runtime),
            ("Isolation", execution.isolation),
            ("Sandbox sharing", execution.sharing),
            ("Entry point", execution.entrypoint),
            ("Mode", execution.get_mode_display()),
            ("Priority", execution.get_priority_display()),
            ("Timeout", f"{execution.timeout:g} s"),
            ("Code hash", execution.code_hash),
            ("Session", self._place),
            ("Cost (estimated)", _text(execution.cost)),
        )
        when = _filled(
            ("Created", _moment(execution.created_at)),
            ("Scheduled for", _moment(execution.run_at)),
            ("Started", _moment(execution.started_at)),
            ("Ended", _moment(execution.finished_at)),
            ("Schedule", self._schedule),
            ("Replay of", self._replay_of),
        )
        found = (Facts("Caller", who), Facts("Environment", where), Facts("Times", when))
        return [group for group in found if group.facts]

    @property
    def _tenant(self) -> SafeString:
        execution = self.execution
        url = self._page_of(Tenant, execution.tenant_id)
        return _link(url or _listed(tenant_slug=execution.tenant_slug), execution.tenant_slug)

    @property
    def _provider(self) -> SafeString | str:
        name = self.execution.provider
        if not name:
            return ""
        pk = None
        if self._may("providers.view_providerconfig"):
            found = ProviderConfig.objects.filter(provider_id=name)
            pk = found.values_list("pk", flat=True).first()
        return _link(self._page_of(ProviderConfig, pk) or _listed(provider=name), name)

    @cached_property
    def _to_version(self) -> str:
        """The page of the configuration that it ran under."""
        execution = self.execution
        if not execution.config_version or not self._may("providers.view_configversion"):
            return ""
        found = ConfigVersion.objects.filter(
            subject=execution.provider, version=execution.config_version
        )
        return self._page_of(ConfigVersion, found.values_list("pk", flat=True).first())

    @property
    def _key(self) -> SafeString | str:
        execution = self.execution
        name = " ".join(filter(None, (execution.api_key_name, execution.api_key_prefix)))
        url = self._page_of(ApiKey, execution.api_key_id)
        return _link(url, name) if url else name

    @property
    def _session(self) -> SafeString | str:
        pk = self.execution.session_id
        url = self._page_of(Session, pk)
        return _link(url, str(pk)) if url else _text(pk)

    @property
    def _place(self) -> str:
        execution = self.execution
        if execution.session_id is None:
            return ""
        place = f"context {execution.context}" if execution.context else "a command"
        lost = "; context state lost" if execution.context_kept is False else ""
        return f"turn {execution.turn}, {place}{lost}"

    @property
    def _schedule(self) -> SafeString | str:
        pk = self.execution.schedule_id
        url = self._page_of(Schedule, pk)
        return _link(url, str(pk)) if url else _text(pk)

    @property
    def _replay_of(self) -> SafeString | str:
        pk = self.execution.replay_of_id
        url = reverse("admin:executions_execution_change", args=[pk]) if pk else ""
        return _link(url, str(pk)) if url else ""

    def _page_of(self, model: type[Model], pk: Any) -> str:
        """Its page in the admin; "" where there is none, or none for this reader."""
        app, name = model._meta.app_label, model._meta.model_name
        if pk is None or not self._may(f"{app}.view_{name}"):
            return ""
        return reverse(f"admin:{app}_{name}_change", args=[pk])


def _moment(when: datetime | None) -> SafeString | str:
    return shown_moment(when) if when else ""


def _filled(*pairs: tuple[str, SafeString | str]) -> list[Fact]:
    """Those that have a value, each of them harmless."""
    return [
        Fact(name, value if isinstance(value, SafeString) else visible(value))
        for name, value in pairs
        if value
    ]


def _text(value: object) -> str:
    return "" if value is None else str(value)


def _size(value: Any) -> str:
    return filesizeformat(value) if isinstance(value, int) else ""


def _link(url: str, text: str) -> SafeString:
    return format_html('<a href="{}">{}</a>', url, visible(text))


def _listed(**query: str) -> str:
    return reverse("admin:executions_execution_changelist", query=query)


def _last_line(text: str) -> str:
    """The last line that says something, of what may be very long."""
    text = text.rstrip()
    line = text[text.rfind("\n") + 1 :].strip()
    return visible(line[:_MOST_OF_ERROR]) + ("…" if len(line) > _MOST_OF_ERROR else "")
