"""Runs a command with the user and the rights that a systemd unit says, where there is no systemd.

`python restricted.py UNIT [DROP-IN]... -- COMMAND`, as root. Of the unit's options these are obeyed:
User, CapabilityBoundingSet, NoNewPrivileges, MemoryDenyWriteExecute, RestrictNamespaces and
RestrictAddressFamilies. The rest is mounts and filters of systemd's own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import pwd
import struct
import sys
from pathlib import Path

PR_CAPBSET_DROP, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_MDWE = 24, 22, 38, 65
CAPABILITIES = {"CAP_DAC_OVERRIDE": 1, "CAP_SETGID": 6, "CAP_SETUID": 7, "CAP_SYS_ADMIN": 21}
LAST_CAPABILITY = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
FAMILIES = {"AF_UNIX": 1, "AF_INET": 2, "AF_INET6": 10}
NEW_NAMESPACES = 0x7E020080
# Of the kernel's tables: clone, unshare, setns, clone3, socket.
CALLS = {"x86_64": (56, 272, 308, 435, 41), "aarch64": (220, 97, 268, 435, 198)}
LOAD, JUMP_EQUAL, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
libc = ctypes.CDLL(None, use_errno=True)


def main(words: list[str]) -> None:
    cut = words.index("--")
    options: dict[str, str] = {}
    for path in words[:cut]:
        lines = Path(path).read_text().splitlines()
        options |= dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")
    if "CapabilityBoundingSet" in options:
        kept = {CAPABILITIES[name] for name in options["CapabilityBoundingSet"].split()}
        for number in set(range(LAST_CAPABILITY + 1)) - kept:
            prctl(PR_CAPBSET_DROP, number)
    user = pwd.getpwnam(options["User"])
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    if options.get("NoNewPrivileges") == "yes":
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if options.get("MemoryDenyWriteExecute") == "yes":
        prctl(PR_SET_MDWE, 1)
    if options.get("RestrictNamespaces") == "yes":
        clone, unshare, setns, clone3, _ = CALLS[platform.machine()]
        refuse([(unshare, REFUSE), (setns, REFUSE), (clone3, UNKNOWN)], clone, NEW_NAMESPACES)
    if families := options.get("RestrictAddressFamilies"):
        refuse_families([FAMILIES[name] for name in families.split()])
    os.execvp(words[cut + 1], words[cut + 1 :])


def prctl(option: int, value: int) -> None:
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option}, {value}")


def refuse(calls: list[tuple[int, int]], call: int, bits: int) -> None:
    """Refuse the calls, and `call` where its first argument has one of the bits."""
    program = [(LOAD, 0, 0, 0)]
    for number, answer in calls:
        program += [(JUMP_EQUAL, 0, 1, number), (RETURN, 0, 0, answer)]
    program += [(JUMP_EQUAL, 0, 3, call), (LOAD, 0, 0, 16)]
    program += [(JUMP_ANY_BIT, 0, 1, bits), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    install(program)


def refuse_families(allowed: list[int]) -> None:
    """Refuse sockets of all families but these."""
    program = [(LOAD, 0, 0, 0), (JUMP_EQUAL, 0, len(allowed) + 2, CALLS[platform.machine()][4])]
    program += [(LOAD, 0, 0, 16)]
    left = len(allowed)
    for family in allowed:
        program.append((JUMP_EQUAL, left, 0, family))
        left -= 1
    program += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    install(program)


def install(program: list[tuple[int, int, int, int]]) -> None:
    text = b"".join(struct.pack("<HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(text, len(text))
    head = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if libc.prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)), 0, 0):
        raise OSError(ctypes.get_errno(), "no filter could be installed")


if __name__ == "__main__":
    main(sys.argv[1:])
