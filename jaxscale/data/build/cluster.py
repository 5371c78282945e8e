"""Running the tasks of a build on many machines: datatrove's executors, with a pipeline step of our own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datatrove.executor.base import PipelineExecutor
from datatrove.executor.ray import RayPipelineExecutor
from datatrove.executor.slurm import SlurmPipelineExecutor
from datatrove.pipeline.base import PipelineStep
from loguru import logger

from jaxscale.config.data import BuildConfig
from jaxscale.config.errors import Fault, Refused, Stop, StoppedEarly
from jaxscale.data.build.encode import perform
from jaxscale.data.build.work import Work
from jaxscale.data.progress import Progress

PAUSE = 2.0
"""Seconds between two looks at what is done."""


class BuildStep(PipelineStep):
    """The one step of the pipeline: does the tasks of a stage; those that are done already are left alone."""

    name = "tokens"
    type = "JAXSCALE"

    def __init__(self, folder: Path, stage: str, numbers: Sequence[int]) -> None:
        """`numbers`: the task that each rank does."""
        super().__init__()
        self.folder, self.stage, self.numbers = str(folder), stage, list(numbers)

    def run(self, data: Any = None, rank: int = 0, world_size: int = 1) -> Any:
        """Do the task of `rank`; what is wrong is left in the work folder for the command that started all this."""
        work, number = Work.open(Path(self.folder)), self.numbers[rank]
        if work.result(self.stage, number).exists():
            return ()
        try:
            perform(work, self.stage, number, lambda read: self.stat_update("bytes", value=read))
        except Exception as error:
            failed = _failures(work) / f"{self.stage}-{number:05d}{'.refused' if isinstance(error, Refused) else ''}"
            failed.parent.mkdir(exist_ok=True)
            failed.write_text(str(error) if isinstance(error, Stop) else f"{type(error).__name__}: {error}")
            raise
        return ()


class JobArray(SlurmPipelineExecutor):
    """datatrove's executor for SLURM, without the job that adds up statistics: nobody reads them here."""

    def launch_merge_stats(self) -> None:
        """Submit nothing more."""


def run_on_slurm(work: Work, settings: BuildConfig) -> None:
    """Submit what is missing as job arrays, a stage after the other; nothing to submit: returns at once.

    Raises StoppedEarly where there is something to wait for, and what tasks raised since the last call.
    """
    missing = {stage: numbers for stage in work.plan.stages if (numbers := work.missing(stage))}
    if not missing:
        return
    tasks = ", ".join(f"{len(numbers)} of {work.plan.stages[stage]} ({stage})" for stage, numbers in missing.items())
    logger.disable("datatrove")  # what matters of its log is said below
    job = work.folder / "slurm-job"
    if job.is_file() and _is_queued(job.read_text()):
        raise StoppedEarly(f"job {job.read_text()} is at work; tasks to do: {tasks}. Run the same command again later")
    _raise_failures(work)
    executor: JobArray | None = None
    for stage, numbers in missing.items():
        executor = JobArray(
            [BuildStep(work.folder, stage, numbers)],
            tasks=len(numbers),
            time=settings.slurm.time,
            partition=settings.slurm.partition or "",
            cpus_per_task=settings.slurm.cpus,
            mem_per_cpu_gb=settings.slurm.memory_gb,
            workers=settings.workers or -1,
            job_name=f"build-{stage}",
            qos="",
            env_command=f"export PATH={Path(sys.executable).parent}:$PATH RAYON_NUM_THREADS={settings.slurm.cpus}",
            sbatch_args=settings.slurm.options,
            depends=executor,
            logging_dir=str(work.folder / "logs" / stage),
            skip_completed=False,
        )
    assert executor is not None
    try:
        executor.run()
    except (OSError, subprocess.CalledProcessError) as error:
        raise Fault(f"sbatch did not take the job: {error}") from error
    job.write_text(str(executor.job_id))
    raise StoppedEarly(
        f"submitted as job {executor.job_id}; tasks to do: {tasks}. Run the same command when it is done"
    )


def run_on_ray(work: Work, settings: BuildConfig, progress: Progress) -> None:
    """Do all that is missing on the Ray cluster that `RAY_ADDRESS` names, or on one of this machine.

    Raises what the tasks raise, and Fault where some are not done for another reason.
    """
    try:
        import ray
    except ImportError as error:
        raise Refused('data.build.executor = "ray": needs the package ray (pip install ray)') from error
    logger.disable("datatrove")
    ray.init(ignore_reinit_error=True, log_to_driver=False)
    for stage, count in work.plan.stages.items():
        numbers = work.missing(stage)
        if not numbers:
            continue
        executor = RayPipelineExecutor(
            [BuildStep(work.folder, stage, numbers)],
            tasks=len(numbers),
            workers=settings.workers or -1,
            logging_dir=str(work.folder / "logs" / stage),
            skip_completed=False,
        )
        _watched(executor, work, stage, count, progress)
        _raise_failures(work)
        if work.missing(stage):
            raise Fault(f"tasks of the build were not done; their logs are in {work.folder / 'logs' / stage}")


def _watched(executor: PipelineExecutor, work: Work, stage: str, count: int, progress: Progress) -> None:
    """Run an executor to its end, and tell how far it is meanwhile."""
    thread = threading.Thread(target=executor.run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(PAUSE)
        progress(stage, count - len(work.missing(stage)), count)


def _failures(work: Work) -> Path:
    return work.folder / "failed"


def _raise_failures(work: Work) -> None:
    """Raise what went wrong in tasks, and forget it, so that the next command tries again."""
    files = sorted(_failures(work).glob("*"))
    if files:
        message = "\n".join(file.read_text() for file in files)
        refused = all(file.suffix == ".refused" for file in files)
        for file in files:
            os.unlink(file)
        raise Refused(message) if refused else Fault(message)


def _is_queued(job: str) -> bool:
    """Whether a job waits or runs."""
    answer = subprocess.run(["squeue", "--noheader", "--jobs", job], capture_output=True, text=True)
    return answer.returncode == 0 and bool(answer.stdout.strip())
