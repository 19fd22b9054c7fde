"""The tools of Claude's agents: which code each call is, and what is answered of its execution.

Each call is code of a session, so that it has a record and can be approved as it is. `bash` runs in
the session's first context and keeps folder and variables. The tools for files are programs in
Python, in a context of their own, which read what the agent gave them as JSON.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from executions.kernel.declarations import Members, refuse
from executions.kernel.text import is_storable
from executions.runs.advice import advice_text
from executions.runs.event_stream import in_order
from executions.runs.models import Execution
from providers.sandbox import DEFAULT_CONTEXT

FILES_CONTEXT = "files"
# Of the output of a command, whose end tells most, and of a tool for files, with its beginning.
MOST_OUTPUT_BYTES, MOST_FILE_BYTES = 100 * 1024, 256 * 1024
# Of a picture or PDF: 5 MiB as base64.
MOST_MEDIA_BYTES = 5 * 1024 * 1024 // 4 * 3
USUAL_SECONDS, FILE_SECONDS = 120.0, 60.0
_LEFT_OUT = "[output truncated]\n"
_NOTHING = "(no output)"
_MEDIA = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".gif": "image/gif",
    ".webp": "image/webp",
    ".pdf": "application/pdf",
}


class _Input(BaseModel):
    """What an agent gives to a tool. What is not known of it is ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Bash(_Input):
    command: str | None = None
    restart: bool | None = None
    timeout_ms: int | None = Field(default=None, ge=0, le=86_400_000)


class Read(_Input):
    file_path: str = Field(min_length=1, max_length=4096)
    view_range: Annotated[list[int], Members(2, least=2)] | None = None


class Write(_Input):
    file_path: str = Field(min_length=1, max_length=4096)
    content: str


class Edit(_Input):
    file_path: str = Field(min_length=1, max_length=4096)
    old_string: str = Field(min_length=1)
    new_string: str
    replace_all: bool | None = None


class Search(_Input):
    pattern: str = Field(min_length=1, max_length=4096)
    path: str | None = Field(default=None, max_length=4096)


_READ = """\
import json, os, stat, sys
given = json.load(sys.stdin)
path, lines = given["file_path"], given.get("view_range")
try:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        sys.exit(f"read: {path}: not a regular file")
    if found.st_size > 262144 and not lines:
        sys.exit(f"read: {path} has {found.st_size} bytes. Read a part of it with view_range.")
    with open(path, encoding="utf-8", newline="") as file:
        if lines:
            for number, line in enumerate(file, 1):
                if 0 < lines[1] < number:
                    break
                if number >= lines[0]:
                    sys.stdout.write(line)
        else:
            sys.stdout.write(file.read())
except UnicodeDecodeError:
    sys.exit(f"read: {path}: not UTF-8 text")
except OSError as error:
    sys.exit(f"read: {path}: {error.strerror}")
"""
_LOOK = """\
import json, os, stat, sys
path = json.load(sys.stdin)["file_path"]
try:
    found = os.stat(path)
except OSError as error:
    sys.exit(f"read: {path}: {error.strerror}")
if not stat.S_ISREG(found.st_mode):
    sys.exit(f"read: {path}: not a regular file")
print(found.st_size, "bytes")
"""
_WRITE = """\
import json, os, sys
given = json.load(sys.stdin)
path, content = given["file_path"], given["content"]
try:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(content)
except OSError as error:
    sys.exit(f"write: {path}: {error.strerror}")
print(f"wrote {len(content)} characters to {path}")
"""
_EDIT = """\
import json, os, stat, sys
given = json.load(sys.stdin)
path, old = given["file_path"], given["old_string"]
try:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        sys.exit(f"edit: {path}: not a regular file")
    if found.st_size > 262144:
        sys.exit(f"edit: {path} has {found.st_size} bytes, and may have 262144.")
    with open(path, encoding="utf-8", newline="") as file:
        text = file.read()
    count = text.count(old)
    if count == 0:
        sys.exit(f"edit: old_string is not in {path}")
    if count > 1 and not given.get("replace_all"):
        sys.exit(f"edit: old_string is {count} times in {path}, and must be unique")
    size = len(text) + count * (len(given["new_string"]) - len(old))
    if size > 1048576:
        sys.exit(f"edit: {path} would have {size} characters, and may have 1048576.")
    new = text.replace(old, given["new_string"]).encode()
    with open(path, "wb") as file:
        file.write(new)
except UnicodeDecodeError:
    sys.exit(f"edit: {path}: not UTF-8 text")
except OSError as error:
    sys.exit(f"edit: {path}: {error.strerror}")
print(f"replaced {count} in {path}")
"""
_GLOB = """\
import itertools, json, pathlib, sys
given = json.load(sys.stdin)
root = pathlib.Path(given.get("path") or ".").resolve()
def modified(path):
    try:
        return path.stat().st_mtime
    except OSError:
        return 0
try:
    found = list(itertools.islice(root.glob(given["pattern"]), 50000))
except (NotImplementedError, OSError, ValueError) as error:
    sys.exit(f"glob: {error}")
found.sort(key=modified, reverse=True)
print("\\n".join(map(str, found[:200])) or "no matches")
"""
_GREP = """\
import json, os, re, sys
given = json.load(sys.stdin)
root, left = os.path.abspath(given.get("path") or "."), 102400
try:
    pattern = re.compile(given["pattern"])
except re.error as error:
    sys.exit(f"grep: not a regular expression: {error}")
if not os.path.exists(root):
    sys.exit(f"grep: {root}: No such file or directory")
def files():
    if not os.path.isdir(root):
        yield root
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in (".git", "node_modules"))
        yield from (os.path.join(folder, each) for each in sorted(names))
for path in files():
    if not os.path.isfile(path) or os.path.islink(path) and path != root:
        continue
    try:
        with open(path, "rb") as file:
            if b"\\0" in file.read(512):
                continue
            file.seek(0)
            for number, line in enumerate(file, 1):
                text = line.decode("utf-8", "replace").rstrip("\\r\\n")
                if len(line) > 2000 or not pattern.search(text):
                    continue
                left -= len(path) + len(text)
                if left < 0:
                    print("[output truncated]")
                    sys.exit()
                print(f"{path}:{number}:{text}")
    except OSError:
        continue
if left == 102400:
    print("no matches")
"""

TOOLS: Mapping[str, type[_Input]] = {
    "bash": Bash,
    "read": Read,
    "write": Write,
    "edit": Edit,
    "glob": Search,
    "grep": Search,
}
_TAIL = "\nINPUT\n"
_PROGRAMS = {"read": _READ, "write": _WRITE, "edit": _EDIT, "glob": _GLOB, "grep": _GREP}


@dataclass(frozen=True)
class Prepared:
    """A call as code of a session. Without code, the context is to be begun anew. `media_path` is
    the file whose bytes are the answer where the code succeeds."""

    code: str
    context: str
    seconds: float
    media_path: str = ""
    media_type: str = ""


@dataclass(frozen=True)
class Result:
    """What the agent is told. `is_approved` says that a person allowed the call."""

    content: list[dict[str, Any]]
    is_error: bool = False
    is_approved: bool = False

    @classmethod
    def of_text(cls, text: str, *, is_error: bool = False) -> Result:
        return cls([{"type": "text", "text": text or _NOTHING}], is_error)

    @property
    def text(self) -> str:
        """Its texts in one."""
        return "".join(each.get("text", "") for each in self.content)


def prepare(name: str, given: Mapping[str, Any]) -> Prepared:
    """Return the code of a call. Raises InvalidConfiguration for what the tool cannot take."""
    try:
        read = TOOLS[name].model_validate(dict(given))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        refuse(".".join(map(str, first["loc"])) or "input", f"{first['msg']}.")
    prepared = _prepare(name, read)
    if not is_storable(prepared.code):
        refuse("input", "Must hold neither NUL nor lone surrogates.")
    return prepared


def _prepare(name: str, read: _Input) -> Prepared:
    if isinstance(read, Bash):
        return _prepare_command(read)
    if isinstance(read, Read) and (media_type := _media_type(read.file_path)):
        if read.view_range:
            refuse("view_range", "Pictures and PDF have no lines.")
        code = _code(_LOOK, read)
        return Prepared(code, FILES_CONTEXT, FILE_SECONDS, read.file_path, media_type)
    return Prepared(_code(_PROGRAMS[name], read), FILES_CONTEXT, FILE_SECONDS)


def _prepare_command(read: Bash) -> Prepared:
    if read.restart:
        return Prepared("", DEFAULT_CONTEXT, 0.0)
    if not read.command:
        refuse("command", "Must be a command.")
    seconds = read.timeout_ms / 1000 if read.timeout_ms else USUAL_SECONDS
    return Prepared(read.command, DEFAULT_CONTEXT, seconds)


def _code(program: str, read: _Input) -> str:
    # A line of JSON is never the word that ends it.
    given = json.dumps(read.model_dump(exclude_none=True), ensure_ascii=False)
    return f"{_head(program)}{given}{_TAIL}"


def _head(program: str) -> str:
    return f"python3 -I -X utf8 -c \"$(cat <<'PROGRAM'\n{program}PROGRAM\n)\" <<'INPUT'\n"


def call_in(code: str) -> tuple[str, dict[str, Any]] | None:
    """Return the tool for files and its input, where code is exactly that of such a call."""
    for name, program in (*_PROGRAMS.items(), ("read", _LOOK)):
        head = _head(program)
        if not code.startswith(head) or not code.endswith(_TAIL):
            continue
        try:
            read = TOOLS[name].model_validate_json(code[len(head) : -len(_TAIL)])
        except ValidationError:
            return None
        # What is more than a call is not shown as one.
        return (name, read.model_dump(exclude_none=True)) if _code(program, read) == code else None
    return None


def _media_type(path: str) -> str:
    ending = path[path.rfind(".") :].lower() if "." in path else ""
    return _MEDIA.get(ending, "")


def result_of(execution: Execution) -> Result:
    """Return what is told of an execution that has ended."""
    output = b"".join(piece for _, piece in in_order(execution))
    is_cut = execution.stdout_truncated or execution.stderr_truncated
    if execution.context == DEFAULT_CONTEXT:
        kept = output[-MOST_OUTPUT_BYTES:]
    else:
        kept = output[:MOST_FILE_BYTES]
    text = kept.decode("utf-8", "replace")
    if is_cut or len(kept) < len(output):
        text = f"{_LEFT_OUT}{text}"
    if execution.exit_code == 0 and execution.status == Execution.Status.SUCCEEDED:
        return Result.of_text(text)
    why = execution.error_message or f"exit code {execution.exit_code}"
    parts = [text.rstrip(), why if execution.error_message or not text.strip() else ""]
    told = "\n".join(filter(None, (*parts, advice_text(execution).rstrip())))
    return Result.of_text(told, is_error=True)


def media_result(media_type: str, data: bytes) -> Result:
    """Return a picture or PDF as the agent sees it."""
    kind = "document" if media_type == "application/pdf" else "image"
    source = {"type": "base64", "media_type": media_type, "data": b64encode(data).decode()}
    return Result([{"type": kind, "source": source}])
