"""The models of transformers, built from a configuration file, with the methods that parallel modes need."""

import copy
import inspect
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checks import Plan, check_sizes

SHARDED = {"colwise", "rowwise"}


def create(
    config: str,
    sample_shape: Sequence[int],
    num_outputs: int,
    architecture: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return the model of transformers, with initial weights.

    Inputs are the arguments of the model's forward: a tensor, or a mapping such as input_ids and attention_mask. The
    output is the model's `logits`, or its whole output if it has none or the inputs contain `labels`. Classifiers have
    num_outputs classes; a model of tokens has the vocabulary of its configuration, at least num_outputs.

    config: a JSON file, or a directory that contains config.json. architecture: a class of transformers; None means the
    one that the configuration names. options: values that replace those of the configuration.
    Raises ValueError if transformers is missing, there is no such file, class or option, or transformers refuses it.
    Source: https://github.com/huggingface/transformers
    """
    check_sizes(sample_shape, num_outputs)
    try:
        import transformers
    except ModuleNotFoundError:
        raise ValueError("model=hf needs transformers; pip install 'experiment-runner[hf]'") from None
    transformers.utils.logging.set_verbosity_error()
    settings = _read(config, options or {})
    name = architecture or next(iter(settings.architectures or ()), None)
    if name is None:
        raise ValueError(f"config={config} names no architecture; set architecture=AutoModelForCausalLM, for example")
    build = _builder(transformers, name)
    if build is None:
        models = (each for each in get_close_matches(name, dir(transformers), n=10) if _builder(transformers, each))
        raise ValueError(f"architecture={name} is not a model of transformers{_near(name, models)}")
    text = settings.get_text_config()
    if "Classification" in name:
        settings.num_labels = num_outputs
    elif (size := getattr(text, "vocab_size", None)) is not None and size < num_outputs:
        raise ValueError(f"config={config}: its vocab_size={size} must be at least num_outputs={num_outputs}")
    if "SequenceClassification" in name and hasattr(text, "vocab_size") and getattr(text, "pad_token_id", None) is None:
        raise ValueError(
            f"config={config}: {name} finds the last token by pad_token_id, which is not set; set a token that no "
            "text ends with, such as options.pad_token_id=0"
        )
    try:
        # Otherwise, weights are created in the dtype of the configuration, often bfloat16, and rounded.
        model: nn.Module = build(settings, dtype=torch.float32)
    except Exception as error:  # constructors raise many types
        raise ValueError(f"transformers refuses {name} with config={config}: {_first_line(error)}") from None
    _offer_methods(model)
    return model


def _builder(transformers: Any, name: str) -> Any:
    """Return the function that builds a model of a class, which may be an AutoModel; None if it is no model."""
    try:
        kind = getattr(transformers, name, None)
        return getattr(kind, "from_config", getattr(kind, "_from_config", None))
    except ImportError:  # of a package that only other classes need
        return None


def _read(path: str, options: Mapping[str, Any]) -> Any:
    """Return the configuration of transformers, with some replaced values."""
    from transformers import AutoConfig

    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise ValueError(f"config={path}: no such file, nor a directory with config.json; models are not downloaded")
    try:
        settings, unused = AutoConfig.from_pretrained(
            str(file), **options, return_unused_kwargs=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # validators raise many types
        reason = f"{_first_line(error)} (code in the directory is never run)"
        raise ValueError(f"config={path}: transformers cannot read it: {reason}") from None
    if unused:
        name = next(iter(unused))
        raise ValueError(f"options.{name} is not a value of config={path}{_near(name, settings.to_dict())}")
    if getattr(settings, "quantization_config", None) is not None:
        raise ValueError(f"config={path}: quantized models (quantization_config) are not supported; use other weights")
    settings.return_dict = True
    if getattr(settings, "gradient_checkpointing", False):  # activation_checkpointing draws the same random numbers
        settings.gradient_checkpointing = False
    return settings


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split('.')[0].split())}"


def _near(name: str, names: Iterable[str]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _offer_methods(model: Any) -> None:
    """Replace the model's class by a subclass whose methods parallel modes call; see models/__init__.py."""
    base, settings = model.base_model, model.config
    members: dict[str, Any] = {"forward": _forward_of(type(model)), "blocks": _blocks}
    pipelined = getattr(base.config, "base_model_pp_plan", None) or {}
    if [*pipelined] == ["embed_tokens", "layers", "norm"] and hasattr(model, "lm_head") and base is not model:
        members["stages"] = _stages
        styles = getattr(settings, "base_model_tp_plan", None) or {}
        if styles and {*styles.values()} <= SHARDED:
            members["tensor_plan"] = _tensor_plan
    model.__class__ = type(type(model).__name__, (type(model),), members)


def _forward_of(kind: Any) -> Any:
    parameters = inspect.signature(kind.forward).parameters
    # The keys and values of a cache would only be kept for a next token.
    options = {"use_cache": False} if "use_cache" in parameters else {}

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "position_ids" in kwargs and "position_ids" not in parameters:
            raise TypeError(f"{kind.__name__} ignores position_ids, and cannot separate packed records by them")
        padding = getattr(self.config.get_text_config(), "pad_token_id", None)
        tokens, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        if padding is not None and tokens is not None and mask is not None and mask.shape == tokens.shape:
            # A classifier may find the last token by the model's padding, which may not be the tokenizer's.
            kwargs["input_ids"] = tokens.masked_fill(mask == 0, padding)
        output = kind.forward(self, *args, **kwargs, **options)
        return output if "labels" in kwargs else getattr(output, "logits", output)

    return forward


def _blocks(self: Any) -> list[nn.Module]:
    """Return the modules that transformers keeps on one device, such as the layers of an encoder."""
    return [part for part in self.modules() if type(part).__name__ in (self._no_split_modules or ())]


def _stages(self: Any) -> list[nn.Module]:
    """Return the embedding, the layers and the head."""
    base = self.base_model
    layers = [Layer(base, number) for number in range(len(base.layers))]
    return [base.embed_tokens, *layers, Head(self)]


def _tensor_plan(self: Any) -> Plan:
    base, prefix = self.base_model, f"{self.base_model_prefix}."
    linear = [name for name, part in base.named_modules() if isinstance(part, nn.Linear)]
    plan: Plan = {}
    for pattern, style in self.config.base_model_tp_plan.items():
        plan |= {prefix + name: style for name in linear if fnmatchcase(name, pattern)}
    return dict(sorted(plan.items(), key=lambda item: linear.index(item[0].removeprefix(prefix))))


class Layer(nn.Module):
    """One layer of a decoder, called by the decoder's own forward, which computes its positions and its mask.

    (N, T, dim) -> (N, T, dim).
    """

    def __init__(self, decoder: Any, number: int) -> None:
        super().__init__()
        self.layer = decoder.layers[number]
        if hasattr(decoder, "rotary_emb"):
            self.rotary_emb = decoder.rotary_emb
        self._decoder = [_reduce(decoder, self.layer, nn.Identity())]  # in a list, because it is not a submodule

    def forward(self, features: Tensor, first_position: int = 0) -> Tensor:
        """first_position: that of the features, which are a part of those of a sample.

        Raises ValueError if the layer's window excludes earlier positions, and the features are such a part.
        """
        decoder, length = self._decoder[0], features.size(1)
        window = getattr(decoder.config, "sliding_window", None)
        if first_position and window is not None and first_position + length > window:
            raise ValueError(f"a part of a sample of more than sliding_window={window} positions is not supported")
        positions: dict[str, Tensor] = {}  # by default, they start at 0
        if first_position:
            numbers = torch.arange(first_position, first_position + length, device=features.device)
            positions["position_ids"] = numbers[None]
        return decoder(inputs_embeds=features, use_cache=False, **positions).last_hidden_state


class Head(nn.Module):
    """The last norm and the head of a language model, called by the model's own forward, which may scale the logits.

    (N, T, dim) -> (N, T, vocab_size).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.lm_head = model.base_model.norm, model.lm_head
        if hasattr(model.base_model, "rotary_emb"):  # the forward calls it, although no layer follows
            self.rotary_emb = model.base_model.rotary_emb
        without_layers = copy.copy(model)
        decoder = _reduce(model.base_model, None, self.norm)
        without_layers._modules = {**model._modules, model.base_model_prefix: decoder}
        self._model = [without_layers]

    def forward(self, features: Tensor) -> Tensor:
        return self._model[0](inputs_embeds=features)


def _reduce(decoder: Any, layer: Any, norm: nn.Module) -> Any:
    """Return a decoder of the same modules, without an embedding and without the other layers."""
    reduced = copy.copy(decoder)
    layers = nn.ModuleList(each if each is layer else Skipped() for each in decoder.layers)
    reduced._modules = {**decoder._modules, "embed_tokens": None, "layers": layers, "norm": norm}
    return reduced


class Skipped(nn.Module):
    """A layer that returns its input; the other layers keep their numbers, by which a decoder selects their masks."""

    def forward(self, features: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return features
