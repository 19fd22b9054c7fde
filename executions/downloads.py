"""What a download says of itself, so that it is saved: never shown, run or guessed at."""

from __future__ import annotations

import re
import unicodedata
from urllib.parse import quote

_MOST_CHARACTERS = 150
# Other than letters of every script: what a header, a shell or a file manager reads as its own.
_UNSAFE = re.compile(
    r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\ud800-\udfff<>:"/\\|?*%;\u202a-\u202e\u2066-\u2069]'
)
_NOT_ASCII = re.compile(r"[^ -~]")
# Nothing of these is a program to a browser, wherever it is shown.
_SAFE_TYPES = frozenset(
    {
        "application/gzip",
        "application/json",
        "application/octet-stream",
        "application/zip",
        "image/gif",
        "image/jpeg",
        "image/png",
        "image/webp",
        "text/csv",
        "text/plain",
    }
)

# Nothing in it can act, whatever a browser takes it for, and no cache keeps it.
INERT = {
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "sandbox; default-src 'none'",
    "Cache-Control": "private, no-store",
}


def clean_filename(path: str) -> str:
    """The last part of a path as a name that a file may have on every system."""
    name = unicodedata.normalize("NFC", path.rstrip("/").rpartition("/")[2])
    # The end of a long name says more than its start, and no name starts with a dot.
    name = _UNSAFE.sub("_", name).strip(" .")[-_MOST_CHARACTERS:].strip(" .")
    return name or "file"


def disposition(path: str) -> str:
    """The Content-Disposition that saves a file under its cleaned name (RFC 6266, RFC 5987)."""
    name = clean_filename(path)
    plain = _NOT_ASCII.sub("_", name)
    return f"attachment; filename=\"{plain}\"; filename*=UTF-8''{quote(name, safe='')}"


def safe_type(mime_type: str) -> str:
    """`mime_type` where it cannot be a program, and bytes for any other."""
    return mime_type if mime_type in _SAFE_TYPES else "application/octet-stream"
