"""A session of Cofferdam as the sandbox of a deep agent."""

from __future__ import annotations

import posixpath
import secrets

from cofferdam import OpenSession
from cofferdam.errors import Blocked, InvalidRequest, NotFound
from deepagents.backends.protocol import (
    FILE_NOT_FOUND,
    INVALID_PATH,
    IS_DIRECTORY,
    PERMISSION_DENIED,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
)
from deepagents.backends.sandbox import BaseSandbox

WORKSPACE = "/workspace/"
# The shell's own number for what may not be run.
_NOT_RUN = 126


class CofferdamSandbox(BaseSandbox):
    """Commands and files of one session, which stays the caller's to close.

    `most_seconds` is the time of a command, and the most that an agent may ask for.
    """

    def __init__(self, session: OpenSession, *, most_seconds: int = 300) -> None:
        self._session = session
        self._most_seconds = most_seconds

    @property
    def id(self) -> str:
        return self._session.id

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        seconds = min(timeout or self._most_seconds, self._most_seconds)
        # One stream, so that errors stand between the lines where they happened.
        run = self._session.stream_command(f"exec 2>&1\n{command}", timeout=seconds)
        try:
            with run as events:
                # Byte for byte: a record holds no NUL, by which `grep -Z` separates.
                said = b"".join(event.content for event in events if event.type == "stdout")
        except (Blocked, InvalidRequest) as refusal:
            return ExecuteResponse(output=str(refusal), exit_code=_NOT_RUN)
        done = events.execution
        output = said.decode(errors="replace")
        if done.error:
            output += f"\n{done.error.message}"
        return ExecuteResponse(output, done.exit_code, done.stdout_truncated)

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        return [FileUploadResponse(path, self._upload(path, content)) for path, content in files]

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        return [FileDownloadResponse(path, *self._download(path)) for path in paths]

    def _upload(self, path: str, content: bytes) -> str | None:
        if not path.startswith("/"):
            return INVALID_PATH
        try:
            if (inside := _below_workspace(path)) is not None:
                self._session.files.write(inside, content)
                return None
            passing = _passing_name()
            self._session.files.write(passing, content)
            return self._placed("mv -T", WORKSPACE + passing, path)
        except (NotFound, InvalidRequest) as refusal:
            return _reason(refusal)

    def _download(self, path: str) -> tuple[bytes | None, str | None]:
        if not path.startswith("/"):
            return None, INVALID_PATH
        try:
            if (inside := _below_workspace(path)) is not None:
                return self._session.files.read(inside), None
            passing = _passing_name()
            if error := self._placed("cp", path, WORKSPACE + passing):
                return None, error
            content = self._session.files.read(passing)
            self._session.files.remove(passing)
        except (NotFound, InvalidRequest) as refusal:
            return None, _reason(refusal)
        return content, None

    def _placed(self, how: str, source: str, target: str) -> str | None:
        """The API has the files of the workspace; others pass through it."""
        passing = source if source.startswith(WORKSPACE) else target
        script = f'mkdir -p "$(dirname "$1")" && {how} -- "$0" "$1" || {{ rm -f "$2"; exit 1; }}'
        words = ["sh", "-c", script, source, target, passing]
        done = self._session.command(words, env={"LC_ALL": "C"})
        return None if done.exit_code == 0 else _meaning(done.stderr)


def _below_workspace(path: str) -> str | None:
    whole = f"/{posixpath.normpath(path).lstrip('/')}"
    return whole.removeprefix(WORKSPACE) if whole.startswith(WORKSPACE) else None


def _passing_name() -> str:
    return f".passing-{secrets.token_hex(8)}"


def _reason(refusal: NotFound | InvalidRequest) -> str:
    return FILE_NOT_FOUND if isinstance(refusal, NotFound) else _meaning(refusal.message)


def _meaning(message: str) -> str:
    """The framework's word for what was refused."""
    if "ermission denied" in message or "Read-only" in message:
        return PERMISSION_DENIED
    if "No such file" in message:
        return FILE_NOT_FOUND
    return IS_DIRECTORY if "directory" in message else INVALID_PATH
