"""Streams, lanes, marks and threads that check happens-before for every byte that is read or written.

Work of a lane runs when it is enqueued, and that of a thread at once, or, of a `late` one, when somebody waits for it;
so results are right whatever the waits say. What is checked is whether they would be right on a device: every host
thread and every stream has a vector clock, which marks, futures and locks carry from one to the other. An operation of
torch is an access of the stream or thread in which it would run; two accesses of the same bytes, one of them a write,
of which neither happened before the other, are a race. So is memory that is given back to the allocator while another
stream than its own may still work with it.

A wait can be left out, by the place in the source from which it is called: see `tests/offload/test_waits.py`.
"""

import sys
from collections import defaultdict
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import penstock
from penstock.flow.arena import Arena
from penstock.flow.lanes import Lane, Mark, Streams
from penstock.flow.transfers import Link

SOURCE = str(Path(penstock.__file__).parent)
MAIN_THREAD, MAIN_STREAM = "main thread", "main stream"


class Race(AssertionError):
    """Two accesses of which neither happened before the other."""


class Access:
    """Bytes of a storage, who touched them, and when by its own clock."""

    def __init__(self, start, end, who, time, writes, op):
        self.start, self.end, self.who, self.time, self.writes, self.op = start, end, who, time, writes, op


class Memory:
    """What is known of one storage."""

    def __init__(self, storage, owner):
        self.reference, self.owner = StorageWeakRef(storage), owner
        self.size, self.accesses, self.users, self.on_host = storage.nbytes(), [], set(), False


class Everybody(set):
    def __contains__(self, who):
        return True


class Checker(TorchDispatchMode):
    """Vector clocks and accesses. `left_out`: the site of a wait that does nothing; `sites`: those reached."""

    def __init__(self, left_out=None, *, ready=True, late=False):
        super().__init__()
        self.left_out, self.ready, self.late, self.sites = left_out, ready, late, set()
        self.threads = []
        self.clocks = defaultdict(lambda: defaultdict(int))
        self.thread, self.stream = MAIN_THREAD, MAIN_STREAM
        self.memory = {}

    # --- who happens before whom

    def join(self, who, clock):
        """Everything that `clock` has seen happened before what `who` does from now on."""
        own = self.clocks[who]
        for other, time in clock.items():
            own[other] = max(own[other], time)

    def snapshot(self, who):
        return dict(self.clocks[who])

    def waits(self, kind):
        """Whether the wait that is being called does anything."""
        site = _site(kind)
        self.sites.add(site)
        return site != self.left_out

    @contextmanager
    def running(self, thread=None, stream=None):
        before = self.thread, self.stream
        self.thread, self.stream = thread or self.thread, stream
        try:
            yield
        finally:
            self.thread, self.stream = before

    # --- accesses

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._check_freed()
        returns = func._schema.returns
        if any(r.alias_info is not None and not r.alias_info.is_write for r in returns):
            return result  # a view: nothing is read or written
        given = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        places = {self._memory_of(tensor).on_host for tensor in given if tensor.numel()}
        who = self.thread if places == {True} else self.stream or self.thread
        self.join(who, self.clocks[self.thread])  # it is enqueued by this thread
        self.clocks[who][who] += 1
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                self._access(tensor, who, writes, func)
        for name, value in (kwargs or {}).items():
            for tensor in tree_leaves(value):
                self._access(tensor, who, name == "out", func)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and places == {True}:
                self._memory_of(tensor, who).on_host = True
            if "empty" not in func.__name__:
                self._access(tensor, who, True, func)
            elif isinstance(tensor, torch.Tensor):
                self._memory_of(tensor)
        if who == MAIN_STREAM and (len(places) == 2 or "_local_scalar_dense" in func.__name__):
            self.join(self.thread, self.clocks[who])  # torch waits for a copy that is not asynchronous
        return result

    def _memory_of(self, tensor, owner=None):
        storage = tensor.untyped_storage()
        found = self.memory.get(storage.data_ptr())
        if found is None or found.reference.expired():
            owner = owner or self.stream or self.thread
            found = self.memory[storage.data_ptr()] = Memory(storage, owner)
            # It may have been something else of its owner's until here.
            found.accesses.append(Access(0, found.size, owner, self.clocks[owner][owner], True, "allocation"))
        return found

    def _access(self, tensor, who, writes, op):
        if not isinstance(tensor, torch.Tensor) or not tensor.numel():
            return
        memory = self._memory_of(tensor, who)
        start = tensor.storage_offset() * tensor.itemsize
        span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + (span + 1) * tensor.itemsize
        seen, kept = self.clocks[who], []
        for other in memory.accesses:
            if other.who == who or other.end <= start or end <= other.start or not (writes or other.writes):
                pass
            elif seen[other.who] < other.time:
                how = ["reads", "writes"]
                raise Race(f"{who} {how[writes]} ({op}) what {other.who} {how[other.writes]} ({other.op})")
            if not (writes and start <= other.start and other.end <= end):  # else this access stands for it
                kept.append(other)
        kept.append(Access(start, end, who, self.clocks[who][who], writes, op))
        memory.accesses = kept

    def _check_freed(self):
        # Asked of all storages after every operation: StorageWeakRef.expired, three calls deep, took a third of a test.
        expired = torch.UntypedStorage._expired
        for address in [address for address, memory in self.memory.items() if expired(memory.reference.cdata)]:
            memory = self.memory.pop(address)
            self.join(memory.owner, self.clocks[self.thread])
            seen = self.clocks[memory.owner]
            for access in memory.accesses:
                if access.who != memory.owner and access.who not in memory.users and seen[access.who] < access.time:
                    raise Race(f"{memory.owner} gets memory back that {access.who} still uses ({access.op})")

    def uses(self, who, tensor):
        memory = self._memory_of(tensor)
        if not memory.on_host:  # of arenas no allocator knows
            memory.users.add(who)


def _site(kind):
    """Where in the source a wait is called from: the nearest line, and the nearest outside of `flow/`."""
    frame, found = sys._getframe(2), []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if name.startswith(SOURCE) and (not found or "/flow/" not in name):
            found.append(f"{name[len(SOURCE) + 1 :]}:{frame.f_lineno}")
            if "/flow/" not in name:
                break
        frame = frame.f_back
    return (kind, *found)


class CheckedMark(Mark):
    """Carries a clock."""

    def __init__(self, checker, clock):
        super().__init__()
        self._checker, self.clock, self._passed = checker, clock, checker.ready

    def ready(self):
        return self._passed

    def wait_on_host(self):
        self._passed = True
        if self._checker.waits("wait_on_host"):
            self._checker.join(self._checker.thread, self.clock)


def clock_of(mark):
    return getattr(mark, "clock", {})  # a plain mark has always been passed


class CheckedLane(Lane):
    """A stream with a clock."""

    def __init__(self, name, checker, number, timeline):
        super().__init__(name, timeline)
        self._checker, self._who = checker, f"{name} {number}"

    @contextmanager
    def work(self, label=None):
        with self._checker.running(stream=self._who), self._timeline.on_device(label or self.name):
            yield

    def current(self):
        return self._checker.running(stream=self._who)

    def mark(self):
        self._checker.join(self._who, self._checker.clocks[self._checker.thread])
        return CheckedMark(self._checker, self._checker.snapshot(self._who))

    def wait(self, mark):
        if self._checker.waits("wait"):
            self._checker.join(self._who, clock_of(mark))

    def uses(self, tensor):
        if self._checker.waits("uses"):
            self._checker.uses(self._who, tensor)


class CheckedLock:
    """Who takes it goes on after all who had it before."""

    def __init__(self, checker):
        self._checker, self._clock = checker, {}

    def __enter__(self):
        self._checker.join(self._checker.thread, self._clock)

    def __exit__(self, *_):
        self._clock = self._checker.snapshot(self._checker.thread)


class CheckedThread(Executor):
    """A thread with a clock."""

    def __init__(self, name, checker):
        self._who, self._checker, self._queue, self._busy = name, checker, [], False
        checker.threads.append(self)

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        given = self._checker.snapshot(self._checker.thread)
        self._queue.append((future, given, lambda: fn(*args, **kwargs)))
        if not self._checker.late:
            self.run_one()
        return future

    def run_one(self):
        """Run the first that waits, unless the thread is at work already; whether it did."""
        if not self._queue or self._busy:
            return False
        self._busy = True
        future, given, work = self._queue.pop(0)
        self._checker.join(self._who, given)
        with self._checker.running(thread=self._who):
            try:
                result = work()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._busy = False
        return True

    def shutdown(self, wait=True, *, cancel_futures=False):
        while self.run_one():
            pass
        self._checker.join(self._checker.thread, self._checker.clocks[self._who])


class CheckedStreams(Streams):
    """Of a device that is apart from the host."""

    separate_memory = True

    def __init__(self, checker):
        self._checker, self._count = checker, 0
        super().__init__(torch.device("cpu"))

    def lane(self, name, *, urgent=False):
        self._count += 1
        return CheckedLane(name, self._checker, self._count, self.timeline)

    def thread(self, name):
        self._count += 1
        return CheckedThread(f"{name} {self._count}", self._checker)

    def main_mark(self):
        self._checker.join(MAIN_STREAM, self._checker.clocks[self._checker.thread])
        return CheckedMark(self._checker, self._checker.snapshot(MAIN_STREAM))

    def main_waits(self, mark):
        if self._checker.waits("main_waits"):
            self._checker.join(MAIN_STREAM, clock_of(mark))

    def main_uses(self, tensor):
        if self._checker.waits("main_uses"):
            self._checker.uses(MAIN_STREAM, tensor)

    def to_host(self, tensor):
        found = super().to_host(tensor)
        memory = self._checker._memory_of(found._values)
        memory.on_host, memory.users = True, Everybody()  # torch's allocator of pinned memory knows who uses it
        return found

    def synchronize(self):
        if self._checker.waits("synchronize"):
            for who in list(self._checker.clocks):
                self._checker.join(self._checker.thread, self._checker.clocks[who])


@contextmanager
def checked(monkeypatch, **how):
    """Inside, optimizers are made with checked streams, kernels are torch's, and every access is checked."""
    checker = Checker(**how)
    set_result, set_exception, result, exception, cut = (
        Future.set_result, Future.set_exception, Future.result, Future.exception, Arena.cut,
    )  # fmt: skip

    def given(write):
        def set_value(future, value):
            future.clock = checker.snapshot(checker.thread)
            write(future, value)

        return set_value

    def joined(read):
        def wait(future, timeout=None):
            while not future.done():
                assert any(thread.run_one() for thread in checker.threads), "nobody works on it"
            value = read(future, timeout)
            checker.join(checker.thread, getattr(future, "clock", {}))
            return value

        return wait

    def cut_from_arena(arena, num_bytes):
        piece = cut(arena, num_bytes)
        memory = checker._memory_of(piece)
        memory.on_host, memory.owner = True, MAIN_THREAD  # which gives it back to the system
        return piece

    with monkeypatch.context() as patch:
        patch.setattr("penstock.flow.transfers.threading", SimpleNamespace(Lock=lambda: CheckedLock(checker)))
        link = Link(CheckedStreams(checker))
        patch.setattr(Future, "set_result", given(set_result))
        patch.setattr(Future, "set_exception", given(set_exception))
        patch.setattr(Future, "result", joined(result))
        patch.setattr(Future, "exception", joined(exception))
        patch.setattr(Arena, "cut", cut_from_arena)
        for module in ("host_threads", "adamw"):
            patch.setattr(f"penstock.update.{module}.host_library", lambda: None)
        # The same accesses in one operation.
        patch.setattr("penstock.update.norm.span_sums", lambda values, out: out.copy_(values.double().square().sum()))
        patch.setattr("penstock.offload.optimizer.link_of", lambda device: link)
        with checker:
            yield checker
