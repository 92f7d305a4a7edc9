"""Models with adapters: a small Llama, and the loop of peft with which runs are compared."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runner.shipped.data.text import Text
from runner.shipped.models.gpt import GPT
from safetensors.torch import save_file
from torch import Tensor, nn

BLOCK, NUM_TRAIN, STEPS = 8, 28, 4
SIZES = ("model.dim=16", "model.depth=2", "model.heads=2")
TEXT = ("data=text", f"data.sample_shape=[{BLOCK}]", "data.num_outputs=256", "data.unit=bytes")
COMMON = ("precision=fp64", "logger=none", "optimizer.lr=0.3", f"max_steps={STEPS}", "epochs=9")
RANK = ("adapters=lora", "adapters.rank=4", "adapters.alpha=8")
GPT_WORDS = ("model=gpt", *SIZES, *RANK, "adapters.target=[query,value]")
LLAMA_WORDS = ("model=gpt", "model._target_=adapted_models.llama", *RANK, "adapters.target=[q_proj,v_proj]")


class Llama(nn.Module):
    """A causal model of transformers that returns its logits, (N, T) -> (N, T, vocabulary)."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
        self.language = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=1, **sizes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.language(tokens, use_cache=False).logits


def llama(sample_shape: Sequence[int], num_outputs: int, **unused: Any) -> Llama:
    return Llama()


def gpt() -> nn.Module:
    return GPT([BLOCK], 256, dim=16, depth=2, heads=2)


@dataclass(frozen=True)
class Files:
    """The text, and weights of another seed in float64."""

    text: Path
    base: Path

    @property
    def words(self) -> tuple[str, ...]:
        return (*TEXT, f"data.files='{self.text}'", f"batch_size={NUM_TRAIN}", *COMMON)


def write_files(folder: Path, make: Callable[[], nn.Module]) -> Files:
    files = Files(folder / "text.txt", folder / "base.safetensors")
    generator = torch.Generator().manual_seed(5)
    files.text.write_bytes(bytes(torch.randint(97, 123, (256,), generator=generator).tolist()))
    torch.manual_seed(6)
    state = {name: 3 * tensor for name, tensor in make().double().state_dict().items()}
    save_file({name: tensor.clone() for name, tensor in state.items()}, files.base)
    return files


def plain_loop(
    files: Files, make: Callable[[], nn.Module], targets: list[str], decay: float = 0.0
) -> tuple[list[float], nn.Module, nn.Module]:
    """Train adapters of peft with SGD, as by default. Return the losses, the model, and the model of the averages."""
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file

    torch.manual_seed(0)
    model = make()
    inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=targets), model)
    model.double()
    base = load_file(files.base)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "lora_" not in name:
                tensor.copy_(base[name.replace(".base_layer", "")])
    average = copy.deepcopy(model)
    data = Text("train", [BLOCK], 256, files=str(files.text), unit="bytes")
    assert len(data) == NUM_TRAIN
    inputs, labels = data.__getitems__(range(NUM_TRAIN))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.3, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mean, value in zip(average.parameters(), model.parameters(), strict=True):
            mean.data = decay * mean.data + (1 - decay) * value.data
    return losses, model, average
