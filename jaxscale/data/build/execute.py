"""Running the tasks of a build in this process, or in several of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from ctypes import c_byte
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import cast

from jaxscale.config.errors import Fault
from jaxscale.data.build.encode import perform
from jaxscale.data.build.work import REPEATED, SEEN, Work
from jaxscale.data.progress import Progress

TOLD = {SEEN: "looking for duplicates", REPEATED: "comparing duplicates"}
"""What a stage is called while it runs; the others encode."""
PAUSE = 0.5
"""Seconds between two looks at how far the workers are."""
ENDING = 10.0
"""Seconds that workers may take to end, when all is done or one task has failed."""


def run(work: Work, workers: int, progress: Progress) -> None:
    """Do all tasks that are missing, stage by stage, at most `workers` at one time, each in a process of its own.

    One task, or one worker, is run in this process. Raises what a task raises, and Fault where a worker is killed.
    """
    for stage, count in work.plan.stages.items():
        missing = work.missing(stage)
        if not missing:
            continue
        total = work.plan.corpus_bytes
        told = Told(progress, TOLD.get(stage, "encoding"), total - _bytes_of(work, stage, missing), total)
        if min(workers, len(missing)) <= 1:
            for number in missing:
                perform(work, stage, number, told.advance)
        else:
            _in_processes(work, stage, missing, min(workers, count), told)
        told.advance(total)  # of damaged files less was read


def usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class Told:
    """Passes on to `progress` how many bytes of the corpus are done."""

    def __init__(self, progress: Progress, what: str, done: int, total: int) -> None:
        self._progress, self._what, self._done, self._total = progress, what, done, total

    def advance(self, read: int) -> None:
        """So many bytes more are done; never told are more than there are."""
        self._done = min(self._done + read, self._total)
        self._progress(self._what, self._done, self._total)


def _bytes_of(work: Work, stage: str, numbers: Sequence[int]) -> int:
    """Bytes of the corpus that these tasks read."""
    if stage == REPEATED:
        return work.plan.corpus_bytes * len(numbers) // work.plan.stages[REPEATED]
    return sum(part.end - part.start for number in numbers for part in work.plan.tasks[number])


def _in_processes(work: Work, stage: str, missing: Sequence[int], workers: int, told: Told) -> None:
    context = multiprocessing.get_context("forkserver")  # plain forks of a process with threads may hang
    # A worker may be killed while it holds a lock, so this process takes none that it shares with them.
    read: Synchronized[int] = context.Value("q", 0)
    stop = context.Value("b", False, lock=False)
    threads, others = max(1, usable_cpus() // workers), set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, context, initializer=_begin, initargs=(work.folder, read, stop, threads))
    try:
        waiting: set[Future[None]] = {pool.submit(_perform, stage, number) for number in missing}
        told_of = 0
        while waiting:
            done, waiting = wait(waiting, PAUSE, FIRST_EXCEPTION)
            so_far = read.get_obj().value
            told.advance(so_far - told_of)
            told_of = so_far
            for future in done:
                future.result()
    except BrokenProcessPool as error:
        raise Fault(
            "a worker of the build was killed (out of memory?); finished tasks are kept: run the same command again, "
            f"with data.build.workers below {workers} if memory is short"
        ) from error
    finally:
        stop.value = True
        pool.shutdown(wait=False, cancel_futures=True)
        _wait_for(set(multiprocessing.active_children()) - others)


def _wait_for(workers: Collection[BaseProcess]) -> None:
    """Return when all workers have ended. One that was killed while idle held the lock behind which the others look for
    work; they would wait for ever, and are killed, too."""
    deadline, left = time.monotonic() + ENDING, {worker.sentinel: worker for worker in workers}
    while left and (patience := deadline - time.monotonic()) > 0:
        for sentinel in connection.wait(list(left), patience):
            left.pop(cast(int, sentinel))
    for worker in left.values():
        worker.kill()


_worker: Callable[[str, int], None]


def _begin(folder: Path, read: Synchronized[int], stop: c_byte, threads: int) -> None:
    """In a worker: what all of its tasks share."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the command, which sets `stop`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    work = Work.open(folder)

    def advance(count: int) -> None:
        if stop.value:
            raise Fault("another task of the build has failed")
        with read.get_lock():
            read.value += count

    def worker(stage: str, number: int) -> None:
        perform(work, stage, number, advance)

    _worker = worker


def _end_with_parent() -> None:
    """End this process as soon as the one that started it is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _perform(stage: str, number: int) -> None:
    _worker(stage, number)
