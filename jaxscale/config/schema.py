"""Every knob of jaxscale: typed, frozen and documented where it is declared. `model.py` and `data.py` hold the largest
sections, this file the others and the whole.

The field descriptions are the reference manual: `jaxscale config schema` prints them as JSON Schema, so an editor shows
them while a TOML file is being written. What one field can judge alone is checked here; what needs two fields is in
`check.py`; what needs the devices is in `train/build.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from jaxscale.config.data import DataConfig
from jaxscale.config.model import CausalObjective, ModelConfig, Objective
from jaxscale.config.section import Section
from jaxscale.config.types import AbsolutePath, Int, NaturalInt, PositiveInt, Seed, Share, Weight


class BatchConfig(Section):
    """How many sequences an update sees."""

    global_size: PositiveInt
    """Sequences in one update, over all devices and microsteps."""
    microbatch: PositiveInt | None = None
    """Sequences a data shard handles in one microstep (data shards = replica x fsdp x expert); unset: one microstep."""


class PhaseConfig(Section):
    """From some point of the run on, another batch, sequence length or mixture; what is unset stays as it was."""

    start: int | str
    """Where it begins, counted from the beginning of the run: updates, or a text such as "10B tokens"."""
    global_size: PositiveInt | None = None
    """Sequences in one update."""
    microbatch: PositiveInt | None = None
    """Sequences a data shard handles in one microstep."""
    sequence_length: PositiveInt | None = None
    """Tokens in a row."""
    weights: dict[str, Weight] | None = None
    """Weights of the sources of `data.train`; one that is not named has weight 0."""


class OptimizerConfig(Section):
    """AdamW (arXiv 1711.05101); weight decay acts on matrices only."""

    kind: Literal["adamw"] = "adamw"
    learning_rate: float = Field(default=3e-4, ge=0)
    """Peak learning rate."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices (embeddings included; norms and biases excluded)."""
    clip_norm: float | None = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; larger ones are scaled down to it."""


class ScheduleConfig(Section):
    """The learning rate by update: update n (from 0) uses schedule(n); the last update reaches the final value."""

    kind: Literal["constant", "cosine", "linear", "warmup_stable_decay"] = "cosine"
    warmup: Int | str = 0
    """Length of the linear warm-up, whose first update uses peak / length: updates, or a text such as "10M tokens" or
    "0.5 epochs"."""
    decay: Int | str | None = None
    """Length of the linear decay that ends `warmup_stable_decay`, written like warmup; refused elsewhere."""
    final_share: Share = 0.1
    """Learning rate of the last update as a share of the peak (`constant` does not decay)."""


class TrainConfig(Section):
    """How long to train: exactly one of the three."""

    steps: PositiveInt | None = None
    """Updates."""
    tokens: PositiveInt | None = None
    """Tokens (rows x sequence length), rounded up to whole updates, which is printed."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the dataset's rows, rounded up to whole updates, which is printed."""


class MeshConfig(Section):
    """The device mesh; the product of the axes is the number of devices, and one axis may be -1: what is left."""

    replica: Int = 1
    """Copies of the parameters, over slow links."""
    fsdp: Int = -1
    """Parameters, gradients and optimizer state sharded, gathered when used."""
    expert: Int = 1
    """Experts of a mixture."""
    context: Int = 1
    """The sequence, sharded."""
    tensor: Int = 1
    """Heads and hidden widths, sharded, over fast links."""
    pipe: Int = 1
    """Stages of layers."""


class ClusterConfig(Section):
    """Processes and devices."""

    simulate: PositiveInt | None = None
    """Simulated CPU devices of each process, instead of the real devices."""
    coordinator: str | None = None
    """HOST:PORT of process 0 where neither SLURM nor JAXSCALE_COORDINATOR gives it."""
    processes: PositiveInt | None = None
    """Number of processes (or JAXSCALE_PROCESSES, or SLURM)."""
    process_id: NaturalInt | None = None
    """Index of this process (or JAXSCALE_PROCESS_ID, or SLURM)."""
    compilation_cache: AbsolutePath | None = Path("~/.cache/jaxscale/compiled")
    """Folder of compiled programs, reused by later starts; "none" turns it off."""


class PrecisionConfig(Section):
    """Number formats; parameters, optimizer state, losses and norms are float32."""

    compute: Literal["auto", "float32", "bfloat16"] = "auto"
    """Matrix products and activations; `auto`: bfloat16 on GPUs, float32 on CPUs."""
    deterministic: bool = False
    """Choose only kernels that give the same bits on each run (GPUs; CPUs always do)."""


class CheckpointConfig(Section):
    """Saving the state; a run always saves its last step."""

    every_steps: PositiveInt | None = None
    """Updates between checkpoints; unset: only the last one."""
    keep: PositiveInt = 3
    """Number of newest complete checkpoints to keep."""


class EvaluateConfig(Section):
    """Evaluation on the splits of data.validation; a run always evaluates its last step if there is a split."""

    every_steps: PositiveInt | None = None
    """Updates between evaluations; unset: only the last one."""
    batch_size: PositiveInt | None = None
    """Sequences in an evaluation step, over all devices; unset: batch.global_size. Results do not depend on it."""
    rows: PositiveInt | None = None
    """Evaluate only so many rows of each split, evenly spread over it; unset: all. Of a split with several sources each
    gives rows in proportion, at least one."""


class MetricsConfig(Section):
    """What is written to metrics.jsonl."""

    every_steps: PositiveInt = 1
    """Updates between lines; the last update always has one."""
    batch_digest: bool = False
    """Add the sha256 of the global batch's token ids to each line."""


class ProfileConfig(Section):
    """A window of the JAX profiler, written to RUN/profile for TensorBoard or Perfetto."""

    first_step: PositiveInt = 3
    """First profiled update, counted from the first that this process executes (1)."""
    steps: NaturalInt = 0
    """Number of profiled updates; 0: the profiler is never started."""


class SampleConfig(Section):
    """Sampling from the model."""

    prompt: str | None = None
    """If set, `train` ends by showing a completion of this text."""
    tokens: PositiveInt = 64
    """Most tokens to generate; generation also ends at the end-of-document marker."""
    temperature: float = Field(default=0.8, ge=0)
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = Field(default=0.95, gt=0.0, le=1.0)
    """Sample from the smallest set of tokens with at least this probability (arXiv 1904.09751)."""


class GuardConfig(Section):
    """When a run ends itself."""

    nonfinite_updates: PositiveInt = 10
    """Stop (exit code 3) after so many updates in a row with a loss or gradient that is not finite; each is skipped."""
    watchdog_seconds: float | None = Field(default=None, gt=0)
    """Write all stacks and stop (exit code 1) if no update ends for so many seconds; unset: wait for ever."""


class Config(Section):
    """One experiment."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run: its directory is runs_dir/name."""
    runs_dir: AbsolutePath = Path("runs")
    """Where run directories are."""
    seed: Seed = 0
    """Seeds initial weights, data order, masks and dropout, each through a stream of its own."""
    model: ModelConfig
    objective: Objective = CausalObjective()
    data: DataConfig
    batch: BatchConfig
    phases: tuple[PhaseConfig, ...] = ()
    """Changes of batch, sequence length or mixture during the run, in order."""
    train: TrainConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    mesh: MeshConfig = MeshConfig()
    cluster: ClusterConfig = Field(default_factory=ClusterConfig)
    precision: PrecisionConfig = PrecisionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluate: EvaluateConfig = EvaluateConfig()
    metrics: MetricsConfig = MetricsConfig()
    profile: ProfileConfig = ProfileConfig()
    guard: GuardConfig = GuardConfig()
    sample: SampleConfig = SampleConfig()

    @property
    def run_dir(self) -> Path:
        """The run directory, runs_dir/name."""
        return self.runs_dir / self.name
