"""What is promised of code that calls tools."""

from __future__ import annotations

import json
import threading
from queue import SimpleQueue

from providers.promises import expect
from providers.sandbox import KeptSandbox
from providers.values import Job, ToolCall


def calls_tools(sandbox: KeptSandbox, code: str) -> None:
    """`code` prints what `double` comes to for 1 and for 2."""
    calls: SimpleQueue[ToolCall | None] = SimpleQueue()
    told: list[object] = []

    def answer_them() -> None:
        for call in iter(calls.get, None):
            asked = json.loads(call.arguments)
            answer = json.dumps({"result": {"is": asked["n"] * 2}}).encode()
            told.append((call.name, asked, sandbox.answer("asks", call.number, answer)))

    # Not one of `providers.threads`: it is joined here, and ends with this check.
    thread = threading.Thread(target=answer_them)
    thread.start()
    try:
        job = Job(code, tools=["double"], run="asks")
        # Whoever is told of an event must not wait.
        result = sandbox.run(job, lambda event: calls.put(event.call) if event.call else None)
    finally:
        calls.put(None)
        thread.join()
    expect("stdout", (result.stdout, result.stderr), ("2\n4\n", ""))
    expect("calls", told, [("double", {"n": n}, True) for n in (1, 2)])
    expect("answered without a call", sandbox.answer("asks", 1, b'{"result":0}'), False)
