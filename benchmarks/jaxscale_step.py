"""The step that `jaxscale train` runs, built and compiled by the same code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import workload
from benchmarks.workload import Preset, Weights
from jaxscale.cluster.distributed import simulate_devices
from jaxscale.config.phases import phases_of
from jaxscale.config.schema import Config
from jaxscale.data.feed import process_rows, to_devices
from jaxscale.data.loader import HostBatch
from jaxscale.train.build import Run, build, compile_steps, make_timeline


def make_config(preset: Preset, data: Path = Path("datasets/none")) -> Config:
    """The workload as a config.

    Its layers are computed without a loop and each device has a copy of the parameters: a model of a few layers and
    megabytes can afford both.
    """
    return Config.model_validate(
        {
            "name": "benchmark",
            "model": {
                "vocabulary_size": preset.vocabulary,
                "embed_dim": preset.embed,
                "layers": preset.layers,
                "heads": preset.heads,
                "mlp_dim": preset.mlp,
                "norm_epsilon": workload.NORM_EPSILON,
                "rope": {"theta": workload.ROPE_THETA},
                "unroll": preset.layers,
            },
            "data": {"train": data, "sequence_length": preset.sequence, "attend_across_documents": True},
            "batch": {"global_size": preset.batch},
            "mesh": {"replica": -1, "fsdp": 1},
            "train": {"steps": 1_000_000},
            "optimizer": {
                "learning_rate": workload.LEARNING_RATE,
                "beta1": workload.BETA1,
                "beta2": workload.BETA2,
                "epsilon": workload.EPSILON,
                "weight_decay": workload.WEIGHT_DECAY,
                "clip_norm": workload.CLIP_NORM,
            },
            "schedule": {"kind": "constant"},
        }
    )


def make_params(weights: Weights, preset: Preset) -> dict[str, Any]:
    """The weights in jaxscale's tree."""
    layers, embed, heads = preset.layers, preset.embed, preset.heads
    into_heads, out_of_heads = (layers, embed, heads, -1), (layers, heads, -1, embed)
    return {
        "embedding": {"tokens": {"table": weights["embedding"]}},
        "layers": {
            "attention_norm": {"scale": weights["attention_norm"]},
            "attention": {
                "query": {"kernel": weights["query"].reshape(into_heads)},
                "key": {"kernel": weights["key"].reshape(into_heads)},
                "value": {"kernel": weights["value"].reshape(into_heads)},
                "output": {"kernel": weights["output"].reshape(out_of_heads)},
            },
            "mlp_norm": {"scale": weights["mlp_norm"]},
            "mlp": {name: {"kernel": weights[name]} for name in ("gate", "up", "down")},
        },
        "final_norm": {"scale": weights["final_norm"]},
        "head": {"table": weights["head"]},
    }


class Training:
    """State and data of a run; calling it does one step and returns its loss."""

    def __init__(self, preset: Preset, devices: int) -> None:
        config = make_config(preset)
        self.run: Run = build(config, jax.devices()[:devices], make_timeline(config, phases_of(config), None), None)
        steps = compile_steps(self.run, evaluates=False, initializes=True)
        self.train = steps.train
        params = make_params(workload.first_weights(preset), preset)
        placed = jax.tree.map(lambda value, leaf: jax.device_put(value, leaf.sharding), params, self.run.state.params)
        self.state = replace(steps.initialize(), params=placed)
        self.batches = workload.batches(preset)

    def __call__(self) -> jax.Array:
        """One update."""
        tokens = next(self.batches)
        starts = np.zeros(tokens.shape, bool)
        lengths = np.full(len(tokens), tokens.shape[1], np.int32)
        batch = HostBatch(0, 0, process_rows(self.run.batch(0)["tokens"]), tokens, starts, lengths)
        self.state, metrics = self.train(self.state, to_devices(batch, self.run.batch(0)))
        return metrics["loss"]


if __name__ == "__main__":
    options = workload.arguments()
    if options.devices > 1:
        simulate_devices(options.devices)
    workload.serve(Training(workload.PRESETS[options.preset], options.devices), float, {"jax": jax.__version__})
