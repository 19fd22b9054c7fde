"""Rich outputs in tests: what they need, and reading them."""

from __future__ import annotations

import base64
import struct
import subprocess
from functools import cache

from providers.runtime.launchers.guest_files import find_python
from tests.support.required import missing


def require_module(name: str) -> None:
    """Skip the test, or fail it under REQUIRE=all, where sandboxes cannot import this module."""
    if _is_importable(name):
        return
    missing(f"python3 of the sandboxes has no {name} (apt-get install python3-{name})")


@cache
def _is_importable(name: str) -> bool:
    finding = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({name!r}))"
    return subprocess.run([find_python(), "-I", "-c", finding], check=False).returncode == 0


def image_size(data: str) -> tuple[int, int]:
    """Width and height of a PNG in base64."""
    content = base64.b64decode(data, validate=True)
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    assert content.endswith(b"IEND\xaeB`\x82")
    width, height = struct.unpack(">II", content[16:24])
    return width, height
