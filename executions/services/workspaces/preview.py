"""The beginning of a saved file, for somebody who looks at it. All of it is hostile."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field

from executions.kernel.presentation import Shown, shown
from executions.models.workspace import Blob
from executions.runs.results import SIGNATURE_BYTES, image_type
from executions.services.workspaces import browsing
from providers.hidden_characters import visible

# What of a file is read for a page, and how large a picture may be that is shown whole.
MOST_BYTES = 128 * 1024
MOST_IMAGE_BYTES = 8 * 1024 * 1024
MOST_ROWS, MOST_COLUMNS, _MOST_CELL = 100, 30, 200
_TABLES = {".csv": ",", ".tsv": "\t"}


@dataclass(frozen=True)
class Preview:
    """One of: the type of a picture, the rows of a table, or a text; none of them where nothing of
    it can be shown. `is_cut` says that there is more.
    """

    image: str = ""
    table: list[list[str]] = field(default_factory=list)
    text: Shown | None = None
    is_cut: bool = False


def preview_of(blob: Blob, path: str) -> Preview:
    """Raises ProviderUnavailable where storage does not give it."""
    return preview_of_start(b"".join(browsing.read(blob, 0, MOST_BYTES)), blob.size, path)


def preview_of_start(start: bytes, size: int, path: str) -> Preview:
    """Of the first bytes of a file that has so many."""
    if mime_type := image_type(start[:SIGNATURE_BYTES]):
        return Preview(mime_type if size <= MOST_IMAGE_BYTES else "")
    text = _decoded(start, is_cut=size > len(start))
    if text is None:
        return Preview()
    delimiter = _TABLES.get(path[-4:].lower())
    if delimiter and (table := _table(text, delimiter)):
        is_wide = any(len(row) > MOST_COLUMNS for row in table)
        rows = [[visible(cell[:_MOST_CELL]) for cell in row[:MOST_COLUMNS]] for row in table]
        is_cut = size > len(start) or len(rows) > MOST_ROWS or is_wide
        return Preview(table=rows[:MOST_ROWS], is_cut=is_cut)
    return Preview(text=shown(text), is_cut=size > len(start))


def image_of(blob: Blob) -> str:
    """As what a browser may draw it: a raster image of a size that a page can have; else ""."""
    if blob.size > MOST_IMAGE_BYTES:
        return ""
    return image_type(b"".join(browsing.read(blob, 0, SIGNATURE_BYTES)))


def _decoded(start: bytes, *, is_cut: bool) -> str | None:
    """Text, unless the bytes are none."""
    if b"\0" in start:
        return None
    for lost in range(4 if is_cut else 1):
        try:
            return start[: len(start) - lost].decode()
        except UnicodeDecodeError:
            continue
    return None


def _table(text: str, delimiter: str) -> list[list[str]]:
    """Its rows, one more than are shown; none for what is no table."""
    rows = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            rows.append(row)
            if len(rows) > MOST_ROWS:
                break
    except csv.Error:
        return []
    return rows
