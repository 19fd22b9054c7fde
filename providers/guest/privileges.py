"""Make the supervisor unreadable and unprivileged before any user code exists."""

import os

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4


def become(uid: int) -> None:
    """Be `uid` for good, with no group but its own and no capability."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def close_to_others() -> None:
    """Become non-dumpable: no other process of this user can read or trace this one.

    A change of user id has that effect by itself, unless the machine's `fs.suid_dumpable` is 1.
    Raises RuntimeError when the process is still dumpable.
    """
    if os.stat("/proc/self/mem").st_uid != os.geteuid():
        return
    # ctypes costs 4 ms to import, so only where the change of user id has not done it.
    import ctypes

    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise RuntimeError("the supervisor is still dumpable")
