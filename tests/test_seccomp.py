"""The filter's program does what the list says, on both architectures, and in a real sandbox."""

from __future__ import annotations

import struct

import pytest

from providers.pool import seccomp
from providers.pool.seccomp import build_filter
from tests.sandboxes import Local

ALLOW, KILL, EPERM, ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


def run_filter(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel's classic BPF machine would return for this system call."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    counter = accumulator = 0
    while True:
        operation, if_true, if_false, operand = struct.unpack_from("<HBBI", program, counter * 8)
        counter += 1
        if operation == 0x06:
            return int(operand)
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
            continue
        taken = {
            0x15: accumulator == operand,
            0x35: accumulator >= operand,
            0x45: bool(accumulator & operand),
        }[operation]
        counter += if_true if taken else if_false


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_every_call_on_the_list_is_refused_and_ordinary_ones_pass(machine: str) -> None:
    program = build_filter(machine)
    assert program is not None
    architecture, denied, filtered = seccomp._TABLES[machine]
    assert architecture == ARCHITECTURES[machine]
    refused = {number: run_filter(program, architecture, number) for number in range(460)}
    for name, number in denied.items():
        assert refused.pop(number) == EPERM, name
    assert refused.pop(filtered["clone3"]) == ENOSYS
    assert set(refused.values()) == {ALLOW}


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_clone_may_make_processes_and_threads_but_no_namespaces(machine: str) -> None:
    program = build_filter(machine)
    assert program is not None
    architecture, _, filtered = seccomp._TABLES[machine]
    thread = 0x003D0F00
    assert run_filter(program, architecture, filtered["clone"], 17) == ALLOW
    assert run_filter(program, architecture, filtered["clone"], thread) == ALLOW
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert run_filter(program, architecture, filtered["clone"], 17 | 1 << bit) == EPERM


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_a_terminal_cannot_be_fed_input(machine: str) -> None:
    program = build_filter(machine)
    assert program is not None
    architecture, _, filtered = seccomp._TABLES[machine]
    assert run_filter(program, architecture, filtered["ioctl"], 0, 0x5412) == EPERM
    assert run_filter(program, architecture, filtered["ioctl"], 0, 0x541C) == EPERM
    assert run_filter(program, architecture, filtered["ioctl"], 0, 0x5401) == ALLOW


def test_calls_of_another_architecture_end_the_process() -> None:
    program = build_filter("x86_64")
    assert program is not None
    i386 = 0x40000003
    assert run_filter(program, i386, 20) == KILL
    assert run_filter(program, ARCHITECTURES["x86_64"], 0x40000000 | 39) == KILL


def test_a_machine_without_a_table_has_no_filter() -> None:
    assert build_filter("riscv64") is None


def test_the_kernel_refuses_what_the_list_names(bubblewrap: Local) -> None:
    result = bubblewrap.run(
        """
        import ctypes, errno
        libc = ctypes.CDLL(None, use_errno=True)
        calls = {
            "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
            "umount": lambda: libc.umount2(b"/tmp", 0),
            "unshare": lambda: libc.unshare(0x10000000),
            "setns": lambda: libc.setns(0, 0),
            "ptrace": lambda: libc.ptrace(0, 0, 0, 0),
            "chroot": lambda: libc.chroot(b"/tmp"),
            "keyctl": lambda: libc.syscall(250, 0, 0, 0, 0, 0),
            "bpf": lambda: libc.syscall(321, 0, 0, 0),
            "io_uring_setup": lambda: libc.syscall(425, 1, 0),
            "userfaultfd": lambda: libc.syscall(323, 0),
            "clone with a user namespace": lambda: libc.syscall(56, 0x10000011, 0, 0, 0, 0),
        }
        for name, call in calls.items():
            ctypes.set_errno(0)
            print(name, call(), errno.errorcode.get(ctypes.get_errno()))
        """
    )
    assert result.stderr == ""
    assert len(result.stdout.splitlines()) == 11
    for line in result.stdout.splitlines():
        assert line.endswith("-1 EPERM"), line
