"""What a caller asks for. A request that exists is valid; nothing refused is ever run."""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NoReturn, cast, get_args

from django.conf import settings

from executions.text import is_storable, to_json
from providers.base import Entrypoint, InputFile, Limits
from providers.errors import InvalidConfiguration

MAX_ARGUMENTS_BYTES = 1024 * 1024
MAX_FILES = 100
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_FILES_BYTES = 40 * 1024 * 1024
MAX_PATH_PARTS = 10
MAX_PATH_BYTES = 512

API_ENTRYPOINTS = ("auto", "main", "script")
MODES = ("sync", "async")


def refuse(name: str, problem: str) -> NoReturn:
    raise InvalidConfiguration(f"{name}: {problem}", field=name)


@dataclass(frozen=True)
class ExecutionRequest:
    """Code and how to run it. `timeout` is seconds, the configured default when None.

    Raises InvalidConfiguration naming the field at fault. `subject` is whom the caller acts for.
    """

    code: str
    language: str = "python"
    arguments: Mapping[str, Any] | None = None
    entrypoint: Entrypoint = "auto"
    timeout: float | None = None
    files: Sequence[InputFile] = ()
    mode: str = "sync"
    idempotency_key: str | None = None
    subject: str = ""
    arguments_json: str = field(init=False, default="")

    def __post_init__(self) -> None:
        _check_code(self.code)
        _check_short_text("language", self.language, 32, required=True)
        if self.entrypoint not in get_args(Entrypoint):
            refuse("entrypoint", f"Must be one of: {', '.join(API_ENTRYPOINTS)}.")
        if self.mode not in MODES:
            refuse("mode", f"Must be one of: {', '.join(MODES)}.")
        if self.idempotency_key is not None:
            _check_short_text("idempotency_key", self.idempotency_key, 255, required=True)
        _check_short_text("subject", self.subject, 255)
        _check_files(self.files)
        object.__setattr__(self, "timeout", _checked_timeout(self.timeout))
        object.__setattr__(self, "arguments_json", _checked_arguments(self.arguments))

    @property
    def code_hash(self) -> str:
        return "sha256:" + hashlib.sha256(self.code.encode()).hexdigest()

    @property
    def limits(self) -> Limits:
        return Limits(output_bytes=settings.SANDBOX_MAX_OUTPUT_KB * 1000)

    @property
    def seconds(self) -> float:
        """The timeout in force."""
        return cast("float", self.timeout)

    def fingerprint(self) -> str:
        """What two requests with the same idempotency key must share."""
        digest = hashlib.sha256()
        parts = [
            self.code_hash,
            self.language,
            self.entrypoint,
            self.mode,
            self.subject,
            repr(self.timeout),
            self.arguments_json,
        ]
        for file in self.files:
            parts += [file.path, hashlib.sha256(file.content).hexdigest()]
        for part in parts:
            digest.update(f"{len(part)}:{part}".encode())
        return digest.hexdigest()

    def to_stored(self) -> dict[str, Any]:
        """What a worker needs to run this later, as JSON."""
        return {
            "code": self.code,
            "language": self.language,
            "arguments": None if self.arguments is None else dict(self.arguments),
            "entrypoint": self.entrypoint,
            "timeout": self.timeout,
            "files": [
                {"path": file.path, "content_base64": base64.b64encode(file.content).decode()}
                for file in self.files
            ],
            "mode": self.mode,
            "subject": self.subject,
        }

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> ExecutionRequest:
        return cls(**{**stored, "files": _decoded_files(stored["files"])})


_JSON_KEYS = (
    *(each.name for each in fields(ExecutionRequest) if each.init and each.name != "subject"),
    "session",
)


def request_from_json(body: Any) -> ExecutionRequest:
    """The request in the body of `POST /api/v1/executions`. Null stands for a key left out."""
    if not isinstance(body, dict):
        refuse("body", "Must be a JSON object.")
    for key in body:
        if key not in _JSON_KEYS:
            refuse(_shown(key), f"Unknown field. Known are: {', '.join(_JSON_KEYS)}.")
    given = {key: value for key, value in body.items() if value is not None}
    if "session" in given:
        refuse("session", "Sessions are not offered yet. Leave it out or send null.")
    if "code" not in given:
        refuse("code", "This field is required.")
    if given.get("entrypoint", "auto") not in API_ENTRYPOINTS:
        refuse("entrypoint", f"Must be one of: {', '.join(API_ENTRYPOINTS)}.")
    if "files" in given:
        given["files"] = _decoded_files(given["files"])
    return ExecutionRequest(**given)


def _check_code(code: Any) -> None:
    if not isinstance(code, str):
        refuse("code", "Must be a string.")
    if not code.strip():
        refuse("code", "Must not be empty.")
    if not is_storable(code):
        refuse("code", "Must hold neither NUL nor lone surrogates.")
    if len(code.encode()) > settings.SANDBOX_MAX_CODE_BYTES:
        refuse("code", f"Must be at most {settings.SANDBOX_MAX_CODE_BYTES} bytes of UTF-8.")


def _check_short_text(name: str, value: Any, longest: int, *, required: bool = False) -> None:
    if not isinstance(value, str):
        refuse(name, "Must be a string.")
    if (required and not value) or len(value) > longest:
        refuse(name, f"Must be {1 if required else 0} to {longest} characters long.")
    if not is_storable(value):
        refuse(name, "Must hold neither NUL nor lone surrogates.")


def _checked_timeout(timeout: Any) -> float:
    if timeout is None:
        timeout = settings.SANDBOX_TIMEOUT_SEC
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        refuse("timeout", "Must be a number of seconds.")
    longest = settings.SANDBOX_MAX_TIMEOUT_SEC
    if not 0 < timeout <= longest or math.isnan(timeout):
        refuse("timeout", f"Must be more than 0 and at most {longest} seconds.")
    return float(timeout)


def _checked_arguments(arguments: Any) -> str:
    if arguments is None:
        return ""
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        refuse("arguments", "Must be an object with names as its keys.")
    try:
        text = to_json(dict(arguments))
    except ValueError as error:
        refuse("arguments", f"Must be JSON: {error}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        refuse("arguments", "Must hold no lone surrogates.")
    if size > MAX_ARGUMENTS_BYTES:
        refuse("arguments", f"Must be at most {MAX_ARGUMENTS_BYTES} bytes; send data as files.")
    return text


def _decoded_files(files: Any) -> tuple[InputFile, ...]:
    if not isinstance(files, list):
        refuse("files", "Must be a list.")
    if len(files) > MAX_FILES:
        refuse("files", f"At most {MAX_FILES} files can be sent.")
    return tuple(_decoded_file(f"files[{index}]", file) for index, file in enumerate(files))


def _decoded_file(name: str, file: Any) -> InputFile:
    if not isinstance(file, dict):
        refuse(name, "Must be an object with path and content_base64.")
    for key in file:
        if key not in ("path", "content_base64"):
            refuse(f"{name}.{_shown(key)}", "Unknown field. Known are: path, content_base64.")
    for key in ("path", "content_base64"):
        if not isinstance(file.get(key), str):
            refuse(f"{name}.{key}", "Must be a string.")
    try:
        content = base64.b64decode(file["content_base64"], validate=True)
    except (binascii.Error, ValueError):
        refuse(f"{name}.content_base64", "Must be base64.")
    return InputFile(path=file["path"], content=content)


def _check_files(files: Sequence[InputFile]) -> None:
    if len(files) > MAX_FILES:
        refuse("files", f"At most {MAX_FILES} files can be sent.")
    if sum(len(file.content) for file in files) > MAX_FILES_BYTES:
        refuse("files", f"Must be at most {MAX_FILES_BYTES} bytes together.")
    taken: set[tuple[str, ...]] = set()
    folders: set[tuple[str, ...]] = set()
    for index, file in enumerate(files):
        name = f"files[{index}].path"
        if len(file.content) > MAX_FILE_BYTES:
            refuse(f"files[{index}]", f"Must be at most {MAX_FILE_BYTES} bytes.")
        parts = _path_parts(name, file.path)
        parents = {parts[:end] for end in range(1, len(parts))}
        if parts in taken or parts in folders or parents & taken:
            refuse(name, "Another file has this path, or is a folder of it.")
        taken.add(parts)
        folders |= parents


def _path_parts(name: str, path: str) -> tuple[str, ...]:
    if not path or not is_storable(path):
        refuse(name, "Must not be empty and hold neither NUL nor lone surrogates.")
    parts = tuple(path.split("/"))
    if any(part in ("", ".", "..") for part in parts):
        refuse(name, "Must be relative, without empty parts, '.' or '..'.")
    if len(parts) > MAX_PATH_PARTS:
        refuse(name, f"Must be at most {MAX_PATH_PARTS} levels deep.")
    if len(path.encode()) > MAX_PATH_BYTES or any(len(part.encode()) > 255 for part in parts):
        refuse(name, f"Must be at most {MAX_PATH_BYTES} bytes, and each part at most 255.")
    return parts


def _shown(key: str) -> str:
    """A key the caller made up, fit to be shown in an answer."""
    return "".join(c if c.isprintable() else "\ufffd" for c in key[:100])
