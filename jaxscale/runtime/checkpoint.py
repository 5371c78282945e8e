"""Checkpoints of any pytree of arrays, on Orbax: asynchronous, sharded, restored onto any mesh and number of processes.

Layout, which `orbax.checkpoint.CheckpointManager` also reads: `FOLDER/STEP/state` holds the arrays under the names of
their paths in the pytree, `FOLDER/STEP/metadata/metadata` is JSON with what the caller wants to know again and with the
shape and dtype of every array. Orbax writes a step in a folder of another name and renames it when all processes are
done, so a folder whose name is a number is complete. A step is deleted the other way round: renamed, then removed.

Which steps are deleted: those that are older than `keep` complete *confirmed* ones. `confirm(step)` says that the
metrics of that step have been read and are finite, so a run that goes wrong never deletes its last good state.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

from jaxscale.cluster.distributed import exchange
from jaxscale.config.errors import Fault, Refused
from jaxscale.data.files import replace_file

PyTree = TypeVar("PyTree")

_CONFIRMED = "confirmed.json"
_DELETED = ".deleted"
_LEFT_OVER = re.compile(rf"\d+({re.escape(_DELETED)}|\.orbax-checkpoint-tmp.*)")
_SHOWN_DIFFERENCES = 8


class Checkpoints:
    """The checkpoints of one run. With several processes, all make one and call its methods in the same order."""

    def __init__(self, folder: Path, keep: int) -> None:
        """`folder` may be relative or start with `~`; `keep` is the number of newest confirmed steps to keep."""
        self.folder = folder.expanduser().resolve()
        self._keep = keep
        self._first = jax.process_index() == 0
        self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        self._saving: int | None = None
        self._deleter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="delete checkpoints")
        self._deletions: list[Future[None]] = []

    def prepare(self) -> None:
        """Make the folder fit for saving: create it, write to it, check that all processes see it, remove left-overs.

        To be called once, before the first save and before anything slow, and only by the run that owns the folder.
        Raises `Refused` where the folder cannot be written or is not shared by all processes.
        """
        probe, problem = self.folder / "writable", ""
        if self._first:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                probe.write_bytes(bytes(4096))
                for path in self.folder.iterdir():
                    if path.is_dir() and _LEFT_OVER.fullmatch(path.name):
                        shutil.rmtree(path)
            except OSError as error:
                problem = f"checkpoints cannot be written to {self.folder}: {error.strerror}"
        problem = exchange(problem.encode())[0].decode()
        if problem:
            raise Refused(problem)
        sees_it = exchange(bytes([probe.exists()]))
        if self._first:
            probe.unlink()
        if blind := [index for index, answer in enumerate(sees_it) if answer != b"\x01"]:
            raise Refused(
                f"process {blind[0]} does not see what process 0 wrote to {self.folder}: runs_dir must be on a "
                "file system that all hosts share"
            )

    def steps(self) -> list[int]:
        """The complete steps on disk as this process sees them, oldest first."""
        return complete_steps(self.folder)

    def latest(self) -> int | None:
        """The newest complete step, the same answer in all processes; None if there is none."""
        return latest_step(self.folder)

    def save(self, step: int, state: Any, metadata: Mapping[str, Any]) -> None:
        """Save `state`, a pytree of `jax.Array`, and return as soon as its buffers may be donated to the next step.

        Waits for a save that is still under way, and raises `Fault` if that one failed. A step that is complete
        already is not saved again. `metadata` must be JSON.
        """
        self.wait()
        if step in self.steps():
            return
        if (in_the_way := self.folder / str(step)).exists():
            raise Fault(f"{in_the_way}: no complete checkpoint, and in the way of the one of step {step}; remove it")
        leaves = _named_leaves(state)
        described = {"metadata": dict(metadata), "leaves": {name: _describe(leaf) for name, leaf in leaves.items()}}
        self._saving = step
        try:
            self._orbax.save(
                self.folder / str(step),
                args=ocp.args.Composite(state=ocp.args.PyTreeSave(leaves), metadata=ocp.args.JsonSave(described)),
            )
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise self._fault(error) from error

    def check_arrays(self, step: int, abstract_state: Any) -> None:
        """Raise `Refused`, with paths and both shapes, where the arrays of `step` are not those of this pytree.

        What is saved beside its first-level entries is no difference. Reads no array.
        """
        wanted = _named_leaves(abstract_state)
        entries = {name.split("/")[0] for name in wanted}
        stored = _read(self.folder, step)["leaves"]
        stored = {name: described for name, described in stored.items() if name.split("/")[0] in entries}
        _check_same_arrays(self.folder / str(step), stored, wanted)

    def restore(self, step: int, abstract_state: PyTree) -> PyTree:
        """The state of `step`, each array read straight into its place.

        `abstract_state` is the pytree to fill, its leaves `jax.ShapeDtypeStruct` with the target's `sharding`; it may
        be on another mesh and another number of processes than the saved one. A part of the saved pytree, such as
        `{"params": ...}`, reads no more than that part. Raises `Refused` as `check_arrays` does.
        """
        self.check_arrays(step, abstract_state)
        wanted = _named_leaves(abstract_state)
        arguments = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in wanted.items()
        }
        items = ocp.args.Composite(
            state=ocp.args.PyTreeRestore(item=wanted, restore_args=arguments, partial_restore=True)
        )
        try:
            restored = self._orbax.restore(self.folder / str(step), args=items).state
        except Exception as error:  # Orbax and TensorStore raise many kinds
            raise Refused(_damaged(self.folder, step, error)) from error
        state: PyTree = jax.tree.unflatten(jax.tree.structure(abstract_state), [restored[name] for name in wanted])
        return state

    def restore_metadata(self, step: int) -> dict[str, Any]:
        """What was given as `metadata` when `step` was saved."""
        return read_metadata(self.folder, step)

    def confirm(self, step: int) -> None:
        """Say that the metrics of `step` have been read and are finite: it now counts for the number to keep."""
        if not self._first:
            return
        confirmed = sorted({*self._confirmed(), step} & {*self.steps(), step})
        replace_file(self.folder / _CONFIRMED, json.dumps(confirmed).encode())
        self._delete_old()

    def check(self) -> None:
        """Raise `Fault` if a save or a deletion in the background has failed; does not wait."""
        try:
            self._orbax.check_for_errors()
        except Exception as error:
            raise self._fault(error) from error
        self._check_deletions(wait=False)

    def wait(self) -> None:
        """Wait for the save under way, so that it is complete on disk; raises `Fault` if it failed."""
        try:
            self._orbax.wait_until_finished()
        except Exception as error:
            raise self._fault(error) from error
        self._saving = None
        if self._first:
            self._delete_old()
        self._check_deletions(wait=False)

    def close(self) -> None:
        """Wait for saves and deletions and end the threads; raises `Fault` if one failed."""
        self.wait()
        self._check_deletions(wait=True)
        self._deleter.shutdown()
        self._orbax.close()

    def _confirmed(self) -> list[int]:
        """Steps confirmed by this run or an earlier start of it."""
        path = self.folder / _CONFIRMED
        return list(json.loads(path.read_text())) if path.exists() else []

    def _delete_old(self) -> None:
        """Delete what is older than the `keep` newest confirmed complete steps (process 0 alone)."""
        steps = self.steps()
        kept = sorted(set(self._confirmed()) & set(steps))[-self._keep :]
        if len(kept) < self._keep:
            return
        for step in steps:
            if step < kept[0]:
                doomed = self.folder / f"{step}{_DELETED}"
                os.rename(self.folder / str(step), doomed)
                self._deletions.append(self._deleter.submit(shutil.rmtree, doomed))

    def _check_deletions(self, *, wait: bool) -> None:
        """Raise the error of a failed deletion; with `wait`, of all that were asked for."""
        for deletion in [deletion for deletion in self._deletions if wait or deletion.done()]:
            self._deletions.remove(deletion)
            if error := deletion.exception():
                raise Fault(f"an old checkpoint in {self.folder} could not be deleted: {error}") from error

    def _fault(self, error: Exception) -> Fault:
        """The user's form of an error of Orbax."""
        reason = str(error).strip().splitlines() or [type(error).__name__]
        return Fault(f"the checkpoint of step {self._saving} could not be saved in {self.folder}: {reason[0]}")


def complete_steps(folder: Path) -> list[int]:
    """The complete steps in `folder`, oldest first; what else lies there is ignored. Needs no devices."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.name.isdigit() and _metadata_file(path).is_file()]
    return sorted(int(name) for name in names if str(int(name)) == name)


def latest_step(folder: Path) -> int | None:
    """The newest complete step in `folder` that process 0 sees; None if there is none. All processes must ask."""
    seen = int(exchange(str(max(complete_steps(folder), default=-1)).encode())[0])
    return None if seen < 0 else seen


def read_metadata(folder: Path, step: int) -> dict[str, Any]:
    """What was given as `metadata` when `step` was saved in `folder`. Needs no devices."""
    return dict(_read(folder, step)["metadata"])


def _read(folder: Path, step: int) -> dict[str, Any]:
    """The JSON of a step. Raises `Refused` if the step is not there."""
    path = _metadata_file(folder / str(step))
    if not path.is_file():
        there = ", ".join(map(str, complete_steps(folder))) or "none"
        raise Refused(f"{folder} holds no complete checkpoint of step {step}; complete: {there}")
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise Refused(_damaged(folder, step, error)) from error


def _damaged(folder: Path, step: int, error: Exception) -> str:
    """That a step cannot be read, and how to go on without it."""
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    others = [other for other in complete_steps(folder) if other < step]
    way = f"to go on from step {others[-1]}, remove that folder" if others else "no earlier one is there"
    return f"{folder / str(step)}: damaged checkpoint ({reason[:200]}); {way}"


def _metadata_file(step_folder: Path) -> Path:
    """Where Orbax's JSON handler puts the item `metadata`."""
    return step_folder / "metadata" / "metadata"


def _named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by path, such as `params/layers/attention/query`, in the order of `jax.tree.leaves`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _describe(leaf: Any) -> str:
    """Shape and dtype of an array as text, such as `float32[8, 128]`."""
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def _check_same_arrays(step_folder: Path, stored: Mapping[str, str], wanted: Mapping[str, Any]) -> None:
    """Raise `Refused` if the stored arrays, by path and description, are not the wanted ones."""
    described = {name: _describe(leaf) for name, leaf in wanted.items()}
    differences = [
        f"  {name}: saved {stored.get(name, 'nothing')}, this run has {described.get(name, 'nothing')}"
        for name in [*stored, *(name for name in described if name not in stored)]
        if stored.get(name) != described.get(name)
    ]
    if differences:
        more = len(differences) - _SHOWN_DIFFERENCES
        lines = differences[:_SHOWN_DIFFERENCES] + ([f"  and {more} more"] if more > 0 else [])
        raise Refused(
            f"the checkpoint {step_folder} is of another architecture or precision:\n" + "\n".join(lines)
            + "\nrestore it with the config it was trained with, or train under another name"
        )  # fmt: skip
