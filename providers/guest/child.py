"""The process user code runs in: its descriptors, its limits, and the runner of its language."""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without enum
import os
import resource
import sys

from . import python_runner, wire
from .job import limit_cpu_time, write_files
from .kernel import become, forbid_message_queues, open_to_kin

JOB, REPORT = 3, 4


def become_child(
    template: "dict[str, object]", job: int, report: int, stdout: int, stderr: int
) -> None:
    """Turn this freshly forked process into the child. Never returns.

    Nothing of the supervisor's stays open: the channel to the host is closed here.
    """
    try:
        # A process group of its own: a signal to the one we were born into would reach others.
        os.setsid()
        _signal.set_wakeup_fd(-1)
        _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        # Twice, because one of the two may have the other's final number.
        job, report = os.dup(job), os.dup(report)
        os.dup2(job, JOB)
        os.dup2(report, REPORT)
        os.set_inheritable(JOB, True)
        os.set_inheritable(REPORT, True)
        os.closerange(REPORT + 1, 1024)
        if template["uid"] is not None:
            become(template["uid"])  # type: ignore[arg-type]
        open_to_kin()
        _bound_resources(template["limits"])  # type: ignore[arg-type]
        language = template["language"]
        if language == "python":
            python_runner.serve(JOB, REPORT, template)
        elif language == "nodejs":
            _exec(template["command"])  # type: ignore[arg-type]
        else:
            _serve_shell(template)
    except BaseException as error:
        os.write(2, f"the sandbox's runner failed: {error!r}\n".encode())
    finally:
        os._exit(71)


def _bound_resources(limits: "dict[str, int | None]") -> None:
    for kind, bound in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_NPROC, limits["processes"]),
        (resource.RLIMIT_DATA, limits["data_bytes"]),
    ):
        if bound is None:
            continue
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            bound = min(bound, most)
        resource.setrlimit(kind, (bound, bound))
    forbid_message_queues()


def _exec(command: "list[str]") -> None:
    # Python ignores SIGPIPE and SIGXFSZ; a program that is not Python expects the defaults.
    _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
    _signal.signal(_signal.SIGXFSZ, _signal.SIG_DFL)
    os.execve(command[0], command, os.environ)


def _serve_shell(template: "dict[str, object]") -> None:
    wire.write_all(REPORT, wire.pack({"type": "ready"}, []))
    frame = wire.read_frame(JOB, wire.Parser(sys.maxsize))
    if frame is None:
        os._exit(0)
    header, parts = frame
    os.closerange(JOB, REPORT + 1)
    write_files(parts)
    with open("main.sh", "wb") as file:
        file.write(parts["code"])
    if "arguments" in parts:
        os.environ["ARGUMENTS"] = parts["arguments"].decode()
    limit_cpu_time(float(header["timeout"]))  # type: ignore[arg-type]
    _exec([*template["command"], "main.sh"])  # type: ignore[misc]
