"""What is asked of a session's files. A request that exists is valid.

Whether there is such a file is the guest's to say.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from executions.kernel.declarations import Body, Folder, Path, PlaceOfPath, Query, declared

MOST_DEPTH = 32
_FOLDER = "Relative to the workspace, or absolute; the default is the workspace."


@declared
class FileListing:
    """What is in a folder, to a depth, from the entry behind `after` on, which is given as the text
    that a page said, and is here the path itself."""

    path: Annotated[Folder, Field(description=_FOLDER)] = ""
    depth: Annotated[int, Field(ge=1, le=MOST_DEPTH)] = 1
    after: Annotated[
        PlaceOfPath, Field(description="The value of `after` in `next` of the previous page.")
    ] = ""


@declared
class FileRequest:
    """A file, or a folder that is not the workspace itself."""

    path: Annotated[Path, Field(description="Relative to the workspace, or absolute.")]


@declared
class FolderRequest:
    """A folder."""

    path: Annotated[Folder, Field(description=_FOLDER)] = ""


@declared
class MoveRequest:
    """Give a file or folder another path."""

    source: Annotated[Path, Field(alias="from")]
    to: Path


LIST = Query(FileListing)
FILE = Query(FileRequest)
FOLDER = Query(FolderRequest)
MOVE = Body(MoveRequest, "Move")
MKDIR = Body(FileRequest, "Mkdir")
