"""One Aliyun sandbox: its interpreters, its workspace and its shell, and what its answers say.

The SDK hands answers over untyped. Their shapes are those that the service documents:
https://help.aliyun.com/zh/functioncompute/fc/sandbox-sandbox-code-interepreter
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from providers.aliyun_codeinterpreter import sdk
from providers.errors import ConnectionFailed, InvalidConfiguration
from providers.remote.output import Output, exit_code_of, without_colours
from providers.remote.service import (
    KEPT_SECONDS,
    NOTE_CHARACTERS,
    AccountClient,
    Cell,
    SandboxDriver,
)
from providers.sandbox import Context, Files, Processes

HOME = "/home/user"
GRACE_SECONDS = 5.0
# Not hidden: the service makes no hidden files.
_NOTE = "/tmp/cofferdam-context"  # noqa: S108  in the sandbox

# The line of a traceback that names the exception, and what follows of its message.
_NAMED = re.compile(r"^(\w+(?:\.\w+)*)(?::\s*(.*))?$", re.DOTALL)
_FRAME = re.compile(r'^  File ".*$\n', re.MULTILINE)


class AliyunMachine(SandboxDriver):
    def __init__(self, config: Callable[[float], Any], ref: str) -> None:
        self._config = config
        self.ref = ref

    def run(self, cell: Cell) -> int:
        answer = self.data(cell.seconds + GRACE_SECONDS).execute_code(
            cell.text,
            cell.context or None,
            language=None if cell.context else cell.language,
            timeout=math.ceil(cell.seconds),
        )
        results = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise ConnectionFailed("Aliyun's answer has no results.")
        exit_code = 0
        for result in results:
            if isinstance(result, dict):
                exit_code = _take(result, cell.output) or exit_code
        return exit_code

    def write(self, path: str, content: bytes) -> None:
        self._upload(f"{HOME}/{path}", content)

    def note(self) -> str:
        return (self._download(_NOTE) or b"")[:NOTE_CHARACTERS].decode("utf-8", "replace")

    def keep_note(self, text: str) -> None:
        self._upload(_NOTE, text.encode())

    def create_context(self, language: str, cwd: str) -> Context:
        made = self.data().create_context(language=language, cwd=f"{HOME}/{cwd}".rstrip("/"))
        return Context(str(made["id"]), language, cwd)

    def contexts(self) -> Sequence[Context]:
        return [
            Context(
                str(one["id"]),
                str(one.get("language", "")),
                str(one.get("cwd", "")).removeprefix(HOME).strip("/"),
            )
            for one in self.data().list_contexts()
        ]

    def destroy_context(self, context_id: str) -> bool:
        try:
            self.data().delete_context(context_id)
        except Exception as error:
            if is_missing(error):
                return False
            raise
        return True

    def restart_context(self, context_id: str, language: str, cwd: str) -> str:
        self.destroy_context(context_id)
        return self.create_context(language, cwd).id

    def settle(self, context_id: str, language: str) -> bool:
        """Nothing tells the service to stop a cell."""
        return False

    def renew(self, seconds: float) -> None:
        """A sandbox's idle time is set once; a call within it makes it begin again."""
        if seconds > KEPT_SECONDS:
            raise InvalidConfiguration(
                f"seconds: Must be at most {KEPT_SECONDS} s: Aliyun ends an idle sandbox then.",
                field="seconds",
            )
        self.data().list_contexts()

    def files(self, service: AccountClient) -> Files:
        from providers.aliyun_codeinterpreter.files import AliyunFiles

        return AliyunFiles(self, service)

    def processes(self, service: AccountClient) -> Processes:
        from providers.aliyun_codeinterpreter.commands import AliyunCommands

        return AliyunCommands(self, service)

    def data(self, seconds: float = 0) -> Any:
        """The sandbox's own interface: contexts, code, files and commands."""
        return sdk.CodeInterpreterDataAPI(self.ref, config=self._config(seconds))

    def is_there(self) -> bool:
        """Whether the sandbox is: it answers for what is missing in it as for itself."""
        config = self._config(0)
        try:
            sdk.SandboxClient(config).get_sandbox(self.ref, config=config)
        except sdk.ResourceNotExistError:
            return False
        return True

    def command(self, text: str, cwd: str, seconds: float) -> tuple[int, str, str]:
        """Give the sandbox's shell a text: its exit code, and what it has put out."""
        answer = self.data(seconds + GRACE_SECONDS).cmd(text, cwd, math.ceil(seconds))
        told = answer.get("result", answer) if isinstance(answer, dict) else None
        code = told.get("exitCode") if isinstance(told, dict) else None
        if not isinstance(told, dict) or type(code) is not int:
            raise ConnectionFailed("Aliyun's answer has no exit code of the command.")
        return code, str(told.get("stdout") or ""), str(told.get("stderr") or "")

    def download(self, path: str, target: Path) -> bool:
        """Save a file of the sandbox. False when it is not there."""
        try:
            self.data().download_file(path, str(target))
        except Exception as error:
            if is_missing(error):
                return False
            raise
        return True

    def _upload(self, path: str, content: bytes) -> None:
        """The SDK sends bytes from a file of this machine only."""
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            source = Path(folder) / "upload"
            source.write_bytes(content)
            self.data().upload_file(str(source), path)

    def _download(self, path: str) -> bytes | None:
        with tempfile.TemporaryDirectory(prefix="cofferdam-") as folder:
            target = Path(folder) / "download"
            return target.read_bytes() if self.download(path, target) else None


def is_missing(error: BaseException) -> bool:
    """Whether the service says that what it was asked for is not there."""
    return getattr(error, "status_code", None) == 404


def _take(result: dict[str, Any], output: Output) -> int:
    """Its exit code is that of an error, and 0 for all else."""
    kind, text = result.get("type"), str(result.get("text") or "")
    if kind == "stdout":
        output.stdout(text)
    elif kind == "stderr":
        output.stderr(text)
    elif kind == "result":
        output.show({"text/plain": text})
    elif kind == "error":
        text = without_colours(text)
        name, value = _exception_in(text)
        exit_code = exit_code_of(name, value)
        output.fail(name, value, "" if name == "SystemExit" else text)
        if name != "SystemExit" or exit_code == 1:
            output.stderr(text if text.endswith("\n") else f"{text}\n")
        return exit_code
    return 0


def _exception_in(traceback: str) -> tuple[str, str]:
    """The type and the whole message that a traceback ends with; empty where it has none.

    The service tells nothing but the traceback.
    """
    lines = traceback.rstrip().splitlines() or [""]
    frames = list(_FRAME.finditer(traceback))
    if frames:
        rest = traceback[frames[-1].end() :].rstrip().splitlines()
        # Its source line comes first, with what is marked in it.
        while rest and rest[0].startswith(" "):
            del rest[0]
        lines = ["\n".join(rest)] if rest else lines
    found = _NAMED.match(lines[-1])
    return (found[1].rpartition(".")[2], found[2] or "") if found else ("", "")
