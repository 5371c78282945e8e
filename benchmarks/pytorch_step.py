"""The step in PyTorch, with its own fused attention, eager or compiled; needs torch and NumPy only."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks import workload
from benchmarks.workload import Preset, Weights


class Block(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        embed = preset.embed
        self.heads = preset.heads
        self.attention_norm = nn.RMSNorm(embed, eps=workload.NORM_EPSILON)
        self.query = nn.Linear(embed, embed, bias=False)
        self.key = nn.Linear(embed, embed, bias=False)
        self.value = nn.Linear(embed, embed, bias=False)
        self.output = nn.Linear(embed, embed, bias=False)
        self.mlp_norm = nn.RMSNorm(embed, eps=workload.NORM_EPSILON)
        self.gate = nn.Linear(embed, preset.mlp, bias=False)
        self.up = nn.Linear(embed, preset.mlp, bias=False)
        self.down = nn.Linear(preset.mlp, embed, bias=False)

    def forward(self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, embed] -> the same."""
        batch, length, embed = x.shape
        h = self.attention_norm(x)
        queries, keys, values = (
            linear(h).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        queries, keys = rotate(queries, cosines, sines), rotate(keys, cosines, sines)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, embed))
        h = self.mlp_norm(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """The decoder; returns the loss."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.embedding = nn.Embedding(preset.vocabulary, preset.embed)
        self.layers = nn.ModuleList(Block(preset) for _ in range(preset.layers))
        self.final_norm = nn.RMSNorm(preset.embed, eps=workload.NORM_EPSILON)
        self.head = nn.Linear(preset.embed, preset.vocabulary, bias=False)
        frequencies = workload.ROPE_THETA ** (-torch.arange(0, preset.head_dim, 2) / preset.head_dim)
        angles = torch.arange(preset.sequence)[:, None] * frequencies
        self.register_buffer("cosines", angles.cos())
        self.register_buffer("sines", angles.sin())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the next tokens of `tokens` [batch, sequence]."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        logits = self.head(self.final_norm(x))
        targets = tokens.roll(-1, 1)
        targets[:, -1] = -100  # ignored by cross_entropy
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, head_dim] -> the same."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)


def load(model: Model, weights: Weights) -> None:
    """Copies the weights into the model, whose matrices are `[output, input]`."""
    with torch.no_grad():
        model.embedding.weight.copy_(torch.from_numpy(weights["embedding"]))
        model.head.weight.copy_(torch.from_numpy(weights["head"]))
        for i, layer in enumerate(model.layers):
            for name, module in layer.named_children():
                module.weight.copy_(torch.from_numpy(np.ascontiguousarray(weights[name][i].T)))


class Training:
    """Model, optimizer and data of a run; calling it does one step and returns its loss."""

    def __init__(self, preset: Preset, compiled: bool) -> None:
        model = Model(preset)
        load(model, workload.first_weights(preset))
        self.parameters = list(model.parameters())
        groups = [
            {"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": workload.WEIGHT_DECAY},
            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0},
        ]
        betas = (workload.BETA1, workload.BETA2)
        self.optimizer = torch.optim.AdamW(groups, lr=workload.LEARNING_RATE, betas=betas, eps=workload.EPSILON)
        self.model = torch.compile(model) if compiled else model
        self.batches = workload.batches(preset)

    def __call__(self) -> torch.Tensor:
        """One update."""
        loss = self.model(torch.from_numpy(next(self.batches)).long())
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, workload.CLIP_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


if __name__ == "__main__":
    options = workload.arguments()
    workload.serve(Training(workload.PRESETS[options.preset], options.compiled), float, {"torch": torch.__version__})
