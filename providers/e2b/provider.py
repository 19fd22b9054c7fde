"""Runs code in E2B's cloud sandboxes, through the official e2b-code-interpreter SDK."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from providers.addresses import given_addresses
from providers.base import (
    ARGUMENTS,
    ARTIFACTS,
    CONTEXTS,
    FILES,
    STREAMING,
    WORKSPACE,
    Entrypoint,
    ExecutionResult,
    Health,
    InputFile,
    Limits,
    OnOutput,
    SandboxInstance,
    SandboxProvider,
    Stream,
)
from providers.e2b.schema import ADDRESS_VARIABLES, DOMAINS, FIELDS, KEY_VARIABLE
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
)
from providers.isolation import MICROVM
from providers.remote.collected import collect_artifacts
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.output import Output
from providers.remote.owner import is_orphan, process_tag
from providers.remote.programs import Program, build_program
from providers.remote.receiver import Receiver, check_trust
from providers.remote.reclaim import end_later
from providers.remote.result import result_of
from providers.remote.secret import Secret

if TYPE_CHECKING:
    from providers.e2b.client import Account, Sandbox
    from providers.e2b.runs import Ended

LANGUAGES = ("python", "javascript", "typescript", "bash", "r", "java")
_ALIASES = {"nodejs": "javascript", "shell": "bash"}
_OWNER, _ATTEMPT = "cofferdam", "cofferdam-attempt"
RUNTIME = "firecracker"

# Beyond the longest run: starting, files before it, artifacts after it.
SPARE_SECONDS = 60


class E2BProvider(SandboxProvider):
    id = "e2b"
    name = "E2B"
    description = "Firecracker microVMs in E2B's cloud, or in any service that speaks its protocol."
    icon = "cloud"
    tags = ("saas", "microVM", "global")
    isolation = MICROVM
    capabilities = frozenset({ARGUMENTS, ARTIFACTS, FILES, CONTEXTS, STREAMING, WORKSPACE})
    config_fields = FIELDS

    def __init__(self) -> None:
        self._account: Account | None = None
        self._template = ""
        self._timeout = 30
        self._region = ""
        self._internet = False
        self._sandboxes: dict[str, Sandbox] = {}
        self._prepared: set[str] = set()
        self._lock = threading.Lock()

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        if not (config["api_key"] or os.environ.get(KEY_VARIABLE)):
            return False, "api_key: This field is required."
        if config["region"] not in DOMAINS and not (config["domain"] or config["api_url"]):
            return False, (
                f"domain: E2B publishes no host for the region {config['region']!r}. Enter the "
                "domain E2B gave you for it, or choose the region us."
            )
        for name in ("api_url", "sandbox_url"):
            if config[name] and not config[name].startswith(("https://", "http://")):
                return False, f"{name}: Must begin with https:// or http://."
        check_trust(config, given_addresses(self.config_fields, config).values())
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        try:
            from providers.e2b.client import Account
        except ImportError as error:
            raise ProviderUnavailable(
                f"The E2B SDK is not installed ({error.name}). Install it: "
                "pip install e2b-code-interpreter"
            ) from None
        self._account = Account(
            Secret(config["api_key"] or os.environ[KEY_VARIABLE]),
            config["domain"] or DOMAINS.get(config["region"], ""),
            config["api_url"] or "",
            config["sandbox_url"] or "",
            Receiver.of(config, (os.environ.get(name, "") for name in ADDRESS_VARIABLES)),
        )
        self._region = config["region"]
        self._template = config["template"] or ""
        self._timeout = config["timeout"]
        self._internet = config["internet_access"]
        return True

    @property
    def max_timeout(self) -> float | None:
        return float(self._timeout)

    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        account = self._opened()
        _language(template)
        attempt = uuid4().hex
        metadata = {_OWNER: process_tag(), _ATTEMPT: attempt}
        try:
            sandbox = account.create(
                self._template,
                self._timeout + SPARE_SECONDS,
                metadata,
                internet=self._internet,
            )
        except ConnectionFailed:
            # Whether it was created nobody has told us.
            end_later(partial(_end_all, account, attempt), attempt)
            raise
        with self._lock:
            self._sandboxes[sandbox.sandbox_id] = sandbox
        return SandboxInstance(
            sandbox.sandbox_id, self.id, "running", {"runtime": RUNTIME, "region": self._region}
        )

    def execute_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> ExecutionResult:
        return self.stream_code(
            instance_id,
            code,
            language,
            timeout,
            arguments,
            on_output=_nobody_listens,
            entrypoint=entrypoint,
            files=files,
            limits=limits,
        )

    def stream_code(
        self,
        instance_id: str,
        code: str,
        language: str,
        timeout: float = 10,
        arguments: Mapping[str, Any] | None = None,
        *,
        on_output: OnOutput,
        entrypoint: Entrypoint = "auto",
        files: Sequence[InputFile] = (),
        limits: Limits | None = None,
    ) -> ExecutionResult:
        from providers.e2b.runs import run_cell, run_shell

        account = self._opened()
        language = _language(language)
        seconds = self._seconds(timeout)
        limits = limits or Limits()
        program = build_program(code, language, entrypoint, arguments, top_level_await=True)
        sandbox = self._sandbox(instance_id)
        self._prepare(account, sandbox)
        for file in files:
            _write(account, sandbox, file)
        output = Output(program.mark, limits, on_output)

        def run() -> Ended:
            if language == "bash":
                return run_shell(account, sandbox, code, output, seconds)
            return run_cell(account, sandbox, program, output, seconds, language=language)

        result = self._timed(sandbox, run, output, program, seconds)
        if not result.timed_out:
            result.artifacts = collect_artifacts(
                account.files_in(sandbox, "artifacts"),
                lambda name, longest: account.read(sandbox, f"artifacts/{name}", longest),
                limits,
            )
        return result

    def _timed(
        self,
        sandbox: Sandbox,
        run: Callable[[], Ended],
        output: Output,
        program: Program,
        seconds: float,
    ) -> ExecutionResult:
        """Run under our own deadline; what runs beyond it is ended with its sandbox."""
        began = time.monotonic()
        try:
            ended = call_within(seconds, run)
        except DeadlinePassed:
            threading.Thread(target=self._kill, args=(sandbox.sandbox_id,), daemon=True).start()
            return result_of(output, program, None, time.monotonic() - began, self._metadata())
        result = result_of(
            output, program, ended.exit_code, time.monotonic() - began, self._metadata()
        )
        result.outputs = ended.outputs
        return result

    def create_context(self, instance_id: str, language: str = "python") -> str:
        sandbox = self._sandbox(instance_id)
        with self._opened().translated():
            return str(sandbox.create_code_context(language=_language(language)).id)

    def execute_in_context(
        self,
        instance_id: str,
        context_id: str,
        code: str,
        timeout: float = 10,
        *,
        limits: Limits | None = None,
    ) -> ExecutionResult:
        from providers.e2b.runs import run_cell

        account, sandbox = self._opened(), self._sandbox(instance_id)
        seconds = self._seconds(timeout)
        program, output = Program(code), Output("", limits or Limits())

        def run() -> Ended:
            return run_cell(account, sandbox, program, output, seconds, context=context_id)

        return self._timed(sandbox, run, output, program, seconds)

    def destroy_context(self, instance_id: str, context_id: str) -> bool:
        account, sandbox = self._opened(), self._sandbox(instance_id)
        with account.translated():
            known = any(context.id == context_id for context in sandbox.list_code_contexts())
            if known:
                sandbox.remove_code_context(context_id)
        return known

    def write_file(self, instance_id: str, file: InputFile) -> None:
        _write(self._opened(), self._sandbox(instance_id), file)

    def read_file(self, instance_id: str, path: str, limit: int) -> bytes | None:
        from e2b import NotFoundException

        account, sandbox = self._opened(), self._sandbox(instance_id)
        with account.translated():
            try:
                found = sandbox.files.get_info(path)
            except NotFoundException:
                return None
        content = None if found.size > limit else account.read(sandbox, path, limit)
        if content is None:
            raise InvalidConfiguration(f"{path}: More than {limit} bytes.", field="path")
        return content

    def destroy_instance(self, instance_id: str) -> bool:
        account = self._opened()
        try:
            killed = account.kill(instance_id)
        except SandboxError:
            end_later(partial(self._kill_at_last, instance_id), instance_id)
            raise
        with self._lock:
            self._sandboxes.pop(instance_id, None)
            self._prepared.discard(instance_id)
        return killed

    def health_check(self) -> Health:
        details = {"region": self._region, "template": self._template or "code-interpreter-v1"}
        try:
            self._opened().check()
        except SandboxError as error:
            said = {**details, "code": error.code}
            return Health(False, error.message, said, answered=error.answered)
        return Health(True, details=details)

    def get_supported_languages(self) -> list[str]:
        return [*LANGUAGES, "nodejs"]

    def sweep(self) -> int:
        """End what processes of this machine that live no more have left behind."""
        account = self._opened()
        ended = 0
        for instance_id, metadata in account.ours({}):
            if is_orphan(metadata.get(_OWNER, "")):
                ended += account.kill(instance_id)
        return ended

    def close(self) -> None:
        with self._lock:
            left, self._sandboxes = list(self._sandboxes), {}
        for instance_id in left:
            self._kill(instance_id)
        self._account = None

    def _opened(self) -> Account:
        if self._account is None:
            raise NotInitialized("The E2B provider is not initialized, or closed.")
        return self._account

    def _sandbox(self, instance_id: str) -> Sandbox:
        account = self._opened()
        with self._lock:
            sandbox = self._sandboxes.get(instance_id)
        if sandbox is None:
            sandbox = account.connect(instance_id)
            with self._lock:
                self._sandboxes[instance_id] = sandbox
        return sandbox

    def _prepare(self, account: Account, sandbox: Sandbox) -> None:
        """Make the folder that code may leave artifacts in, as it is there in a local sandbox."""
        if sandbox.sandbox_id not in self._prepared:
            with account.translated():
                sandbox.files.make_dir("artifacts")
            with self._lock:
                self._prepared.add(sandbox.sandbox_id)

    def _seconds(self, timeout: float) -> float:
        if timeout > self._timeout:
            raise InvalidConfiguration(
                f"timeout: The E2B provider runs code for at most {self._timeout} s. Ask for "
                "less, or raise the timeout of its configuration.",
                field="timeout",
            )
        return timeout

    def _metadata(self) -> dict[str, Any]:
        return {"runtime": RUNTIME, "region": self._region}

    def _kill(self, instance_id: str) -> None:
        with suppress(SandboxError):
            if self._account is not None:
                self._account.kill(instance_id)

    def _kill_at_last(self, instance_id: str) -> bool:
        """Closing tries, too. Should both fail, its lifetime ends it."""
        account = self._account
        if account is None:
            return True
        account.kill(instance_id)
        with self._lock:
            self._sandboxes.pop(instance_id, None)
        return True


def _end_all(account: Account, attempt: str) -> bool:
    """End what a creation that failed for us has made after all. Whether there was any.

    Also when the provider has been closed meanwhile: nobody else knows of it.
    """
    found = account.ours({_ATTEMPT: attempt})
    for instance_id, _ in found:
        account.kill(instance_id)
    return bool(found)


def _nobody_listens(stream: Stream, text: str) -> None:
    pass


def _language(language: str) -> str:
    language = _ALIASES.get(language, language)
    if language not in LANGUAGES:
        raise InvalidConfiguration(
            f"language: Must be one of: {', '.join(LANGUAGES)}.", field="language"
        )
    return language


def _write(account: Account, sandbox: Sandbox, file: InputFile) -> None:
    with account.translated():
        sandbox.files.write(file.path, file.content)
