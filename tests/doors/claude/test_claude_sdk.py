"""The vendor's own worker, unmodified, against the queue of the tests: so that is as theirs is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.claude_queue import ENVIRONMENT, KEY, Queue
from tests.support.claude_worker import text_of
from tests.support.required import missing, require

SDK = Path("/usr/local/lib/cofferdam-anthropic/python")
SECONDS = 60.0
_WORKER = """
import asyncio, sys
from anthropic import AsyncAnthropic, beta_async_tool
url, environment, key, folder = sys.argv[1:]

@beta_async_tool(name="bash")
async def bash(command: str) -> str:
    \"\"\"Run a command.\"\"\"
    return f"would run {command}"

client = AsyncAnthropic(base_url=url, api_key="unused")
worker = client.beta.environments.work.worker(
    environment_id=environment,
    environment_key=key,
    tools=lambda context: [bash],
    workdir=folder,
    max_idle=1,
)
asyncio.run(worker.run())
"""


@pytest.fixture
def queue() -> Iterator[Queue]:
    made = Queue()
    yield made
    made.close()


@contextmanager
def vendors_worker(queue: Queue, folder: Path) -> Iterator[None]:
    if not SDK.exists():
        missing("Anthropic's SDK is not installed: .ci/install-anthropic")
    environment = {"PYTHONPATH": str(SDK), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    command = [require("python3"), "-c", _WORKER, queue.url, ENVIRONMENT, KEY, str(folder)]
    process = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        yield
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_the_vendors_worker_serves_a_session_of_the_queue(queue: Queue, tmp_path: Path) -> None:
    for number in range(5):
        queue.events.setdefault("sesn_1", [])
        queue.say("sesn_1", "user.message", content=[{"type": "text", "text": f"{number}"}])
    call = queue.call("sesn_1", "bash", command="one")
    item = queue.add_session("sesn_1")
    with vendors_worker(queue, tmp_path):
        assert text_of(queue.result(call)) == "would run one"
        asks = queue.call("sesn_1", "bash", "ask", command="two")
        other = queue.call("sesn_1", "bash", command="three")
        assert text_of(queue.result(other)) == "would run three"
        assert queue.said("user.tool_result", asks) == []
        queue.say("sesn_1", "user.tool_confirmation", tool_use_id=asks, result="allow")
        assert text_of(queue.result(asks)) == "would run two"
        queue.wait(lambda: len(item.beats) > 1)
        queue.end_turn("sesn_1")
        queue.wait(lambda: item.is_stopped)


def test_the_vendors_worker_leaves_an_item_that_was_taken_away(
    queue: Queue, tmp_path: Path
) -> None:
    item = queue.add_session("sesn_1")
    with vendors_worker(queue, tmp_path):
        queue.wait(lambda: bool(item.beats))
        queue.take_away(item)
        # It is found again, and not stopped by who has lost it.
        queue.wait(lambda: len(item.workers) == 2)
        assert not item.is_stopped
