"""A folder that sandboxes have none of their own over."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.template_images import long_wait_for_images as long_wait_for_images


@pytest.fixture(scope="module")
def outside() -> Iterator[Path]:
    """An empty folder elsewhere than below /tmp."""
    folder = Path(tempfile.mkdtemp(dir="/var/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)
