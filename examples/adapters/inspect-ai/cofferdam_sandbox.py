"""Sessions of Cofferdam as the sandboxes of an evaluation: `sandbox="cofferdam"`."""

from __future__ import annotations

import errno
import os
import secrets
import shlex
from typing import Any, Literal, overload

from cofferdam import AsyncCofferdam, AsyncOpenSession, Execution
from cofferdam.errors import Blocked, CofferdamError
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    SandboxUserUnsupportedError,
    sandboxenv,
)

USER = "sandbox"
# Of one command, where the service allows no more.
MOST_SECONDS = 300
# A command above it goes in as a file: the API takes 1 MiB.
_MOST_SENT = 512 * 1024
# The shell's own number for what may not be run.
_NOT_RUN = 126
_TOO_LARGE = 99

# Through the shell, not the API of files: that has the workspace alone, and replaces a file that
# may not be written.
_WRITE = """
mkdir -p -- "$(dirname -- "$1")" &&
if [ -e "$1" ]; then cat < "$0" > "$1"; else mv -T -- "$0" "$1"; fi
code=$?
rm -f -- "$0"
exit $code
"""
_READ = f"""
[ ! -d "$1" ] || {{ echo "Is a directory" >&2; exit 1; }}
size=$(wc -c < "$1") || exit 1
[ "$size" -le "$2" ] || exit {_TOO_LARGE}
ln -L -- "$1" "$0" 2>/dev/null || cat < "$1" > "$0"
"""
_ERRORS = {
    "Permission denied": errno.EACCES,
    "Is a directory": errno.EISDIR,
    "No such file": errno.ENOENT,
    "Not a directory": errno.ENOENT,
}


@sandboxenv(name="cofferdam")
class CofferdamSandboxEnvironment(SandboxEnvironment):
    """One session, which is opened for a sample and closed behind it.

    A command that took too long is not run again, whatever `timeout_retry` says: it may have done
    half of something.
    """

    def __init__(self, client: AsyncCofferdam, session: AsyncOpenSession) -> None:
        super().__init__()
        self._client = client
        self._session = session

    @classmethod
    async def sample_init(
        cls, task_name: str, config: Any, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        client = AsyncCofferdam()
        try:
            session = await client.open_session(metadata={"task": task_name[:100]})
        except BaseException:
            await client.aclose()
            raise
        return {"default": cls(client, session)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: Any,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for each in environments.values():
            sandbox = each.as_type(cls)
            try:
                await sandbox._session.close()
            finally:
                await sandbox._client.aclose()

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,  # noqa: A002
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        if user not in (None, USER):
            raise SandboxUserUnsupportedError(f"There is no user but {USER!r}, so no {user!r}.")
        script = f"exec {shlex.join(cmd)}"
        if input is not None:
            passed = shlex.quote(await self._sent(input))
            script = f"exec < {passed}; rm -f {passed}; {script}"
        if cwd is not None:
            script = f"cd -- {shlex.quote(cwd)} && {{ {script}; }}"
        try:
            done = await self._run(await self._called(script), env=env, timeout=timeout)
        except Blocked as refusal:
            return ExecResult(False, _NOT_RUN, "", str(refusal))
        if done.status == "timed_out":
            raise TimeoutError(done.error.message if done.error else "It ran too long.")
        if done.exit_code == _NOT_RUN and "Permission denied" in done.stderr:
            raise PermissionError(errno.EACCES, done.stderr, cmd[0])
        if done.stdout_truncated or done.stderr_truncated:
            limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit, done.stdout or done.stderr)
        code = -1 if done.exit_code is None else done.exit_code
        return ExecResult(code == 0, code, done.stdout, done.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        passing = await self._sent(contents)
        _raise_for(await self._run(["sh", "-c", _WRITE, passing, file]), file)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        passing = _passing_name()
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        done = await self._run(["sh", "-c", _READ, passing, file, str(limit)])
        if done.exit_code == _TOO_LARGE:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None)
        _raise_for(done, file)
        content = await self._session.files.read(passing)
        await self._session.files.remove(passing)
        return content.decode() if text else content

    async def _called(self, script: str) -> list[str]:
        if len(script.encode()) <= _MOST_SENT:
            return ["/bin/bash", "-c", script]
        passing = _passing_name()
        content = f"rm -f {passing}; {script}"
        await self._session.files.write(passing, content)
        return ["/bin/bash", passing]

    async def _sent(self, content: str | bytes) -> str:
        """Where it is now, inside: the shell moves it on from there."""
        passing = _passing_name()
        await self._session.files.write(passing, content)
        return f"/workspace/{passing}"

    async def _run(
        self, words: list[str], *, env: dict[str, str] | None = None, timeout: int | None = None
    ) -> Execution:
        seconds = min(timeout or MOST_SECONDS, MOST_SECONDS)
        try:
            return await self._session.command(
                words, env={"LC_ALL": "C.UTF-8", **(env or {})}, timeout=seconds
            )
        except Blocked:
            raise
        except CofferdamError as error:
            raise SandboxUnavailableError(str(error)) from error


def _passing_name() -> str:
    return f".passing-{secrets.token_hex(8)}"


def _raise_for(done: Execution, file: str) -> None:
    if done.exit_code == 0:
        return
    for words, number in _ERRORS.items():
        if words in done.stderr:
            raise OSError(number, os.strerror(number), file)
    if done.status == "timed_out":
        raise TimeoutError(f"{file}: it took too long.")
    raise OSError(errno.EIO, done.stderr or done.status, file)
