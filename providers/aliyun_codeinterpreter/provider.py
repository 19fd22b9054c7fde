"""Runs code in Alibaba Cloud's Code Interpreter sandboxes, through the official agentrun-sdk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from providers.addresses import given_addresses
from providers.aliyun_codeinterpreter.schema import (
    DEFAULT_REGION,
    FIELDS,
    MAX_SECONDS,
    REGIONS,
    REQUIRED,
    chosen,
    from_environment,
)
from providers.base import (
    ARGUMENTS,
    CONTEXTS,
    FILES,
    WORKSPACE,
    Entrypoint,
    ExecutionResult,
    Health,
    InputFile,
    Limits,
    SandboxInstance,
    SandboxProvider,
)
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    NotInitialized,
    ProviderUnavailable,
    SandboxError,
)
from providers.isolation import MICROVM
from providers.remote.deadline import DeadlinePassed, call_within
from providers.remote.output import Output
from providers.remote.owner import is_orphan, process_tag
from providers.remote.programs import Program, build_program
from providers.remote.receiver import Receiver, check_trust
from providers.remote.reclaim import end_later
from providers.remote.result import result_of
from providers.remote.secret import Secret

if TYPE_CHECKING:
    from providers.aliyun_codeinterpreter.client import Account
    from providers.aliyun_codeinterpreter.runs import Ended

LANGUAGES = ("python", "javascript")
RUNTIME = "microvm"

# Beyond the longest run; the service ends a sandbox in which nothing happens for so long.
SPARE_SECONDS = 60
_PREFIX = "cofferdam-"


class AliyunCodeInterpreterProvider(SandboxProvider):
    id = "aliyun_codeinterpreter"
    name = "Aliyun Code Interpreter"
    description = "Serverless microVMs of Alibaba Cloud, at most 30 s a run."
    icon = "cloud"
    tags = ("saas", "microVM", "China")
    isolation = MICROVM
    capabilities = frozenset({ARGUMENTS, FILES, CONTEXTS, WORKSPACE})
    config_fields = FIELDS

    def __init__(self) -> None:
        self._account: Account | None = None
        self._template = ""
        self._timeout = MAX_SECONDS
        self._ours: set[str] = set()
        self._lock = threading.Lock()

    def validate_config(self, config: Mapping[str, Any]) -> tuple[bool, str | None]:
        for name in REQUIRED:
            if not chosen(config, name):
                return False, f"{name}: This field is required."
        if (region := chosen(config, "region")) and region not in REGIONS:
            return False, f"region: Must be one of: {', '.join(REGIONS)}."
        if not chosen(config, "account_id").isdecimal():
            return False, "account_id: Must be the primary account's id, which has digits only."
        check_trust(config, given_addresses(self.config_fields, config).values())
        return True, None

    def initialize(self, config: Mapping[str, Any]) -> bool:
        try:
            from providers.aliyun_codeinterpreter.client import Account
        except ImportError as error:
            raise ProviderUnavailable(
                f"The Aliyun SDK is not installed ({error.name}). Install it: "
                "pip install agentrun-sdk==0.0.54"
            ) from None
        self._account = Account(
            Secret(chosen(config, "access_key_id")),
            Secret(chosen(config, "access_key_secret")),
            chosen(config, "account_id"),
            chosen(config, "region") or DEFAULT_REGION,
            chosen(config, "data_endpoint"),
            chosen(config, "control_endpoint"),
            Receiver.of(config, map(from_environment, ("data_endpoint", "control_endpoint"))),
        )
        self._template = config["template_name"] or ""
        self._timeout = config["timeout"]
        return True

    @property
    def max_timeout(self) -> float | None:
        return float(self._timeout)

    def create_instance(self, template: str = "python", *, owner: str = "") -> SandboxInstance:
        account = self._opened()
        _language(template)
        # A name of our own, so that what we do not hear about can still be ended.
        name = f"{_PREFIX}{process_tag()}-{uuid4().hex[:8]}"
        try:
            instance_id = account.create(self._template, name, self._timeout + SPARE_SECONDS)
        except ConnectionFailed:
            # Whether it was created nobody has told us, and nobody else will end it: not even
            # when we have been closed meanwhile.
            end_later(partial(account.delete, name), name)
            raise
        with self._lock:
            self._ours.add(instance_id)
        return SandboxInstance(instance_id, self.id, "running", self._metadata())

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
        from providers.aliyun_codeinterpreter.runs import run_cell

        account, language = self._opened(), _language(language)
        seconds = self._seconds(timeout)
        program = build_program(code, language, entrypoint, arguments, top_level_await=False)
        for file in files:
            account.write(instance_id, file.path, file.content)
        output = Output(program.mark, limits or Limits())

        def run() -> Ended:
            return run_cell(account, instance_id, program, output, seconds, language=language)

        return self._timed(instance_id, run, output, program, seconds)

    def _timed(
        self,
        instance_id: str,
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
            threading.Thread(target=self._end, args=(instance_id,), daemon=True).start()
            return result_of(output, program, None, time.monotonic() - began, self._metadata())
        result = result_of(
            output, program, ended.exit_code, time.monotonic() - began, self._metadata()
        )
        result.outputs = ended.outputs
        return result

    def create_context(self, instance_id: str, language: str = "python") -> str:
        account, language = self._opened(), _language(language)
        with account.translated():
            created = account.data(instance_id).create_context(language=language)
            return str(created["id"])

    def execute_in_context(
        self,
        instance_id: str,
        context_id: str,
        code: str,
        timeout: float = 10,
        *,
        limits: Limits | None = None,
    ) -> ExecutionResult:
        from providers.aliyun_codeinterpreter.runs import run_cell

        account, seconds = self._opened(), self._seconds(timeout)
        program, output = Program(code), Output("", limits or Limits())

        def run() -> Ended:
            return run_cell(account, instance_id, program, output, seconds, context=context_id)

        return self._timed(instance_id, run, output, program, seconds)

    def destroy_context(self, instance_id: str, context_id: str) -> bool:
        account = self._opened()
        with account.translated():
            try:
                account.data(instance_id).delete_context(context_id)
            except Exception as error:
                if getattr(error, "status_code", None) == 404:
                    return False
                raise
        return True

    def write_file(self, instance_id: str, file: InputFile) -> None:
        self._opened().write(instance_id, file.path, file.content)

    def read_file(self, instance_id: str, path: str, limit: int) -> bytes | None:
        content = self._opened().read(instance_id, path)
        if content is not None and len(content) > limit:
            raise InvalidConfiguration(f"{path}: More than {limit} bytes.", field="path")
        return content

    def destroy_instance(self, instance_id: str) -> bool:
        account = self._opened()
        try:
            deleted = account.delete(instance_id)
        except SandboxError:
            end_later(partial(self._end_at_last, instance_id), instance_id)
            raise
        with self._lock:
            self._ours.discard(instance_id)
        return deleted

    def health_check(self) -> Health:
        account = self._account
        if account is None:
            return Health(False, "not initialized")
        details = {"region": account.region, "template": self._template}
        try:
            account.check()
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
        for instance_id in account.listed():
            tag, _, _ = instance_id.removeprefix(_PREFIX).rpartition("-")
            if instance_id.startswith(_PREFIX) and is_orphan(tag):
                ended += account.delete(instance_id)
        return ended

    def close(self) -> None:
        with self._lock:
            left, self._ours = list(self._ours), set()
        for instance_id in left:
            self._end(instance_id)
        self._account = None

    def _opened(self) -> Account:
        if self._account is None:
            raise NotInitialized("The Aliyun provider is not initialized, or closed.")
        return self._account

    def _metadata(self) -> dict[str, Any]:
        return {"runtime": RUNTIME, "region": self._account.region if self._account else ""}

    def _seconds(self, timeout: float) -> float:
        if timeout > self._timeout:
            raise InvalidConfiguration(
                f"timeout: The Aliyun provider runs code for at most {self._timeout} s, and the "
                f"service for at most {MAX_SECONDS} s. Ask for less.",
                field="timeout",
            )
        return timeout

    def _end(self, instance_id: str) -> None:
        with suppress(SandboxError):
            if self._account is not None:
                self._account.delete(instance_id)

    def _end_at_last(self, instance_id: str) -> bool:
        """Closing tries, too. Should both fail, idleness ends it."""
        account = self._account
        if account is None:
            return True
        account.delete(instance_id)
        with self._lock:
            self._ours.discard(instance_id)
        return True


def _language(language: str) -> str:
    language = "javascript" if language == "nodejs" else language
    if language not in LANGUAGES:
        raise InvalidConfiguration(
            f"language: Must be one of: {', '.join(LANGUAGES)}.", field="language"
        )
    return language
