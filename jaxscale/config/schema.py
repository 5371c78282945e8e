"""Every knob of jaxscale: typed, frozen and documented where it is declared.

The field descriptions are the reference manual: `jaxscale config schema` prints them as JSON Schema, so an editor shows
them while a TOML file is being written. What one field can judge alone is checked here; what needs two fields is in
`check.py`; what needs the devices is in `train/build.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from jaxscale.config.types import AbsolutePath, Int, NaturalInt, PathText, PositiveInt, Seed, Share, TokenizerName

VOCABULARY_MULTIPLE = 128
"""Vocabulary tables are padded to a multiple of this, whatever the mesh, so that `tensor` divides them."""


class Section(BaseModel):
    """Base of every section: unknown keys are errors, values never change, and none is converted to another type."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        validate_default=True,
    )


class RopeConfig(Section):
    """Rotary position embeddings (arXiv 2104.09864), half-split layout as in the published Llama weights."""

    theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotation frequencies."""
    scaling_factor: float = Field(default=1.0, ge=1)
    """Llama-3 frequency scaling: low frequencies are divided by this factor; 1 means no scaling."""
    low_frequency_factor: float = Field(default=1.0, gt=0)
    """Wavelengths above original_length / this are scaled fully."""
    high_frequency_factor: float = Field(default=4.0, gt=0)
    """Wavelengths below original_length / this are left alone; between the two bounds the scaling is interpolated."""
    original_length: PositiveInt = 8192
    """Sequence length (tokens) the frequencies were first trained at."""


class ModelConfig(Section):
    """The shape of one Transformer: decoders (Llama, Qwen, GPT-2) and encoders (BERT) alike."""

    vocabulary_size: PositiveInt
    """Number of token ids. Tables are padded to a multiple of 128 internally; padding is never counted."""
    embed_dim: PositiveInt
    """Width of the residual stream."""
    layers: PositiveInt
    """Number of blocks."""
    heads: PositiveInt
    """Number of query heads."""
    kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped queries); unset: as many as query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; unset: embed_dim / heads."""
    mlp_dim: PositiveInt
    """Hidden width of the MLP."""
    activation: Literal["swiglu", "gelu", "gelu_tanh"] = "swiglu"
    """MLP nonlinearity: `swiglu` has a gate matrix; `gelu` is exact, `gelu_tanh` its tanh approximation (GPT-2)."""
    causal: bool = True
    """True: decoder, each token sees itself and earlier ones. False: encoder, each token sees its whole document."""
    positions: Literal["rope", "learned"] = "rope"
    """How position enters the model."""
    rope: RopeConfig = RopeConfig()
    """Read where positions = "rope"."""
    max_positions: PositiveInt | None = None
    """Rows of the table of learned positions; needed where positions = "learned", refused elsewhere."""
    token_types: NaturalInt = 0
    """Rows of BERT's token type table, of which row 0 is used; 0: no table."""
    norm: Literal["rms", "layer"] = "rms"
    """Kind of normalisation."""
    norm_placement: Literal["pre", "post"] = "pre"
    """`pre`: before attention and MLP, with a final norm (Llama, GPT-2); `post`: after each residual sum (BERT)."""
    norm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the variance inside every norm."""
    embedding_norm: bool = False
    """Normalise the sum of the embeddings (BERT)."""
    query_key_norm: bool = False
    """RMS-normalise queries and keys per head before the rotation (Qwen-3)."""
    bias: bool = False
    """Biases on the matrices of attention and MLP (GPT-2, BERT)."""
    tied_embeddings: bool = False
    """Use the token embedding as the output matrix."""
    head_transform: bool = False
    """BERT's masked-LM head: dense, activation, norm, then the output matrix with a bias."""
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Dropout rate on embeddings and on both residual branches; never applied in evaluation or generation."""
    initializer_scale: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial matrices; those that write to the residual stream get it / sqrt(2 layers)."""
    unroll: PositiveInt = 1
    """Layers computed in one iteration of the loop over layers: more is faster to run and slower to compile."""
    attention: Literal["auto", "blockwise", "cudnn"] = "auto"
    """Attention implementation. `auto`: cuDNN where the mesh's devices are GPUs and the mask allows, else blockwise."""
    remat: Literal["none", "dots", "full"] = "none"
    """Rematerialisation of each block in the backward pass: `none` keeps all activations, `dots` keeps the results of
    matrix products, `full` keeps only the block's input."""

    @property
    def key_value_heads(self) -> int:
        """Number of key and value heads, resolved."""
        return self.kv_heads or self.heads

    @property
    def width_of_head(self) -> int:
        """Width of one head, resolved."""
        return self.head_dim or self.embed_dim // self.heads

    @property
    def padded_vocabulary(self) -> int:
        """Rows of the vocabulary tables: vocabulary_size, rounded up to a multiple of VOCABULARY_MULTIPLE."""
        return -(-self.vocabulary_size // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


class CausalObjective(Section):
    """Next-token prediction."""

    kind: Literal["causal"] = "causal"
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-normaliser (PaLM, arXiv 2204.02311, section 5)."""
    logits_chunk: PositiveInt = 1024
    """Positions of each row whose logits exist at one time."""


class MaskedObjective(Section):
    """Masked language modelling (BERT, arXiv 1810.04805, section 3.1)."""

    kind: Literal["masked"]
    mask_share: float = Field(default=0.15, gt=0.0, lt=1.0)
    """Share of the real tokens that are predicted."""
    replace_share: Share = 0.8
    """Share of the predicted tokens that are shown as the mask token."""
    random_share: Share = 0.1
    """Share of the predicted tokens that are shown as a random token; the rest are shown unchanged."""
    mask_id: NaturalInt | None = None
    """Id of the mask token; unset: the one that the dataset's tokenizer declares."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the mean squared log-normaliser."""
    logits_chunk: PositiveInt = 1024
    """Positions of each row whose logits exist at one time."""


def _objective_kind(value: Any) -> str:
    """Which objective a section describes: its `kind`, causal where it does not say."""
    return str(value.get("kind", "causal") if isinstance(value, dict) else getattr(value, "kind", None))


Objective = Annotated[
    Annotated[CausalObjective, Tag("causal")] | Annotated[MaskedObjective, Tag("masked")],
    Discriminator(_objective_kind),
]


class BuildConfig(Section):
    """How to build the token dataset `data.train` (and a validation split) from text; used by `jaxscale data build`,
    and by `jaxscale train` where the dataset is not there yet."""

    files: tuple[PathText, ...] = ()
    """Globs of text: `.jsonl` holds one document a line, every other file is one document (UTF-8)."""
    corpus: Literal["python-stdlib"] | None = None
    """A corpus found on every machine instead of files: the source code of the interpreter's standard library."""
    text_field: str = "text"
    """Key of the text in a JSONL object."""
    tokenizer: TokenizerName = "bytes"
    """`bytes` (built in) or the path of a `tokenizer.json`."""
    train_vocabulary: PositiveInt | None = None
    """Where the file `tokenizer` does not exist yet: train a byte-level BPE of this many ids and save it there."""
    begin_marker: bool = False
    """Start each document with the tokenizer's begin marker; its end marker always closes it."""
    validation_share: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of documents held out by a hash of their ids, written to the one split of data.validation."""
    malformed: Literal["refuse", "skip"] = "refuse"
    """What to do with a line or file that cannot be read: stop and name it, or skip, count and report it."""
    shard_tokens: PositiveInt = 2**28
    """Tokens in one shard file."""


class DataConfig(Section):
    """Where the tokens are and how they are cut into rows."""

    train: AbsolutePath
    """Folder of the token dataset to train on."""
    validation: dict[str, AbsolutePath] = {}
    """Named token datasets to evaluate on."""
    sequence_length: PositiveInt = 1024
    """Tokens in a row."""
    attend_across_documents: bool = False
    """Let attention and positions run over document boundaries inside a row."""
    shuffle: bool = True
    """Visit the rows of each epoch in a new pseudo-random order; false: in stored order."""
    accept_change: bool = False
    """On resume, go on with another dataset, seed or order than the checkpoint's, at the same cursor."""
    build: BuildConfig | None = None
    """How to build the dataset where it does not exist yet."""
    read_threads: PositiveInt = 1
    """Threads that gather batches."""
    read_ahead: PositiveInt = 4
    """Batches gathered ahead of the step."""


class BatchConfig(Section):
    """How many sequences an update sees."""

    global_size: PositiveInt
    """Sequences in one update, over all devices and microsteps."""
    microbatch: PositiveInt | None = None
    """Sequences a data shard handles in one microstep (data shards = replica x fsdp x expert); unset: one microstep."""


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
    """Evaluate only so many rows of each split, evenly spread over it; unset: all."""


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
