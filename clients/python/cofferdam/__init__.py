"""Client of Cofferdam: `Cofferdam()`, `AsyncCofferdam()`, `check_receipt`, `run_python_code`."""

from __future__ import annotations

from cofferdam._async.client import AsyncCofferdam
from cofferdam._async.process import AsyncBackgroundProcess
from cofferdam._async.session import AsyncOpenSession
from cofferdam._async.streams import AsyncRunStream
from cofferdam._sync.client import Cofferdam
from cofferdam._sync.process import BackgroundProcess
from cofferdam._sync.session import OpenSession
from cofferdam._sync.streams import RunStream
from cofferdam.errors import CofferdamError, ServiceError, StillRunning, Unreachable
from cofferdam.events import Event
from cofferdam.receipts import ReceiptCheck, check_receipt
from cofferdam.retries import NEVER, Retries
from cofferdam.shapes import Execution
from cofferdam.tool import run_python_code

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "AsyncBackgroundProcess",
    "AsyncCofferdam",
    "AsyncOpenSession",
    "AsyncRunStream",
    "BackgroundProcess",
    "Cofferdam",
    "CofferdamError",
    "Event",
    "Execution",
    "OpenSession",
    "ReceiptCheck",
    "Retries",
    "RunStream",
    "ServiceError",
    "StillRunning",
    "Unreachable",
    "__version__",
    "check_receipt",
    "run_python_code",
]
