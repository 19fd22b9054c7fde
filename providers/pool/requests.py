"""What every user of a pool does alike: make its templates, and requests that fit them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from providers.base import Entrypoint, InputFile, Limits
from providers.errors import InvalidConfiguration
from providers.pool.launcher import Launcher
from providers.pool.sandbox import RunRequest
from providers.pool.template import Template, normalize_language

# The runners put the code into these files of the workspace.
RESERVED_NAMES = frozenset({"main.py", "main.js", "main.mjs", "main.sh"})

# The bounds that belong to a run. The others belong to a sandbox, which exists already.
_SANDBOX_LIMITS = ("memory_bytes", "workspace_bytes", "file_bytes", "processes", "open_files")
RUN_LIMITS = tuple(each.name for each in fields(Limits) if each.name not in _SANDBOX_LIMITS)


@dataclass(frozen=True)
class Job:
    """What a caller wants run. `timeout` is seconds; of `limits` those of a run are taken."""

    code: str
    language: str
    timeout: float
    arguments: Mapping[str, Any] | None = None
    entrypoint: Entrypoint = "auto"
    files: Sequence[InputFile] = ()
    limits: Limits = field(default_factory=Limits)


def arguments_problem(arguments: Mapping[str, Any] | None) -> str:
    """Why these arguments cannot be handed to a program, "" when they can."""
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return f"Not JSON: {error}"
    return ""


def run_request(job: Job, template: Template) -> RunRequest:
    """The request for a sandbox made from `template`. Raises InvalidConfiguration."""
    language = normalize_language(job.language)
    if language not in (template.language, template.name):
        raise InvalidConfiguration(
            f"The instance runs {template.language}, not {language}.", field="language"
        )
    if template.language == "bash" and job.entrypoint == "main":
        raise InvalidConfiguration("Shell code has no main().", field="entrypoint")
    for file in job.files:
        _check_path(file.path)
    asked = {name: getattr(job.limits, name) for name in RUN_LIMITS}
    return RunRequest(
        code=job.code,
        entrypoint=job.entrypoint,
        timeout=job.timeout,
        arguments=job.arguments,
        files=job.files,
        limits=replace(template.limits, **asked),
    )


def _check_path(path: str) -> None:
    """Only below the workspace, which matters most where nothing else confines the program."""
    first, *rest = path.split("/")
    if any(part in ("", ".", "..") for part in (first, *rest)) or "\0" in path:
        raise InvalidConfiguration(
            f"files: {path!r} is no path below the workspace.", field="files"
        )
    if first in RESERVED_NAMES or path == "artifacts":
        raise InvalidConfiguration(f"files: {path!r} is taken.", field="files")


def make_template(
    name: str,
    language: str,
    launcher: Launcher,
    limits: Limits,
    preload: Sequence[str] = (),
    *,
    advise: bool = False,
) -> Template:
    """The template `name` of a language, in sandboxes of this launcher."""
    interpreter = launcher.interpreter(language) or ""
    command: tuple[str, ...] = (interpreter,)
    if language == "nodejs":
        # More than there is, so that whoever bounds the memory sees it used up: at a limit of its
        # own Node ends with an exit code like any other.
        heap = f"--max-old-space-size={2 * limits.memory_bytes // (1024 * 1024)}"
        runner = f"{launcher.guest_path()}/node_runner.js"
        command = (interpreter, "--expose-internals", "--no-warnings", heap, runner)
    modules = tuple(preload) if language == "python" else ()
    return Template(name, language, command, limits, modules, advise)
