"""One E2B sandbox: its code interpreter, its workspace, and code that is run as a command."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import httpx
from e2b import CommandExitException, FileType, NotFoundException, TimeoutException
from e2b.api.client_sync import get_transport
from e2b_code_interpreter import Context as CodeContext
from e2b_code_interpreter import Execution, ExecutionError, Result, Sandbox

from providers.errors import InvalidConfiguration
from providers.remote import service as remote_service
from providers.remote.bounded import BoundedClient, CancelToken, ResponseTooLarge
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.output import NOT_REGULAR, Output, exit_code_of, without_colours
from providers.remote.service import AccountClient, Cell, SandboxDriver
from providers.sandbox import Context, Files, Processes
from providers.values import RunLimits

HOME = "/home/user"

# The service's own end of a run that ours has not ended: the SDK's timeouts fire late.
GRACE_SECONDS = 5.0
# How long an interpreter that was cut off may take to stop and keep its state.
STOP_SECONDS = 1.0
# Code that no interpreter of the service runs: the file it is put into, and the command that runs
# it with an exit code of its own.
_COMMANDS = {
    "bash": ("main.sh", "bash main.sh"),
    "go": (
        "main.go",
        "if ! command -v go >/dev/null; then echo 'The template has no Go. Choose one that has it "
        "in the configuration of E2B.' >&2; exit 127; fi; "
        "go build -o /tmp/.cofferdam-main main.go && exec /tmp/.cofferdam-main",
    ),
}
_NOTE = "/tmp/.cofferdam-context"  # noqa: S108  in the sandbox

_MIME_TYPES = {
    "text": "text/plain",
    "html": "text/html",
    "markdown": "text/markdown",
    "svg": "image/svg+xml",
    "png": "image/png",
    "jpeg": "image/jpeg",
    "pdf": "application/pdf",
    "latex": "text/latex",
    "json": "application/json",
    "javascript": "application/javascript",
}

_cut: ContextVar[CancelToken | None] = ContextVar("e2b_cut", default=None)


class CodeInterpreter(Sandbox):  # type: ignore[misc]
    """The SDK's sandbox, whose code interpreter's answers are bounded and can be cut off."""

    @property
    def _client(self) -> httpx.Client:
        transport = get_transport(self.connection_config, http_version="1.1")
        return BoundedClient(transport=transport, cut=_cut.get())


class E2BMachine(SandboxDriver):
    def __init__(self, sandbox: CodeInterpreter) -> None:
        self.sandbox = sandbox
        self.ref: str = sandbox.sandbox_id

    def run(self, cell: Cell) -> int:
        if cell.language in _COMMANDS and not cell.context:
            return self._run_command(cell)
        output = cell.output
        _cut.set(cell.cut)
        try:
            execution = self.sandbox.run_code(
                cell.text,
                language=None if cell.context else cell.language,
                context=CodeContext(cell.context, "", "") if cell.context else None,
                on_stdout=lambda message: output.stdout(message.line),
                on_stderr=lambda message: output.stderr(message.line),
                on_result=lambda result: output.show(_bundle(result)),
                envs=dict(cell.environment or {}) or None,
                timeout=cell.seconds + GRACE_SECONDS,
            )
        except ResponseTooLarge as error:
            output.truncated["stdout"] = True
            output.stderr(f"The run was ended: {error} of output.\n")
            return 137
        return _exit_code(execution, output)

    def _run_command(self, cell: Cell) -> int:
        file, command = _COMMANDS[cell.language]
        self.write(file, cell.text.encode())
        try:
            self.sandbox.commands.run(
                command,
                envs=dict(cell.environment or {}),
                on_stdout=cell.output.stdout,
                on_stderr=cell.output.stderr,
                timeout=cell.seconds + GRACE_SECONDS,
                retain_output=False,
            )
        except CommandExitException as ended:
            return int(ended.exit_code) if ended.exit_code >= 0 else 137
        return 0

    def write(self, path: str, content: bytes) -> None:
        self.sandbox.files.write(path, content)

    def prepare(self) -> None:
        self.sandbox.files.make_dir("artifacts")

    def artifacts(self) -> Iterator[tuple[str, int]]:
        try:
            entries = self.sandbox.files.list("artifacts", depth=8)
        except NotFoundException:
            return
        for entry in entries:
            _, _, name = entry.path.partition("/artifacts/")
            if entry.symlink_target is not None:
                yield name, NOT_REGULAR
            elif entry.type == FileType.FILE:
                yield name, entry.size

    def read(self, path: str, longest: int) -> bytes | None:
        content = bytearray()
        with self.sandbox.files.read(
            path, format="stream", request_timeout=remote_service.REQUEST_SECONDS
        ) as stream:
            for chunk in stream:
                content += chunk
                if len(content) > longest:
                    return None
        return bytes(content)

    def create_context(self, language: str, cwd: str) -> Context:
        if language == "go":
            raise InvalidConfiguration(
                "language: Go has no interpreter that keeps state. Run a command instead.",
                field="language",
            )
        made = self.sandbox.create_code_context(cwd=f"{HOME}/{cwd}", language=language)
        return Context(made.id, language, cwd)

    def contexts(self) -> Sequence[Context]:
        return [
            Context(one.id, one.language, one.cwd.removeprefix(HOME).strip("/"))
            for one in self.sandbox.list_code_contexts()
        ]

    def destroy_context(self, context_id: str) -> bool:
        try:
            self.sandbox.remove_code_context(context_id)
        except NotFoundException:
            return False
        return True

    def restart_context(self, context_id: str, language: str, cwd: str) -> str:
        self.sandbox.restart_code_context(context_id)
        return context_id

    def settle(self, context_id: str, language: str) -> bool:
        """An interpreter whose reader has left is interrupted; one that has stopped runs a cell."""
        empty = Cell("", language, Output("", RunLimits()), STOP_SECONDS, context_id)
        try:
            call_within(STOP_SECONDS, lambda: self.run(empty))
        except (DeadlinePassed, httpx.HTTPError, TimeoutException):
            return False
        return True

    def note(self) -> str:
        try:
            content = self.read(_NOTE, remote_service.NOTE_CHARACTERS)
        except NotFoundException:
            return ""
        return "too long" if content is None else content.decode("utf-8", "replace")

    def keep_note(self, text: str) -> None:
        self.sandbox.files.write(_NOTE, text)

    def renew(self, seconds: float) -> None:
        self.sandbox.set_timeout(int(seconds))

    def files(self, service: AccountClient) -> Files:
        from providers.e2b.files import E2BFiles

        return E2BFiles(self, service)

    def processes(self, service: AccountClient) -> Processes:
        from providers.e2b.processes import E2BProcesses

        return E2BProcesses(self, service)


def _exit_code(execution: Execution, output: Output) -> int:
    error: ExecutionError | None = execution.error
    if error is None:
        return 0
    code = exit_code_of(error.name, error.value)
    trace = without_colours(error.traceback or "")
    output.fail(error.name, error.value or "", "" if error.name == "SystemExit" else trace)
    if error.name != "SystemExit" or code == 1:
        text = without_colours(error.traceback or f"{error.name}: {error.value}")
        output.stderr(text if text.endswith("\n") else f"{text}\n")
    return code


def _bundle(result: Result) -> dict[str, Any]:
    return {
        mime_type: value
        for name, mime_type in _MIME_TYPES.items()
        if (value := getattr(result, name)) is not None
    } | (result.extra or {})
