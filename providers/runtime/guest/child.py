"""The process user code runs in: its descriptors, its limits, and the runner of its language."""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import os
import resource
import sys

from . import python_runner, wire
from .job import enter_folder, free_name, limit_cpu_time, write_files
from .kernel import become, forbid_message_queues, keep_apart, open_to_kin

# By STOP a context of JavaScript hears which of its runs is to stop.
JOB, REPORT, STOP = 3, 4, 5
# How a child ends that could not become one; by the second, for want of processes and the like.
FAILED, EXHAUSTED = 71, 72

# Below which number a context of a shell has its own two.
SHELL_DESCRIPTORS = 252

# A crash with a limit of 0 still starts the machine's handler where core dumps are piped to one.
# At 1 byte the kernel does nothing (do_coredump in fs/coredump.c).
NO_CORE = 1
# What is counted per user over the whole machine where the kernel is shared: waiting signals and
# timers. `resource` has no name for it before Python 3.13.
_RLIMIT_SIGPENDING, _SIGNALS = 11, 1024


def become_child(
    template: "dict[str, object]", job: int, report: int, stdout: int, stderr: int, stop: int = -1
) -> None:
    """Turn this freshly forked process into the child. Never returns.

    Nothing of the supervisor's stays open: the channel to the host is closed here.
    """
    code = FAILED
    try:
        # A process group of its own: a signal to the one we were born into would reach others.
        os.setsid()
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # The supervisor has their numbers taken, so that no pipe can have another's.
        is_program = template["language"] == "nodejs"
        os.dup2(job, JOB, inheritable=is_program)
        os.dup2(report, REPORT, inheritable=is_program)
        if stop >= 0:
            os.dup2(stop, STOP, inheritable=True)
        os.closerange((REPORT if stop < 0 else STOP) + 1, 1024)
        confine(template)
        language = template["language"]
        if language == "python":
            python_runner.serve(JOB, REPORT, template)
        elif language == "nodejs":
            # It cannot do so itself when it becomes a context.
            keep_apart()
            _exec(template["command"])  # type: ignore[arg-type]
        else:
            _serve_program(template)
    except BaseException as error:
        code = EXHAUSTED if wire.is_exhaustion(error) else FAILED
        os.write(2, f"the sandbox's runner failed: {error!r}\n".encode())
    finally:
        os._exit(code)


def confine(template: "dict[str, object]") -> None:
    """Be the program's user, within the limits of a program. Raises OSError."""
    if template["uid"] is not None:
        become(template["uid"], template.get("group"))  # type: ignore[arg-type]
    open_to_kin()
    for kind, bound in template["bounds"]:  # type: ignore[attr-defined]
        resource.setrlimit(kind, (bound, bound))
    forbid_message_queues()


def bounds(limits: "dict[str, int | None]") -> "list[tuple[int, int]]":
    """What to set of a template's limits: those that are not in force here already."""
    found = []
    for kind, bound in (
        (resource.RLIMIT_CORE, NO_CORE),
        (_RLIMIT_SIGPENDING, _SIGNALS),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_DATA, limits["data_bytes"]),
    ):
        if bound is None:
            continue
        now, most = resource.getrlimit(kind)
        if most != resource.RLIM_INFINITY:
            bound = min(bound, most)
        if (now, most) != (bound, bound):
            found.append((kind, bound))
    return found


def _exec(command: "list[str]") -> None:
    # Python ignores SIGPIPE and SIGXFSZ; a program that is not Python expects the defaults.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
    os.execve(command[0], command, os.environ)


def _serve_program(template: "dict[str, object]") -> None:
    wire.write_all(REPORT, wire.pack({"type": "ready"}, []))
    frame = wire.read_frame(JOB, wire.Parser(sys.maxsize))
    if frame is None:
        os._exit(0)
    header, parts = frame
    if header.get("type") == "context":
        _be_shell_context(template, header, parts)
    os.closerange(JOB, REPORT + 1)
    program = free_name(str(template["program"]), parts)
    write_files(parts)
    with open(program, "wb") as file:
        file.write(parts["code"])
    os.environ.update(header["environment"])  # type: ignore[call-overload]
    if "arguments" in parts:
        os.environ["ARGUMENTS"] = parts["arguments"].decode()
    limit_cpu_time(float(header["timeout"]))  # type: ignore[arg-type]
    _exec([*template["command"], program])  # type: ignore[misc]


def _be_shell_context(
    template: "dict[str, object]", header: "dict[str, object]", parts: "dict[str, bytes]"
) -> None:
    keep_apart()
    os.environ.update(header["environment"])  # type: ignore[call-overload]
    enter_folder(str(header["cwd"]))
    # Scripts use the first ones themselves.
    job = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], SHELL_DESCRIPTORS) - 2
    os.dup2(JOB, job)
    os.dup2(REPORT, job + 1)
    os.closerange(JOB, REPORT + 1)
    shell: "list[str]" = template["command"]  # type: ignore[assignment]
    text = parts["runner"].decode()
    options = ("--norc", "--noprofile", "-c")
    _exec([*shell, *options, text, "bash", str(job), str(job + 1), ""])
