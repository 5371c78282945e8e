"""Text from a run's model."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config.devices import data_shards
from jaxscale.config.errors import Refused
from jaxscale.data.store import TokenDataset
from jaxscale.model.generate import Progress, begin, extend
from jaxscale.parallel.sharding import replicated
from jaxscale.train.build import Run
from jaxscale.train.state import ModelArrays

PIECE = 64
"""Tokens that are generated at one time."""


def complete(run: Run, model: ModelArrays, dataset: TokenDataset, prompt: str) -> str:
    """`prompt` and its continuation. All processes of the run must call it.

    The prompt follows a begin marker if the dataset's documents have one. Sampling is seeded by the run's seed.
    """
    sample, tokenizer = run.config.sample, dataset.tokenizer()
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"the prompt is not UTF-8 text (character {error.start})") from None
    begins = bool(dataset.built.get("settings", {}).get("begin_marker"))
    ids = [*([dataset.begin_id] if begins else []), *tokenizer.encode(prompt).tolist()]
    if not ids:
        raise Refused("the prompt is empty: there is nothing to continue")
    longest = len(ids) + sample.tokens
    if run.config.model.max_positions is not None and longest > run.config.model.max_positions:
        raise Refused(
            f"prompt and continuation are {longest} tokens, model.max_positions = {run.config.model.max_positions}; "
            f"nearest: sample.tokens={max(1, run.config.model.max_positions - len(ids))}"
        )

    def read(model: ModelArrays, prompts: jax.Array) -> Progress:
        return begin(merged(model), prompts, longest, dataset.end_id)

    def go_on(model: ModelArrays, progress: Progress, until: jax.Array) -> Progress:
        return extend(
            merged(model),
            progress,
            jax.random.key(run.config.seed),
            until,
            vocabulary_size=dataset.vocabulary_size,
            temperature=sample.temperature,
            top_p=sample.top_p,
            end_id=dataset.end_id,
        )

    def merged(model: ModelArrays) -> Any:
        return nnx.merge(run.structure, model["params"], model["model_state"])

    # One copy of the prompt for each data shard, so that every device has a row.
    copies = data_shards(dict(run.mesh.shape))
    prompts = jnp.asarray(np.tile(np.array(ids, np.int32), (copies, 1)))
    everywhere = replicated(run.mesh)
    with jax.set_mesh(run.mesh):
        progress = jax.jit(read, out_shardings=everywhere)(model, prompts)
        step = jax.jit(go_on, out_shardings=everywhere, donate_argnums=1)
        # In pieces, between which Python runs: a signal would otherwise wait for the last token.
        for until in range(len(ids) + PIECE, longest + PIECE, PIECE):
            progress = jax.block_until_ready(step(model, progress, jnp.asarray(min(until, longest))))
            if bool(np.asarray(progress.ended).all()):
                break
        tokens = progress.tokens
    row = np.asarray(tokens)[0, len(ids) :].tolist()
    ended = row.index(dataset.end_id) if dataset.end_id in row else len(row)
    return prompt + tokenizer.decode(row[:ended])
