"""Ending a sandbox once its run is over, with nobody waiting for it but the end of the process."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from executions.services import ongoing
from executions.services.asking import guarded
from providers.errors import SandboxError
from providers.manager import Lease
from providers.sandbox import Sandbox
from providers.waiting import submit, within

logger = logging.getLogger(__name__)

# How long a provider may take to end one. After that it is its own to see to.
DESTROY_SECONDS = 10.0


def end_behind(lease: Lease, sandbox: Sandbox, held: ExitStack) -> None:
    """Have the sandbox ended. What `held` lends stays lent until it is, or DESTROY_SECONDS long.

    Never raises SandboxError: the result is there and belongs to the caller, whatever becomes of
    the sandbox.
    """
    try:
        ending = guarded(lease.provider_id, lambda: sandbox.submit_close())
    except SandboxError as error:
        _complain(sandbox, error)
        return
    ended = within(DESTROY_SECONDS, ending)
    if ended.done():
        _look_at(ended, sandbox)
        return
    lent, given_back = held.pop_all(), Future[None]()
    ongoing.expect(given_back)

    def give_back() -> None:
        # A provider that was lent to nobody else is closed by this, which takes its time.
        try:
            lent.close()
        finally:
            given_back.set_result(None)

    def done(_: Future[Any]) -> None:
        _look_at(ended, sandbox)
        submit(give_back)

    ended.add_done_callback(done)


def _look_at(ended: Future[Any], sandbox: Sandbox) -> None:
    try:
        ended.result()
    except BaseException as error:  # what was raised elsewhere, SystemExit included
        _complain(sandbox, error)


def _complain(sandbox: Sandbox, error: BaseException) -> None:
    logger.error("sandbox %s could not be destroyed", sandbox.ref, exc_info=error)
