"""Sandbox agents of the OpenAI Agents SDK, by its own client for E2B, unmodified."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from agents import RunConfig, Runner
from agents.extensions.sandbox import E2BSandboxClient, E2BSandboxClientOptions
from agents.items import ToolCallOutputItem
from agents.sandbox import Manifest, SandboxAgent, SandboxRunConfig
from agents.sandbox.entries import File
from agents.testing import ScriptedModel, assistant_message, function_call
from cofferdam import Cofferdam

FILES = Manifest(entries={"numbers.txt": File(content=b"3\n10\n2\n")})
OPTIONS = E2BSandboxClientOptions("e2b", timeout=120, metadata={"of": "check"})


def calling(name: str, **arguments: Any) -> list[Any]:
    return [function_call(name, arguments, call_id=f"{name}-{len(str(arguments))}")]


async def test_an_agent_works_on_files_with_its_own_tools() -> None:
    script = [
        calling("exec_command", cmd="sort -n numbers.txt | tail -1"),
        calling("exec_command", cmd="awk '{ s += $1 } END { print s }' numbers.txt; exit 3"),
        [assistant_message("They add up to 15.")],
    ]
    agent = SandboxAgent(name="adder", model=ScriptedModel(script), default_manifest=FILES)
    result = await Runner.run(
        agent,
        "Add the numbers up.",
        run_config=RunConfig(
            sandbox=SandboxRunConfig(client=E2BSandboxClient(), options=OPTIONS),
            tracing_disabled=True,
        ),
    )
    assert result.final_output == "They add up to 15."
    told = [each.output for each in result.new_items if isinstance(each, ToolCallOutputItem)]
    assert "exited with code 0\nOutput:\n10\n" in told[0]
    assert "exited with code 3\nOutput:\n15\n" in told[1]
    with Cofferdam() as client:
        assert next(client.sessions()).info.state == "closed"


async def test_a_session_has_files_a_terminal_and_is_resumed() -> None:
    client = E2BSandboxClient()
    session = await client.create(manifest=FILES, options=OPTIONS)
    async with session:
        await session.write(Path("in/data.bin"), io.BytesIO(bytes(range(256))))
        assert (await session.read(Path("in/data.bin"))).read() == bytes(range(256))
        failed = await session.exec("echo said; echo why >&2; exit 4")
        assert (failed.exit_code, failed.stdout, failed.stderr) == (4, b"said\n", b"why\n")

        begun = await session.pty_exec_start("python3", "-iq", shell=False, tty=True)
        answer = await session.pty_write_stdin(
            session_id=begun.process_id, chars="6 * 7\n", yield_time_s=2
        )
        assert b"42" in answer.output
        await session.pty_terminate_all()

        again = await client.resume(session.state)
        assert (await again.exec("wc -c < in/data.bin")).stdout == b"256\n"
