"""The optax chain and the learning rate by update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxscale.config.schema import OptimizerConfig, ScheduleConfig
from jaxscale.model.layers import ParameterAxes

Schedule = Callable[[Any], jax.Array]


def make_schedule(config: ScheduleConfig, peak: float, steps: int, *, warmup: int, decay: int) -> Schedule:
    """The learning rate of update n = 0, 1, ..., steps - 1.

    Warm-up: update n uses peak x (n + 1) / warmup, so the first one is not zero and update warmup - 1 has the peak.
    Then `cosine` and `linear` fall to final_share x peak, which the last update uses; `warmup_stable_decay`
    (arXiv 2404.06395) keeps the peak and falls linearly over the last `decay` updates only; `constant` never falls.

    Args:
        config: kind and final share.
        peak: largest learning rate.
        steps: number of updates.
        warmup: updates of the warm-up, at most `steps`.
        decay: updates of the final decay of `warmup_stable_decay`.
    """
    falls_from = steps - decay if config.kind == "warmup_stable_decay" else warmup
    length = max(1, steps - falls_from)

    def schedule(update: Any) -> jax.Array:
        n = jnp.asarray(update, jnp.float32)
        progress = jnp.clip((n - falls_from + 1) / length, 0, 1)
        if config.kind == "constant":
            share = jnp.ones_like(progress)
        elif config.kind == "cosine":
            share = config.final_share + (1 - config.final_share) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        else:
            share = 1 - (1 - config.final_share) * progress
        rising = jnp.minimum(1, (n + 1) / warmup) if warmup else 1.0
        return peak * jnp.minimum(share, rising)

    return schedule


def make_optimizer(
    config: OptimizerConfig, schedule: Schedule, axes: dict[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """Clipping by the global norm, then AdamW with decay on matrices only.

    Args:
        config: hyperparameters.
        schedule: learning rate by number of updates done.
        axes: the ParameterAxes of each parameter, which tell matrices from vectors.
    """
    matrices = jax.tree.map(lambda a: a.is_matrix, axes, is_leaf=lambda a: isinstance(a, ParameterAxes))
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    adamw = optax.adamw(
        schedule,
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=matrices,
    )
    return optax.chain(clip, adamw)
