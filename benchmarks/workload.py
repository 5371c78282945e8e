"""What every contestant of benchmarks/step.py computes: one model, its first weights, its data, its optimizer.

A decoder: RMSNorm before attention and MLP, rotary positions (halves of a head are the pairs), full causal attention,
SwiGLU, an output matrix of its own. The loss is the mean over all tokens but the last of each row. AdamW with decay on
matrices, gradients clipped by their global norm. Everything in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np

LEARNING_RATE, BETA1, BETA2, EPSILON, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.9, 0.95, 1e-8, 0.1, 1.0
NORM_EPSILON, ROPE_THETA = 1e-5, 10_000.0
BATCHES = 2
"""Different batches, used in turn."""
WARMUP = 4
"""Steps before the first that is timed; their losses must be the same for all contestants. Each batch is met twice, so
that they also tell how the weights were updated."""


@dataclass(frozen=True)
class Preset:
    """Shape of the model and of a batch; `steps` are timed at once in each round."""

    embed: int
    layers: int
    heads: int
    mlp: int
    vocabulary: int
    sequence: int
    batch: int
    steps: int

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.embed // self.heads

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.sequence


PRESETS = {
    "tiny": Preset(embed=128, layers=4, heads=4, mlp=384, vocabulary=512, sequence=256, batch=16, steps=3),
    "small": Preset(embed=512, layers=8, heads=8, mlp=1536, vocabulary=4096, sequence=512, batch=8, steps=1),
}

Weights = dict[str, np.ndarray]


def first_weights(preset: Preset) -> Weights:
    """The weights before the first step, float32; matrices are `[input, output]`, layers come first."""
    random = np.random.default_rng(0)
    layers, embed, mlp = preset.layers, preset.embed, preset.mlp

    def matrix(*shape: int) -> np.ndarray:
        return 0.02 * random.standard_normal(shape, np.float32)

    return {
        "embedding": matrix(preset.vocabulary, embed),
        "attention_norm": np.ones((layers, embed), np.float32),
        "query": matrix(layers, embed, embed),
        "key": matrix(layers, embed, embed),
        "value": matrix(layers, embed, embed),
        "output": matrix(layers, embed, embed),
        "mlp_norm": np.ones((layers, embed), np.float32),
        "gate": matrix(layers, embed, mlp),
        "up": matrix(layers, embed, mlp),
        "down": matrix(layers, mlp, embed),
        "final_norm": np.ones(embed, np.float32),
        "head": matrix(preset.vocabulary, embed),
    }


def batches(preset: Preset) -> Iterator[np.ndarray]:
    """Token ids `[batch, sequence] int32`: BATCHES batches of noise, over and over."""
    random = np.random.default_rng(1)
    shape = (preset.batch, preset.sequence)
    return cycle([random.integers(0, preset.vocabulary, shape, np.int32) for _ in range(BATCHES)])


def arguments() -> argparse.Namespace:
    """The options of a contestant's process; each reads those that it has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=PRESETS, required=True)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--scanned", action="store_true")
    return parser.parse_args()


def serve(step: Callable[[], Any], wait: Callable[[Any], float], versions: dict[str, str]) -> None:
    """The life of a contestant's process: warm up, say so, then time as many steps as each line on stdin asks for.

    Args:
        step: starts one step and returns its loss, which may not be computed yet.
        wait: waits until a loss and all before it are computed, and returns it.
        versions: what is being measured, for the report.

    It prints one JSON line when it is ready, and then the seconds of each request. Between requests it is blocked.
    """
    losses = [wait(step()) for _ in range(WARMUP)]
    print(json.dumps({"losses": losses, "versions": versions}), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        for _ in range(int(line)):
            loss = step()
        wait(loss)
        print(time.perf_counter() - begin, flush=True)
