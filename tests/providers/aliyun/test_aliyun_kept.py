"""What is Aliyun's own about a kept sandbox: its files, its commands, what it has not."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from providers.aliyun_codeinterpreter.provider import AliyunCodeInterpreterProvider
from providers.errors import (
    ConnectionFailed,
    InvalidConfiguration,
    KeptSandboxLost,
    ProviderUnavailable,
    SandboxError,
)
from providers.sandbox import KeptSandbox
from providers.values import Command, Job, SandboxSpec
from tests.support.agentrun_server import AgentRunServer
from tests.support.remote_providers import followed

KEPT = SandboxSpec(kept=True)


def test_what_aliyun_lacks_it_says(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer
) -> None:
    sandbox = aliyun.open(replace(KEPT, seconds=60), "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    for field, command in (
        ("stdin", Command(shell="true", stdin=True, timeout=5)),
        ("pty", Command(shell="true", pty=(80, 24), timeout=5)),
        ("user", Command(shell="true", user="root", timeout=5)),
        ("timeout", Command(shell="true")),
        ("timeout", Command(shell="true", timeout=31)),
    ):
        with pytest.raises(InvalidConfiguration, match=f"^{field}: "):
            sandbox.processes.start(command)
    with pytest.raises(InvalidConfiguration, match="does not report changes"):
        sandbox.files.watch()
    with pytest.raises(InvalidConfiguration, match=r"^mode: "):
        sandbox.files.write("file", [b""], mode=0o600)
    with pytest.raises(InvalidConfiguration, match="63 MiB"):
        sandbox.files.write("file", itertools.repeat(bytes(1 << 20)))
    with pytest.raises(InvalidConfiguration, match="UTF-8"):
        sandbox.files.stat("\udcff")
    with pytest.raises(InvalidConfiguration, match="ends an idle sandbox"):
        sandbox.renew(5000)
    assert sandbox.close() is True
    assert aliyun_server.sandboxes == {}
    assert aliyun_server.idle_seconds == [900]


@pytest.mark.parametrize("replaces", [True, False])
def test_a_file_at_aliyun_is_replaced_whole_or_not_at_all(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer, replaces: bool
) -> None:
    aliyun_server.replaces = replaces
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    files = sandbox.files
    files.write(".hidden", [b"former"])
    for operation in ("upload", "move"):
        aliyun_server.fail(operation, "500")
        with pytest.raises(SandboxError):
            files.write(".hidden", [b"the new one"])
        assert b"".join(files.read(".hidden")) == b"former"
        assert [entry.path for entry in files.list()] == [".hidden"]
    assert files.write(".hidden", [b"the new one"]).path == ".hidden"
    assert b"".join(files.read(".hidden")) == b"the new one"
    odd = "d é/ %2e%2e?a=b&c#\n"
    assert files.write(odd, [b"odd"]).path == odd
    assert b"".join(files.read(odd)) == b"odd"
    assert [(entry.path, entry.size) for entry in files.list("d é")] == [(odd, 3)]
    assert aliyun_server.unsigned == 0
    sandbox.close()
    with pytest.raises(ProviderUnavailable, match="any more"):
        files.stat(".hidden")


LIES = [
    {"entries": [{"path": "/etc/passwd", "type": "file", "size": 1}]},
    {"entries": [{"path": "/home/user/../x", "type": "file", "size": 1}]},
    {"entries": [{"path": "/home/user//x", "type": "file", "size": 1}]},
    {"entries": [{"path": "/home/user/x", "type": "file", "size": -1}]},
    {"entries": ["x"]},
    {"entry": {"path": "/home/user/x"}, "result": {"exitCode": "0"}},
    [],
]


def test_what_aliyun_says_of_files_and_commands_is_a_claim(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    files = sandbox.files
    for lie in LIES:
        told = {"filesystem": lie, "stat": lie, "cmd": lie}
        aliyun_server.lies = told.get
        for ask in (files.list, lambda: files.stat("x"), lambda: list(files.read_archive())):
            with pytest.raises((ConnectionFailed, ProviderUnavailable)):
                ask()
    with pytest.raises(SandboxError) as caught:
        sandbox.processes.start(Command(shell="true", timeout=5))
    assert caught.value.started
    aliyun_server.lies = {}.get
    sandbox.close()


def test_of_much_output_of_a_command_at_aliyun_at_least_the_last_is_told(
    aliyun: AliyunCodeInterpreterProvider,
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    much = "head -c 3000000 /dev/zero | tr '\\0' x; echo end; echo err >&2"
    process = sandbox.processes.start(Command(shell=much, timeout=30))
    told = followed(sandbox, process.pid)
    assert told.endswith(b"xend\nerr\n")
    assert len(told) > 900_000
    sandbox.close()


def test_a_context_that_aliyun_lost_is_found_by_others_too(
    aliyun: AliyunCodeInterpreterProvider,
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    again = aliyun.attach(sandbox.ref)
    assert again.run(Job("kept = 1")).exit_code == 0
    result = sandbox.run(Job("while True: pass", timeout=0.5))
    assert (result.timed_out, result.metadata["context_kept"]) == (True, False)
    told = sandbox.run(Job("kept = 41"))
    assert told.metadata["context_kept"] is True
    assert again.run(Job("print(kept + 1)")).stdout == "42\n"
    sandbox.close()


def test_a_sandbox_at_aliyun_that_goes_before_a_download_is_lost(
    aliyun: AliyunCodeInterpreterProvider,
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    sandbox.files.write("file", [b"content"])
    pieces = [sandbox.files.read("file"), sandbox.files.read_archive()]
    aliyun.attach(sandbox.ref).close()
    for each in pieces:
        with pytest.raises(KeptSandboxLost):
            next(iter(each))


def test_an_archive_at_aliyun_that_fails_leaves_nothing_in_the_sandbox(
    aliyun: AliyunCodeInterpreterProvider, aliyun_server: AgentRunServer
) -> None:
    sandbox = aliyun.open(KEPT, "wonderland")
    assert isinstance(sandbox, KeptSandbox)
    files = sandbox.files
    files.write("file", [b"content"])
    (notebook,) = aliyun_server.sandboxes.values()
    with pytest.raises(InvalidConfiguration):
        files.write_archive([b"no archive"])
    with pytest.raises(InvalidConfiguration):
        files.write_archive([b"no archive"], "file")
    with pytest.raises(InvalidConfiguration):
        files.read_archive("missing")
    assert list(notebook.tmp.glob("*.tar")) == []
    sandbox.close()
