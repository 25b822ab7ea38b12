"""Forks the ranks of a job out of one warm process, so that they cost a fraction of a second and not the imports.

Reads one JSON object a line: {"job": NAME, "ranks": N, "port": P, "out": DIR, "limit": SECONDS, "args": {...}}. Every
rank runs the function of that name in rank_jobs.py and leaves what it returns in DIR/RANK.pt; the answer is the list of
exit codes. A rank that is not done in time leaves in DIR/RANK.log where its threads were.
Where ranks share a GPU each is a fresh process: CUDA, which imports begin, does not survive a fork.
"""

import faulthandler
import gc
import json
import os
import signal
import sys
import time
import traceback

import torch
from quick_products import use_quick_products


def child(request, rank):
    log = os.open(f"{request['out']}/{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    code = 99
    try:
        faulthandler.enable()
        torch.set_num_threads(1)
        use_quick_products()
        ranks = str(request["ranks"])
        os.environ.update(RANK=str(rank), WORLD_SIZE=ranks, LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(request["port"]), GLOO_SOCKET_IFNAME="lo")
        result = getattr(rank_jobs, request["job"])(**request["args"])
        torch.save(result, f"{request['out']}/{rank}.pt")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pids, limit):
    """Exit codes; when one rank fails, or they are not done in time, the others are killed."""
    codes, deadline, asked = {}, time.monotonic() + limit, False
    while len(codes) < len(pids):
        for pid in pids:
            ended, status = (0, 0) if pid in codes else os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + 3) if codes[pid] else deadline
        if time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL if asked else signal.SIGABRT)
            deadline, asked = time.monotonic() + 2, True
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        import rank_jobs

        child(json.loads(sys.argv[1]), int(sys.argv[2]))
    forks = os.environ.get("PENSTOCK_SHARE_GPU") != "1"
    answers = os.dup(1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    if forks:
        import rank_jobs

    gc.freeze()  # or a child that looks for garbage copies every page it looks at
    os.write(answers, b"[]\n")
    for line in sys.stdin:
        asked = json.loads(line)
        pids = []
        for number in range(asked["ranks"]):
            pids.append(os.fork())
            if pids[-1] == 0 and forks:
                child(asked, number)
            elif pids[-1] == 0:
                os.execv(sys.executable, [sys.executable, __file__, line, str(number)])
        os.write(answers, (json.dumps(wait(pids, asked["limit"])) + "\n").encode())
