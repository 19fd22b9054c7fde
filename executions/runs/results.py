"""Results: what a provider answers is validated (a claim until it has passed here) and read from
records, one by one or page by page.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from django.db.models import QuerySet
from pydantic import Field

from executions.kernel.declarations import STORABLE, Id, Query, declared, newest_first, one_of
from executions.kernel.text import from_json, storable, to_json, without_nan, without_surrogates
from executions.runs.models import Artifact, Execution, LateResult
from executions.runs.network import (
    NETWORK_CREDENTIALS,
    NETWORK_LISTS,
    checked_attempts,
    network_remarks,
)
from executions.runs.requests import CLAIMS, Agent, ConversationName, Model, OnBehalfOf
from executions.runs.shapes import (
    ExecutionSummaryShape,
    ObservationShape,
    OmissionShape,
    PlaceShape,
    PolicyShape,
    TemplateUseShape,
    TimingsShape,
    VerdictShape,
)
from executions.tenants.models import Tenant
from providers.errors import BLOCKED, CreationFailed, ProviderUnavailable, SandboxError
from providers.network import NETWORK
from providers.runtime.guest import advice
from providers.runtime.guest.names import Omissions, problem, too_large, too_many
from providers.sandbox import Sandbox
from providers.values import (
    ARTIFACTS_SKIPPED,
    KINDS,
    OBSERVATIONS,
    OUTPUTS_SKIPPED,
    ArtifactFile,
    ExecutionResult,
    RunLimits,
    checked,
    note,
    note_omissions,
)
from providers.values import exception_of as claimed_exception

# The key of a result's metadata that names what was wrong with the rest.
REFUSED = "refused_by_the_gate"

METADATA_BYTES = 64 * 1024
METADATA_DEPTH = 8
METADATA_ENTRIES = 1000
MIME_CHARACTERS = 100
MIME_TYPES_PER_OUTPUT = 12
_NOTED = 50
# Turns of stdout and stderr beyond which their order is not kept.
MOST_PIECES = 4096

# What databases and JSON readers hold exactly.
_LARGEST = 2**53
_EXIT_CODES = range(-(2**31), 2**31)


@dataclass(frozen=True)
class ValidatedResult:
    """A result that can be recorded and answered with as it is, and its values as JSON text."""

    result: ExecutionResult
    result_json: str
    outputs_json: str
    exception_json: str


def validate_sandbox(sandbox: Any) -> Sandbox:
    """The sandbox. Raises CreationFailed for what is none; nothing has run then."""
    if (
        not isinstance(sandbox, Sandbox)
        or not isinstance(getattr(sandbox, "ref", None), str)
        or not isinstance(getattr(sandbox, "metadata", None), Mapping)
    ):
        raise CreationFailed("The provider did not return a sandbox.")
    return sandbox


def validate_result(answer: Any, limits: RunLimits) -> ValidatedResult:
    """What a provider answered with, within `limits` and of the right kinds. Changed in place.

    Raises ProviderUnavailable, `started`, for what is no ExecutionResult.
    """
    if not isinstance(answer, ExecutionResult):
        raise ProviderUnavailable("The provider did not return a result.", started=True)
    refused: list[str] = []
    metadata = _metadata(answer.metadata, refused)
    _check_observations(metadata, refused)
    for stream in ("stdout", "stderr"):
        _check_stream(answer, stream, limits.output_bytes, refused)
    _check_numbers(answer, refused)
    result_json = _result(answer, limits)
    _check_order(answer, refused)
    outputs_json = _outputs(answer, limits, metadata, refused)
    exception_json = _exception(answer, refused)
    _artifacts(answer, limits, metadata, refused)
    if refused:
        metadata[REFUSED] = refused[:_NOTED]
    answer.metadata = metadata
    return ValidatedResult(answer, result_json, outputs_json, exception_json)


def _check_stream(result: ExecutionResult, name: str, bound: int, refused: list[str]) -> None:
    text, flag = getattr(result, name), f"{name}_truncated"
    if isinstance(text, bytes | bytearray):
        text = bytes(text[:bound]).decode("utf-8", "replace")
        refused.append(f"{name}: bytes")
    elif not isinstance(text, str):
        refused.append(f"{name}: {_kind(text)}")
        text = ""
    truncated = getattr(result, flag)
    if not isinstance(truncated, bool):
        refused.append(f"{flag}: {_kind(truncated)}")
        truncated = bool(truncated)
    text = storable(text)
    if text.isascii():
        if len(text) > bound:
            text, truncated = text[:bound], True
    elif len(text) * 4 > bound:
        data = text.encode()
        # A byte that is no text has become a sign of three by now, and counts as the one it was.
        if len(data) - 2 * text.count("\ufffd") > bound:
            text, truncated = data[:bound].decode("utf-8", "ignore"), True
    setattr(result, name, text)
    setattr(result, flag, truncated)


def _exception(result: ExecutionResult, refused: list[str]) -> str:
    """What ended the program as JSON text; "" where it has not failed, or nothing is known."""
    told, result.exception = result.exception, None
    if told is None or not result.exit_code or result.timed_out or result.out_of_memory:
        return ""
    if (found := claimed_exception(told)) is None:
        refused.append(f"exception: {_kind(told)}")
        return ""
    result.exception = {name: storable(text) for name, text in found.items()}
    return without_surrogates(to_json(result.exception))


def _check_order(result: ExecutionResult, refused: list[str]) -> None:
    """Kept where it adds up to what is kept of both streams, and says something: of one there is
    no order."""
    order, result.output_order = result.output_order, None
    if order is None or not (result.stdout and result.stderr):
        return
    if not is_order(order):
        refused.append(f"output_order: {_kind(order)}")
        return
    sizes = [sum(size for number, size in order if number == which) for which in (1, 2)]
    if sizes == [len(result.stdout.encode()), len(result.stderr.encode())]:
        result.output_order = [list(piece) for piece in order]


def is_order(order: Any) -> bool:
    return (
        isinstance(order, list)
        and len(order) <= MOST_PIECES
        and all(
            isinstance(piece, list)
            and len(piece) == 2
            and type(piece[0]) is int
            and type(piece[1]) is int
            and piece[0] in (1, 2)
            and 0 < piece[1] < _LARGEST
            for piece in order
        )
    )


def _check_numbers(result: ExecutionResult, refused: list[str]) -> None:
    """A code that is none counts as a failure, and a verdict that is no boolean as none."""
    code = result.exit_code
    if code is not None and (type(code) is not int or code not in _EXIT_CODES):
        refused.append(f"exit_code: {_kind(code)}")
        result.exit_code = None
    for name in ("timed_out", "out_of_memory", "has_result"):
        value = getattr(result, name)
        if not isinstance(value, bool):
            refused.append(f"{name}: {_kind(value)}")
            setattr(result, name, False)
    seconds = result.execution_time
    if type(seconds) not in (int, float) or not 0 <= seconds < _LARGEST:
        refused.append(f"execution_time: {_kind(seconds)}")
        result.execution_time = 0.0


def _result(result: ExecutionResult, limits: RunLimits) -> str:
    """The value of `main()` as JSON text; one that is none is a failure of the program's."""
    if not result.has_result:
        result.result = None
        return ""
    try:
        text, result.result = _json_of(result.result)
        if len(text) * 4 > limits.result_bytes and len(text.encode("utf-8", "replace")) > (
            limits.result_bytes
        ):
            raise ValueError(f"more than {limits.result_bytes} bytes")
    except ValueError as error:
        result.has_result, result.result = False, None
        result.exit_code = result.exit_code or 1
        result.stderr = storable(f"{result.stderr}The returned value is not JSON: {error}.\n")
        return ""
    cleaned = without_surrogates(text)
    if cleaned != text:
        result.result = from_json(cleaned)
    return cleaned


def _outputs(
    result: ExecutionResult, limits: RunLimits, metadata: dict[str, Any], refused: list[str]
) -> str:
    """The rich outputs as JSON text. What is not kept, of the streams too, is named in the
    metadata."""
    skipped = Omissions()
    for stream in ("stdout", "stderr"):
        if getattr(result, f"{stream}_truncated"):
            kept_bytes = len(getattr(result, stream).encode())
            skipped.add(stream, f"cut: the first {kept_bytes} bytes are kept")
    skipped.add_claimed(metadata.pop(OUTPUTS_SKIPPED, None))
    if not isinstance(result.outputs, list | tuple):
        refused.append(f"outputs: {_kind(result.outputs)}")
        result.outputs = []
    texts: list[str] = []
    kept: list[dict[str, Any]] = []
    room = limits.rich_output_bytes * 4 // 3 + 4096
    for number, bundle in enumerate(result.outputs, start=1):
        text, reason = "", ""
        if len(kept) >= limits.rich_output_count:
            reason = too_many(limits.rich_output_count, "outputs")
        else:
            try:
                text, bundle = _bundle_json(bundle)
            except ValueError as error:
                reason = f"it cannot be kept: {error}"
        size = len(text.encode())
        if size > room:
            reason = too_large(limits.rich_output_bytes, "outputs")
        if reason:
            skipped.add(f"output {number}", reason)
            continue
        room -= size
        texts.append(text)
        kept.append(bundle)
    note_omissions(metadata, OUTPUTS_SKIPPED, skipped)
    result.outputs = kept
    return f"[{','.join(texts)}]" if texts else ""


def bundle_text(bundle: Any) -> str:
    """A rich output as JSON text, "" for what is none."""
    try:
        return _bundle_json(bundle)[0]
    except ValueError:
        return ""


def _bundle_json(bundle: Any) -> tuple[str, Any]:
    """The same, and the bundle that the text stands for. Raises ValueError for what is none."""
    if not _is_bundle(bundle):
        raise ValueError("it is not a map from MIME types to data")
    text, bundle = _json_of(bundle)
    return without_surrogates(text), bundle


def _json_of(value: Any) -> tuple[str, Any]:
    """A value as JSON text, and the value that it stands for: NaN and infinities become null.

    Raises ValueError.
    """
    try:
        return to_json(value), value
    except ValueError:
        value = without_nan(value)
        return to_json(value), value


def _is_bundle(bundle: Any) -> bool:
    return (
        isinstance(bundle, dict)
        and 0 < len(bundle) <= MIME_TYPES_PER_OUTPUT
        and all(
            isinstance(mime, str) and len(mime) <= MIME_CHARACTERS and mime.isprintable()
            for mime in bundle
        )
    )


def _artifacts(
    result: ExecutionResult, limits: RunLimits, metadata: dict[str, Any], refused: list[str]
) -> None:
    if not isinstance(result.artifacts, list | tuple):
        refused.append(f"artifacts: {_kind(result.artifacts)}")
        result.artifacts = []
    kept: list[ArtifactFile] = []
    # What the provider says that it left out itself.
    skipped = Omissions()
    skipped.add_claimed(metadata.pop(ARTIFACTS_SKIPPED, None))
    taken: set[str] = set()
    room = limits.artifacts_total_bytes
    for file in result.artifacts:
        reason = _problem(file, taken)
        if not reason and len(kept) >= limits.artifact_count:
            reason = too_many(limits.artifact_count)
        if not reason and len(file.content) > limits.artifact_bytes:
            reason = too_large(limits.artifact_bytes)
        if not reason and len(file.content) > room:
            reason = too_large(limits.artifacts_total_bytes, "files")
        if reason:
            name = getattr(file, "name", "")
            skipped.add(name if isinstance(name, str) else "", reason)
            continue
        taken.add(file.name)
        room -= len(file.content)
        kept.append(file)
    note_omissions(metadata, ARTIFACTS_SKIPPED, skipped)
    result.artifacts = kept


def _problem(file: Any, taken: set[str]) -> str:
    """Why this is no artifact that can be kept, "" when it is one."""
    if not isinstance(file, ArtifactFile):
        return "not a file"
    if not isinstance(file.content, bytes) or not isinstance(file.mime_type, str):
        return "not a file"
    return problem(file.name) or ("another file has this name" if file.name in taken else "")


def _metadata(told: Any, refused: list[str]) -> dict[str, Any]:
    """What a provider says of itself, as a copy in JSON that every database takes."""
    if not isinstance(told, Mapping):
        refused.append(f"metadata: {_kind(told)}")
        return {}
    pruned = _Pruned()
    # It has bounds of its own: a record keeps more attempts than other metadata.
    rest = {name: value for name, value in told.items() if name != NETWORK}
    copy: dict[str, Any] = pruned.value(rest, METADATA_DEPTH)
    if pruned.left_out:
        refused.append("metadata: too deep, too much, or not JSON")
    if NETWORK in told:
        attempts = checked_attempts(told[NETWORK])
        if attempts is None:
            refused.append(f"{NETWORK}: {_kind(told[NETWORK])}")
        else:
            copy[NETWORK] = attempts
    return copy


def _check_observations(metadata: dict[str, Any], refused: list[str]) -> None:
    """Only what has a meaning stays: records are found, counted and alerted of by it."""
    claimed = metadata.pop(OBSERVATIONS, None)
    kept = checked(claimed)
    if claimed is not None and kept != claimed:
        refused.append(f"{OBSERVATIONS}: not all of them are known")
    note(metadata, kept)


class _Pruned:
    """Copies values as JSON, as far as depth, number and size allow."""

    def __init__(self) -> None:
        self.left_out = False
        self._entries = METADATA_ENTRIES
        self._room = METADATA_BYTES

    def value(self, value: Any, depth: int) -> Any:
        self._entries -= 1
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int | float):
            # Not a number is below nothing, and a whole number may be too large for `isfinite`.
            if abs(value) <= _LARGEST:
                # Of a subclass, such as an enumeration, the number alone.
                return int(value) if isinstance(value, int) else float(value)
            self.left_out = True
            return None
        if isinstance(value, str):
            return self._text(value)
        if depth > 0 and isinstance(value, Mapping):
            return {
                self._text(key) if isinstance(key, str) else self._text(_kind(key)): self.value(
                    child, depth - 1
                )
                for key, child in value.items()
                if self._has_room()
            }
        if depth > 0 and isinstance(value, list | tuple):
            return [self.value(child, depth - 1) for child in value if self._has_room()]
        self.left_out = True
        return None

    def _text(self, text: str) -> str:
        if len(text) > self._room:
            self.left_out = True
        kept = storable(text[: max(0, self._room)])
        self._room -= len(kept)
        return kept

    def _has_room(self) -> bool:
        if self._entries > 0 and self._room > 0:
            return True
        self.left_out = True
        return False


def _kind(value: Any) -> str:
    """What it is, in a word; of a number that is beyond its bounds, that."""
    if type(value) in (int, float):
        return "out of range"
    return storable(type(value).__name__)[:50]


def kinds_in(meta: Mapping[str, Any]) -> str | None:
    """What goes into `observed`: None where nothing was seen."""
    return " ".join(entry["kind"] for entry in checked(meta.get(OBSERVATIONS))) or None


def observations_of(execution: Execution) -> list[ObservationShape]:
    """As the API tells them."""
    return [
        {"kind": each["kind"], "seen_by": each["seen_by"], "count": each["count"]}
        for each in checked(execution.meta.get(OBSERVATIONS))
    ]


def in_words(execution: Execution) -> list[str]:
    """A line for each, for whoever reads the page."""
    return [
        f"{entry['kind']}: {entry['count']} {KINDS[entry['kind']]} (seen by the {entry['seen_by']})"
        for entry in observations_of(execution)
    ]


IMAGE_SIGNATURES = {
    "image/png": (b"\x89PNG\r\n\x1a\n",),
    "image/jpeg": (b"\xff\xd8\xff",),
    "image/gif": (b"GIF87a", b"GIF89a"),
    "image/webp": (b"RIFF",),
}
SIGNATURE_BYTES = 16
# Of all outputs of an execution: to read so many takes a tenth of a second.
MOST_VALUES = 500_000
# The best to read, where a bundle offers several.
_TEXTS = ("text/plain", "application/json", "text/markdown", "text/html", "image/svg+xml")


@dataclass(frozen=True)
class RichOutput:
    """One value that was shown. `image` are bytes that a browser may draw as `mime_type`."""

    mime_type: str
    text: str = ""
    image: bytes = b""


def rich_outputs(execution: Execution) -> list[RichOutput]:
    """What the program showed, in its order, as `bundles_of` has it."""
    return [_best(bundle) for bundle in bundles_of(execution)]


def bundles_of(execution: Execution) -> list[dict[str, Any]]:
    """What the program showed, in its order; nothing where it was erased, there was none, or it has
    too many values to be read where others wait for it. The record has it all the same."""
    if not execution.outputs or values_in(execution.outputs) > MOST_VALUES:
        return []
    found: list[dict[str, Any]] = from_json(execution.outputs)
    return found


def values_in(text: str) -> int:
    """How many values a JSON text has at most: what it costs to read it."""
    return text.count(",") + text.count("[") + text.count("{")


def image_type(start: bytes) -> str:
    """What kind of raster image begins so; "" when it is none. SVG is a document with scripts."""
    for mime_type, signatures in IMAGE_SIGNATURES.items():
        if start.startswith(signatures) and (start[:4] != b"RIFF" or start[8:12] == b"WEBP"):
            return mime_type
    return ""


def _best(bundle: Mapping[str, Any]) -> RichOutput:
    for mime_type in IMAGE_SIGNATURES:
        image = _decode(bundle.get(mime_type))
        if found := image_type(image[:SIGNATURE_BYTES]):
            return RichOutput(found, image=image)
    mime_type = next((name for name in _TEXTS if name in bundle), next(iter(bundle), ""))
    value = bundle.get(mime_type, "")
    return RichOutput(mime_type, text=value if isinstance(value, str) else to_json(value))


def _decode(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        return b""


# The key of a record's metadata under which it says which policy held, and what it warned of.
POLICY = "policy"


# The same, how often its code called tools.
TOOL_CALLS = "tool_calls"
# The same, which template the sandbox had: name, version and digest.
TEMPLATE = "template"
# What no provider may say, whichever capabilities are installed: answers and the ledger show it.
RESERVED_METADATA = frozenset((POLICY, TOOL_CALLS, NETWORK_LISTS, NETWORK_CREDENTIALS, TEMPLATE))


class BlockedByPolicy(SandboxError):
    """A policy does not allow it. Nothing ran."""

    entry = BLOCKED


def template_of(execution: Execution) -> TemplateUseShape | None:
    """Return the template that a run had; None where it had none."""
    said = execution.meta.get(TEMPLATE)
    if not isinstance(said, Mapping):
        return None
    return {"name": said["name"], "version": said["version"], "digest": said["digest"]}


def policy_of(execution: Execution) -> PolicyShape | None:
    """Which one held, what was found in the code, and who had to approve it and did. Hosts that a
    list refused are remarks too.

    Where no policy looked, the remarks count that the sandbox made because its provider is
    configured with `enable_ast_analysis`: that is `warn`.
    """
    stated = execution.meta.get(POLICY)
    remarks, _ = advice.checked(execution.meta.get("advice") or [])
    warnings: list[Any] = [
        {"line": line, "kind": "remark", "name": f"{name}: {what}"} for line, name, what in remarks
    ]
    refused = network_remarks(execution) if NETWORK in execution.meta else []
    refusals: list[Any] = [{"line": 0, "kind": "remark", "name": line} for line in refused]
    if isinstance(stated, Mapping):
        return {
            "id": stated.get("id"),
            "version": stated.get("version"),
            "warnings": [*(stated.get("warnings") or warnings), *refusals],
            "approved": stated.get("approved"),
        }
    if not warnings and not refusals:
        return None
    return {
        "id": None,
        "version": None,
        "warnings": [*warnings, *refusals],
        "approved": None,
    }


# Of the end of an output, which is a traceback, or what pip says last; and the words that
# interpreters and installers say there where something is missing.
LOOKED_AT_CHARACTERS = 8192
_MISSING = ("No module named", "not found", "annot find", "npm ", "ERROR: ", "'pip", "externally-")


def may_have_missed(execution: Execution) -> bool:
    """Whether there may be advice for it (`runs.advice`), without a look at what it would be."""
    if execution.exit_code not in (0, None) or NETWORK in execution.meta:
        return True
    ends = (execution.stderr[-LOOKED_AT_CHARACTERS:], execution.stdout[-LOOKED_AT_CHARACTERS:])
    return any(word in end for end in ends for word in _MISSING)


def place_of(execution: Execution) -> PlaceShape:
    """Which one it is, where it ran, which is null outside sessions, and who asked for it."""
    return {
        "id": str(execution.pk),
        "status": execution.status,
        "session": str(execution.session_id) if execution.session_id else None,
        "context": execution.context or None,
        "context_kept": execution.context_kept,
        "pid": execution.pid,
        "agent": execution.agent or None,
        "model": execution.model or None,
        "conversation": execution.conversation or None,
        "on_behalf_of": execution.on_behalf_of or None,
        "traceparent": execution.traceparent or None,
    }


def error_of(execution: Execution | LateResult) -> VerdictShape | None:
    """The verdict that it ended with; None for one that ran to its end."""
    if not execution.error_code:
        return None
    return {"code": execution.error_code, "message": execution.error_message}


def omissions_of(execution: Execution) -> dict[str, list[OmissionShape]]:
    """What was left out of its files and of its outputs, each with the reason."""
    return {
        key: [
            {"name": name, "reason": reason} for name, reason in _entries(execution.meta.get(key))
        ]
        for key in (ARTIFACTS_SKIPPED, OUTPUTS_SKIPPED)
    }


def omission_lines(execution: Execution) -> list[str]:
    """The same, as a line for each."""
    return [
        _line(f"{what}{entry['name']}", entry["reason"]) if entry["name"] else entry["reason"]
        for what, key in (("file ", ARTIFACTS_SKIPPED), ("", OUTPUTS_SKIPPED))
        for entry in omissions_of(execution)[key]
    ]


def _line(name: str, reason: str) -> str:
    return f"{name} was {reason if reason.startswith('cut: ') else f'left out: {reason}'}"


def _entries(kept: Any) -> list[list[str]]:
    return kept if isinstance(kept, list) else []


def exception_of(execution: Execution) -> dict[str, str] | None:
    """What ended its program, by its own account: type, message, traceback. None where nothing is
    known of it, or it was erased."""
    if not execution.exception:
        return None
    told: dict[str, str] = from_json(execution.exception)
    return told


def timings_of(execution: Execution) -> TimingsShape:
    """Milliseconds; None for what did not happen, or not yet."""
    return {
        "received_ms": execution.received_ms,
        "queue_ms": execution.queue_ms,
        "start_ms": execution.start_ms,
        "run_ms": execution.run_ms,
        "closed_ms": execution.closed_ms,
        "total_ms": execution.total_ms,
    }


DEFAULT_LIMIT = 50
MAX_LIMIT = 200

Limit = Annotated[int, Field(ge=1, le=MAX_LIMIT)]
Cursor = Annotated[Id, Field(description="The cursor from `next` of the previous page.")]

_LARGE = (*("pending", "code", "arguments", "result", "outputs", "exception", "stdout", "stderr"),)
_EXACT = ("status", "language", "provider", *CLAIMS, "trace_id", "schedule_id")


@declared
class ExecutionFilter:
    """Which executions, and where to go on. Empty strings stand for no restriction."""

    status: Annotated[str, one_of(Execution.Status.values)] = ""
    language: Annotated[str, STORABLE] = ""
    provider: Annotated[str, STORABLE] = ""
    agent: Agent = ""
    model: Model = ""
    conversation: ConversationName = ""
    on_behalf_of: OnBehalfOf = ""
    trace_id: Annotated[str, STORABLE] = ""
    schedule_id: Annotated[
        Id | None, Field(alias="schedule", description="The id of a schedule.")
    ] = None
    limit: Limit = DEFAULT_LIMIT
    cursor: Cursor | None = None


LIST = Query(ExecutionFilter, empty_is_none=True)


@dataclass(frozen=True)
class Page:
    executions: list[Execution]
    next_cursor: str


def list_executions(tenant: Tenant, wanted: ExecutionFilter) -> Page:
    """One page, without what may be large."""
    found = executions_of(tenant).defer(*_LARGE)
    for name in _EXACT:
        if value := getattr(wanted, name):
            found = found.filter(**{name: value})
    return Page(*newest_first(found, wanted.cursor, wanted.limit))


def execution_summary(execution: Execution) -> ExecutionSummaryShape:
    """What a list shows of an execution: everything but the parts that may be large."""
    return {
        **place_of(execution),
        "mode": execution.mode,
        "priority": execution.Priority(execution.priority).label,
        "language": execution.language,
        "provider": execution.provider,
        "runtime": execution.runtime,
        "isolation": execution.isolation,
        "sharing": execution.sharing,
        "exit_code": execution.exit_code,
        "error": error_of(execution),
        "timings": timings_of(execution),
        "created_at": execution.created_at.isoformat(),
        "run_at": execution.run_at.isoformat() if execution.run_at else None,
        "schedule": str(execution.schedule_id) if execution.schedule_id else None,
    }


LARGE = ("pending", "code", "arguments")


def executions_of(tenant: Tenant | None) -> QuerySet[Execution]:
    found = Execution.objects.defer(*LARGE)
    return found if tenant is None else found.filter(tenant=tenant)


def artifacts_of(tenant: Tenant | None) -> QuerySet[Artifact]:
    found = Artifact.objects.all()
    return found if tenant is None else found.filter(execution__tenant=tenant)
