"""Text from a run's model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.config.devices import data_shards
from jaxscale.config.errors import Refused
from jaxscale.data.store import TokenDataset
from jaxscale.model.generate import generate
from jaxscale.parallel.sharding import replicated
from jaxscale.train.build import Run
from jaxscale.train.state import ModelArrays


def complete(run: Run, model: ModelArrays, dataset: TokenDataset, prompt: str) -> str:
    """`prompt` and its continuation. All processes of the run must call it.

    The prompt follows a begin marker if the dataset's documents have one. Sampling is seeded by the run's seed.
    """
    sample, tokenizer = run.config.sample, dataset.tokenizer()
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

    def continue_prompts(model: ModelArrays, prompts: jax.Array) -> jax.Array:
        return generate(
            nnx.merge(run.structure, model["params"], model["model_state"]),
            prompts,
            jax.random.key(run.config.seed),
            longest=longest,
            vocabulary_size=dataset.vocabulary_size,
            temperature=sample.temperature,
            top_p=sample.top_p,
            end_id=dataset.end_id,
        )

    # One copy of the prompt for each data shard, so that every device has a row.
    copies = data_shards(dict(run.mesh.shape))
    prompts = jnp.asarray(np.tile(np.array(ids, np.int32), (copies, 1)))
    with jax.set_mesh(run.mesh):
        tokens = jax.jit(continue_prompts, out_shardings=replicated(run.mesh))(model, prompts)
    row = np.asarray(tokens)[0, len(ids) :].tolist()
    ended = row.index(dataset.end_id) if dataset.end_id in row else len(row)
    return prompt + tokenizer.decode(row[:ended])
