"""Adapters: small trained matrices beside layers of a model, whose other weights are frozen."""

import re
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.modules.module import register_module_forward_pre_hook

from runner.config.instantiate import check_contract, make_group
from runner.distributed.sync_batch_norm import is_batch_norm
from runner.errors import InputError
from runner.optimization.parameter_patterns import counted, keep_in_evaluation_mode, names_of, near

ALL_LINEAR = "all-linear"
ADAPTED = "peft_config"  # the attribute that peft sets on a model with adapters
CLASSIFIERS = ("score", "classifier")  # names of the output layer of a classifier of transformers, as in peft


class Adapters:
    """The contract of the options of the group `adapters`; the defaults are those of a model without adapters."""

    is_active = False

    def inject(self, module: nn.Module) -> nn.Module:
        """Return the module with adapters, whose other parameters are frozen. Raise InputError if that fails."""
        return module

    def describe(self, module: nn.Module, has_file: bool) -> list[str]:
        """Return lines for the run's header. has_file: `init_from` names a file with the frozen weights."""
        return []

    def base_names(self, module: nn.Module) -> dict[str, str | None]:
        """Return the names without adapters of the tensors that have others with them; None for those of adapters."""
        return {}

    def merge(self, module: nn.Module) -> nn.Module:
        """Return the module without adapters, which were added to its weights."""
        return module

    def write(self, module: nn.Module, directory: Path) -> None:
        """Write the trained weights into a new directory, in the adapters' own format. Called if `is_active`."""
        raise NotImplementedError


class NoAdapters(Adapters):
    """adapters=none: the model is trained as it is."""


class LoRA(Adapters):
    """adapters=lora: y = W x + alpha / rank * B A x for each adapted linear layer, where only A and B are trained.

    A has random initial values, which are drawn after those of the model, and B is 0. Raises ValueError if peft is
    missing or a value is invalid.
    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, by https://github.com/huggingface/peft
    """

    is_active = True

    def __init__(
        self,
        rank: int = 8,
        alpha: float = 16.0,
        target: list[str] | Literal["all-linear"] = "all-linear",
        dropout: float = 0.0,
        train: Sequence[str] = (),
    ):
        if find_spec("peft") is None:
            raise ValueError("it needs peft; pip install 'experiment-runner[lora]'")
        if rank < 1:
            raise ValueError(f"rank={rank} must be at least 1; try rank=8")
        if not alpha > 0:
            raise ValueError(f"alpha={alpha:g} must be above 0; try alpha={2 * rank}")
        if not 0 <= dropout < 1:
            raise ValueError(f"dropout={dropout:g} must be at least 0 and below 1")
        if not target:
            raise ValueError(f"target=[] must name layers; try target={ALL_LINEAR}")
        self._rank, self._alpha, self._dropout, self._target, self._train = rank, alpha, dropout, target, train

    def inject(self, module: nn.Module) -> nn.Module:
        from peft import LoraConfig, inject_adapter_in_model

        modules = {name: part for name, part in module.named_modules() if name}
        linear = {name: part for name, part in modules.items() if _is_linear(part)}
        targets = _all_linear(module, linear) if isinstance(self._target, str) else self._named(module, modules, linear)
        trained, tied = [name for entry in self._train for name in _find("train", entry, modules)], _tied(module)
        if shared := [(name, each) for name in trained for each in tied if f"{each}.".startswith(f"{name}.")]:
            (name, part), *_ = shared
            raise InputError(
                f"adapters.train={name}: {part} shares its weight with {tied[part]}, which would be trained as well; "
                "choose other modules"
            )
        if inside := [name for name in targets if any(f"{name}.".startswith(f"{each}.") for each in trained)]:
            raise InputError(
                f"adapters.train={list(self._train)} trains all of {inside[0]}, which adapters.target={self._target} "
                "adapts; leave one of them out"
            )
        config = LoraConfig(
            r=self._rank,
            lora_alpha=self._alpha,  # type: ignore[arg-type]  # only divided by the rank
            lora_dropout=self._dropout,
            target_modules=targets if isinstance(self._target, str) else list(self._target),
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that peft detects the transposed weight of a Conv1D
            inject_adapter_in_model(config, module)
        for name in trained:
            module.get_submodule(name).requires_grad_(True)
        for layer in [part for part in modules.values() if isinstance(part, _NormBase) or is_batch_norm(part)]:
            if [*layer.buffers()] and not any(parameter.requires_grad for parameter in layer.parameters()):
                keep_in_evaluation_mode(layer)
        return module

    def _named(self, module: nn.Module, modules: Mapping[str, nn.Module], linear: Mapping[str, nn.Module]) -> list[str]:
        """Return the full names of the layers that the option names."""
        tied, targets = _tied(module), list[str]()
        for entry in self._target:
            found = _find("target", entry, modules, linear)
            for name in found:
                if name not in linear:
                    raise InputError(
                        f"adapters.target={entry}: {name} is a {type(modules[name]).__name__}, but only linear layers "
                        f"can have adapters; {near(entry, list(linear))}"
                    )
                if name in tied:
                    raise InputError(
                        f"adapters.target={entry}: {name} shares its weight with {tied[name]}, so that an adapter "
                        "could not be merged into it; choose other layers"
                    )
            targets += found
        return targets

    def describe(self, module: nn.Module, has_file: bool) -> list[str]:
        names = [*_adapted_layers(module)]
        kind = f"rank {self._rank}, alpha {self._alpha:g}"
        lines = [f"adapters {kind}, in {len(names):,} layers: {counted(names, 8)}"]
        if not has_file:
            lines.append(
                "         the frozen weights are those of the model's constructor; init_from.path=FILE reads others"
            )
        return lines

    def base_names(self, module: nn.Module) -> dict[str, str | None]:
        names: dict[str, str | None] = {}
        for prefix, layer in _adapted_layers(module).items():
            for name, _ in chain(layer.named_parameters(), layer.named_buffers()):
                part, _, rest = name.partition(".")
                names[f"{prefix}.{name}"] = f"{prefix}.{rest}" if part == "base_layer" else None
        return names

    def merge(self, module: nn.Module) -> nn.Module:
        for name, layer in _adapted_layers(module).items():
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, layer.get_base_layer())
        delattr(module, ADAPTED)
        return module

    def write(self, module: nn.Module, directory: Path) -> None:
        """Write the files that `peft.PeftModel.from_pretrained(base, directory)` reads."""
        from safetensors.torch import save_file

        (config,) = getattr(module, ADAPTED).values()
        config.target_modules = sorted(config.target_modules)  # a set, whose order varies
        config.modules_to_save = [*self._train] or None
        # A PeftModel contains the model as base_model.model, and its files leave out the name of the adapter.
        trained = {f"base_model.model.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}
        state = {re.sub(r"\.(lora_[AB])\.default\.", r".\1.", name): tensor for name, tensor in trained.items()}
        config.save_pretrained(directory)
        save_file(state, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def make_adapters(node: dict[str, Any], choices: Mapping[str, str], freeze: Sequence[str] = ()) -> Adapters:
    """Construct the adapters. Raise InputError for an invalid option. freeze: the value of this key."""
    adapters: Adapters = make_group(choices, "adapters", node)
    check_contract(adapters, Adapters, "adapters")
    if adapters.is_active and freeze:
        raise InputError(
            f"freeze={list(freeze)} has no effect with adapters={choices.get('adapters')}, which trains only adapters "
            "and the modules in adapters.train; remove freeze"
        )
    return adapters


def make_model(choices: Mapping[str, str], node: dict[str, Any], adapters: Adapters) -> nn.Module:
    """Construct the model of a configuration node, with adapters. Raise InputError for an invalid option."""
    return adapters.inject(make_group(choices, "model", node))


def is_adapted(module: nn.Module) -> bool:
    """Return True if the module has adapters of peft."""
    return hasattr(module, ADAPTED)


@contextmanager
def recording_calls() -> Iterator[set[nn.Module]]:
    """Yield a set of the modules whose forward is called within the context."""
    called: set[nn.Module] = set()
    hook = register_module_forward_pre_hook(lambda module, inputs: called.add(module))
    try:
        yield called
    finally:
        hook.remove()


def warn_of_uncalled(module: nn.Module, called: Container[nn.Module]) -> list[str]:
    """Return a warning if layers with adapters are not among the called ones: the adapters then have no effect."""
    names = (
        [name for name, layer in _adapted_layers(module).items() if layer not in called] if is_adapted(module) else []
    )
    return [f"adapters: for the first samples, the model does not call {counted(names)}"] if names else []


def _adapted_layers(module: nn.Module) -> dict[str, Any]:
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in module.named_modules() if isinstance(layer, LoraLayer)}


def _find(
    option: str, entry: str, modules: Mapping[str, nn.Module], listed: Mapping[str, nn.Module] | None = None
) -> list[str]:
    """Return the modules with this name or last part of a name. Raise InputError if none has it.

    listed: the modules among which the message looks for a similar name; by default all.
    """
    found = [name for name in modules if name == entry or name.endswith(f".{entry}")]
    if not found:
        raise InputError(
            f"adapters.{option}={entry} matches no layer of the model; {near(entry, list(listed or modules))}"
        )
    return found


def _all_linear(module: nn.Module, linear: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the linear layers except the output layers and those that share their weight."""
    output, tied = _output_layers(module, linear), _tied(module)
    targets = [name for name, layer in linear.items() if layer not in output and name not in tied]
    if not targets:
        raise InputError(f"adapters.target={ALL_LINEAR}: the model has no linear layer besides its output layer")
    return targets


def _output_layers(module: nn.Module, linear: Mapping[str, nn.Module]) -> set[nn.Module]:
    """Return the layer that peft leaves out for a model of transformers, and for one of timm the layers of its heads.

    For any other model, return the last linear layer.
    """
    models: list[Any] = [*module.modules()]
    if found := [model for model in models if hasattr(model, "get_output_embeddings")]:
        classifier = next((layer for name, layer in linear.items() if name.split(".")[-1] in CLASSIFIERS), None)
        output = found[0].get_output_embeddings()
        return {*filter(None, (classifier if output is None else output,))}
    if found := [model for model in models if hasattr(model, "get_classifier")]:
        heads = found[0].get_classifier()  # one, or a tuple
        return {layer for head in (heads if isinstance(heads, tuple) else (heads,)) for layer in head.modules()}
    return {*[*linear.values()][-1:]}


def _tied(module: nn.Module) -> dict[str, str]:
    """Return the modules that share a parameter, each with another name of the parameter."""
    tied: dict[str, str] = {}
    for names in names_of([*module.named_parameters(remove_duplicate=False)]).values():
        for name in names if len(names) > 1 else []:
            tied[name.rpartition(".")[0]] = next(other for other in names if other != name)
    return tied


def _is_linear(part: nn.Module) -> bool:
    """Return True for a linear layer that is used by calling it, unlike the one in nn.MultiheadAttention."""
    if type(part).__name__ == "Conv1D" and type(part).__module__ == "transformers.pytorch_utils":
        return True  # a linear layer of GPT-2
    return isinstance(part, nn.Linear) and not isinstance(part, NonDynamicallyQuantizableLinear)
