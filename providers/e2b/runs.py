"""One run in an E2B sandbox: by the code interpreter, or as a command for shell code."""

from __future__ import annotations

from typing import Any

from e2b import CommandExitException
from e2b_code_interpreter import Context, Execution, ExecutionError, Result

from providers.e2b.client import Account, Sandbox
from providers.remote.bounded import ResponseTooLarge
from providers.remote.output import Output
from providers.remote.programs import Program
from providers.remote.text import exit_code_of, without_colours

# The service's own end of a run that ours has not ended: the SDK's timeouts fire late.
GRACE_SECONDS = 5.0
SHELL_FILE = "main.sh"
MAX_OUTPUTS_CHARACTERS = 10 * 1024 * 1024

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


class Ended:
    """How a run ended: its exit code, and the rich outputs it displayed."""

    def __init__(self, exit_code: int, outputs: list[dict[str, Any]] | None = None) -> None:
        self.exit_code = exit_code
        self.outputs = outputs or []


def run_cell(
    account: Account,
    sandbox: Sandbox,
    program: Program,
    output: Output,
    seconds: float,
    *,
    language: str | None = None,
    context: str | None = None,
) -> Ended:
    """Run a program in the interpreter for `language`, or in a context. Raises SandboxError."""
    with account.translated(running=True):
        try:
            execution = sandbox.run_code(
                program.text,
                language=language,
                context=Context(context, "", "") if context else None,
                on_stdout=lambda message: output.stdout(message.line),
                on_stderr=lambda message: output.stderr(message.line),
                timeout=seconds + GRACE_SECONDS,
            )
        except ResponseTooLarge as error:
            output.truncated["stdout"] = True
            output.stderr(f"The run was ended: {error} of output.\n")
            return Ended(137)
    return Ended(_exit_code(execution, output), _outputs(execution.results))


def run_shell(
    account: Account, sandbox: Sandbox, code: str, output: Output, seconds: float
) -> Ended:
    """Run shell code as a command, which has an exit code of its own. Raises SandboxError."""
    with account.translated():
        sandbox.files.write(SHELL_FILE, code)
    with account.translated(running=True):
        try:
            sandbox.commands.run(
                f"bash {SHELL_FILE}",
                on_stdout=output.stdout,
                on_stderr=output.stderr,
                timeout=seconds + GRACE_SECONDS,
                retain_output=False,
            )
        except CommandExitException as ended:
            return Ended(ended.exit_code if ended.exit_code >= 0 else 137)
    return Ended(0)


def _exit_code(execution: Execution, output: Output) -> int:
    error: ExecutionError | None = execution.error
    if error is None:
        return 0
    code = exit_code_of(error.name, error.value)
    if error.name != "SystemExit" or code == 1:
        text = without_colours(error.traceback or f"{error.name}: {error.value}")
        output.stderr(text if text.endswith("\n") else f"{text}\n")
    return code


def _outputs(results: list[Result]) -> list[dict[str, Any]]:
    """Rich results as MIME bundles, as many as fit."""
    bundles = []
    room = MAX_OUTPUTS_CHARACTERS
    for result in results:
        bundle = {
            mime_type: value
            for name, mime_type in _MIME_TYPES.items()
            if (value := getattr(result, name)) is not None
        } | (result.extra or {})
        room -= sum(len(str(value)) for value in bundle.values())
        if bundle and room >= 0:
            bundles.append(bundle)
    return bundles
