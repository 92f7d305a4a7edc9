"""The typed top level of the configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

SPLITS = ("train", "val", "test")  # of a dataset
DEBUG_BATCHES = 3  # with debug=true, of each training epoch and each evaluation


@dataclass
class Checkpoints:
    """When checkpoints are saved, how many are kept, and which of them a task reads."""

    every_epochs: int = 1
    every_steps: int | None = None
    every_seconds: float | None = None
    asynchronous: bool = True
    keep: int = 2
    keep_best: int = 1
    load: str = "last"


@dataclass
class EarlyStop:
    """When a run stops early because its monitor no longer improves."""

    patience: int | None = None
    min_delta: float = 0.0


@dataclass
class Averaging:
    """The exponential moving average of the weights, which is evaluated, and saved with them."""

    decay: float | None = None
    warmup_steps: int = 0


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
    world_sizes: list[int] = field(default_factory=lambda: [1, 2])


@dataclass
class Planning:
    """What task=plan plans, and for which device."""

    modes: list[str] | None = None
    world_sizes: list[int] = field(default_factory=lambda: [1, 2, 4])
    device: str = "this"
    memory_gib: float | None = None
    collectives: str | None = None


@dataclass
class Reporting:
    """What task=report reads, sorts by and writes."""

    runs: list[str] = field(default_factory=list)
    metric: str | None = None
    direction: str | None = None
    value: str = "best"
    over: list[str] = field(default_factory=lambda: ["seed"])
    output: str | None = None


@dataclass
class Exporting:
    """What task=export writes, and the tolerance of its outputs."""

    format: str = "safetensors"
    output: str | None = None
    tolerance: float | None = None


@dataclass
class Predicting:
    """What task=predict writes, and its batch size per rank."""

    format: str = "csv"
    output: str | None = None
    batch_size: int = 64


@dataclass
class Differing:
    """What task=diff compares, how closely, and whether it repeats the runs."""

    other: str | None = None  # also written diff.with
    tolerance: float | None = None
    trace: bool = False


@dataclass
class Config:
    """One experiment. A group is a node with a `_target_`, whose constructor's signature types it.

    OmegaConf does not support the types in `Annotated`; `runner.config.texts` reads them.
    """

    task: Any = MISSING
    model: Any = MISSING
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
    seed: int = 0
    epochs: int = 10
    max_steps: int | None = None
    val_fraction: float | None = None
    keep_samples: bool = False
    transform_targets: Annotated[Any, bool | Literal["auto"]] = "auto"
    batch_size: int = 64
    micro_batches: Annotated[Any, int | Literal["auto"]] = 1
    precision: str = "fp32"
    compile: bool = False
    memory_format: str = "auto"
    sync_batchnorm: Annotated[Any, bool | Literal["auto"]] = "auto"
    activation_checkpointing: Annotated[Any, int | Literal["none", "full"]] = "none"
    clip_grad_norm: float | None = None
    on_nonfinite: str = "stop"
    loss_spike: float | None = None
    replay_every_steps: int | None = None
    ema: Averaging = field(default_factory=Averaging)
    init_from: InitFrom = field(default_factory=InitFrom)
    freeze: list[str] = field(default_factory=list)
    monitor: str | None = None
    monitor_direction: str | None = None
    threads: int | None = None
    log_every: int = 1
    train_metrics: bool = False
    eval_every: int = 1
    eval_every_steps: int | None = None
    eval_batches: int | None = None
    checkpoint: Checkpoints = field(default_factory=Checkpoints)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    profile: bool = False
    debug: bool = False
    compare: Comparison = field(default_factory=Comparison)
    plan: Planning = field(default_factory=Planning)
    report: Reporting = field(default_factory=Reporting)
    export: Exporting = field(default_factory=Exporting)
    predict: Predicting = field(default_factory=Predicting)
    diff: Differing = field(default_factory=Differing)
    resume: str | None = None
    resume_force: bool = False
    fork: str | None = None
    run: str | None = None
    trust: bool = False
    code: str | None = None  # recorded or current; None means current for task=rerun, else recorded
    split: str = "val"
    outputs: str = "outputs"


ConfigStore.instance().store(name="schema", node=Config)

KEYS = tuple(f.name for f in fields(Config))
GROUPS = tuple(f.name for f in fields(Config) if f.default == MISSING)
SECTIONS: dict[str, type] = {f.name: f.default_factory for f in fields(Config) if is_dataclass(f.default_factory)}  # type: ignore[misc]
OF_TASKS = ("compare", "plan", "report", "export", "predict", "diff")  # sections of one task
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
