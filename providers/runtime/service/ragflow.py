"""RAGFlow's executor contract: `POST /run` and the health check, field for field.

Its shapes are kept, its mistakes are not: verdicts rest on evidence and never on what the code
printed, what was printed before a failure is returned, and no two runs share a container.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from providers.errors import CREATION_FAILED, RATE_LIMITED, ProviderUnavailable, SandboxError
from providers.json_reading import MOST_DEPTH, MOST_VALUES, CannotRead, is_plain, read_bytes
from providers.json_values import check
from providers.runtime.pool.requests import arguments_problem
from providers.values import ArtifactFile, ExecutionResult, Job, RunLimits

LANGUAGES = ("python", "nodejs")

ARTIFACT_SUFFIXES = (".png", ".jpg", ".jpeg", ".svg", ".pdf", ".csv", ".json", ".html")
MOST_ARTIFACTS = 10
# Of a request beyond which what is wrong in it is not shown again.
MOST_ECHOED_BYTES = 64 * 1024
ARTIFACT_BYTES = 10 * 1024 * 1024

# More files than are returned are looked at: those of other kinds must not take the place.
LIMITS = replace(
    RunLimits(),
    artifact_count=100,
    artifact_bytes=ARTIFACT_BYTES,
    artifacts_total_bytes=MOST_ARTIFACTS * ARTIFACT_BYTES,
)

TIME_EXIT_CODE = -124
MEMORY_EXIT_CODE = -137
BUSY_EXIT_CODE = -10
INTERNAL_EXIT_CODE = -3
UNHANDLED_EXIT_CODE = -999


@dataclass(frozen=True)
class Refused(Exception):
    """A request that is answered with 422. `detail` is in pydantic's words, as clients expect."""

    detail: dict[str, Any]


def parse(text: bytes, timeout: float) -> Job:
    """The job in a request body. Raises Refused and ProviderUnavailable."""
    try:
        return _job_in(_object(text), timeout)
    except Refused as refused:
        if len(text) > MOST_ECHOED_BYTES and "input" in refused.detail:
            raise Refused({**refused.detail, "input": None}) from None
        raise


def _job_in(body: Mapping[str, Any], timeout: float) -> Job:
    encoded = body.get("code_b64")
    if "code_b64" not in body:
        raise _refused("missing", "code_b64", "Field required", body)
    if not isinstance(encoded, str):
        raise _refused("string_type", "code_b64", "Input should be a valid string", encoded)
    language = body.get("language", "python")
    if language not in LANGUAGES:
        expected = "'python' or 'nodejs'"
        raise _refused(
            "enum", "language", f"Input should be {expected}", language, {"expected": expected}
        )
    arguments = body.get("arguments")
    if arguments is not None and not isinstance(arguments, dict):
        raise _refused("dict_type", "arguments", "Input should be a valid dictionary", arguments)
    if problem := arguments_problem(arguments):
        raise _refused("value_error", "arguments", f"Value error, {problem}", None, {"error": {}})
    return Job(
        code=_decoded(encoded),
        language=language,
        timeout=timeout,
        arguments=arguments or {},
        entrypoint="main",
        limits=LIMITS,
    )


def answer(result: ExecutionResult) -> dict[str, Any]:
    """What came of the code."""
    fields = _fields(result)
    if result.timed_out:
        return fields | {
            "status": "resource_limit_exceeded",
            "stderr": _with_note(result.stderr, "Execution timeout"),
            "exit_code": TIME_EXIT_CODE,
            "resource_limit_type": "time",
        }
    if result.out_of_memory:
        return fields | {
            "status": "resource_limit_exceeded",
            "stderr": _with_note(result.stderr, "Memory limit exceeded (killed by OOM)"),
            "exit_code": MEMORY_EXIT_CODE,
            "resource_limit_type": "memory",
        }
    if result.exit_code != 0:
        return fields | {"status": "program_error", "runtime_error_type": "nonzero_exit"}
    value = {"present": True, "value": result.result, "type": "json"}
    return fields | {
        "artifacts": [_artifact(each) for each in _chosen(result.artifacts)],
        "result": value if result.has_result else None,
    }


def failure(error: SandboxError) -> dict[str, Any]:
    """What is answered, with status 200, when the code could not be carried out."""
    if error.entry in (RATE_LIMITED, CREATION_FAILED) and not error.started:
        busy = error.entry == RATE_LIMITED
        message = "Container pool is busy" if busy else error.message
        return _failed(BUSY_EXIT_CODE, "no_available_container", message)
    return _failed(INTERNAL_EXIT_CODE, "internal_error", error.message)


def unhandled() -> dict[str, Any]:
    """What is answered when the fault is our own."""
    return _failed(UNHANDLED_EXIT_CODE, "unhandled_exception", "The service's log has the reason.")


def _fields(result: ExecutionResult | None) -> dict[str, Any]:
    """Every field of an answer, in the contract's order, as for success."""
    peak = result.metadata.get("memory_peak_bytes") if result else None
    return {
        "status": "success",
        "stdout": result.stdout if result else "",
        "stderr": result.stderr if result else "",
        "exit_code": result.exit_code if result else 0,
        "detail": None,
        "time_used_ms": result.execution_time * 1000 if result else None,
        "memory_used_kb": peak // 1024 if isinstance(peak, int) else None,
        "resource_limit_type": "output" if result and result.truncated else None,
        "unauthorized_access_type": None,
        "runtime_error_type": None,
        "artifacts": [],
        "result": None,
    }


def _failed(exit_code: int, detail: str, message: str) -> dict[str, Any]:
    return _fields(None) | {
        "status": "program_runner_error",
        "stderr": message,
        "exit_code": exit_code,
        "detail": detail,
    }


def _with_note(stderr: str, note: str) -> str:
    return f"{stderr.rstrip()}\n{note}" if stderr.strip() else note


def _chosen(artifacts: list[ArtifactFile]) -> list[ArtifactFile]:
    """Files right in the folder, of the kinds that are passed on, neither empty nor hidden."""
    fitting = [
        each
        for each in artifacts
        if "/" not in each.name
        and not each.name.startswith(".")
        and each.name.lower().endswith(ARTIFACT_SUFFIXES)
        and 0 < len(each.content) <= ARTIFACT_BYTES
    ]
    return fitting[:MOST_ARTIFACTS]


def _artifact(artifact: ArtifactFile) -> dict[str, Any]:
    return {
        "name": artifact.name,
        "mime_type": artifact.mime_type,
        "size": len(artifact.content),
        "content_b64": base64.b64encode(artifact.content).decode(),
    }


def _object(text: bytes) -> dict[str, Any]:
    if not text:
        raise Refused({"type": "missing", "loc": ["body"], "msg": "Field required", "input": None})
    try:
        body = _value(text)
    except CannotRead as error:
        raise ProviderUnavailable(f"The request cannot be read now: {error}.") from error
    except ValueError as error:
        position = getattr(error, "pos", 0)
        raise Refused(
            {
                "type": "json_invalid",
                "loc": ["body", position],
                "msg": "JSON decode error",
                "input": {},
                "ctx": {"error": getattr(error, "msg", str(error))},
            }
        ) from None
    if not isinstance(body, dict):
        raise Refused(
            {
                "type": "model_attributes_type",
                "loc": ["body"],
                "msg": "Input should be a valid dictionary or object to extract fields from",
                "input": body,
            }
        )
    return body


def _value(text: bytes) -> Any:
    if not is_plain(text):
        return read_bytes(text).value
    check(text, MOST_VALUES, MOST_DEPTH)
    # NaN is refused as the argument that it is.
    return json.loads(text)


def _decoded(encoded: str) -> str:
    try:
        # Line breaks do not count; RAGFlow's own words stay for what is none.
        lines = encoded.translate({ord("\r"): None, ord("\n"): None})
        code = base64.b64decode(lines, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _value_error(encoded, f"Invalid base64 encoding: {error}") from None
    try:
        return code.decode()
    except UnicodeDecodeError:
        raise _value_error(encoded, "The code is not UTF-8") from None


def _value_error(value: Any, problem: str) -> Refused:
    return _refused("value_error", "code_b64", f"Value error, {problem}", value, {"error": {}})


def _refused(
    kind: str, name: str, message: str, value: Any, context: dict[str, Any] | None = None
) -> Refused:
    detail = {"type": kind, "loc": ["body", name], "msg": message, "input": value}
    return Refused(detail | ({"ctx": context} if context is not None else {}))
