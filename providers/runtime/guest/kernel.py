"""The kernel's calls that Python's library has no function for."""

import ctypes
import errno
import os
import resource

NEW_MOUNT, NEW_CGROUP, NEW_UTS, NEW_IPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
NEW_USER, NEW_PID, NEW_NET = 0x10000000, 0x20000000, 0x40000000

_PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER = 3, 4, 22, 36
_SECCOMP_MODE_FILTER = 2
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_MS_REC, _MNT_DETACH = 0x4000, 2
_PIVOT_ROOT = {"x86_64": 155}
_PIVOT_ROOT_ELSEWHERE = 41
_CAPABILITY_VERSION_3 = 0x20080522
_PR_SET_NO_NEW_PRIVS, _PR_GET_NO_NEW_PRIVS = 38, 39
_MQ_OPEN = {"x86_64": 240, "aarch64": 180}
# Calls that make nodes, each with the place of its argument `mode`; devices have this bit in it.
_MAKE_NODE = {"x86_64": {133: 24, 259: 32}, "aarch64": {33: 32}}
_DEVICE = 0x2000
_IOPRIO_GET, _IOPRIO_GET_ELSEWHERE = {"x86_64": 252}, 31
_GET_MARKS, _SET_MARKS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS
_SHM_INFO, _MSG_INFO, _SEM_INFO = 14, 12, 19
# Landlock's calls have the same numbers everywhere; what it handles here is the moving of files,
# and that they are opened to read or to write where some of them are not for everybody.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_REFER, _PATH_BENEATH, _VERSION = 1 << 13, 1, 1
_OPEN_FILES = 1 << 1 | 1 << 2  # LANDLOCK_ACCESS_FS_WRITE_FILE, LANDLOCK_ACCESS_FS_READ_FILE

# Where the terminals of commands are, apart from those that programs make.
TERMINALS = "/dev/terminals"

# What a supervisor that is root needs to look after a program of another user: CHOWN, DAC_OVERRIDE,
# KILL, SETGID, SETUID.
OF_A_SUPERVISOR = 1 << 0 | 1 << 1 | 1 << 5 | 1 << 6 | 1 << 7

_CLONE, _CLONE_ELSEWHERE, _SIGCHLD = {"x86_64": 56}, 220, 17

_libc = ctypes.CDLL(None, use_errno=True)
# Without letting go of the interpreter's lock meanwhile.
_held_libc = ctypes.PyDLL(None, use_errno=True)


def _check(status: int, what: str) -> None:
    if status != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)


def unshare(namespaces: int) -> None:
    """Leave these namespaces for new ones. For NEW_PID that is true of later children only."""
    _check(_libc.unshare(namespaces), "unshare")


def fork_into(namespaces: int) -> int:
    """`os.fork()`, but the child is in these namespaces, new ones.

    Only for a process with one thread and without libraries that want to hear of a fork.

    To leave them and then to fork took a process more, whose making and ending were a tenth of
    all that a sandbox costs.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    flags = namespaces | _SIGCHLD
    pid: int = _held_libc.syscall(
        _CLONE.get(os.uname().machine, _CLONE_ELSEWHERE), flags, 0, 0, 0, 0
    )
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    _check(0 if pid > 0 else -1, "clone")
    return pid


def mount(
    kind: str,
    target: str,
    options: str,
    *,
    executable: bool = True,
    read_only: bool = False,
    devices: bool = False,
) -> None:
    """Mount a fresh file system of `kind`; set-user-id bits mean nothing on it."""
    flags = _MS_NOSUID | (0 if devices else _MS_NODEV)
    flags |= (0 if executable else _MS_NOEXEC) | (_MS_RDONLY if read_only else 0)
    arguments = (kind.encode(), target.encode(), kind.encode(), flags, options.encode())
    _check(_libc.mount(*arguments), f"mount {target}")


def bind(source: str, target: str, *, read_only: bool = False) -> None:
    """Show `source`, with what is mounted below it, at `target` as well."""
    flags = _MS_BIND | _MS_REC
    _check(_libc.mount(source.encode(), target.encode(), None, flags, None), f"bind {target}")
    if read_only:
        make_read_only(target)


def make_read_only(target: str, *, devices: bool = False) -> None:
    """See to it that nothing can be written through the mount at `target`."""
    flags = _MS_BIND | _MS_REMOUNT | _MS_RDONLY | _MS_NOSUID | (0 if devices else _MS_NODEV)
    _check(_libc.mount(None, target.encode(), None, flags, None), f"read-only {target}")


def change_root(new: str) -> None:
    """Have `new` as the root, and the old one no more."""
    os.chdir(new)
    number = _PIVOT_ROOT.get(os.uname().machine, _PIVOT_ROOT_ELSEWHERE)
    # On itself: the old root then lies over the new one, from where it is taken off.
    _check(_libc.syscall(number, b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")


def become(uid: int, group: "int | None" = None) -> None:
    """Be `uid` for good, with no group but its own and `group`, and no capability."""
    os.setgroups([] if group is None else [group])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def unmount(target: str) -> None:
    """Take off what is mounted at `target`, in this mount namespace."""
    _check(_libc.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def keep_capabilities(kept: int) -> None:
    """Have none but these any more, bits of a mask; with no-new-privileges set, for good."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted, inheritable, first for the lower 32 of them.
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)), "capset")


def drop_capabilities() -> None:
    """Have no capability any more; with no-new-privileges set, none can be regained."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")


def close_to_others() -> None:
    """Become non-dumpable: no other process of this user can read or trace this one.

    Raises RuntimeError when it had no effect.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    if _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise RuntimeError("the supervisor is still dumpable")


def open_to_kin() -> None:
    """Be dumpable again: the supervisor may measure this process, which has nothing to hide."""
    _libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def keep_apart() -> None:
    """Have this process and those it starts read, change and trace no other but themselves.

    Programs of one sandbox share a user, who may open the memory and the pipes of all that is his:
    what one of them says could be said by another in its name. A Landlock domain ends that, and
    nothing else here: it forbids to move files between folders, and all of them are allowed it.
    Terminals have names, which the user may open as well: of those in TERMINALS, where the sandbox
    has that folder, the domain may open none.
    Before Linux 5.19, under gVisor, where Landlock is switched off, and for whoever may still gain
    privileges, as without isolation, nothing happens.
    """
    rules = domain_rules()
    if rules >= 0:
        enter_domain(rules)


def domain_rules(terminal: int = -1) -> int:
    """A descriptor for the rules of domains as `keep_apart` has them, -1 where there are none.

    With `terminal`, a descriptor, one terminal of TERMINALS may be opened. Each process that enters
    has a domain of its own, so that the same rules serve many.
    """
    has_landlock = _libc.syscall(_CREATE_RULESET, None, 0, _VERSION) >= 2
    if not has_landlock or _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) != 1:
        return -1
    others = _all_but_terminals()
    handled = _REFER | (_OPEN_FILES if others else 0)
    rules: int = _libc.syscall(_CREATE_RULESET, handled.to_bytes(8, "little"), 8, 0)
    _check(min(rules, 0), "landlock_create_ruleset")
    try:
        for path, rights in (("/", _REFER), *((other, _OPEN_FILES) for other in others)):
            fd = os.open(path, os.O_PATH)
            try:
                _allow(rules, fd, rights)
            finally:
                os.close(fd)
        if others and terminal >= 0:
            _allow(rules, terminal, _OPEN_FILES)
    except BaseException:
        os.close(rules)
        raise
    return rules


def enter_domain(rules: int) -> None:
    """Have a domain of these rules from now on, and close their descriptor."""
    try:
        _check(_libc.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    finally:
        os.close(rules)


def _all_but_terminals() -> "list[str]":
    """The paths below which all files are but those in TERMINALS; none where there is no such
    folder. The root of a sandbox that has it cannot be written to, so that no path comes later."""
    if not os.path.isdir(TERMINALS):
        return []
    with os.scandir("/") as root, os.scandir(os.path.dirname(TERMINALS)) as devices:
        paths = [
            entry.path
            for entry in (*root, *devices)
            if not entry.is_symlink() and entry.path not in (os.path.dirname(TERMINALS), TERMINALS)
        ]
    # A zygote's program comes from a root that is gone.
    return [*paths, "/proc/self/exe"]


def _allow(rules: int, fd: int, rights: int) -> None:
    allowed = rights.to_bytes(8, "little") + fd.to_bytes(4, "little")
    _check(_libc.syscall(_ADD_RULE, rules, _PATH_BENEATH, allowed, 0), "landlock_add_rule")


def adopt_orphans() -> None:
    """See to it that orphans become our children. Process 1 of a namespace has them anyway."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def filter_system_calls(program: bytes) -> None:
    """Have every system call of this process and its children pass this BPF program."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]

    filled = Program(len(program) // 8, program)
    status = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filled), 0, 0)
    _check(status, "seccomp")


def forbid_message_queues() -> None:
    """See to it that this process and its children can make no POSIX message queue.

    One outlives its maker and cannot be listed, so nobody could tell whether one is left. Under
    gVisor, which lets everybody make devices, none of these can be made either.
    """
    try:
        resource.setrlimit(resource.RLIMIT_MSGQUEUE, (0, 0))
    except ValueError:
        # gVisor has no such limit, but filters system calls. Mostly that is done already, and it
        # takes 2 ms: without a filter it is the name that would be wrong.
        ctypes.set_errno(0)
        status = _libc.syscall(_MQ_OPEN[os.uname().machine], None, 0, 0, None)
        if status == -1 and ctypes.get_errno() == errno.EPERM:
            return
        allow, deny = (0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)  # deny answers EPERM
        steps = [
            (0x20, 0, 0, 0),  # load the number of the call
            (0x15, 0, 1, _MQ_OPEN[os.uname().machine]),  # is it mq_open?
            deny,
        ]
        for number, mode in _MAKE_NODE[os.uname().machine].items():
            steps += [
                (0x15, 0, 4, number),  # is it this one?
                (0x20, 0, 0, mode),  # then load its mode
                (0x45, 0, 1, _DEVICE),  # is it that of a device?
                deny,
                allow,
            ]
        steps.append(allow)
        program = b"".join(
            code.to_bytes(2, "little") + bytes((yes, no)) + value.to_bytes(4, "little")
            for code, yes, no, value in steps
        )
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        filter_system_calls(program)


def io_priority() -> int:
    """This process's class and level of input and output; -1 where there is none (gVisor)."""
    number = _IOPRIO_GET.get(os.uname().machine, _IOPRIO_GET_ELSEWHERE)
    return int(_libc.syscall(number, 1, 0))


def file_marks(path: str) -> int:
    """What `lsattr` shows of a file; 0 where its file system has no such thing, or it is closed."""
    marks = ctypes.c_long(0)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except PermissionError:
        return 0
    try:
        return marks.value if _libc.ioctl(fd, _GET_MARKS, ctypes.byref(marks)) == 0 else 0
    finally:
        os.close(fd)


def clear_file_marks(path: str) -> None:
    """Take them all off, as far as we may. Whoever compares afterwards sees whether it helped."""
    if file_marks(path):
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _libc.ioctl(fd, _SET_MARKS, ctypes.byref(ctypes.c_long(0)))
        finally:
            os.close(fd)


def shared_objects() -> int:
    """How many System V segments, queues and semaphore sets there are. Raises OSError.

    They outlive their makers. gVisor has no /proc/sysvipc, but it answers these calls.
    """
    found = 0
    for name, arguments, field in (
        ("shmctl", (0, _SHM_INFO), 0),
        ("msgctl", (0, _MSG_INFO), 0),
        ("semctl", (0, 0, _SEM_INFO), 7),
    ):
        answer = (ctypes.c_int * 64)()
        if getattr(_libc, name)(*arguments, answer) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
        found += answer[field]
    return found
