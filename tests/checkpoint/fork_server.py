"""Runs the command in children of one warm process, so that a run costs a fraction of a second and not the imports.

Reads one JSON object a line: {"argv": [...], "out": FILE} starts a child and answers its pid; {"wait": PID} answers its
exit code, or minus the signal that ended it. `fault` arms the preloaded shim (see fault.c), `code` is run in the child
first, `file_bytes` limits the size of its files, `env` is set in it.
"""

import ctypes
import gc
import json
import os
import platform
import resource
import signal
import sys
import time
import traceback

import torch


def child(request):
    out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 99
    try:
        gc.unfreeze = lambda: None  # or the first step looks through all that the server has imported
        torch.set_num_threads(1)  # mends torch's pool after the fork; two threads that found it broken would race to
        os.environ.update(request.get("env", {}))
        if "file_bytes" in request:
            resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_bytes"],) * 2)
        exec(request.get("code", ""), {})
        if "fault" in request:
            path, nth, action = request["fault"]
            ctypes.CDLL(None).fault_arm(path.encode(), ctypes.c_long(nth), action)
        code = main([str(word) for word in request["argv"]])
        if "fault" in request:
            print("calls", ctypes.CDLL(None).fault_calls())
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid):
    deadline = time.monotonic() + 40
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGABRT)  # not a signal that a test sends: a child that hangs is a failure
            deadline += 60
        time.sleep(0.002)


def serve():
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = wait(request["wait"])
        else:
            answer = os.fork()
            if answer == 0:
                child(request)
        os.write(answers, f"{answer}\n".encode())


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(platform.machine() != "aarch64")  # as in conftest.py
    from penstock.command.cli import main

    assert main(json.loads(sys.argv[1])) == 0, "the run that warms everything up"
    gc.freeze()  # or a child that looks for garbage copies every page it looks at
    os.write(answers, b"0\n")
    serve()
