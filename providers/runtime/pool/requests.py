"""What every user of a pool does alike: make its templates, and check what is asked of them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from providers.errors import InvalidConfiguration
from providers.languages import language_of, normalize_language
from providers.runtime.guest import wire
from providers.runtime.guest.names import problem
from providers.runtime.guest.wire import EXCEPTION_BYTES
from providers.runtime.pool.launcher import Launcher
from providers.runtime.pool.template import Template
from providers.values import Job, RunLimits, SandboxLimits, SandboxSpec


def arguments_problem(arguments: Mapping[str, Any] | None) -> str:
    """Why these arguments cannot be handed to a program, "" when they can."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return f"Not JSON: {error}"
    return ""


def check_spec(spec: SandboxSpec, has: SandboxLimits) -> None:
    """Whether a single-use sandbox bounded by `has` is what is asked for.

    A warm sandbox has the size it was started with, so that one with more than the caller allows is
    refused, and one with less keeps the caller's bound too. Raises InvalidConfiguration.
    """
    if spec.kept:
        raise InvalidConfiguration("kept: This pool has only sandboxes for one run.", field="kept")
    if spec.environment:
        raise InvalidConfiguration(
            "environment: Only persistent sandboxes accept variables.", field="environment"
        )
    check_limits(spec.limits, has)


def check_limits(limits: SandboxLimits | None, has: SandboxLimits) -> None:
    """Whether a sandbox bounded by `has` keeps what is asked for. Raises InvalidConfiguration."""
    if limits is None:
        return
    for each in fields(SandboxLimits):
        asked, configured = getattr(limits, each.name), getattr(has, each.name)
        if asked < configured:
            raise InvalidConfiguration(
                f"{each.name}: Sandboxes have {configured} here, and the request has {asked}. "
                f"Request at least {configured}, or configure the provider with less.",
                field=each.name,
            )


def check_job(job: Job, template: Template) -> None:
    """Whether a sandbox made from `template` can run it. Raises InvalidConfiguration."""
    language = normalize_language(job.language)
    if language not in (template.language, template.name):
        raise InvalidConfiguration(
            f"The sandbox runs {template.language}, not {language}.", field="language"
        )
    known = language_of(template.language)
    if known and not known.has_main and job.entrypoint == "main":
        raise InvalidConfiguration(f"Code in {known.name} has no main().", field="entrypoint")
    if job.context:
        raise InvalidConfiguration("context: The sandbox is for one run.", field="context")
    check_files(job)


def check_files(job: Job) -> None:
    """Whether each goes where a job's files may. Raises InvalidConfiguration."""
    for file in job.files:
        _check_path(file.path)


def answer_bytes(limits: RunLimits) -> int:
    """The most that an answer within the limits can hold."""
    files = limits.artifacts_total_bytes + limits.rich_output_bytes
    return 2 * limits.output_bytes + limits.result_bytes + files + EXCEPTION_BYTES


def request_frame(
    job: Job,
    request_id: int,
    memory_bytes: int,
    *,
    again: bool,
    live: bool = False,
    network: bool = False,
) -> bytes:
    """The job as the guest reads it; `again` has it make ready for another, `live` tell what the
    program puts out while it runs, and `network` send its connections as frames.

    Raises InvalidConfiguration naming the field that cannot be sent.
    """
    header: dict[str, object] = {
        "id": request_id,
        "again": again,
        "stream": live,
        **({"network": True} if network else {}),
        "entrypoint": job.entrypoint,
        "timeout": job.timeout,
        "environment": dict(job.environment),
        "limits": {"memory_bytes": memory_bytes, **vars(job.limits)},
    }
    return pack_job(header, job)


def pack_job(header: Mapping[str, object], job: Job) -> bytes:
    """Return a job as a frame with this header. Raises InvalidConfiguration naming the field."""
    with _refusing("environment"):
        # The names of the files are in the header too.
        if len(wire.dumps(dict(job.environment)).encode()) > wire.HEADER_LIMIT // 2:
            raise ValueError("too large")
    parts = parts_of(job)
    with _refusing("files"):
        frame = wire.pack(dict(header), parts)
        names = int.from_bytes(frame[:4], "big")
        if names > wire.HEADER_LIMIT or len(frame) - names > wire.REQUEST_LIMIT:
            raise ValueError("too many or too large")
    return frame


def parts_of(job: Job) -> list[tuple[str, bytes]]:
    """What a job's frame has besides its header. Raises InvalidConfiguration naming the field."""
    with _refusing("code"):
        # Compilers take an editor's byte order mark from a file, but not from a text.
        parts = [("code", job.code.removeprefix("\ufeff").encode())]
    if job.arguments is not None:
        with _refusing("arguments"):
            parts.append(("arguments", wire.dumps(dict(job.arguments)).encode()))
    parts += [(f"file:{file.path}", file.content) for file in job.files]
    return parts


@contextlib.contextmanager
def _refusing(field: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidConfiguration(f"{field}: cannot be sent: {error}", field=field) from error


def _check_path(path: str) -> None:
    """Only below the workspace, which matters most where nothing else confines the program."""
    if reason := problem(path):
        raise InvalidConfiguration(f"files: {path!r}: {reason}.", field="files")
    if path == "artifacts":
        raise InvalidConfiguration(f"files: {path!r} is taken.", field="files")


def make_template(
    name: str,
    language: str,
    launcher: Launcher,
    limits: SandboxLimits,
    preload: Sequence[str] = (),
    *,
    advise: bool = False,
) -> Template:
    """The template `name` of a language, in sandboxes of this launcher."""
    command = command_of(name, language, launcher, limits)
    modules = tuple(preload) if language == "python" else ()
    version = launcher.version(language, name)
    return Template(name, language, command, limits, modules, advise, version)


def command_of(
    name: str, language: str, launcher: Launcher, limits: SandboxLimits
) -> tuple[str, ...]:
    """The argument list of a language's interpreter in sandboxes of the template `name`."""
    interpreter = launcher.interpreter(language, name) or ""
    return interpreter_command(language, interpreter, launcher.node_runner(), limits)


def interpreter_command(
    language: str, interpreter: str, node_runner: Sequence[str], limits: SandboxLimits
) -> tuple[str, ...]:
    """The argument list of a language's interpreter, which has this path. `node_runner` has the
    arguments by which Node.js finds the guest's runner."""
    if language == "nodejs":
        # More than there is, so that whoever bounds the memory sees it used up: at a limit of its
        # own Node ends with an exit code like any other.
        heap = f"--max-old-space-size={2 * limits.memory_bytes // (1024 * 1024)}"
        # What is broken off in the middle of a timer leaves those checks unsettled. Without the
        # modules of `vm`, cells import nothing in Node 18.
        options = (
            *("--expose-internals", "--experimental-vm-modules", "--no-warnings"),
            *("--no-force-async-hooks-checks", heap),
        )
        return (interpreter, *options, *node_runner)
    return (interpreter,)
