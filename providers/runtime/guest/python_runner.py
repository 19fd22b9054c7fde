"""Runs Python code in this process, which waits for its job with everything already warm."""

import gc
import os
import sys
import time

from . import display, ending, network, preload, printing, program, wire
from .job import free_name, lend_artifacts, limit_cpu_time, write_files

# The program may replace what is in `os`, and would come back to whoever called us.
_exit = os._exit


def prepare() -> None:
    """What is the same for every child, done once before the first is forked."""
    sys.stdin = open(0, closefd=False)
    printing.open_streams()
    preload.set_environment()


def serve(job: int, report: int, template: "dict[str, object]") -> None:
    """Rehearse, say so, wait for the one job, run it, report, and end the process."""
    preload.reseed()
    outputs = display.Outputs(report)
    outputs.open()
    _rehearse(outputs)
    wire.write_all(report, wire.pack({"type": "ready"}, []))
    if not template.get("once"):
        preload.use_the_wait(job)
    frame = wire.read_frame(job, wire.Parser(sys.maxsize))
    if frame is None:
        os._exit(0)
    header, parts = frame
    del frame
    if header.get("type") == "context":
        # Only here: a single run does not pay for it.
        from . import python_context

        python_context.serve(job, outputs, header, advised=bool(template["advise"]))
    os.close(job)
    environment: "dict[str, str]" = header["environment"]  # type: ignore[assignment]
    os.environ.update(environment)
    if "TZ" in environment:
        time.tzset()
    limit_cpu_time(float(header["timeout"]))  # type: ignore[arg-type]
    _choose_file(parts)
    _complete_sys_path()
    if network.is_open(environment):
        preload.find_own_packages(makes_folder=True)
    lend_artifacts()
    write_files(parts)
    _write_program(parts["code"])
    if template["advise"]:
        # Before anything of the program runs, which could write the like.
        from . import advice

        found = advice.remarks(parts["code"].decode())
        outputs.report(wire.pack({"type": "advice", "remarks": found}, []))
    outputs.allow(int(header["rich_output_bytes"]))  # type: ignore[call-overload]
    # What was loaded while nobody waited is of no interest to a look through all objects.
    gc.freeze()
    end = ending.Ending()
    exit_code, result = program.run(
        parts["code"].decode(),
        str(header["entrypoint"]),
        parts.get("arguments"),
        int(header["result_bytes"]),  # type: ignore[call-overload]
        outputs,
    )
    outputs.finish()
    exit_code = ending.run_exit_functions(exit_code)
    reported = outputs.parts_of_end(result)
    # A child that the program forked and that runs on to here reports nothing.
    if end.is_needed():
        outputs.report(wire.pack({"type": "ending", "exit_code": exit_code}, reported))
        end.release()
        reported = []
    outputs.report(wire.pack({"type": "done", "exit_code": exit_code}, reported))
    _exit(exit_code)


def _rehearse(outputs: display.Outputs) -> None:
    """Go the whole way once, so that no page of it is touched first by a caller's code."""
    wire.loads(wire.dumps({"a": [1, None]}))
    end = ending.Ending()
    program.run("len('warm')", "script", None, 0, outputs)
    outputs.finish()
    end.is_needed()
    end.release()


def _choose_file(parts: "dict[str, bytes]") -> None:
    """Have another name for the program's file where its caller has sent one of that name."""
    program.FILE = free_name("main.py", parts)


def _write_program(code: bytes) -> None:
    # `open()` would make three more system calls.
    fd = os.open(program.FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    wire.write_all(fd, code)
    os.close(fd)


def _complete_sys_path() -> None:
    preload.load_site()
    sys.path.insert(0, os.getcwd())
    sys.argv[:] = [program.FILE]
