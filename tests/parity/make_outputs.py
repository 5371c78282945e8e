"""Outputs of `transformers` for small models with known weights, stored for tests/test_parity.py.

    python -m tests.parity.make_outputs

needs the extra `parity` (torch and transformers) and writes tests/parity/outputs/NAME.json (the Hugging Face config)
and NAME.npz (`tokens [rows, sequence] int32`, `logits [rows, sequence, vocabulary] float32`). The weights are not
stored: they are a function of each tensor's name and shape.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

OUTPUTS = Path(__file__).parent / "outputs"

# Vocabularies are not multiples of 128, so that padding is met; heads are wider than embed / heads where a family can;
# 150 tokens are more than one block of queries.
LLAMA = {
    "model_type": "llama",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 131,
    "n_positions": 40,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "layer_norm_epsilon": 1e-5,
}
BERT = {
    "model_type": "bert",
    "vocab_size": 131,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
}
CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "llama": (LLAMA, (2, 32)),
    "llama-tied": (LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 12}, (2, 32)),
    "llama3-rope": (LLAMA | {"vocab_size": 37, "rope_parameters": LLAMA3_ROPE}, (2, 150)),
    "qwen3": (LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True, "rms_norm_eps": 1e-6}, (2, 32)),
    "gpt2": (GPT2, (2, 32)),
    "bert": (BERT, (2, 32)),
    "bert-long": (BERT | {"vocab_size": 37, "max_position_embeddings": 160}, (2, 150)),
}
"""Name -> Hugging Face config, (rows, sequence) of the tokens."""


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The float32 values of a tensor: uniform, of variance 1 / input width for matrices, around 1 for norms.

    They come from the raw bits of Philox, which NumPy keeps the same in all versions.
    """
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    uniform = 2 * ((bits >> np.uint64(11)) * 2.0**-53).reshape(shape) - 1
    if len(shape) == 1:
        values = (1.0 if name.endswith("weight") else 0.0) + 0.3 * uniform
    else:
        values = uniform * math.sqrt(3 / min(shape))
    return values.astype(np.float32)


def tokens(name: str, vocabulary: int, shape: tuple[int, int]) -> np.ndarray:
    """Token ids `[rows, sequence] int32` of a case."""
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(math.prod(shape))
    return (bits % np.uint64(vocabulary)).astype(np.int32).reshape(shape)


def make_model(config: dict[str, Any], tensors: dict[str, np.ndarray] | None = None) -> Any:
    """The `transformers` model of a config, with the given tensors or those of `weight`; ready to be called."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    kind = AutoModelForMaskedLM if config["model_type"] == "bert" else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(**config), attn_implementation="eager").float().eval()
    # Tied tensors are one parameter and have one name here.
    parameters = dict(model.named_parameters())
    if tensors is None:
        tensors = {name: weight(name, tuple(p.shape)) for name, p in parameters.items()}
    assert tensors.keys() == parameters.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(torch.from_numpy(tensors[name]))
    return model


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Logits `[rows, sequence, vocabulary] float32` of a `transformers` model."""
    import torch

    with torch.no_grad():
        return model(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


def main() -> None:
    """Writes the outputs of every case."""
    OUTPUTS.mkdir(exist_ok=True)
    for name, (config, shape) in CASES.items():
        ids = tokens(name, config["vocab_size"], shape)
        (OUTPUTS / f"{name}.json").write_text(json.dumps(config, indent=2) + "\n")
        np.savez_compressed(OUTPUTS / f"{name}.npz", tokens=ids, logits=logits(make_model(config), ids))
        print(name, (OUTPUTS / f"{name}.npz").stat().st_size, "bytes")


if __name__ == "__main__":
    main()
