"""A seccomp filter as a classic BPF program, built without any library.

A deny list: what lets a program reach into the kernel or other processes answers EPERM, and every
call of a foreign architecture ends the process. Numbers are from the kernel's syscall tables.
Sockets can be made of few families: network namespaces do not hold back all of them, VSOCK would
lead to the hypervisor, and netlink's other protocols tell of the machine's devices. Whatever
watches files is refused where the kernel is shared with others: some inodes are everybody's (those
of devices, and before Linux 6.14 one for all event descriptors), and so is the count of watches.
What our own code watches the workspace with is opened before the filter (guest/notices.py).
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from typing import Any

EPERM = 1
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT, _THIRD_ARGUMENT = 0, 4, 16, 24, 32
_THIRD_UPPER, _FOURTH_ARGUMENT = 36, 40
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080  # every CLONE_NEW* flag
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# FS_IOC_SETFLAGS, its 32-bit form, FS_IOC_FSSETXATTR: marks that would outlive a run.
_MARK_FILES = (0x40086602, 0x40046602, 0x401C5820)
_F_SETLEASE, _F_NOTIFY, _F_SETPIPE_SZ = 1024, 1026, 1031
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
_SOL_SOCKET, _BUFFER_SIZES = 1, (7, 8, 32, 33)
_RLIMIT_CORE = 4
# What character and block devices have in their mode, and neither pipes, sockets nor files.
_DEVICE = 0x2000

_UNIX, _INET, _INET6, _NETLINK = 1, 2, 10, 16
# One more than the last that the kernel has.
_FAMILIES = 46

# (audit architecture, {syscall: number}); clone, ioctl and socket are filtered by their arguments.
_DENIED_X86_64 = {
    "ptrace": 101, "syslog": 103, "personality": 135, "pivot_root": 155, "adjtimex": 159,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "sethostname": 170, "setdomainname": 171, "iopl": 172,
    "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "add_key": 248,
    "request_key": 249, "keyctl": 250, "migrate_pages": 256, "unshare": 272, "move_pages": 279,
    "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "process_vm_readv": 310,
    "process_vm_writev": 311, "kcmp": 312, "finit_module": 313, "kexec_load": 246,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_getfd": 438,
    "mount_setattr": 442, "lookup_dcookie": 212, "vhangup": 153, "modify_ldt": 154,
    "ioprio_set": 251, "open_tree_attr": 467, "file_setattr": 469, "mq_open": 240,
}  # fmt: skip
_DENIED_AARCH64 = {
    "ptrace": 117, "syslog": 116, "personality": 92, "pivot_root": 41, "adjtimex": 171,
    "chroot": 51, "acct": 89, "settimeofday": 170, "mount": 40, "umount2": 39, "swapon": 224,
    "swapoff": 225, "reboot": 142, "sethostname": 161, "setdomainname": 162, "init_module": 105,
    "delete_module": 106, "quotactl": 60, "add_key": 217, "request_key": 218, "keyctl": 219,
    "migrate_pages": 238, "unshare": 97, "move_pages": 239, "perf_event_open": 241,
    "fanotify_init": 262, "name_to_handle_at": 264, "open_by_handle_at": 265,
    "clock_adjtime": 266, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "finit_module": 273, "kexec_load": 104, "kexec_file_load": 294, "bpf": 280,
    "userfaultfd": 282, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432,
    "fspick": 433, "pidfd_getfd": 438, "mount_setattr": 442, "lookup_dcookie": 18, "vhangup": 58,
    "ioprio_set": 30, "open_tree_attr": 467, "file_setattr": 469, "mq_open": 180,
}  # fmt: skip
# Answered with "no such call". The counts of watches and of asynchronous requests are the whole
# machine's or user's, and what of a file is in memory tells what others have run.
_SHARED_X86_64 = {
    "inotify_init": 253, "inotify_init1": 294, "io_setup": 206, "cachestat": 451,
}  # fmt: skip
_SHARED_AARCH64 = {"inotify_init1": 26, "io_setup": 0, "cachestat": 451}
# Access lists of files, 100 KB each, are kernel memory that no cgroup counts.
_ATTRIBUTES_X86_64 = (188, 189, 190, 463)  # setxattr, lsetxattr, fsetxattr, setxattrat
_ATTRIBUTES_AARCH64 = (5, 6, 7, 463)
# Memory that belongs to no process.
_UNCOUNTED_X86_64 = {
    "shmget": 29, "msgget": 68, "semget": 64, "memfd_create": 319, "memfd_secret": 447,
    "vmsplice": 278,
}  # fmt: skip
_UNCOUNTED_AARCH64 = {
    "shmget": 194, "msgget": 186, "semget": 190, "memfd_create": 279, "memfd_secret": 447,
    "vmsplice": 75,
}  # fmt: skip
_FILTERED_X86_64 = {
    "clone": 56, "ioctl": 16, "socket": 41, "clone3": 435, "mmap": 9, "fcntl": 72,
    "setsockopt": 54, "setrlimit": 160, "prlimit64": 302, "mknod": 133, "mknodat": 259,
}  # fmt: skip
_FILTERED_AARCH64 = {
    "clone": 220, "ioctl": 29, "socket": 198, "clone3": 435, "mmap": 222, "fcntl": 25,
    "setsockopt": 208, "setrlimit": 164, "prlimit64": 261, "mknodat": 33,
}  # fmt: skip
# What one process may do to another of its user. Process 1, the supervisor, may be the program's
# own user and is guarded by nothing else. Of these the first argument names the process.
_OF_A_PROCESS_X86_64 = {
    "prlimit64": 302, "sched_setparam": 142, "sched_setscheduler": 144, "sched_setaffinity": 203,
    "sched_setattr": 314,
}  # fmt: skip
_OF_A_PROCESS_AARCH64 = {
    "prlimit64": 261, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
    "sched_setattr": 274,
}  # fmt: skip
# Of these the second names a process or a group, and the first says which, or that it is a user.
_PRIORITIES_X86_64 = {"setpriority": 141, "ioprio_set": 251}
_PRIORITIES_AARCH64 = {"setpriority": 140, "ioprio_set": 30}
_OF_A_USER = {"setpriority": 2, "ioprio_set": 3}
_FIRST_PROCESS = 1

_TABLES = {
    "x86_64": (
        *(0xC000003E, _DENIED_X86_64, _FILTERED_X86_64),
        *(_SHARED_X86_64, _ATTRIBUTES_X86_64, _UNCOUNTED_X86_64),
        *(_OF_A_PROCESS_X86_64, _PRIORITIES_X86_64),
    ),
    "aarch64": (
        *(0xC00000B7, _DENIED_AARCH64, _FILTERED_AARCH64),
        *(_SHARED_AARCH64, _ATTRIBUTES_AARCH64, _UNCOUNTED_AARCH64),
        *(_OF_A_PROCESS_AARCH64, _PRIORITIES_AARCH64),
    ),
}
_ENOMEM, _ENOSYS, _EPROTONOSUPPORT, _EOPNOTSUPP, _EAFNOSUPPORT = 12, 38, 93, 95, 97


# About the root of how many calls there are.
_GROUP = 10

_Step = tuple[int, int, str | None, str | None]


def build_filter(
    machine: str | None = None,
    *,
    uncounted_memory: bool = True,
    shared_kernel: bool = True,
    supervisor_only: bool = False,
) -> bytes | None:
    """The program for this machine's architecture, None where we have no table for it.

    Without `uncounted_memory` nothing can be made that holds memory and belongs to no process,
    which only a cgroup would count. `shared_kernel` is false for gVisor, whose kernel is the
    sandbox's own. With `supervisor_only` nothing is refused but what would reach process 1, the
    supervisor.
    """
    table = _TABLES.get(machine or platform.machine())
    if table is None:
        return None
    architecture, denied, filtered, shared, attributes, uncounted, of_a_process, priorities = table
    deny, allow, kill, no_such_call = "deny", "allow", "kill", "no_such_call"
    no_such_family, no_such_protocol = "no_such_family", "no_such_protocol"
    no_memory, not_supported, pretend = "no_memory", "not_supported", "pretend"
    # Each step: (operation, operand, where to go if true, where if false); None is the next step.
    steps: list[_Step] = [
        (_LOAD, _ARCHITECTURE, None, None),
        (_JUMP_EQUAL, architecture, None, kill),
        (_LOAD, _NUMBER, None, None),
    ]
    if machine_has_x32(architecture):
        steps.append((_JUMP_GREATER_EQUAL, _X32_BIT, kill, None))
    blocks: dict[str, list[_Step]] = {
        **{
            name: [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_EQUAL, _FIRST_PROCESS, deny, allow),
            ]
            for name in of_a_process
        },
        **{
            name: [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_EQUAL, _OF_A_USER[name], deny, None),
                (_LOAD, _SECOND_ARGUMENT, None, None),
                (_JUMP_EQUAL, _FIRST_PROCESS, deny, allow),
            ]
            for name in priorities
        },
    }
    numbers = {**filtered, **of_a_process, **priorities}
    # Where to go for a call; what comes first holds.
    calls: dict[int, str] = {}
    if not supervisor_only:
        # glibc falls back to clone, whose flags can be read; those of clone3 are behind a pointer.
        missing = [filtered["clone3"]]
        if shared_kernel:
            missing += shared.values()
        if not uncounted_memory:
            missing += uncounted.values()
        calls |= dict.fromkeys(missing, no_such_call)
        if shared_kernel:
            calls |= dict.fromkeys(attributes, not_supported)
        for number in denied.values():
            calls.setdefault(number, deny)
        blocks |= {
            "clone": [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_ANY_BIT, _NEW_NAMESPACES, deny, allow),
            ],
            "ioctl": [
                (_LOAD, _SECOND_ARGUMENT, None, None),
                *((_JUMP_EQUAL, request, deny, None) for request in _MARK_FILES),
                (_JUMP_EQUAL, _TIOCSTI, deny, None),
                (_JUMP_EQUAL, _TIOCLINUX, deny, allow),
            ],
            "socket": [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_EQUAL, _UNIX, allow, None),
                (_JUMP_EQUAL, _INET, allow, None),
                (_JUMP_EQUAL, _INET6, allow, None),
                (_JUMP_EQUAL, _NETLINK, None, no_such_family),
                # What lists addresses. Another one hears of the machine's devices.
                (_LOAD, _THIRD_ARGUMENT, None, None),
                (_JUMP_EQUAL, 0, allow, no_such_protocol),
            ],
            "fcntl": [
                (_LOAD, _SECOND_ARGUMENT, None, None),
                *([(_JUMP_EQUAL, _F_SETPIPE_SZ, deny, None)] if not uncounted_memory else []),
                (_JUMP_EQUAL, _F_SETLEASE, deny, None),
                (_JUMP_EQUAL, _F_NOTIFY, deny, allow),
            ],
            "mmap": [
                (_LOAD, _FOURTH_ARGUMENT, None, None),
                # Huge pages are set aside for somebody on this machine.
                (_JUMP_ANY_BIT, _MAP_HUGETLB, no_memory, allow if uncounted_memory else None),
                *(
                    [
                        (_JUMP_ANY_BIT, _MAP_ANONYMOUS, None, allow),
                        (_JUMP_ANY_BIT, _MAP_SHARED, no_memory, allow),
                    ]
                    if not uncounted_memory
                    else []
                ),
            ],
            # gVisor lets anybody make a device, and open those that it has.
            **{
                name: [
                    (_LOAD, mode, None, None),
                    (_JUMP_ANY_BIT, _DEVICE, deny, allow),
                ]
                for name, mode in (("mknod", _SECOND_ARGUMENT), ("mknodat", _THIRD_ARGUMENT))
                if name in filtered
            },
            # A crash has the machine's own handler of core dumps do nothing at a limit of 1 only.
            "setrlimit": [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_EQUAL, _RLIMIT_CORE, pretend, allow),
            ],
            "prlimit64": [
                (_LOAD, _FIRST_ARGUMENT, None, None),
                (_JUMP_EQUAL, _FIRST_PROCESS, deny, None),
                (_LOAD, _SECOND_ARGUMENT, None, None),
                (_JUMP_EQUAL, _RLIMIT_CORE, None, allow),
                (_LOAD, _THIRD_ARGUMENT, None, None),
                (_JUMP_EQUAL, 0, None, pretend),
                (_LOAD, _THIRD_UPPER, None, None),
                (_JUMP_EQUAL, 0, allow, pretend),
            ],
        }
        if not uncounted_memory:
            blocks["setsockopt"] = [
                (_LOAD, _SECOND_ARGUMENT, None, None),
                (_JUMP_EQUAL, _SOL_SOCKET, None, allow),
                (_LOAD, _THIRD_ARGUMENT, None, None),
                *((_JUMP_EQUAL, option, pretend, None) for option in _BUFFER_SIZES),
                (_RETURN, _ALLOW, None, None),
            ]
    for name in blocks:
        calls.setdefault(numbers[name], name)
    groups = _groups(calls, allow)
    steps += [(_JUMP_GREATER_EQUAL, first, f"from {first}", None) for first in reversed(groups)]
    # What nothing was said of.
    steps.append((_RETURN, _ALLOW, None, None))
    blocks = {
        **{f"from {first}": group for first, group in groups.items()},
        **blocks,
        allow: [(_RETURN, _ALLOW, None, None)],
        deny: [(_RETURN, _ERRNO | EPERM, None, None)],
        no_such_family: [(_RETURN, _ERRNO | _EAFNOSUPPORT, None, None)],
        no_such_protocol: [(_RETURN, _ERRNO | _EPROTONOSUPPORT, None, None)],
        no_such_call: [(_RETURN, _ERRNO | _ENOSYS, None, None)],
        not_supported: [(_RETURN, _ERRNO | _EOPNOTSUPP, None, None)],
        no_memory: [(_RETURN, _ERRNO | _ENOMEM, None, None)],
        pretend: [(_RETURN, _ERRNO, None, None)],
        kill: [(_RETURN, _KILL, None, None)],
    }
    labels = {}
    for name, block in blocks.items():
        labels[name] = len(steps)
        steps += block
    program = b""
    for index, (operation, operand, if_true, if_false) in enumerate(steps):
        jumps = [labels[to] - index - 1 if to else 0 for to in (if_true, if_false)]
        program += struct.pack("<HBBI", operation, *jumps, operand)
    return program


def build_profile(machine: str | None = None) -> dict[str, Any] | None:
    """The filter as runc and crun load it before the first process, where that is not our code.

    They know calls by name. Watches are left to the guest's own filter, as it opens one before
    that; what would reach the first process is its own affair. None where there is no table.
    """
    table = _TABLES.get(machine or platform.machine())
    if table is None:
        return None
    families = set(range(_FAMILIES)) - {_UNIX, _INET, _INET6, _NETLINK}
    spaces = [1 << bit for bit in range(32) if _NEW_NAMESPACES >> bit & 1]
    core = _argument(1, _RLIMIT_CORE)
    given = {"index": 2, "value": 0, "op": "SCMP_CMP_NE"}
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": [f"SCMP_ARCH_{(machine or platform.machine()).upper()}"],
        "syscalls": [
            _refuse(EPERM, table[1]),
            _refuse(_ENOSYS, ["clone3", "io_setup", "cachestat"]),
            _refuse(_EOPNOTSUPP, ["setxattr", "lsetxattr", "fsetxattr", "setxattrat"]),
            *(_refuse(EPERM, ["clone"], _argument(0, space, space)) for space in spaces),
            *(
                _refuse(EPERM, ["ioctl"], _argument(1, request))
                for request in (*_MARK_FILES, _TIOCSTI, _TIOCLINUX)
            ),
            *(
                _refuse(_EAFNOSUPPORT, ["socket"], _argument(0, family))
                for family in sorted(families)
            ),
            _refuse(_EPROTONOSUPPORT, ["socket"], _argument(0, _NETLINK), given),
            *(
                _refuse(EPERM, ["fcntl"], _argument(1, command))
                for command in (_F_SETLEASE, _F_NOTIFY)
            ),
            _refuse(_ENOMEM, ["mmap"], _argument(3, _MAP_HUGETLB, _MAP_HUGETLB)),
            _refuse(0, ["setrlimit"], _argument(0, _RLIMIT_CORE)),
            _refuse(0, ["prlimit64"], core, given),
        ],
    }


def _refuse(error: int, names: Iterable[str], *arguments: dict[str, Any]) -> dict[str, Any]:
    refused = {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": error}
    return {**refused, "args": list(arguments)}


def _argument(index: int, value: int, mask: int = 0xFFFFFFFF) -> dict[str, Any]:
    """The kernel reads 32 bits of it, whatever the others are."""
    return {"index": index, "value": mask, "valueTwo": value, "op": "SCMP_CMP_MASKED_EQ"}


def _groups(calls: dict[int, str], otherwise: str) -> dict[int, list[_Step]]:
    """The calls by the first number of their group, each with where to go for them.

    A program is as many steps long as it has calls, and gVisor goes through it for every call that
    there is whenever it is loaded: that took longer than all else that a run's start asks of it.
    """
    numbers = sorted(calls)
    parts = [numbers[start : start + _GROUP] for start in range(0, len(numbers), _GROUP)]
    return {
        part[0]: [
            (_JUMP_EQUAL, number, calls[number], otherwise if number == part[-1] else None)
            for number in part
        ]
        for part in parts
    }


def machine_has_x32(architecture: int) -> bool:
    """x86-64 has a second set of numbers for the same calls, which would slip past the list."""
    return architecture == _TABLES["x86_64"][0]
