"""Importing agentrun-sdk, which costs seconds and about 100 MB, and does more than one would want.

While it is imported it loads a `.env` file from around its own folder into our environment, and
gives its logger a handler of its own. Neither happens here.
"""

from __future__ import annotations

import logging
import os
from unittest.mock import patch

with patch.dict(os.environ, {"PYTHON_DOTENV_DISABLED": "true"}):
    from agentrun.sandbox import Sandbox, TemplateInput, TemplateType
    from agentrun.sandbox.api.code_interpreter_data import CodeInterpreterDataAPI
    from agentrun.sandbox.client import SandboxClient
    from agentrun.sandbox.model import ListSandboxesInput
    from agentrun.utils.config import Config
    from agentrun.utils.exception import ResourceNotExistError

_logger = logging.getLogger("agentrun-logger")
_logger.handlers.clear()
# Below this it logs the headers of its requests.
_logger.setLevel(logging.WARNING)

__all__ = [
    "CodeInterpreterDataAPI",
    "Config",
    "ListSandboxesInput",
    "ResourceNotExistError",
    "Sandbox",
    "SandboxClient",
    "TemplateInput",
    "TemplateType",
]
