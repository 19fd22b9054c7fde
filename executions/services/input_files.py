"""The files that come with a request: bounds, shape and paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, GetCoreSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

from executions.kernel.declarations import END, STRICT, Members, Rule, refuse
from executions.kernel.text import is_storable
from providers import slices
from providers.guest.names import problem
from providers.json_reading import Base64
from providers.values import InputFile

MAX_FILES = 100
MAX_FILE_BYTES = 32 * 1024 * 1024
MAX_FILES_BYTES = 40 * 1024 * 1024
MAX_PATH_PARTS = 10
MAX_PATH_BYTES = 512

_PART = r"(?!\.{1,2}(/|$))[^/\u0000-\u001f\u007f-\u009f]{1,255}"
_PATH = rf"^{_PART}(/{_PART}){{0,{MAX_PATH_PARTS - 1}}}{END}"
# Line breaks do not count.
_SIGN = r"[A-Za-z0-9+/][\r\n]*"
_BASE64 = (
    rf"^[\r\n]*(({_SIGN}){{4}})*"
    rf"(({_SIGN}){{2}}=[\r\n]*=[\r\n]*|({_SIGN}){{3}}=[\r\n]*)?$"
)


def decoded(text: Any) -> bytes:
    """What a text of base64, or one that was read apart, stands for. Raises ValueError."""
    if isinstance(text, Base64):
        if text.content is None:
            raise ValueError(text.problem)
        return text.content
    if not isinstance(text, str):
        raise ValueError("Must be a string.")
    return slices.decoded(text)


class _SentFile(BaseModel):
    """An input file as JSON."""

    model_config = STRICT

    path: Annotated[
        str,
        WithJsonSchema({"type": "string", "maxLength": MAX_PATH_BYTES, "pattern": _PATH}),
        Field(description="Relative to the workspace, without '..'."),
    ]
    content_base64: Annotated[
        bytes,
        BeforeValidator(decoded),
        WithJsonSchema({"type": "string", "pattern": _BASE64}),
        Field(description=f"At most {MAX_FILE_BYTES} bytes, and {MAX_FILES_BYTES} for all files."),
    ]


@dataclass(frozen=True)
class _AsSent:
    """An input file, or the JSON that describes one."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return no_info_wrap_validator_function(self._read, handler.generate_schema(_SentFile))

    @staticmethod
    def _read(file: Any, read: Callable[[Any], _SentFile]) -> InputFile:
        if isinstance(file, InputFile):
            return file
        sent = read(file)
        return InputFile(path=sent.path, content=sent.content_base64)


Files = Annotated[Sequence[Annotated[InputFile, _AsSent()]], Members(MAX_FILES), Rule(tuple)]


def check_files(files: Sequence[InputFile]) -> None:
    """Raises InvalidConfiguration for files that no workspace can have together."""
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
    if problem(path):
        refuse(name, "Must hold no control characters.")
    return parts
