"""Sandboxes of a remote service, for one run or kept, the same over every `SandboxDriver`, and the
paths of their workspaces.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from providers.base import ARTIFACTS, FILES, PROCESSES, WORKSPACE
from providers.cancelled_runs import CancelledRuns
from providers.errors import (
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
    before_the_code,
)
from providers.remote.bounded import CancelToken
from providers.remote.contexts import RemoteContexts
from providers.remote.deadline import DeadlinePassed
from providers.remote.output import Output, collect_artifacts, result_of
from providers.remote.programs import Program, build_call, build_program, calls_main
from providers.remote.service import Cell, SandboxDriver
from providers.sandbox import (
    DEFAULT_CONTEXT,
    Files,
    KeptSandbox,
    Processes,
    Sandbox,
    SandboxState,
    below_workspace,
)
from providers.threads import NoThreadLeft, start_thread
from providers.values import Emit, ExecutionResult, Job

if TYPE_CHECKING:
    from providers.remote.base import RemoteProvider

# For the artifacts, where a run has taken all of its own time.
COLLECT_SECONDS = 4.0

# How long a run that was interrupted waits to be told what became of its context.
_SETTLED_SECONDS = 10.0


class RemoteSandbox(Sandbox):
    """A sandbox for one run, which ends with it when it takes too long."""

    def __init__(self, provider: RemoteProvider, machine: SandboxDriver) -> None:
        self.ref = machine.ref
        self.metadata = {"runtime": provider.runtime, **provider.service.details()}
        self._provider = provider
        self._service = provider.service
        self._machine = machine
        self._closed = False

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        began = time.monotonic()
        provider, service, machine, limits = (
            self._provider,
            self._service,
            self._machine,
            job.limits,
        )
        with before_the_code():
            language, seconds = self._checked(job)
            program = build_program(
                job.code,
                language,
                job.entrypoint,
                job.arguments,
                top_level_await=provider.awaits_at_top,
                result_bytes=limits.result_bytes,
            )
            if ARTIFACTS in provider.capabilities:
                service.ask(machine.prepare)
            self._write_files(job)
        output = Output(program.mark, limits, emit)
        cell = Cell(program.text, language, output, seconds, environment=job.environment)
        ran = time.monotonic()
        try:
            exit_code = service.ask(machine.run, cell, running=True, seconds=seconds)
        except DeadlinePassed:
            # Without a thread it is whoever closes the sandbox that ends it.
            with suppress(NoThreadLeft):
                start_thread("remote-end", self._end_quietly)
            return self._result(output, program, None, ran)
        result = self._result(output, program, exit_code, ran)
        if ARTIFACTS in provider.capabilities:
            collect_artifacts(
                result,
                lambda: service.ask(lambda: list(machine.artifacts()), running=True),
                lambda name, most: service.ask(
                    machine.read, f"artifacts/{name}", most, running=True
                ),
                limits,
                # Who waits for the run gives it a few seconds more.
                max(COLLECT_SECONDS / 2, began + seconds + COLLECT_SECONDS - time.monotonic()),
            )
        return result

    def close(self) -> bool:
        self._closed = True
        return self._provider.end(self.ref)

    def _checked(self, job: Job) -> tuple[str, float]:
        if self._closed:
            raise ProviderUnavailable(f"The sandbox {self.ref!r} was closed.")
        self._provider.check_environment(job.environment)
        if job.files and FILES not in self._provider.capabilities:
            raise self._provider.lacks(FILES)
        self._provider.check_timeout(job)
        return self._provider.language(job.language), job.timeout

    def _write_files(self, job: Job) -> None:
        for file in job.files:
            self._service.ask(self._machine.write, file.path, file.content)

    def _result(
        self, output: Output, program: Program, exit_code: int | None, began: float
    ) -> ExecutionResult:
        seconds = time.monotonic() - began
        return result_of(output, program, exit_code, seconds, dict(self.metadata))

    def _end_quietly(self) -> None:
        # Whoever closes the sandbox is told, and the service ends it in any case.
        with suppress(SandboxError):
            self._provider.end(self.ref)


@dataclass
class _Running:
    """A cell under way, as an interrupt finds it. `context` is our name, `context_id` theirs.

    `was_lost` says that what its context held was gone before it, `given_up` that nobody is told
    what comes of it.
    """

    context: str
    context_id: str
    language: str
    run: str = ""
    was_lost: bool = False
    cut: CancelToken = field(default_factory=CancelToken)
    interrupted: bool = False
    given_up: bool = False
    kept: bool = True
    settled: threading.Event = field(default_factory=threading.Event)


class KeptRemoteSandbox(RemoteSandbox, KeptSandbox):
    """A sandbox that stays. Its `ref` is the service's and the language of its first context.

    An interrupt reaches the runs that this object has begun, and no other's.
    """

    def __init__(self, provider: RemoteProvider, machine: SandboxDriver, language: str) -> None:
        super().__init__(provider, machine)
        self.ref = f"{machine.ref}/{language}"
        self._service = provider.service.of_kept()
        self.template = provider.language(language)
        self._running: dict[str, _Running] = {}
        self._turns: defaultdict[str, threading.Lock] = defaultdict(threading.Lock)
        self._given_up = CancelledRuns()
        self._beginning = threading.Lock()
        self.contexts: RemoteContexts = RemoteContexts(provider, machine, self.template)
        self.files = machine.files(self._service) or cast("Files", _Lacking(provider, WORKSPACE))
        self.processes = machine.processes(self._service) or cast(
            "Processes", _Lacking(provider, PROCESSES)
        )

    def run(self, job: Job, emit: Emit | None = None) -> ExecutionResult:
        """A cell in a context. Artifacts are not collected: `files` has them."""
        context = job.context or DEFAULT_CONTEXT
        with self._turns[context]:
            with before_the_code():
                _, seconds = self._checked(job)
                context_id, language, was_lost = self.contexts.begin(context)
                programs = [Program(job.code.removeprefix("\ufeff"))]
                if job.arguments is not None and calls_main(job.code, job.arguments):
                    call = build_call(
                        language,
                        job.arguments,
                        top_level_await=self._provider.awaits_at_top,
                        result_bytes=job.limits.result_bytes,
                    )
                    programs.append(call)
                self._write_files(job)
                running = _Running(context, context_id, language, job.run, was_lost)
                with self._beginning:
                    self._given_up.refuse(job.run)
                    self._running[context] = running
            try:
                return self._run(job, programs, seconds, running, emit)
            finally:
                del self._running[context]

    def _run(
        self,
        job: Job,
        programs: list[Program],
        seconds: float,
        running: _Running,
        emit: Emit | None,
    ) -> ExecutionResult:
        began = time.monotonic()
        exit_code: int | None = 0
        output, program = Output("", job.limits, emit), programs[0]
        for program in programs:
            output.mark = program.mark
            left = max(0.1, began + seconds - time.monotonic())
            cell = Cell(
                program.text,
                running.language,
                output,
                left,
                running.context_id,
                job.environment,
                running.cut,
            )
            try:
                exit_code = self._service.ask(self._machine.run, cell, running=True, seconds=left)
            except DeadlinePassed:
                exit_code = None
                self._stop(running)
            except KeptSandboxLost:
                raise
            except SandboxError:
                if not running.interrupted:
                    raise
            if running.interrupted:
                running.settled.wait(_SETTLED_SECONDS)
                exit_code = 130 if exit_code is not None else None
            if exit_code != 0:
                break
        ended_early = Program("") if running.interrupted else program
        result = self._result(output, ended_early, exit_code, began)
        kept = running.kept and not running.was_lost
        result.metadata["context_kept"] = kept
        if not kept:
            with suppress(SandboxError):
                # Where nobody hears of it now, the next run is to tell.
                self.contexts.note_lost(running.context, lost=running.given_up)
        return result

    def interrupt(self, context_id: str = DEFAULT_CONTEXT, run: str = "") -> bool:
        with self._beginning:
            running = self._running.get(context_id)
            if run and (running is None or running.run != run):
                self._given_up.note(run)
                return False
            if running is None or running.interrupted:
                return False
            running.interrupted = True
            running.given_up = bool(run)
        try:
            self._stop(running)
        finally:
            running.settled.set()
        return True

    def reset(self) -> None:
        for context in self.contexts.list():
            if context.id == DEFAULT_CONTEXT:
                self.contexts.restart(DEFAULT_CONTEXT)
            else:
                self.contexts.destroy(context.id)
        if not isinstance(self.processes, _Lacking):
            for process in self.processes.list():
                if process.exit_code is None:
                    self.processes.signal(process.pid, "SIGKILL")

    def renew(self, seconds: float) -> None:
        self._service.ask(self._machine.renew, seconds)

    def state(self) -> SandboxState:
        lacking = isinstance(self.processes, _Lacking)
        return SandboxState(
            self.contexts.list(), () if lacking else self.processes.list(), details=self.metadata
        )

    def close(self) -> bool:
        self._closed = True
        return self._provider.end(self._machine.ref)

    def _stop(self, running: _Running) -> None:
        running.cut.cut()
        running.kept = False
        if self._service.ask(self._machine.settle, running.context_id, running.language):
            running.kept = True
        else:
            self.contexts.lose(running.context, told=not running.given_up)


class _Lacking:
    """Stands for what a service has no interface for: whatever is asked of it says so."""

    def __init__(self, provider: RemoteProvider, what: str) -> None:
        self._provider = provider
        self._what = what

    def __getattr__(self, name: str) -> Any:
        raise self._provider.lacks(self._what)


_LONGEST = 4096


def workspace_path(path: str) -> str:
    """The path without needless parts, "" for the workspace itself. Raises InvalidConfiguration for
    what is none, and for what lies outside of the workspace."""
    below = below_workspace(path)
    parts = (below or "").split("/")
    if below is None or ".." in path.split("/") or "\0" in path or len(path) > _LONGEST:
        raise InvalidConfiguration(
            "path: Must lead below the workspace with this provider, without '..' and NUL.",
            field="path",
        )
    return "/".join(part for part in parts if part not in ("", "."))
