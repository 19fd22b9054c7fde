"""What is typed into the playground, kept as it was typed, and the request that it makes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest

from executions.kernel.declarations import refuse
from executions.kernel.text import from_json
from executions.runs.models import Execution
from executions.runs.requests import CELL, MAX_FILES_BYTES, RUN, ExecutionRequest
from executions.sessions.requests import OPEN, SessionRequest
from executions.tenants.service import INTERNAL
from providers.values import InputFile

FIELDS = ("code", "tenant", "provider", "language", "context", "arguments", "entrypoint", "timeout")


@dataclass
class Typed:
    """The fields as texts, `session` the one to run in, and the files that came along."""

    code: str = ""
    tenant: str = INTERNAL
    provider: str = ""
    language: str = "python"
    context: str = ""
    arguments: str = ""
    entrypoint: str = "auto"
    timeout: str = ""
    session: UUID | None = None
    files: Sequence[UploadedFile[Any]] = ()

    @classmethod
    def sent(cls, request: HttpRequest) -> Typed:
        """What a form brought."""
        texts = {name: request.POST.get(name, "") for name in FIELDS}
        for name in ("code", "arguments"):
            # Every form sends its lines with CRLF, whatever they ended with when they were typed.
            texts[name] = texts[name].replace("\r\n", "\n")
        return cls(
            **texts,
            session=id_in(request.POST.get("session", "")),
            files=request.FILES.getlist("files"),
        )

    @classmethod
    def again(cls, execution: Execution) -> Typed:
        """What a run was asked with, as far as its record has it."""
        return cls(
            code=execution.code,
            tenant=execution.tenant_slug,
            language=execution.language,
            arguments=execution.arguments,
            entrypoint=execution.entrypoint,
        )

    def request(self, **ours: Any) -> ExecutionRequest:
        """`ours` are fields that no form has. Raises InvalidConfiguration, which names the field
        at fault."""
        body: dict[str, Any] = {"code": self.code}
        if self.arguments.strip():
            body["arguments"] = _json(self.arguments)
        if self.timeout.strip():
            body["timeout"] = _number(self.timeout)
        files = self._files()
        if self.session is not None:
            body["context"] = self.context
            return CELL.read(body, session=self.session, files=files, **ours)
        body |= {"language": self.language, "entrypoint": self.entrypoint or "auto"}
        return RUN.read(body, provider=self.provider, files=files, **ours)

    def session_request(self, **ours: Any) -> SessionRequest:
        """A session to type cells for. Raises as `request`."""
        return OPEN.read({"language": self.language, "provider": self.provider}, **ours)

    def _files(self) -> list[InputFile]:
        if sum(file.size or 0 for file in self.files) > MAX_FILES_BYTES:
            # Before any of it is read into memory.
            refuse("files", f"Must be at most {MAX_FILES_BYTES} bytes together.")
        return [InputFile(path=file.name or "", content=file.read()) for file in self.files]


def id_in(text: str) -> UUID | None:
    """The id that a text is, None where it is none."""
    try:
        return UUID(text)
    except ValueError:
        return None


def _json(text: str) -> Any:
    try:
        return from_json(text)
    except ValueError as error:
        refuse("arguments", f"Must be JSON: {error}.")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        refuse("timeout", "Must be a number.")
