"""The settings of the tests without one capability, which the environment names."""

import os

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_CAPABILITIES

INSTALLED_CAPABILITIES = [
    package for package in INSTALLED_CAPABILITIES if package != os.environ["WITHOUT_CAPABILITY"]
]
