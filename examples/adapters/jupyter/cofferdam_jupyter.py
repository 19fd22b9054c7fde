"""Notebooks whose cells run in a session: a kernel provisioner, and the kernel that it starts.

The provisioner opens the session and closes it behind the kernel, interrupts it, and starts its
interpreter anew. The kernel is a small process beside JupyterLab that runs no code of the
notebook: it speaks Jupyter's protocol to one side and the session's to the other.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

from cofferdam import Cofferdam, CofferdamError, ServiceError
from ipykernel.kernelbase import Kernel
from jupyter_client.provisioning import LocalProvisioner

SESSION = "COFFERDAM_SESSION"
# Seconds without a cell, after which a session sleeps or is closed. Its own bounds hold as well.
IDLE_SECONDS = int(os.environ.get("COFFERDAM_NOTEBOOK_IDLE_SECONDS", "1800"))
# Seconds after which a session is closed however much it is used; fewer where the service allows no
# more.
MAX_SECONDS = int(os.environ.get("COFFERDAM_NOTEBOOK_MAX_SECONDS", "86400"))
# Seconds that one cell may take; the provider's usual time where it is not set.
CELL_SECONDS = os.environ.get("COFFERDAM_NOTEBOOK_CELL_SECONDS", "")
INTERRUPTED = 130
# What a first line may say of the rest of a cell, and the context that this runs in.
OTHER_LANGUAGES = {
    "%%bash": "bash",
    "%%sh": "bash",
    "%%javascript": "nodejs",
    "%%js": "nodejs",
}


class SessionProvisioner(LocalProvisioner):
    """A session for as long as the notebook's kernel is there."""

    _client: Cofferdam | None = None
    _session: Any = None

    async def pre_launch(self, **kwargs: Any) -> dict[str, Any]:
        """Before each start: an empty interpreter, in the session that there is or in a new one."""
        kwargs = await super().pre_launch(**kwargs)
        await asyncio.to_thread(self._prepare)
        kwargs["env"] = {**kwargs.get("env", os.environ), SESSION: self._session.id}
        return kwargs

    async def send_signal(self, signum: int) -> None:
        """An interrupt is the session's. The kernel learns of it as the end of its cell."""
        if signum == signal.SIGINT and self._session is not None:
            await asyncio.to_thread(self._interrupt, self._session)
        else:
            await super().send_signal(signum)

    @staticmethod
    def _interrupt(session: Any) -> None:
        """Whichever of its interpreters the cell runs in."""
        for context in session.contexts():
            session.interrupt(context.id)

    async def cleanup(self, restart: bool = False) -> None:
        """After the kernel's end. Restarted, it finds its files again."""
        await super().cleanup(restart)
        if not restart:
            await asyncio.to_thread(self._close)

    def _prepare(self) -> None:
        if self._client is None:
            self._client = Cofferdam()
        if self._session is not None:
            try:
                self._session.restart_context("default")
                return
            except CofferdamError:
                # It has ended meanwhile; the notebook goes on with another.
                self._session = None
        self._session = open_for_long(
            self._client, MAX_SECONDS, metadata={"kernel": str(self.kernel_id)}
        )

    def _close(self) -> None:
        client, session = self._client, self._session
        self._client = self._session = None
        if session is not None:
            session.close()
        if client is not None:
            client.close()


def open_for_long(client: Cofferdam, seconds: int, **options: Any) -> Any:
    """A session that may grow so old, or as old as the service lets one grow. Unasked it would be
    closed after half an hour, with its files, while the notebook is in use."""
    options["idle_seconds"] = min(IDLE_SECONDS, seconds)
    try:
        return client.open_session(max_seconds=seconds, **options)
    except ServiceError as error:
        allowed = re.search("at most ([0-9]+)", error.message)
        if error.field not in ("idle_seconds", "max_seconds") or allowed is None:
            raise
        if (most := int(allowed[1])) >= seconds:
            raise
    return open_for_long(client, most, **options)


def read_cell(code: str) -> tuple[str, str]:
    """The other language that a cell is in, "" where it says none, and what is to be run."""
    first, _, rest = code.lstrip().partition("\n")
    if language := OTHER_LANGUAGES.get(first.strip()):
        return language, rest
    lines = [line for line in code.splitlines() if line.strip()]
    if all(line.startswith("!") for line in lines):
        return "bash", "\n".join(line[1:] for line in lines)
    return "", code


class SessionKernel(Kernel):  # type: ignore[misc]
    """Cells there, and what comes of them back."""

    implementation = "cofferdam"
    implementation_version = "0.1.0"
    banner = "Python in a session of Cofferdam"
    language_info = {
        "name": "python",
        "mimetype": "text/x-python",
        "file_extension": ".py",
        "pygments_lexer": "python3",
        "codemirror_mode": {"name": "python", "version": 3},
    }

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._session = Cofferdam().session(os.environ[SESSION])

    def do_execute(self, code: str, silent: bool, *_: Any, **__: Any) -> dict[str, Any]:
        if not code.strip():
            return self._reply()
        try:
            return self._run(code, silent)
        except CofferdamError as error:
            return self._failed(type(error).__name__, str(error), silent)

    def _run(self, code: str, silent: bool) -> dict[str, Any]:
        options: Any = {"timeout": float(CELL_SECONDS)} if CELL_SECONDS else {}
        language, code = read_cell(code)
        if language:
            self._have_context(language)
            options["context"] = language
        with self._session.stream(code, agent="jupyter", **options) as events:
            for event in events:
                if event.type == "done":
                    return self._ended(event.execution, silent)
                if silent:
                    continue
                if event.type in ("stdout", "stderr"):
                    self._say("stream", name=event.type, text=event.text)
                elif event.type == "output":
                    self._say("display_data", data=dict(event.data), metadata={})
        return self._failed("ConnectionError", "The stream ended before the cell did.", silent)

    def _have_context(self, language: str) -> None:
        if language not in {context.id for context in self._session.contexts()}:
            self._session.create_context(language, id=language)

    def _ended(self, execution: Any, silent: bool) -> dict[str, Any]:
        if execution.context_kept is False and not silent:
            lost = "The interpreter was lost, and what was in it. It has started again, empty.\n"
            self._say("stream", name="stderr", text=lost)
        if execution.status == "succeeded":
            return self._reply()
        if execution.error is not None:
            return self._failed(execution.error.code, execution.error.message, silent)
        if execution.exit_code == INTERRUPTED:
            return self._failed("KeyboardInterrupt", "", silent)
        # The traceback has been printed.
        if (told := execution.exception) is None:
            return self._failed("Exit", f"code {execution.exit_code}", silent)
        return self._failed(told.type, told.message, silent)

    def _reply(self) -> dict[str, Any]:
        return {
            "status": "ok",
            "execution_count": self.execution_count,
            "payload": [],
            "user_expressions": {},
        }

    def _failed(self, name: str, value: str, silent: bool) -> dict[str, Any]:
        told = f"{name}: {value}" if value else name
        content = {"ename": name, "evalue": value, "traceback": [told]}
        if not silent:
            self._say("error", **content)
        return {"status": "error", "execution_count": self.execution_count, **content}

    def _say(self, kind: str, **content: Any) -> None:
        self.send_response(self.iopub_socket, kind, content)


if __name__ == "__main__":
    from ipykernel.kernelapp import IPKernelApp

    IPKernelApp.launch_instance(kernel_class=SessionKernel)
