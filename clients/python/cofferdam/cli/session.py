"""`cofferdam session` and `cofferdam files`."""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from cofferdam import Cofferdam, OpenSession
from cofferdam.cli import code, exits, output
from cofferdam.cli.parser import Commands

_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_WHICH = "id of a session, or its name while it is open or asleep"


def add_session(commands: Commands) -> None:
    parser = commands.add_parser("session", help="open, list, use and close sessions")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    each = actions.add_parser("open", help="open a session and print its id")
    each.add_argument("--name", help="name of the session, unique among the open ones")
    each.add_argument("-l", "--language", help="language of its default context")
    each.add_argument("--template", help="template of the sandbox")
    each.add_argument("--provider", help="provider, from those of the tenant's route")
    each.add_argument(
        "--idle", type=int, metavar="SECONDS", help="idle time until the session goes to sleep"
    )
    each.add_argument("--max", type=int, metavar="SECONDS", help="time until the session is closed")
    each.add_argument("--snapshot", metavar="ID", help="start with the files of a snapshot")
    code.add_network(each)
    each.add_argument("--json", action="store_true", help="print the whole session as JSON")
    each.set_defaults(do=open_one)

    each = actions.add_parser("list", help="list sessions")
    each.add_argument(
        "--state", choices=("open", "asleep", "closed", "lost"), help="only sessions in this state"
    )
    each.add_argument("--json", action="store_true", help="one line of JSON for each session")
    each.set_defaults(do=list_all)

    each = actions.add_parser(
        "run",
        help="run code in a session",
        description="Run code in a session, which keeps its variables and files.\nPrints the value "
        "of the last expression, and the return value of main().",
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    each.add_argument("session", help=_WHICH)
    code.add_arguments(each)
    each.add_argument("--context", help="id of the session's context (interpreter)")
    each.set_defaults(do=run)

    each = actions.add_parser("close", help="close a session and delete its saved files")
    each.add_argument("session", help=_WHICH)
    each.set_defaults(do=close)


def add_files(commands: Commands) -> None:
    parser = commands.add_parser("files", help="list, copy and remove files of a session")
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    each = actions.add_parser("ls", help="list a folder")
    each.add_argument("session", help=_WHICH)
    each.add_argument("path", nargs="?", default="", help="folder; default: the workspace")
    each.add_argument("--depth", type=int, help="number of levels")
    each.add_argument("--json", action="store_true", help="one line of JSON for each file")
    each.set_defaults(do=ls)

    each = actions.add_parser("get", help="download a file")
    each.add_argument("session", help=_WHICH)
    each.add_argument("path", help="file of the session")
    each.add_argument(
        "target",
        nargs="?",
        help="local file or folder; - is standard output; default: the name of the file",
    )
    each.set_defaults(do=get)

    each = actions.add_parser("put", help="upload a file")
    each.add_argument("session", help=_WHICH)
    each.add_argument("source", help="local file; - is standard input")
    each.add_argument("path", help="file of the session")
    each.add_argument("--json", action="store_true", help="print the uploaded file as JSON")
    each.set_defaults(do=put)

    each = actions.add_parser("rm", help="remove a file, or a folder with its contents")
    each.add_argument("session", help=_WHICH)
    each.add_argument("path", help="file or folder of the session")
    each.set_defaults(do=rm)


def open_one(client: Cofferdam, options: argparse.Namespace) -> int:
    wanted: dict[str, Any] = {
        "name": options.name,
        "language": options.language,
        "template": options.template,
        "provider": options.provider,
        "idle_seconds": options.idle,
        "max_seconds": options.max,
        "snapshot": options.snapshot,
        **code.network_of(options),
    }
    session = client.open_session(**{name: each for name, each in wanted.items() if each})
    if options.json:
        output.as_json(session.info.raw)
    else:
        output.line(session.id)
    return 0


def list_all(client: Cofferdam, options: argparse.Namespace) -> int:
    found = [each.info for each in client.sessions(options.state)]
    if options.json:
        for each in found:
            output.as_json(each.raw)
    elif found:
        rows = [(each.id, each.state, each.language, each.name or "") for each in found]
        output.table([("ID", "STATE", "LANGUAGE", "NAME"), *rows])
    return 0


def run(client: Cofferdam, options: argparse.Namespace) -> int:
    text, wanted = code.code_of(options), code.options_of(options)
    if options.context:
        wanted["context"] = options.context
    stream = _found(client, options.session).stream(text, **wanted)
    execution = code.told(stream, options, with_results=True)
    if options.artifacts:
        client.save_artifacts(execution, options.artifacts)
    return exits.exit_code_of(execution)


def close(client: Cofferdam, options: argparse.Namespace) -> int:
    _found(client, options.session).close()
    return 0


def ls(client: Cofferdam, options: argparse.Namespace) -> int:
    found = list(_found(client, options.session).files.list(options.path, depth=options.depth))
    if options.json:
        for each in found:
            output.as_json(each.raw)
    elif found:
        output.table([(each.type, str(each.size_bytes), each.path) for each in found])
    return 0


def get(client: Cofferdam, options: argparse.Namespace) -> int:
    files = _found(client, options.session).files
    if options.target == "-":
        files.download(options.path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return 0
    name = PurePosixPath(options.path).name
    target = Path(options.target or name)
    if target.is_dir():
        target = target / name
    with _Whole(target) as part:
        files.download(options.path, part)
    return 0


def put(client: Cofferdam, options: argparse.Namespace) -> int:
    files = _found(client, options.session).files
    is_given = options.source == "-"
    content = sys.stdin.buffer.read() if is_given else Path(options.source).read_bytes()
    found = files.write(options.path, content)
    if options.json:
        output.as_json(found.raw)
    return 0


def rm(client: Cofferdam, options: argparse.Namespace) -> int:
    _found(client, options.session).files.remove(options.path)
    return 0


def _found(client: Cofferdam, which: str) -> OpenSession:
    """The session with this id or name. Raises NotFound, ValueError."""
    if _ID.fullmatch(which.lower()):
        return client.session(which)
    for state in ("open", "asleep"):
        for session in client.sessions(state):
            if session.info.name == which:
                return session
    raise ValueError(f"session: There is no open session named {which!r}. See `session list`.")


class _Whole:
    """A local file that appears only when its download is complete."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __enter__(self) -> BinaryIO:
        number, name = tempfile.mkstemp(dir=self._target.parent, prefix=".cofferdam-")
        self._part = Path(name)
        self._file: BinaryIO = os.fdopen(number, "wb")
        return self._file

    def __exit__(self, kind: object, *_: object) -> None:
        self._file.close()
        if kind is None:
            mask = os.umask(0)
            os.umask(mask)
            self._part.chmod(0o666 & ~mask)
            self._part.replace(self._target)
        else:
            self._part.unlink()
