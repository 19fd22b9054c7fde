"""A session with a plot."""

from __future__ import annotations

import base64
import struct
import zlib


def plot() -> str:
    """Bars on white, as a PNG in base64."""
    heights = (30, 50, 80, 130)
    rows = b"".join(
        b"\0"
        + b"".join(
            b"\x25\x63\xeb" if 140 - y < heights[x // 60] and x % 60 > 12 else b"\xff\xff\xff"
            for x in range(240)
        )
        for y in range(140)
    )
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", 240, 140, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    )
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
