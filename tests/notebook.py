"""What a notebook kernel does with a cell, done in single-use local sandboxes.

A cell runs in a sandbox of its own; what it leaves in `artifacts/` and the values of its variables,
as far as they can be pickled, are kept for the next one. It is as isolated as any execution.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from typing import Any

from providers.base import ExecutionResult, InputFile, Limits
from providers.local.provider import LocalProvider

LIMITS = Limits(output_bytes=100_000_000, result_bytes=8 * 1024 * 1024)

KERNEL = """
import ast, base64, pickle, sys, traceback, types

def main(cell, state):
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    names = module.__dict__
    for name, pickled in state.items():
        names[name] = pickle.loads(base64.b64decode(pickled))
    text = error = None
    try:
        tree = ast.parse(cell, "cell")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            text = None if value is None else repr(value)
    except BaseException as problem:
        trace = problem.__traceback__.tb_next or problem.__traceback__
        lines = traceback.format_exception(type(problem), problem, trace)
        error = {"name": type(problem).__name__, "value": str(problem), "traceback": "".join(lines)}
    kept = {}
    for name, value in names.items():
        if name.startswith("__") or isinstance(value, (type, types.ModuleType, types.FunctionType)):
            continue
        try:
            kept[name] = base64.b64encode(pickle.dumps(value)).decode()
        except Exception:
            continue
    return {"text": text, "error": error, "state": kept}
"""


@dataclass
class Context:
    """A kernel of one language, whose variables outlive a cell."""

    language: str
    state: dict[str, str] = field(default_factory=dict)


@dataclass
class Cell:
    """What came of one cell. `error` has name, value and traceback. None died with its kernel."""

    stdout: str
    stderr: str
    text: str | None = None
    error: dict[str, str] | None = None


class Notebook:
    """One remote sandbox: files, contexts, and the local sandboxes its cells run in right now."""

    def __init__(self, provider: LocalProvider) -> None:
        self._provider = provider
        self.files: dict[str, bytes] = {}
        self.contexts: dict[str, Context] = {}
        self._running: set[str] = set()
        self._lock = threading.Lock()
        self.dead = False

    def run(self, code: str, language: str, timeout: float, context: Context | None = None) -> Cell:
        """Run a cell. Raises KeyError for a language there is no kernel for."""
        language = {"python": "python", "javascript": "nodejs", "typescript": "nodejs"}[language]
        if language != "python":
            # Such kernels wait for a top-level await; Node does so in modules alone.
            if ("await " in code and "import(" in code) or "\n;await " in code:
                code += "\nexport {}"
            result = self._execute(code, language, timeout)
            if result.exit_code == 0:
                return Cell(result.stdout, result.stderr)
            return Cell(result.stdout, "", error=_error("Error", result.stderr))
        state = context.state if context else {}
        result = self._execute(
            KERNEL, "python", timeout, {"cell": code, "state": state}, entrypoint="main"
        )
        if not result.has_result:
            return Cell(result.stdout, result.stderr, error=_error("KernelDied", ""))
        said = result.result
        if context:
            context.state = said["state"]
        return Cell(result.stdout, result.stderr, said["text"], said["error"])

    def run_shell(self, command: str, timeout: float) -> ExecutionResult:
        """Run a command; `bash FILE` runs the file of the workspace."""
        program, _, name = command.partition(" ")
        code = self.files[name].decode() if program == "bash" and name in self.files else command
        return self._execute(code, "bash", timeout)

    def kill(self) -> None:
        self.dead = True
        with self._lock:
            running = list(self._running)
        for instance_id in running:
            self._provider.destroy_instance(instance_id)

    def _execute(
        self,
        code: str,
        language: str,
        timeout: float,
        arguments: dict[str, Any] | None = None,
        **options: Any,
    ) -> ExecutionResult:
        given = [
            InputFile(path, content)
            for path, content in self.files.items()
            if path not in ("main.py", "main.js", "main.sh")
        ]
        instance = self._provider.create_instance(language)
        with self._lock:
            self._running.add(instance.instance_id)
        try:
            result = self._provider.execute_code(
                instance.instance_id,
                code,
                language,
                timeout,
                json.loads(json.dumps(arguments)) if arguments else None,
                files=given,
                limits=LIMITS,
                **options,
            )
        finally:
            with self._lock:
                self._running.discard(instance.instance_id)
            self._provider.destroy_instance(instance.instance_id)
        for artifact in result.artifacts:
            self.files[f"artifacts/{artifact.name}"] = artifact.content
        return result


def _error(name: str, traceback: str) -> dict[str, str]:
    lines = traceback.strip().splitlines()
    return {"name": name, "value": lines[-1] if lines else name, "traceback": traceback}


def standalone_provider() -> LocalProvider:
    """A local provider for a process that is no Django project."""
    import tempfile
    from pathlib import Path

    from django.conf import settings

    settings.configure(
        DATA_DIR=Path(tempfile.mkdtemp()),
        SANDBOX_LOCAL_UNISOLATED=False,
        MINIMUM_ISOLATION="namespaces",
    )
    provider = LocalProvider()
    provider.initialize(LocalProvider.check_config({"launcher": "bubblewrap"}))
    return provider
