"""The interpreters of a kept sandbox by their names, and what the host may do with them."""

import os

from . import python_runner
from .context import Context
from .kept import Refused
from .paths import NAME_BYTES, PATH_BYTES
from .process_tree import Child
from .protocol import DEFAULT_CONTEXT, MOST_CONTEXTS

TYPE_CHECKING = False  # as in typing, which is too dear to import here
if TYPE_CHECKING:
    from typing import Callable

    from .kept import Handler, Header, Loop, Operation, Parts

NAME_LIMIT = 100
# How long a new interpreter may take to be ready, where the host does not say.
START_SECONDS = 10.0


class ContextRoom:
    """All contexts of a sandbox. The first is the child that was warm already."""

    def __init__(
        self, loop: "Loop", template: "dict[str, object]", header: "Header", child: Child
    ) -> None:
        self.loop = loop
        self.template = template
        self.environment: "dict[str, str]" = header.get("environment") or {}  # type: ignore[assignment]
        self.start_seconds: float = header.get("start_seconds") or START_SECONDS  # type: ignore[assignment]
        self.artifacts = os.path.abspath("artifacts")
        self.home = str(template.get("home", ""))
        self._commands: "dict[str, list[str]]" = header.get("commands") or {}  # type: ignore[assignment]
        self._commands.setdefault(str(template["language"]), template["command"])  # type: ignore[arg-type]
        self._commands.setdefault("python", [])
        if template["language"] != "python":
            python_runner.prepare()
        self._contexts: "dict[str, Context]" = {}
        self._made = 0
        if template["uid"] is not None:
            # Its pipes belong to its user, who is to have other programs.
            child.kill_all()
            child.close()
        given = child if template["uid"] is None else None
        self._add(DEFAULT_CONTEXT, str(template["language"]), "", given)

    def operations(self) -> "dict[str, Handler]":
        return {
            "run": self._run,
            "interrupt": self._interrupt,
            "context.create": self._create,
            "context.destroy": self._destroy,
            "context.restart": self._restart,
            "context.list": self._list,
        }

    def busy(self) -> bool:
        return any(context.cell is not None for context in self._contexts.values())

    def running(self) -> "list[tuple[int, Callable[[], None]]]":
        return [
            (context.pid, context.use_too_much)
            for context in self._contexts.values()
            if context.is_alive
        ]

    def forget(self) -> None:
        for context in self._contexts.values():
            context.is_dropped = True
            context.close()
        self._contexts.clear()
        self._add(DEFAULT_CONTEXT, str(self.template["language"]), "")

    def template_of(self, language: str) -> "dict[str, object]":
        """The template for a child of this language."""
        return {**self.template, "language": language, "command": self._commands[language]}

    def when_ready(self, operation: "Operation") -> None:
        """Answer `operation` with all contexts once the first is ready."""
        self._contexts[DEFAULT_CONTEXT].waiting.append(operation)

    def drop(self, context: Context) -> None:
        """It has never been there."""
        self._contexts.pop(context.name, None)

    def _add(self, name: str, language: str, cwd: str, child: "Child | None" = None) -> Context:
        context = Context(self, name, language, cwd, child)
        self._contexts[name] = context
        return context

    def _named(self, header: "Header", field: str = "context") -> Context:
        context = self._contexts.get(str(header.get(field) or DEFAULT_CONTEXT))
        if context is None:
            raise Refused("there is no such context", field, "missing")
        return context

    def _run(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        self._named(header).run(operation, header, parts)

    def _interrupt(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        cell = self._named(header, "target").cell
        if cell is not None:
            cell.interrupt()
        operation.done({"stopped": cell is not None})

    def _create(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        language, name = header.get("language"), header.get("context")
        cwd = header.get("cwd") or ""
        if not isinstance(language, str) or language not in self._commands:
            raise Refused("this sandbox does not have this language", "language")
        if not isinstance(cwd, str) or "\0" in cwd or _is_too_long(cwd):
            raise Refused("this is not a folder", "cwd")
        if not name:
            self._made += 1
            name = f"{language}-{self._made}"
        if not isinstance(name, str) or len(name) > NAME_LIMIT or not name.isprintable():
            raise Refused("this is not a valid name of a context", "context")
        if name in self._contexts:
            raise Refused("a context with this name exists already", "context")
        if len(self._contexts) >= MOST_CONTEXTS:
            raise Refused(f"a sandbox can have at most {MOST_CONTEXTS} contexts", code="exhausted")
        self._add(name, language, cwd).waiting.append(operation)

    def _destroy(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        if header.get("context") == DEFAULT_CONTEXT:
            raise Refused("the first context of a sandbox cannot be ended", "context")
        context = self._contexts.pop(str(header.get("context")), None)
        if context is None:
            operation.done({"found": False})
        else:
            context.end(lambda: operation.done({"found": True}))

    def _restart(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        self._named(header).restart(operation)

    def _list(self, operation: "Operation", header: "Header", parts: "Parts") -> None:
        operation.done({"contexts": [each.described for each in self._contexts.values()]})


def _is_too_long(folder: str) -> bool:
    """Whether no file system has such a folder."""
    names = [name.encode(errors="surrogatepass") for name in folder.split("/")]
    return max(map(len, names)) > NAME_BYTES or sum(len(n) + 1 for n in names) > PATH_BYTES
