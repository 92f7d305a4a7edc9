"""The typed top level of the configuration: each key with its type, its default and the values that are valid."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from runner.config.rules import AtLeast, Between, OneOf, Rule
from runner.remote.address import local_outputs

SPLITS = ("train", "val", "test")  # of a dataset
DEBUG_BATCHES = 3  # with debug=true, of each training epoch and each evaluation


@dataclass
class Checkpoints:
    """When checkpoints are saved, how many are kept, and which of them a task reads."""

    every_epochs: Annotated[int, AtLeast(1)] = 1
    every_steps: Annotated[int | None, AtLeast(1)] = None
    every_seconds: Annotated[float | None, Between(0, math.inf, "600")] = None
    asynchronous: bool = True
    keep: Annotated[int, AtLeast(1)] = 2
    keep_best: Annotated[int, AtLeast(0)] = 1
    load: str = "last"


@dataclass
class EarlyStop:
    """When a run stops early because its monitor no longer improves."""

    patience: Annotated[int | None, AtLeast(1)] = None
    min_delta: Annotated[float, AtLeast(0)] = 0.0


@dataclass
class Averaging:
    """The exponential moving average of the weights, which is evaluated, and saved with them."""

    decay: Annotated[float | None, Between(0, 1, "0.999")] = None
    warmup_steps: Annotated[int, AtLeast(0)] = 0


@dataclass
class InitFrom:
    """The source of the initial weights."""

    path: str | None = None
    map: list[str] = field(default_factory=list)
    strict: bool = True


@dataclass
class Comparison:
    """What task=compare measures."""

    modes: list[str] | None = None
    world_sizes: Annotated[list[int], AtLeast(1)] = field(default_factory=lambda: [1, 2])


@dataclass
class Planning:
    """What task=plan plans, and for which device."""

    modes: list[str] | None = None
    world_sizes: Annotated[list[int], AtLeast(1)] = field(default_factory=lambda: [1, 2, 4])
    device: str = "this"
    memory_gib: Annotated[float | None, Between(0, math.inf, "40")] = None
    collectives: str | None = None


@dataclass
class Reporting:
    """What task=report reads, sorts by and writes."""

    runs: list[str] = field(default_factory=list)
    metric: str | None = None
    direction: Annotated[str | None, OneOf((None, "max", "min"))] = None
    value: Annotated[str, OneOf(("best", "last"))] = "best"
    over: list[str] = field(default_factory=lambda: ["seed"])
    output: str | None = None


@dataclass
class Sweeping:
    """How a sweep reacts to its jobs."""

    stop_on_failure: bool = False


@dataclass
class Exporting:
    """What task=export writes, the size of its files, and the tolerance of its outputs."""

    format: Annotated[str, OneOf(("safetensors", "hf", "peft", "torch_export", "onnx"))] = "safetensors"
    output: str | None = None
    shard_gb: Annotated[float, Between(0, math.inf, "5")] = 5.0
    tolerance: Annotated[float | None, AtLeast(0)] = None


@dataclass
class Predicting:
    """What task=predict writes, and its batch size per rank."""

    format: Annotated[str, OneOf(("csv", "parquet", "npy", "jsonl"))] = "csv"
    output: str | None = None
    batch_size: Annotated[int, AtLeast(1)] = 64


@dataclass
class Differing:
    """What task=diff compares, how closely, and whether it repeats the runs."""

    other: str | None = None  # also written diff.with
    tolerance: Annotated[float | None, AtLeast(0)] = None
    trace: bool = False


@dataclass
class Remote:
    """How object stores are used, if outputs= or another key is an address such as s3://bucket/prefix."""

    patience_s: Annotated[float, AtLeast(1)] = 300.0
    local_dir: str | None = None
    options: Any = None  # a mapping by name, or null


@dataclass
class Config:
    """One experiment. A group is a node with a `_target_`, whose constructor's signature types it.

    A key whose type includes numbers needs a rule in `Annotated`, which `runner.config.validate` checks. OmegaConf does
    not support the types that follow `Any`; `runner.config.texts` reads them.
    """

    task: Any = MISSING
    model: Any = MISSING
    adapters: Any = MISSING
    data: Any = MISSING
    parallel: Any = MISSING
    backend: Any = MISSING
    launcher: Any = MISSING
    optimizer: Any = MISSING
    scheduler: Any = MISSING
    loss: Any = MISSING
    objective: Any = MISSING
    loader: Any = MISSING
    logger: Any = field(default_factory=dict)  # any number of options, as for the next three groups
    transforms: Any = field(default_factory=dict)
    metrics: Any = field(default_factory=dict)
    callbacks: Any = field(default_factory=dict)
    name: str = "run"
    seed: Annotated[int, AtLeast(0)] = 0
    epochs: Annotated[int, AtLeast(1)] = 10
    max_steps: Annotated[int | None, AtLeast(1)] = None
    val_fraction: Annotated[float | None, Between(0, 1, "0.1")] = None
    val_fold: Annotated[int | None, AtLeast(0)] = None
    keep_samples: Annotated[Any, bool | Literal["device"], OneOf((True, False, "device"))] = False
    transform_targets: Annotated[Any, bool | Literal["auto"], OneOf(("auto", True, False))] = "auto"
    batch_size: Annotated[int, AtLeast(1)] = 64
    micro_batches: Annotated[Any, int | Literal["auto"], AtLeast(1, ("auto",))] = 1
    precision: Annotated[str, OneOf(("fp64", "fp32", "bf16", "fp16", "float8"))] = "fp32"
    compile: Annotated[
        Any, bool | Literal["reduce-overhead", "max-autotune"], OneOf((True, False, "reduce-overhead", "max-autotune"))
    ] = False
    tf32: Annotated[Any, bool | Literal["convolutions"], OneOf(("convolutions", True, False))] = "convolutions"
    cudnn_benchmark: bool = False
    cuda_graph: bool = False
    memory_format: Annotated[str, OneOf(("auto", "contiguous", "channels_last"))] = "auto"
    sync_batchnorm: Annotated[Any, bool | Literal["auto"], OneOf(("auto", True, False))] = "auto"
    activation_checkpointing: Annotated[Any, int | Literal["none", "full"], AtLeast(1, ("none", "full"))] = "none"
    clip_grad_norm: Annotated[float | None, Between(0, math.inf, "1.0")] = None
    on_nonfinite: Annotated[str, OneOf(("stop", "skip", "go_on"))] = "stop"
    loss_spike: Annotated[float | None, Between(1, math.inf, "10")] = None
    replay_every_steps: Annotated[int | None, AtLeast(1)] = None
    elastic_every_steps: Annotated[int | None, AtLeast(1)] = None
    ema: Averaging = field(default_factory=Averaging)
    init_from: InitFrom = field(default_factory=InitFrom)
    freeze: list[str] = field(default_factory=list)
    monitor: str | None = None
    monitor_direction: Annotated[str | None, OneOf((None, "max", "min"))] = None
    threads: Annotated[int | None, AtLeast(1)] = None
    log_every: Annotated[int, AtLeast(1)] = 1
    train_metrics: bool = False
    eval_every: Annotated[int, AtLeast(1)] = 1
    eval_every_steps: Annotated[int | None, AtLeast(1)] = None
    eval_batches: Annotated[int | None, AtLeast(1)] = None
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    profile: bool = False
    debug: bool = False
    compare: Comparison = field(default_factory=Comparison)
    plan: Planning = field(default_factory=Planning)
    sweep: Sweeping = field(default_factory=Sweeping)
    report: Reporting = field(default_factory=Reporting)
    export: Exporting = field(default_factory=Exporting)
    predict: Predicting = field(default_factory=Predicting)
    diff: Differing = field(default_factory=Differing)
    run_id: str | None = None
    resume: str | None = None
    resume_force: bool = False
    fork: str | None = None
    run: str | None = None
    trust: bool = False
    # None means current for task=rerun, else recorded.
    code: Annotated[str | None, OneOf((None, "recorded", "current"))] = None
    split: Annotated[str, OneOf(SPLITS)] = "val"
    remote: Remote = field(default_factory=Remote)
    outputs: str = "outputs"  # the last key is no section, so that a truncated config.yaml lacks a key

    @property
    def local_outputs(self) -> str:
        """The absolute path of the directory of the runs, which is a local copy if `outputs` is an address."""
        return str(local_outputs(self.outputs, self.remote.local_dir))


ConfigStore.instance().store(name="schema", node=Config)

KEYS = tuple(f.name for f in fields(Config))
GROUPS = tuple(f.name for f in fields(Config) if f.default == MISSING)
SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config) if is_dataclass(f.default_factory)}  # type: ignore[misc]
RULES: dict[str, Rule] = {  # by dotted key
    f"{section}.{name}".lstrip("."): rule
    for section, schema in {"": Config, **SECTIONS}.items()
    for name, hint in get_type_hints(schema, include_extras=True).items()
    for rule in getattr(hint, "__metadata__", ())
    if isinstance(rule, Rule)
}
OF_TASKS = ("compare", "plan", "report", "export", "predict", "diff")  # sections of one task
# Keys that determine what a command reads, does and writes, but not the experiment.
OF_COMMANDS = (
    *("task", "run", "run_id", "code", "resume", "resume_force", "fork", "trust", "name", "outputs", "remote", "split"),
    *OF_TASKS,
)
# Keys that only determine where and how a run is computed, recorded and observed. Their changes are not listed.
FREE_ON_RESUME: tuple[str, ...] = (
    *OF_COMMANDS,
    *("parallel", "backend", "launcher", "threads", "logger", "log_every", "checkpoint", "profile", "init_from"),
    *("keep_samples", "train_metrics", "replay_every_steps", "elastic_every_steps"),
    *("loader.num_workers", "loader.pin_memory", "loader.prefetch", "loader.timeout_s", "model.devices"),
    *("data.cache", "data.cache_dir", "data.cache_gb", "data.remote_options"),
)
# Keys that determine the model, the order of the data or a step. A resumed run refuses their changes.
FIXED_ON_RESUME: tuple[str, ...] = (
    *("seed", "model", "data", "val_fraction", "val_fold", "transforms", "transform_targets", "precision", "loss"),
    *("adapters", "objective", "freeze", "debug", "loader", "optimizer._target_"),
)
# Groups that are mappings of names, and the noun for one entry in messages.
NAMED_GROUPS = {"logger": "a logger", "transforms": "a transform", "metrics": "a metric", "callbacks": "a callback"}


def as_config(container: Mapping[str, Any]) -> Config:
    """Return the typed configuration of a resolved container; a missing key has its default, others are ignored."""
    values = {key: container[key] for key in KEYS if key in container}
    for key, section in SECTIONS.items():
        names = vars(section())
        values[key] = section(**{name: value for name, value in values.get(key, {}).items() if name in names})
    return Config(**values)


def apply_debug(config: Config) -> Config:
    """Return the configuration with the settings that debug=true implies, or unchanged without it."""
    if not config.debug:
        return config
    # No loader workers: a debugger has no terminal in them. A custom loader need not have these options.
    in_process = {key: value for key, value in {"num_workers": 0, "prefetch": None}.items() if key in config.loader}
    batches = min(config.eval_batches or DEBUG_BATCHES, DEBUG_BATCHES)
    return replace(config, loader={**config.loader, **in_process}, eval_batches=batches)
