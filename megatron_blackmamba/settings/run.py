"""The config of a run: every section except `model:`, and checks of invalid combinations."""

import unicodedata
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from megatron_blackmamba.settings.base import Section, UserPath
from megatron_blackmamba.settings.model import ModelConfig
from megatron_blackmamba.settings.optimizer import OptimizerConfig
from megatron_blackmamba.settings.rules import BY_NAME, FIXED, FIXED_IN_RUN, OTHER, OTHER_DATA, ROUNDED, SAME
from megatron_blackmamba.settings.run_schedule import Scheduled

LONGEST_NAME = 200
"""Bytes. File systems take 255 for the name of a folder."""


class ParallelConfig(Section):
    """The parallel layout of the model; the rest of the world is data-parallel."""

    rule = ROUNDED

    tensor: int = Field(1, ge=1)
    """Tensor parallelism; above 1, sequence parallelism is on."""
    pipeline: int = Field(1, ge=1)
    """Number of pipeline stages."""
    context: int = Field(1, ge=1)
    """Contiguous parts that each sequence is cut into, one a rank; layers pass their state on."""
    expert: int = Field(1, ge=1)
    """Experts are spread over this many ranks; it does not shrink the data-parallel size."""
    expert_tensor: int = Field(1, ge=1)
    """Tensor parallelism inside an expert."""


class SyntheticConfig(Section):
    """A seeded, learnable source: no files needed."""

    rule = FIXED

    sources: int = Field(3, ge=1)
    """Number of sources."""
    order: int = Field(2, ge=1)
    """Largest number of earlier tokens that the next one depends on."""


class DataConfig(Section):
    kind: Annotated[Literal["synthetic", "mixture"], FIXED] = "synthetic"
    """synthetic: generated tokens. mixture: the token shards of data.mixture."""
    mixture: Annotated[UserPath | None, OTHER_DATA] = None
    """The mixture file, when kind is mixture; relative to the file that names it."""
    sequence_length: Annotated[int, FIXED_IN_RUN] = Field(2048, gt=0)
    """Tokens per sequence."""
    seed: Annotated[int, FIXED] = 1234
    """Seed of the order of the samples."""
    workers: Annotated[int, SAME] = Field(2, ge=0, le=1024)
    """Number of threads that prefetch samples."""
    verify_rate: Annotated[float, SAME] = Field(100.0, ge=0)
    """Megabytes per second that each rank reads to compare the shards with their manifests; 0 switches this off."""
    mask_first_token: Annotated[bool, FIXED_IN_RUN] = False
    """Exclude each document's first token from the training loss: the text before it is another document's."""
    synthetic: SyntheticConfig = SyntheticConfig()
    """Settings of synthetic data."""

    @model_validator(mode="after")
    def _mixture_named(self) -> "DataConfig":
        if self.kind == "mixture" and not self.mixture:
            raise ValueError("data.kind is mixture: name the file in data.mixture")
        return self


class GuardConfig(Section):
    """Reactions to a bad step."""

    max_bad_steps: Annotated[int, SAME] = Field(5, ge=1)
    """Stop after this many steps in a row with a loss or gradient that is not finite. Spikes never stop a run."""
    spike: Annotated[Literal["off", "warn", "skip", "rewind"], OTHER] = "warn"
    """What to do about a spike. `rewind` also rewinds if a step is not finite or if replicas differ."""
    spike_deviations: Annotated[float, OTHER] = Field(8.0, gt=0)
    """A spike: a loss this many median absolute deviations above the running median."""
    spike_window: Annotated[int, OTHER] = Field(128, ge=8)
    """Number of latest steps over which the median loss is taken."""
    max_spikes: Annotated[int, OTHER] = Field(5, ge=2)
    """After this many spikes in a row, or rewinds to one checkpoint, the higher loss becomes the baseline."""
    rewind_batches: Annotated[int, OTHER] = Field(1, ge=1)
    """Batches that a rewind skips: the one that spiked, and those before it, at most back to the checkpoint."""
    replicas_every: Annotated[int, SAME] = Field(100, ge=0)
    """Steps between comparisons of replicated weights, which also precede every save; 0: none."""
    slow_ratio: Annotated[float, SAME] = Field(1.3, gt=1)
    """A rank is slow if its own time is this many times the median of the other ranks."""
    slow_steps: Annotated[int, SAME] = Field(50, ge=1)
    """Number of steps over which the times of ranks are compared."""
    hang_seconds: Annotated[float, SAME] = Field(600.0, ge=1)
    """Seconds without progress after which every rank writes a report and exits with 70."""


class RampStage(Section):
    """A global batch for the beginning of a run."""

    batch: int = Field(gt=0)
    """Sequences per step."""
    until: int = Field(gt=0)
    """Tokens of the run after which the next stage begins; the last stage is followed by training.global_batch."""


class TrainingConfig(Section):
    tokens: Annotated[int, BY_NAME] = Field(gt=0)
    """Tokens of the whole run, which stops after the first full batch that reaches this number."""
    global_batch: Annotated[int, BY_NAME] = Field(gt=0)
    """Sequences per step, over all ranks."""
    batch_ramp: Annotated[list[RampStage], BY_NAME] = Field([])
    """Smaller batches at the beginning, such as [{batch: 256, until: 10B}, {batch: 512, until: 30B}]."""
    micro_batch: Annotated[int, OTHER] = Field(1, gt=0)
    """Sequences that a rank processes at once; it accumulates gradients over its share of the batch."""
    precision: Annotated[Literal["bf16", "fp32", "fp64"], FIXED] = "bf16"
    """Precision of weights and activations. fp64 is for comparing runs on CPUs: slow, and refused on GPUs."""
    seed: Annotated[int, FIXED] = 1234
    """Seed of the initial weights."""
    ema: Annotated[float, OTHER] = Field(0.0, ge=0, lt=1)
    """Decay rate per step of a moving average of the weights, saved in checkpoints for `--ema`; 0: no average."""
    recompute: Annotated[Literal["none", "experts", "layers"], SAME] = "none"
    """What the backward pass recomputes to save memory: nothing, the experts or whole layers."""
    overlap: Annotated[bool, SAME] = True
    """Reduce gradients and gather parameters while computing."""
    bucket_size: Annotated[int | None, SAME] = Field(None, ge=1)
    """Smallest number of parameters that `overlap` exchanges at once.
    null: 40 million, or 1 million per data-parallel rank if that is more."""
    deterministic: Annotated[bool, ROUNDED] = False
    """Make steps bit-identical on GPUs, at some cost in speed; on CPUs they always are."""
    evaluate_every: Annotated[int, SAME] = Field(0, ge=0)
    """Steps between validations; the last step is validated too. 0 disables validation."""
    evaluate_batches: Annotated[int, SAME] = Field(8, ge=1)
    """Number of global batches per source in a validation."""
    validate_balanced: Annotated[bool, SAME] = False
    """Measure the validation loss also with the experts balanced as in training."""
    router_every: Annotated[int, SAME] = Field(10, ge=1)
    """Steps between logs of the experts' loads and of the largest attention logits."""
    stop_after_steps: Annotated[int | None, OTHER] = Field(None, ge=1)
    """Stop the job at this step. The schedule still follows `tokens`, and the run can be resumed."""
    profile: Annotated[tuple[int, int] | None, SAME] = None
    """First and last step to trace."""
    guard: GuardConfig = GuardConfig()
    """Reactions to bad steps, slow ranks and hangs."""

    @field_validator("batch_ramp")
    @classmethod
    def _rises(cls, ramp: list[RampStage]) -> list[RampStage]:
        for before, after in pairwise(ramp):
            if after.until <= before.until:
                raise ValueError(
                    f"training.batch_ramp: the stage until {after.until} tokens follows the one until {before.until}:"
                    " list stages in order"
                )
        return ramp

    @field_validator("profile")
    @classmethod
    def _in_order(cls, profile: tuple[int, int] | None) -> tuple[int, int] | None:
        if profile and not 1 <= profile[0] <= profile[1]:
            raise ValueError(f"training.profile={list(profile)} is no first and last step")
        return profile


class CheckpointConfig(Section):
    rule = SAME

    every: int = Field(1000, ge=0)
    """Steps between checkpoints; 0: only at the end and when asked to stop."""
    keep_last: int = Field(3, ge=1)
    """Number of newest checkpoints to keep."""
    keep_every: int = Field(10000, ge=0)
    """Checkpoints at multiples of this step are kept forever, and saved there if `every` is not 0; 0: none."""
    asynchronous: bool = True
    """Write checkpoints in the background."""
    retry_every: int = Field(10, ge=1)
    """Steps until a failed save is retried, for example on a full disk."""
    if_damaged: Literal["older", "stop"] = "older"
    """If the newest checkpoint is damaged: resume from the one before it, or stop."""
    export_every: int = Field(0, ge=0)
    """Steps between Hugging Face exports, written by the ranks to FOLDER/NAME/exports, and one at the end; 0: none."""
    export_check: Literal["full", "short", "none"] = "short"
    """Load these exports in transformers, beside training: whole, the first layers of each kind, or not at all."""

    export_ema: bool = False
    """Let these exports hold the averaged weights (training.ema), rounded to training.precision."""

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        return bool(self.every) and (step % self.every == 0 or self.is_kept(step))

    def is_kept(self, step: int) -> bool:
        """Return whether the checkpoint of this step is kept forever."""
        return bool(self.keep_every) and step % self.keep_every == 0


class EvaluationConfig(Section):
    """Scores of checkpoints on tasks, measured beside training on a CPU core, in a process of low priority."""

    rule = SAME

    every: int = Field(0, ge=0)
    """Steps after which the next checkpoint is scored; so is the last one of the run. 0: none."""
    tasks: str = "paper"
    """lm-eval tasks, comma-separated; paper means the paper's eight."""
    data: UserPath | None = None
    """Folder with TASK.jsonl, TASK.jsonl.gz or TASK.parquet; relative to the file that names it."""
    limit: int | None = Field(None, ge=1)
    """Maximum number of questions per task."""

    @model_validator(mode="after")
    def _has_data(self) -> "EvaluationConfig":
        if self.every and self.data is None:
            raise ValueError(f"evaluation.every={self.every} needs questions: name their folder in evaluation.data")
        return self


class LoggingConfig(Section):
    rule = SAME

    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Log to Weights & Biases (pip install wandb)."""
    wandb_project: str = "blackmamba"
    """Project name in Weights & Biases."""


class KernelsConfig(Section):
    """The implementation of each part of the model. Results agree within rounding, which FP8 makes coarse."""

    rule = ROUNDED

    linear: Literal["local", "te", "fp8"] = "local"
    """Linear layers: megatron-core's own (local), Transformer Engine's (te), or products in FP8, also of the experts
    (fp8; needs an H100 or newer GPU). te has not run."""
    dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """megatron-core's exchange of tokens between the ranks that share the experts."""
    scan: Literal["auto", "reference", "chunked", "cpp", "cuda", "triton", "mamba_ssm"] = "auto"
    """The selective scan; auto: the first of cuda, triton, mamba_ssm, cpp and chunked that works here."""
    scan_states: Literal["keep", "recompute"] = "keep"
    """From Hopper GPUs on: keep every fourth state for the backward pass, or recompute it (slower, less memory)."""
    ssd: Literal["auto", "reference", "chunked", "triton", "mamba_ssm"] = "auto"
    """The scan of Mamba-2 layers; auto: the first of triton, mamba_ssm and chunked that works here (the first two are
    unmeasured). Mamba-3 layers take chunked, or triton if it is named here."""
    delta: Literal["auto", "reference", "chunked", "triton"] = "auto"
    """The delta rule; auto: chunked, in PyTorch. triton is unmeasured, and takes up to 128 key channels on a GPU."""
    cuda_graph: Annotated[Literal["auto", "off"], SAME] = "auto"
    """auto: on a GPU, forward and backward pass of a micro-batch as one launch, a CUDA graph. Only runs of one process
    without recomputation; the log says why if there is none."""
    if_missing: Literal["stop", "pytorch"] = "stop"
    """If a GPU kernel of this project cannot run on a GPU: do not start, or use PyTorch, several times slower."""


class StartConfig(Section):
    """Start of a new run; not read on resume."""

    rule = SAME

    from_: UserPath | None = Field(None, alias="from")
    """A checkpoint whose weights start this run, with a fresh optimizer and schedule."""
    branch: UserPath | None = None
    """RUN or RUN@STEP: go on from a checkpoint of another run, with its optimizer, steps and place in the data."""
    reread: bool = False
    """Let a branch with another sequence length read text again that its trunk has read."""

    @model_validator(mode="after")
    def _one_start(self) -> "StartConfig":
        if self.from_ and self.branch:
            raise ValueError("start.from takes weights alone, and start.branch all of a checkpoint: set one of the two")
        return self


class ResumeConfig(Section):
    """The changes allowed to a resumed run, and to the weights of start.from."""

    rule = SAME

    allow: list[str] = Field([])
    """Keys that may differ from the resumed checkpoint or from start.from, such as optimizer.learning_rate."""


class RunConfig(Section, Scheduled):
    """Everything that defines a run. `blackmamba config FILE` prints it composed."""

    name: Annotated[str, SAME] = "run"
    """Name of the run and of its folder."""
    folder: Annotated[UserPath, SAME] = "runs"
    """Folder of runs; the run is stored in FOLDER/NAME."""
    model: ModelConfig
    """Architecture of the model."""
    kernels: KernelsConfig = KernelsConfig()
    """Implementations of parts of the model."""
    parallel: ParallelConfig = ParallelConfig()
    """Layout over processes."""
    data: DataConfig = DataConfig()
    """Training data."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    training: TrainingConfig
    """Length, batch, precision and validation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and what to keep."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Scores of checkpoints beside training."""
    logging: LoggingConfig = LoggingConfig()
    """Loggers beside metrics.jsonl and log.txt, which are always written."""
    start: StartConfig = StartConfig()
    """Initial weights."""
    resume: ResumeConfig = ResumeConfig()
    """Changes allowed when the run resumes or starts from other weights."""

    @field_validator("name")
    @classmethod
    def _a_folder_name(cls, name: str) -> str:
        if not name or "/" in name or name.startswith((".", "-")) or any(unicodedata.category(c) == "Cc" for c in name):
            raise ValueError(f"a run's name is the name of its folder; {name!r} cannot be one")
        if len(name.encode()) > LONGEST_NAME:
            raise ValueError(f"a run's name has at most {LONGEST_NAME} bytes; this one has {len(name.encode())}")
        return name

    @field_validator("folder")
    @classmethod
    def _a_local_folder(cls, folder: str) -> str:
        if "://" in folder:
            raise ValueError(
                f"folder={folder}: a run writes to a folder of a file system, not to object storage. Write to such a"
                " folder, and copy what you want to keep"
            )
        return folder

    @model_validator(mode="after")
    def _combinations(self) -> "RunConfig":
        parallel, model, training = self.parallel, self.model, self.training
        if model.experts % parallel.expert:
            divisors = ", ".join(str(size) for size in range(1, model.experts + 1) if model.experts % size == 0)
            raise ValueError(
                f"model.experts={model.experts} cannot be spread evenly over parallel.expert={parallel.expert},"
                f" only over {divisors}"
            )
        for batch in self.batches:
            if batch % training.micro_batch:
                key = "training.global_batch" if batch == training.global_batch else "training.batch_ramp: batch"
                raise ValueError(_unequal_micro_batches(key, batch, training.micro_batch))
        self._fits_schedule()
        if training.precision == "bf16" and not self.optimizer.distributed:
            raise ValueError(
                "optimizer.distributed=false needs training.precision=fp32: megatron-core's plain optimizer cannot save"
                " bf16 weights beside the fp32 ones of a Mamba layer. The distributed one works on one process too."
            )
        if self.checkpoint.export_ema and not training.ema:
            raise ValueError(
                "checkpoint.export_ema needs averaged weights: set training.ema, such as 0.999, or leave it out"
            )
        if self.optimizer.gradients == "bf16" and training.precision != "bf16":
            raise ValueError(
                f"optimizer.gradients=bf16 needs training.precision=bf16, not {training.precision}: gradients have the"
                " precision of the weights. Set both, or leave optimizer.gradients=fp32."
            )
        if self.data.sequence_length % parallel.tensor:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} is not divisible by"
                f" parallel.tensor={parallel.tensor} (sequence parallelism splits it)"
            )
        return self


def _unequal_micro_batches(key: str, global_batch: int, micro_batch: int) -> str:
    """Return what is wrong with a global batch that micro-batches do not fill, and the nearest sizes that do."""
    less = next(size for size in range(min(micro_batch, global_batch), 0, -1) if global_batch % size == 0)
    more = next(size for size in range(min(micro_batch, global_batch), global_batch + 1) if global_batch % size == 0)
    works = " or ".join(f"training.micro_batch={size}" for size in dict.fromkeys((less, more)))
    return (
        f"{key}={global_batch} is not a multiple of training.micro_batch={micro_batch}. Use {works}. On N"
        " data-parallel ranks it must be a multiple of N × training.micro_batch."
    )
