"""The images of sandboxes without an engine as a command."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from providers.runtime.launchers.images import ImageStore
from providers.runtime.service.command import PoolOptions

HELP = (
    "Import images for the pool service's launchers gvisor, runc and crun, which need no engine. "
    "The fields of the provider's configuration for images then accept the names."
)


def add_arguments(parser: ArgumentParser, _: PoolOptions) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(dest="action", required=True)
    add = actions.add_parser("import", help="unpack an image, which gets this name")
    add.add_argument("name", metavar="NAME")
    add.add_argument(
        "archive",
        metavar="ARCHIVE",
        type=Path,
        help="tar file of `docker save`, `skopeo copy` to docker-archive, or an OCI image layout",
    )
    actions.add_parser("list", help="list the imported images")
    remove = actions.add_parser("remove", help="remove an image")
    remove.add_argument("name", metavar="NAME")


def run(settings: PoolOptions, arguments: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Carry out one action; `say` is told each line. Raises SandboxError."""
    store = ImageStore(settings.DATA_DIR)
    shown = []
    if arguments["action"] == "import":
        shown = [store.add(arguments["name"], arguments["archive"])]
    elif arguments["action"] == "remove":
        store.remove(arguments["name"])
    else:
        shown = list(store.list())
    for image in shown:
        say(f"{image.name} {image.digest}")
