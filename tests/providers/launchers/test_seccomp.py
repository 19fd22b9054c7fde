"""The filter of system calls decides as it should on every architecture it knows."""

from __future__ import annotations

import platform
import stat
import struct

import pytest

from providers.runtime.launchers.seccomp import build_filter
from tests.support.sandboxes import Local

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
DENIED, NO_SUCH_CALL, NO_SUCH_FAMILY = ERRNO | 1, ERRNO | 38, ERRNO | 97

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
FOREIGN = {"i386": 0x40000003, "arm": 0x40000028, "nothing": 0}

CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "ioctl": 16, "socket": 41, "clone": 56, "fork": 57, "vfork": 58, "execve": 59,
        "kill": 62, "prctl": 157, "ptrace": 101, "personality": 135, "mount": 165, "umount2": 166, "reboot": 169, "keyctl": 250,
        "unshare": 272, "setns": 308, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "clone3": 435, "openat2": 437,
        "process_vm_readv": 310, "perf_event_open": 298, "open_by_handle_at": 304, "init_module": 175, "futex": 202,
    },
    "aarch64": {
        "read": 63, "write": 64, "openat": 56, "ioctl": 29, "socket": 198, "clone": 220, "execve": 221,
        "kill": 129, "prctl": 167, "ptrace": 117, "personality": 92, "mount": 40, "umount2": 39, "reboot": 142, "keyctl": 219,
        "unshare": 97, "setns": 268, "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "clone3": 435, "openat2": 437,
        "process_vm_readv": 270, "perf_event_open": 241, "open_by_handle_at": 265, "init_module": 105, "futex": 98,
    },
}  # fmt: skip

ORDINARY = {"read", "write", "open", "openat", "openat2", "fork", "vfork", "execve", "kill", "prctl", "futex"}  # fmt: skip
BY_ARGUMENT = {"ioctl", "clone", "clone3", "socket"}


def decide(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """What the kernel would: run the program over a `struct seccomp_data`."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(arguments + (0,) * 6)[:6])
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    accumulator = at = 0
    for _ in range(len(steps)):
        operation, if_true, if_false, operand = steps[at]
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == 0x06:
            return operand
        else:
            holds = {
                0x15: accumulator == operand,
                0x35: accumulator >= operand,
                0x45: bool(accumulator & operand),
            }[operation]
            at += if_true if holds else if_false
    raise AssertionError("the program does not end")


def verdict(machine: str, call: str, *arguments: int) -> int:
    program = build_filter(machine)
    assert program is not None
    return decide(program, ARCHITECTURES[machine], CALLS[machine][call], *arguments)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_ordinary_calls_are_allowed(machine: str) -> None:
    for call in ORDINARY & CALLS[machine].keys():
        assert verdict(machine, call) == ALLOW, call


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_that_reach_into_the_kernel_are_denied(machine: str) -> None:
    for call in CALLS[machine].keys() - ORDINARY - BY_ARGUMENT:
        assert verdict(machine, call) == DENIED, call


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_threads_and_processes_can_be_cloned_but_no_namespaces(machine: str) -> None:
    assert verdict(machine, "clone", 0x11) == ALLOW
    assert verdict(machine, "clone", 0x3D0F00) == ALLOW
    for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):  # fmt: skip
        assert verdict(machine, "clone", flag | 0x11) == DENIED, hex(flag)
    assert verdict(machine, "clone3") == NO_SUCH_CALL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_nothing_can_be_typed_into_a_terminal(machine: str) -> None:
    assert verdict(machine, "ioctl", 1, 0x5401) == ALLOW
    assert verdict(machine, "ioctl", 1, 0x5412) == DENIED
    assert verdict(machine, "ioctl", 1, 0x541C) == DENIED
    # The kernel looks at the lower half alone, and so does the filter.
    assert verdict(machine, "ioctl", 1, 0x1_0000_5412) == DENIED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_sockets_are_of_families_that_have_namespaces(machine: str) -> None:
    allowed = {number for number in range(60) if verdict(machine, "socket", number) == ALLOW}
    assert allowed == {1, 2, 10, 16}
    assert verdict(machine, "socket", 40) == NO_SUCH_FAMILY


@pytest.mark.parametrize("machine", ARCHITECTURES)
@pytest.mark.parametrize("foreign", FOREIGN.values(), ids=FOREIGN)
def test_a_call_of_another_architecture_is_the_end(machine: str, foreign: int) -> None:
    program = build_filter(machine)
    assert program is not None
    for number in range(500):
        assert decide(program, foreign, number) == KILL


def test_the_second_numbers_of_x86_are_the_end_too() -> None:
    program = build_filter("x86_64")
    assert program is not None
    for number in (0x40000000, 0x40000000 | 165, 0xFFFFFFFF):
        number = number - (1 << 32) if number >= 1 << 31 else number
        assert decide(program, ARCHITECTURES["x86_64"], number) == KILL


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_program_is_one_the_kernel_would_take(machine: str) -> None:
    program = build_filter(machine)
    assert program is not None
    assert len(program) % 8 == 0
    steps = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    assert len(steps) <= 4096
    for at, (operation, if_true, if_false, _) in enumerate(steps):
        if operation in (0x15, 0x35, 0x45):
            assert at + 1 + max(if_true, if_false) < len(steps)
    assert steps[-1][0] == 0x06


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_netlink_is_for_addresses_only(machine: str) -> None:
    assert verdict(machine, "socket", 16, 3, 0) == ALLOW
    for protocol in range(1, 24):
        assert verdict(machine, "socket", 16, 3, protocol) == ERRNO | 93


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_devices_are_not_made_and_other_nodes_are(machine: str) -> None:
    program = build_filter(machine, shared_kernel=False)
    assert program is not None
    calls = {"x86_64": ((133, (1,)), (259, (-100, 1))), "aarch64": ((33, (-100, 1)),)}[machine]
    for number, before in calls:
        for kind, expected in (
            *((stat.S_IFCHR, DENIED), (stat.S_IFBLK, DENIED), (stat.S_IFIFO, ALLOW)),
            *((stat.S_IFSOCK, ALLOW), (stat.S_IFREG, ALLOW), (0, ALLOW)),
        ):
            arguments = [each % (1 << 64) for each in (*before, kind | 0o666)]
            assert decide(program, ARCHITECTURES[machine], number, *arguments) == expected


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_files_get_no_marks(machine: str) -> None:
    for request in (0x40086602, 0x40046602, 0x401C5820):
        assert verdict(machine, "ioctl", 3, request) == DENIED


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_watching_and_access_lists_are_for_kernels_of_the_sandboxs_own(machine: str) -> None:
    watching = {"x86_64": (253, 294, 206, 451), "aarch64": (26, 0, 451)}[machine]
    lists = {"x86_64": (188, 189, 190, 463), "aarch64": (5, 6, 7, 463)}[machine]
    for shared, refused, unsupported in ((True, NO_SUCH_CALL, ERRNO | 95), (False, ALLOW, ALLOW)):
        program = build_filter(machine, shared_kernel=shared)
        assert program is not None
        for number in watching:
            assert decide(program, ARCHITECTURES[machine], number) == refused
        for number in lists:
            assert decide(program, ARCHITECTURES[machine], number) == unsupported


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_limit_of_core_dumps_stays_as_it_is(machine: str) -> None:
    setrlimit, prlimit = {"x86_64": (160, 302), "aarch64": (164, 261)}[machine]
    program = build_filter(machine)
    assert program is not None

    def decided(*call: int) -> int:
        return decide(program, ARCHITECTURES[machine], *call)

    assert decided(setrlimit, 4, 0x1000) == ERRNO
    assert decided(setrlimit, 7, 0x1000) == ALLOW
    assert decided(prlimit, 0, 4, 0x1000) == ERRNO
    assert decided(prlimit, 0, 4, 0x1_0000_0000) == ERRNO
    assert decided(prlimit, 0, 4, 0) == ALLOW
    assert decided(prlimit, 0, 7, 0x1000) == ALLOW


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_mappings_that_nobody_could_count_are_refused_without_a_cgroup(machine: str) -> None:
    mmap = {"x86_64": 9, "aarch64": 222}[machine]
    shared, private, anonymous, huge = 0x01, 0x02, 0x20, 0x40000
    for counted in (True, False):
        program = build_filter(machine, uncounted_memory=counted)
        assert program is not None

        def decided(flags: int, program: bytes = program) -> int:
            return decide(program, ARCHITECTURES[machine], mmap, 0, 4096, 3, flags)

        assert decided(private | anonymous) == ALLOW
        assert decided(private) == decided(shared) == ALLOW
        assert decided(private | anonymous | huge) == ERRNO | 12
        assert decided(shared | anonymous) == (ALLOW if counted else ERRNO | 12)


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_memory_that_belongs_to_no_process_can_be_ruled_out(machine: str) -> None:
    numbers = {
        "x86_64": (29, 64, 68, 278, 319, 447),
        "aarch64": (194, 190, 186, 75, 279, 447),
    }[machine]
    for number in numbers:
        for uncounted, expected in ((True, ALLOW), (False, NO_SUCH_CALL)):
            program = build_filter(machine, uncounted_memory=uncounted)
            assert program is not None
            assert decide(program, ARCHITECTURES[machine], number) == expected


def test_an_unknown_machine_has_no_filter() -> None:
    assert build_filter("riscv64") is None


def test_the_filter_is_in_force_in_a_sandbox(bubblewrap: Local) -> None:
    if build_filter() is None:
        pytest.skip(f"no filter for {platform.machine()}")
    status = bubblewrap.run("print(open('/proc/self/status').read())").stdout
    assert "Seccomp:\t2" in status
    code = "grep Seccomp: /proc/self/status"
    assert bubblewrap.run(code, "bash").stdout == "Seccomp:\t2\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a second set of call numbers")
def test_a_process_that_uses_the_second_numbers_is_ended(bubblewrap: Local) -> None:
    code = "import ctypes\nprint('before', flush=True)\nctypes.CDLL(None).syscall(0x40000000 | 39)"
    result = bubblewrap.run(code)
    assert (result.exit_code, result.stdout) == (128 + 31, "before\n")
