"""The contexts of a sandbox that a service keeps, under names that stay when their ids change.

Which id a name has is a note in the sandbox, because any process may go on with it. Code there may
change the note: what it says is a claim, and reaches nothing but this sandbox.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from providers.errors import ConnectionFailed, InvalidConfiguration, SandboxError
from providers.remote.service import SandboxDriver
from providers.sandbox import DEFAULT_CONTEXT, Context, Contexts

if TYPE_CHECKING:
    from providers.remote.base import RemoteProvider

MOST_CONTEXTS = 16
_LONGEST_NAME = 100
_LONGEST_TEXT = 1000
# An id becomes part of an address: one with a slash or dots would lead to another sandbox.
_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")


@dataclass(frozen=True)
class _Known:
    """`id` is the service's, empty where the interpreter is to be made when it is next needed.

    `lost` says that what runs had left is gone and that nobody has been told.
    """

    id: str
    language: str
    cwd: str = ""
    lost: bool = False


class RemoteContexts(Contexts):
    def __init__(self, provider: RemoteProvider, machine: SandboxDriver, template: str) -> None:
        self._provider = provider
        self._service = provider.service.of_kept()
        self._machine = machine
        self._template = template
        self._lock = threading.RLock()

    def create(self, language: str, cwd: str = "", context_id: str = "") -> Context:
        language = self._provider.language(language)
        if len(context_id) > _LONGEST_NAME:
            raise InvalidConfiguration(
                f"context_id: At most {_LONGEST_NAME} characters.", field="context_id"
            )
        if len(cwd) > _LONGEST_TEXT:
            raise InvalidConfiguration(f"cwd: At most {_LONGEST_TEXT} characters.", field="cwd")
        with self._noted() as known:
            if context_id == DEFAULT_CONTEXT or context_id in known:
                raise InvalidConfiguration(
                    f"context_id: There is a context {context_id!r}.", field="context_id"
                )
            if len(known.keys() | {DEFAULT_CONTEXT}) >= MOST_CONTEXTS:
                raise InvalidConfiguration(
                    f"context_id: A sandbox has at most {MOST_CONTEXTS} contexts.",
                    field="context_id",
                )
            made = self._made(_Known("", language, cwd))
            name = context_id or made.id
            known[name] = made
        return Context(name, language, cwd)

    def list(self) -> Sequence[Context]:
        with self._noted() as known:
            listed = {context.id for context in self._service.ask(self._machine.contexts)}
        first = Context(DEFAULT_CONTEXT, self._template)
        return [first] + [
            Context(name, one.language, one.cwd)
            for name, one in known.items()
            if name != DEFAULT_CONTEXT and (not one.id or one.id in listed)
        ]

    def destroy(self, context_id: str) -> bool:
        if context_id == DEFAULT_CONTEXT:
            raise InvalidConfiguration(
                "context: The default context cannot be ended. Restart it instead.", field="context"
            )
        with self._noted() as known:
            one = known.get(context_id)
            if one is None:
                return False
            ended = not one.id or self._service.ask(self._machine.destroy_context, one.id)
            del known[context_id]
            return ended

    def restart(self, context_id: str) -> Context:
        one = self._start_again(context_id, lost=False)
        return Context(context_id, one.language, one.cwd)

    # For the sandbox's runs.

    def begin(self, name: str) -> tuple[str, str, bool]:
        """The service's id of a context, its language, and whether what it held is gone untold."""
        with self._noted() as known:
            one = self._found(known, name)
            if not one.id:
                one = known[name] = self._made(one)
        return one.id, one.language, one.lost

    def lose(self, name: str, *, told: bool) -> None:
        """Begin anew in a context that did not stop. Raises SandboxError; it is then made later."""
        self._start_again(name, lost=not told)

    def note_lost(self, name: str, *, lost: bool) -> None:
        """Whether the next run is to say that what the context held is gone."""
        with self._noted() as known:
            if name in known:
                known[name] = replace(known[name], lost=lost)

    def _start_again(self, name: str, *, lost: bool) -> _Known:
        failure: SandboxError | None = None
        with self._noted() as known:
            one = self._found(known, name)
            fresh = ""
            try:
                if one.id:
                    asked = self._machine.restart_context
                    fresh = _checked(self._service.ask(asked, one.id, one.language, one.cwd))
            except SandboxError as error:
                # Nobody knows what has become of it: the next run has another one.
                failure = error
            one = known[name] = replace(one, id=fresh, lost=lost or failure is not None)
        if failure is not None:
            raise failure
        return one

    def _found(self, known: dict[str, _Known], name: str) -> _Known:
        if name == DEFAULT_CONTEXT:
            return replace(known.get(name, _Known("", "")), language=self._template)
        if name not in known:
            raise InvalidConfiguration(f"context: There is no {name!r}.", field="context")
        return known[name]

    def _made(self, one: _Known) -> _Known:
        made = self._service.ask(self._machine.create_context, one.language, one.cwd)
        return replace(one, id=_checked(made.id))

    @contextmanager
    def _noted(self) -> Iterator[dict[str, _Known]]:
        """What is noted, to be changed within the block, and noted again where it was."""
        with self._lock:
            known = _read(self._service.ask(self._machine.note))
            before = dict(known)
            try:
                yield known
            finally:
                if known != before:
                    text = json.dumps({name: asdict(one) for name, one in known.items()})
                    self._service.ask(self._machine.keep_note, text)


def _checked(context_id: str) -> str:
    if not _ID.fullmatch(context_id):
        raise ConnectionFailed("The service's answer has no id of a context.")
    return context_id


def _read(text: str) -> dict[str, _Known]:
    """What a note says, without what no honest one does."""
    try:
        said = json.loads(text or "{}")
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict):
        return {DEFAULT_CONTEXT: _Known("", "", lost=True)}
    known: dict[str, _Known] = {}
    for name, one in list(said.items())[:MOST_CONTEXTS]:
        found = _known(one) if len(name) <= _LONGEST_NAME else None
        if found is not None:
            known[name] = found
    return known


def _known(said: object) -> _Known | None:
    if not isinstance(said, dict):
        return None
    texts = [said.get(key) for key in ("id", "language", "cwd")]
    if not all(isinstance(text, str) and len(text) <= _LONGEST_TEXT for text in texts):
        return None
    context_id, language, cwd = map(str, texts)
    if context_id and not _ID.fullmatch(context_id):
        return None
    return _Known(context_id, language, cwd, said.get("lost") is True)
