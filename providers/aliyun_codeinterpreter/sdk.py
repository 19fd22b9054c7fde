"""Importing agentrun-sdk, which costs seconds and about 100 MB, and does more than one would want.

While it is imported it loads a `.env` file from around its own folder into our environment, and
gives its logger a handler of its own. Neither happens here, and its answers are bounded.
"""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace
from unittest.mock import patch

import httpx

from providers.remote.bounded import BoundedClient

_QUIETLY = {"PYTHON_DOTENV_DISABLED": "true", "DISABLE_BREAKING_CHANGES_WARNING": "1"}

with patch.dict(os.environ, _QUIETLY):
    from agentrun.sandbox import Sandbox, TemplateInput, TemplateType
    from agentrun.sandbox.api import sandbox_data
    from agentrun.sandbox.api.code_interpreter_data import CodeInterpreterDataAPI
    from agentrun.sandbox.client import SandboxClient
    from agentrun.sandbox.model import ListSandboxesInput
    from agentrun.utils import data_api
    from agentrun.utils.config import Config
    from agentrun.utils.exception import ResourceNotExistError

for _module in (data_api, sandbox_data):
    # The SDK reads answers whole, however long they are, and leaves no other way in.
    _module.httpx = SimpleNamespace(**{**vars(httpx), "Client": BoundedClient})

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
