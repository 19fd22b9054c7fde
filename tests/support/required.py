"""What a test needs of the machine. Without Django, for `tests.chaos` too."""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def require(component: str) -> str:
    """The path of a program the test needs, such as "bwrap" or "chromium"."""
    return shutil.which(component) or missing(f"{component} is not installed")


def missing(reason: str) -> NoReturn:
    """Skip the test for what this machine lacks; under REQUIRE=all fail it."""
    if os.environ.get("REQUIRE") == "all":
        pytest.fail(f"{reason}, and REQUIRE=all", pytrace=False)
    pytest.skip(reason)
