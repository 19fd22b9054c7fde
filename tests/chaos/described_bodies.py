"""What schemathesis cannot make by itself, and what no description can say. It loads this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jsonschema
import schemathesis
from hypothesis import strategies
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

CRON = ("30 6 * * mon-fri", "0 0 1 1 *", "*/5 8-17 * * *")
# What may be said by a header and in the body as well, and then is the same.
TWICE = {
    "X-Agent": "agent",
    "X-Model": "model",
    "X-Conversation": "conversation",
    "X-On-Behalf-Of": "on_behalf_of",
    "Idempotency-Key": "idempotency_key",
}
# What the web server reads of an address (sandbox_site/gunicorn_conf.py).
MOST_OF_ADDRESS = 36 * 1024


@dataclass(frozen=True)
class Refusal:
    """What is refused though it is described: by which operations, how it is told, and why."""

    operations: tuple[str, ...]
    told: str
    why: str


FILES = (
    *("list_session_files", "remove_session_file", "read_session_file", "write_session_file"),
    *("move_session_file", "make_session_directory", "read_session_archive"),
    "write_session_archive",
)
STATE = "only the sandbox knows"
CONTEXTS = ("create_context",)
CELLS = ("run_execution", "run_in_session")
RUNS = (*CELLS, "start_process")
PROCESSES = ("resize_process", "signal_process", "write_to_process")
SCHEDULES = ("create_schedule", "change_schedule")
REFUSED = (
    Refusal(FILES, "No such file or directory", STATE),
    Refusal(FILES, "Not a directory", STATE),
    Refusal(FILES, "regular file", STATE),
    Refusal(FILES, "with this name exists", STATE),
    Refusal(FILES, "Something else has this name", STATE),
    Refusal(("write_session_archive",), "rchive", "a format is not for JSON Schema to say"),
    Refusal((*FILES, *CONTEXTS, *RUNS, *SCHEDULES), " bytes", "there, texts have characters"),
    Refusal((*CONTEXTS, "start_process"), "not a folder", STATE),
    Refusal(("start_process",), "No such file or directory", STATE),
    Refusal(("start_process",), "There is no such user", STATE),
    Refusal(PROCESSES, "There is no such process.", STATE),
    Refusal(("write_to_process",), "Its input is closed, or it has none.", STATE),
    Refusal(("resize_process",), "The process has no terminal.", STATE),
    Refusal(CONTEXTS, "does not have this language", STATE),
    Refusal(CONTEXTS, "a context with this name exists", STATE),
    Refusal(("end_context",), "the first context of a sandbox cannot be ended", STATE),
    Refusal(("open_session",), "There is no template", STATE),
    Refusal(("open_session",), "language: Must be one of", "the tenant's route decides"),
    Refusal(
        ("open_session",), "provider: Must be a configuration on", "the tenant's route decides"
    ),
    Refusal(CELLS, "Name one that runs", "the session's context decides"),
    Refusal((*CELLS, "interrupt_session"), "The session has no context with this id", STATE),
    Refusal(RUNS, "has another value. Send only one of them.", "a header and the body together"),
    Refusal((*RUNS, *SCHEDULES), "must be a schema for a tool", "of any JSON Schema"),
    Refusal((*RUNS, *SCHEDULES), "are not a valid schema", "of any JSON Schema"),
    Refusal((*RUNS, *SCHEDULES), "cannot be the name of a tool", "Python's own words"),
    Refusal((*RUNS, *SCHEDULES), "Two tools have the same name", "names of several objects"),
    Refusal((*RUNS, *SCHEDULES), "Must be a time with its zone", "not every day is in the year"),
    Refusal((*RUNS, *SCHEDULES), "Another file has this path", "files together"),
    Refusal((*RUNS, *SCHEDULES), "has no webhook secret", "an administrator makes one"),
    Refusal(("open_session", "change_session"), "neither NUL nor", "names may be at any depth"),
    Refusal((*RUNS, *SCHEDULES), "Its url must be https", "where a name leads to"),
    Refusal(
        ("set_config", "test_connection", "set_active"),
        "Unknown provider",
        "what is installed decides",
    ),
)

schemathesis.openapi.media_type("application/x-tar", strategies.binary(max_size=2048))
schemathesis.openapi.format("cron", strategies.sampled_from(CRON))
schemathesis.openapi.format("time-zone", strategies.sampled_from(("UTC", "Europe/Berlin")))


@schemathesis.hook
def filter_case(context: Any, case: Any) -> bool:
    """Whether a header and the body do not contradict each other, and all of it is sent: a
    parameter without a value is not.
    """
    body, headers = case.body, case.headers or {}
    if any(value is None or value == [] for value in (case.query or {}).values()):
        return False
    if not isinstance(body, dict):
        return True
    return not any(name in headers and body.get(field) for name, field in TWICE.items())


@schemathesis.check
def what_is_described_is_accepted(ctx: Any, response: Any, case: Any) -> bool | None:
    """As schemathesis's own check has it, but for REFUSED."""
    if _is_excepted(response, case) or not _is_body(case):
        return None
    return positive_data_acceptance(ctx, response, case)


@schemathesis.check
def what_is_not_described_is_refused(ctx: Any, response: Any, case: Any) -> bool | None:
    """As schemathesis's own check has it, but where it says itself that nothing is wrong, as in
    steps that follow others.
    """
    if (case.meta.phase.data.description or "").startswith("Positive"):
        return None
    return negative_data_rejection(ctx, response, case)


def _is_excepted(response: Any, case: Any) -> bool:
    if response.status_code == 414:
        # Each parameter may be as long, and all together longer than is read.
        return len(response.request.url) > MOST_OF_ADDRESS
    name = case.operation.definition.raw.get("operationId")
    return any(
        name in each.operations and each.told in response.text
        for each in REFUSED
        if response.status_code == 400
    )


def _is_body(case: Any) -> bool:
    """Whether a body of JSON is what is described: where schemathesis can make none that is, it
    sends another for it."""
    content = case.operation.definition.raw.get("requestBody", {}).get("content", {})
    described = content.get(case.media_type)
    if described is None or case.media_type != "application/json":
        return True
    parts = {"components": case.operation.schema.raw_schema["components"]}
    return bool(
        jsonschema.Draft202012Validator({**described["schema"], **parts}).is_valid(case.body)
    )
