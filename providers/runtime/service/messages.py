"""What the service and its client say to each other, as JSON. Both sides use this module."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NoReturn, cast, get_args

from providers import credentials, errors, slices
from providers.credentials import Credential
from providers.errors import (
    InvalidConfiguration,
    KeptFull,
    KeptSandboxLost,
    ProviderUnavailable,
    RateLimited,
    SandboxError,
)
from providers.json_reading import Base64, Bounds, CannotRead, read_bytes, read_text
from providers.network import Network
from providers.runtime.guest import names
from providers.runtime.pool.requests import arguments_problem
from providers.values import ArtifactFile, Entrypoint, ExecutionResult, InputFile, Job, RunLimits

LONGEST_TIMEOUT = 86_400.0
MOST_FILES = 1000
# Of code, at most.
MOST_TEXT_BYTES = 64 * 1024 * 1024
# Beyond so many bytes JSON and base64 are left to a thread: everybody else would wait for them.
LARGE = 256 * 1024
_SMALL = Bounds(1024 * 1024, 10_000)

_LIMITS = tuple(each.name for each in fields(RunLimits))
_JOB = frozenset(each.name for each in fields(Job)) - {"context"}

# Names the configuration a client expects to be in force; 412 says that it was never pushed.
SETTINGS_HEADER = "X-Pool-Settings"
# Which process an instance is lent to, as `remote.reclaim` names it.
CLIENT_HEADER = "X-Pool-Client"
SETTINGS_UNKNOWN = 412

_ERRORS: dict[str, type[SandboxError]] = {
    kind.entry.code: kind
    for kind in (
        errors.NotInitialized,
        errors.ConnectionFailed,
        errors.CreationFailed,
        errors.BlockedByPolicy,
        errors.RateLimited,
        errors.ProviderUnavailable,
    )
}
_PLAIN = tuple(
    each.name for each in fields(ExecutionResult) if each.name not in ("artifacts", "metadata")
)


def loads(text: bytes) -> Any:
    """Strict JSON. Raises InvalidConfiguration."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"body: Not JSON: {error}", field="body") from None


def loads_request(text: bytes) -> Any:
    """The JSON of a request, of a bounded number of values; a large one is read in a process of its
    own, with its files decoded. Raises InvalidConfiguration, and ProviderUnavailable."""
    try:
        return read_bytes(text, ("content_base64", "code_b64"), MOST_TEXT_BYTES).value
    except ValueError as error:
        raise InvalidConfiguration(f"body: Not JSON: {error}", field="body") from None
    except CannotRead as error:
        raise ProviderUnavailable(f"The request cannot be read now: {error}.") from error


def loads_small(text: bytes) -> Any:
    """The JSON of a request that has neither code nor files. Raises InvalidConfiguration."""
    try:
        return read_text(text, _SMALL).value
    except ValueError as error:
        raise InvalidConfiguration(f"body: Not JSON: {error}", field="body") from None


def dumps(value: Any) -> bytes:
    """Compact JSON as UTF-8, with escapes: text from a sandbox may hold lone surrogates."""
    return json.dumps(value, cls=slices.JSONInSlices, separators=(",", ":")).encode()


def error_to_json(error: SandboxError) -> dict[str, Any]:
    told = {
        "code": error.code,
        "message": error.message,
        "field": error.field,
        "started": error.started,
        "retry_after": error.retry_after,
    }
    if isinstance(error, KeptSandboxLost):
        told["lost"] = True
        if error.nothing_ran:
            told["nothing_ran"] = True
    if isinstance(error, KeptFull):
        told["full"] = True
    return {"error": told}


def error_from_json(body: Any) -> SandboxError | None:
    """The error a service answered with, None when it is none of ours."""
    told = body.get("error") if isinstance(body, dict) else None
    if not isinstance(told, dict) or not isinstance(told.get("message"), str):
        return None
    message, name = told["message"], told.get("field")
    if told.get("code") == errors.INVALID_CONFIGURATION.code:
        refused = InvalidConfiguration(message, field=name)
        refused.started = told.get("started") is not False
        return refused
    kind = _ERRORS.get(str(told.get("code")))
    if told.get("lost") is True:
        kind = KeptSandboxLost
    elif told.get("full") is True and kind is RateLimited:
        kind = KeptFull
    if kind is None:
        return None
    found = kind(
        message,
        field=name,
        started=told.get("started") is not False,
        retry_after=told.get("retry_after"),
    )
    found.nothing_ran = told.get("nothing_ran") is True and not found.started
    return found


def job_to_json(job: Job) -> dict[str, Any]:
    return {
        "code": job.code,
        "language": job.language,
        "timeout": job.timeout,
        "arguments": None if job.arguments is None else dict(job.arguments),
        "entrypoint": job.entrypoint,
        "files": [
            {"path": file.path, "content_base64": slices.encoded_text(file.content)}
            for file in job.files
        ],
        "limits": dict(vars(job.limits)),
        # What knows of no variables refuses a run with some, and no other.
        **({"environment": dict(job.environment)} if job.environment else {}),
    }


def job_from_json(body: Any, default_timeout: float) -> Job:
    """Raises InvalidConfiguration naming the field at fault."""
    if not isinstance(body, dict):
        _refuse("body", "Must be a JSON object.")
    for name in body:
        if name not in _JOB:
            _refuse(name, "Unknown field.")
    code, language = body.get("code"), body.get("language")
    if not isinstance(code, str) or not _is_utf8(code):
        _refuse("code", "Must be a string without lone surrogates.")
    if not isinstance(language, str):
        _refuse("language", "Must be a string.")
    arguments = body.get("arguments")
    if arguments is not None and not isinstance(arguments, dict):
        _refuse("arguments", "Must be an object or null.")
    if problem := arguments_problem(arguments):
        _refuse("arguments", problem)
    entrypoint = body.get("entrypoint") or "auto"
    if entrypoint not in get_args(Entrypoint):
        _refuse("entrypoint", f"Must be one of: {', '.join(get_args(Entrypoint))}.")
    return Job(
        code=code,
        language=language,
        timeout=_timeout(body.get("timeout"), default_timeout),
        arguments=arguments,
        entrypoint=cast("Entrypoint", entrypoint),
        files=[_file(each) for each in _list("files", body.get("files"))],
        limits=_limits(body.get("limits") or {}),
        environment=environment(body.get("environment") or {}),
    )


def result_to_json(result: ExecutionResult) -> dict[str, Any]:
    return {
        **{name: getattr(result, name) for name in _PLAIN},
        "metadata": result.metadata,
        "artifacts": [
            {
                "name": artifact.name,
                "mime_type": artifact.mime_type,
                "content_base64": slices.encoded_text(artifact.content),
            }
            for artifact in result.artifacts
        ],
    }


def result_from_json(body: Any) -> ExecutionResult:
    """Raises ProviderUnavailable, `started`, for what is no result."""
    try:
        artifacts = [
            ArtifactFile(
                each["name"],
                each["mime_type"],
                slices.decoded(each["content_base64"]),
            )
            for each in body["artifacts"]
        ]
        known = {name: body[name] for name in _PLAIN}
        return ExecutionResult(**known, metadata=dict(body["metadata"]), artifacts=artifacts)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProviderUnavailable(
            f"The pool service answered with an invalid result: {error!r}.",
            started=True,
        ) from None


def network(given: object) -> Network | None:
    """What a sandbox may reach, None where nothing is given. Raises InvalidConfiguration."""
    if given is None:
        return None
    try:
        return Network.from_json(given)
    except ValueError as error:
        _refuse("network", str(error))


def digest(given: object) -> str:
    """The template whose files a sandbox has, "" for none. Raises InvalidConfiguration."""
    if given in (None, ""):
        return ""
    if not isinstance(given, str) or not re.fullmatch(r"[0-9a-f]{64}", given):
        _refuse("template", "Is no digest.")
    return given


def credential_changes(given: object) -> dict[str, Credential | None]:
    """Other versions of credentials by id. Raises InvalidConfiguration."""
    try:
        return credentials.credential_changes(given)
    except ValueError as error:
        _refuse("credentials", str(error))


def environment(given: object) -> dict[str, str]:
    """Names and values that a process may be given. Raises InvalidConfiguration."""
    if not isinstance(given, dict) or not all(
        isinstance(name, str)
        and isinstance(value, str)
        and name
        and "=" not in name
        and "\0" not in name + value
        and _is_utf8(name + value)
        for name, value in given.items()
    ):
        _refuse("environment", "Must be an object of names and strings.")
    return dict(given)


def _timeout(value: Any, default: float) -> float:
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 < value <= LONGEST_TIMEOUT:
        _refuse("timeout", f"Must be seconds, more than 0 and at most {LONGEST_TIMEOUT:g}.")
    return float(value)


def _file(value: Any) -> InputFile:
    if not isinstance(value, dict) or not isinstance(value.get("path"), str):
        _refuse("files", "Each must be an object with path and content_base64.")
    path = value["path"]
    if reason := names.problem(path):
        _refuse("files", f"{path!r}: {reason}.")
    encoded = value.get("content_base64", "")
    if isinstance(encoded, Base64) and encoded.content is not None:
        return InputFile(path, encoded.content)
    try:
        return InputFile(path, slices.decoded(encoded))
    except (AttributeError, TypeError, ValueError) as error:
        _refuse("files", f"The content of {path!r}: {error}")


def _limits(given: Any) -> RunLimits:
    if not isinstance(given, Mapping):
        _refuse("limits", "Must be an object.")
    for name, value in given.items():
        if name not in _LIMITS:
            _refuse("limits", f"{name!r} is unknown. Known: {', '.join(_LIMITS)}.")
        if type(value) is not int or not 0 <= value <= 1 << 30:
            _refuse("limits", f"{name} must be a whole number from 0 to {1 << 30}.")
    return RunLimits(**given)


def _list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list) or len(value) > MOST_FILES:
        _refuse(name, f"Must be a list of at most {MOST_FILES}.")
    return value


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse(name: str, problem: str) -> NoReturn:
    raise InvalidConfiguration(f"{name}: {problem}", field=name)
