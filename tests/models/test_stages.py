"""The structure that models declare for parallel modes: stages, tensor plans, re-initialization; and split."""

import copy
import pickle

import pytest
import torch
from runner.shipped.models.convnet import ConvNet
from runner.shipped.models.gpt import GPT
from runner.shipped.models.linear import Linear
from runner.shipped.models.mlp import MLP
from runner.shipped.models.net import Net
from runner.shipped.models.resnet18 import ResNet18
from runner.shipped.models.split import Split
from runner.shipped.models.toy import Toy
from runner.shipped.models.transformer import Transformer
from torch import nn

IMAGE = (1, 16, 16)
NUM_TOKENS = 6
MAKES = {
    "toy": lambda: Toy(IMAGE, 5, hidden=12),
    "linear": lambda: Linear(IMAGE, 5),
    "mlp": lambda: MLP(IMAGE, 5, hidden=[12, 8, 4]),
    "mlp of an odd number": lambda: MLP(IMAGE, 5, hidden=[12, 8]),
    "mlp with batch_norm": lambda: MLP(IMAGE, 5, hidden=[12, 8, 4], batch_norm=True, dropout=0.1),
    "convnet": lambda: ConvNet(IMAGE, 5, channels=[4, 6]),
    "net": lambda: Net(IMAGE, 5),
    "transformer": lambda: Transformer(IMAGE, 5, dim=16, depth=2, mlp_ratio=2),
    "resnet18": lambda: ResNet18(IMAGE, 5),
    "gpt": lambda: GPT([NUM_TOKENS], 5, dim=16, depth=2, mlp_ratio=2, dropout=0.1),
    "gpt with untied ends": lambda: GPT([NUM_TOKENS], 5, dim=16, depth=2, mlp_ratio=2, tied=False),
}
NUM_STAGES = dict(zip(MAKES, (2, 1, 4, 3, 4, 3, 4, 4, 6, 4, 4), strict=True))
TIED = {"gpt": "embed.weight"}  # in the first stage and in the last one
every_model = pytest.mark.parametrize("name", MAKES)


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MAKES[name]().double()


def samples(name: str, num: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if name.startswith("gpt"):
        return torch.randint(5, (num, NUM_TOKENS), generator=generator)
    return torch.rand(num, *IMAGE, dtype=torch.float64, generator=generator)


def gradients(model: nn.Module, outputs: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (outputs * torch.arange(outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_all_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@every_model
@pytest.mark.parametrize("num", [3, 0])
def test_composition_of_stages_is_forward(name, num):
    model = make(name)
    other = copy.deepcopy(model)  # BatchNorm's statistics change in each forward
    inputs = samples(name, num)
    torch.manual_seed(0)
    outputs = model(inputs)
    torch.manual_seed(0)
    composed = nn.Sequential(*other.stages())(inputs)
    assert outputs.shape == ((num, NUM_TOKENS, 5) if name.startswith("gpt") else (num, 5))
    assert torch.equal(outputs, composed)
    assert_all_equal(gradients(model, outputs), gradients(other, composed))
    assert_all_equal(model.state_dict(), other.state_dict())
    assert torch.equal(model.eval()(inputs), nn.Sequential(*other.eval().stages())(inputs))


@every_model
def test_every_tensor_of_the_model_is_in_exactly_one_stage_unless_it_is_tied(name):
    model = make(name)
    stages = model.stages()
    assert len(stages) == NUM_STAGES[name]
    tensors = [tensor for stage in stages for tensor in (*stage.parameters(), *stage.buffers())]
    if name in TIED:
        tied = tensors.pop()
        assert tied is model.get_parameter(TIED[name]) and tied is tensors[0]
    assert [*map(id, tensors)] != [] and len({*map(id, tensors)}) == len(tensors)
    assert {*map(id, tensors)} == {*map(id, (*model.parameters(), *model.buffers()))}


def test_plans():
    names = ("mlp", "mlp of an odd number", "mlp with batch_norm", "transformer")
    plans = {name: MAKES[name]().tensor_plan() for name in names}
    block = {"attention.query": "colwise", "attention.key": "colwise", "attention.value": "colwise"}
    block |= {"attention.proj": "rowwise", "up": "colwise", "down": "rowwise"}
    blocks = {f"blocks.{i}.{layer}": form for i in (0, 1) for layer, form in block.items()}
    assert plans == {
        "mlp": {"layers.0": "colwise", "layers.2": "rowwise", "layers.4": "colwise", "head": "rowwise"},
        "mlp of an odd number": {"layers.0": "colwise", "layers.2": "rowwise", "head": "rowwise"},
        "mlp with batch_norm": dict.fromkeys(["layers.0", "layers.4", "layers.8", "head"], "rowwise"),
        "transformer": blocks,
    }


@pytest.mark.parametrize("name", ["mlp with batch_norm", "net", "gpt with untied ends"])
def test_split_equals_the_model(name):
    model = make(name)
    split = Split(make(name), devices=["cpu", "cpu"])
    assert split.devices == [torch.device("cpu")] * 2
    inputs = samples(name)
    torch.manual_seed(0)
    outputs = model(inputs)
    torch.manual_seed(0)
    from_parts = split(inputs)
    assert torch.equal(outputs, from_parts)
    assert_all_equal(gradients(model, outputs), gradients(split, from_parts))
    assert list(split.state_dict()) == list(model.state_dict())
    assert_all_equal(dict(split.state_dict()), dict(model.state_dict()))
    split.load_state_dict(make(name).state_dict())
    assert [type(stage) for stage in split.stages()] == [type(stage) for stage in model.stages()]
    for other in (copy.deepcopy(split), pickle.loads(pickle.dumps(split))):
        with torch.no_grad():
            next(other.parameters()).add_(1)  # its parts contain its weights, and not those of the original model
        assert not torch.equal(other.eval()(inputs), split.eval()(inputs))
        assert torch.equal(split(inputs), Split(make(name)).eval()(inputs))


def test_inputs_are_moved_to_the_device_of_each_part():
    """The meta device stands for a second one."""
    split = Split(Net(IMAGE, 5), parts=3)
    assert split.devices is None
    split.place(["cpu", "meta", torch.device("meta")])
    places = {name: parameter.device.type for name, parameter in split.named_parameters() if name.endswith("weight")}
    assert places == {"conv1.weight": "cpu", "conv2.weight": "meta", "fc1.weight": "meta", "fc2.weight": "meta"}
    seen = []
    split.conv2.register_forward_hook(lambda module, args, outputs: seen.append(args[0].device.type))
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):  # on the way back to the inputs
        split(samples("net", 2).float())
    assert seen == ["meta"]
    moved = Split(Net(IMAGE, 5)).to("meta")
    assert moved(samples("net", 2).float().to("meta")).shape == (2, 5)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def stages(self):
        return [nn.Identity(), nn.Identity()]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Toy((4,), 2), {"parts": 1}, "parts=1 must be at least 2 and at most the 2 stages of Toy; try 2"),
        (Linear((4,), 2), {}, "model=Linear cannot be split, because it has one stage; try convnet"),
        (nn.Linear(4, 2), {}, "model=Linear cannot be split, because it does not define stages(); try convnet"),
        (
            MAKES["gpt"](),
            {},
            "model=GPT cannot be split, because embed.weight and head.weight are one tensor in two parts",
        ),
        (Bare(), {}, "model=Bare cannot be split, because it has tensors outside its submodules"),
        (Toy((4,), 2), {"devices": ["cpu"]}, "devices=[cpu] must be 2 devices, one per part"),
        (Toy((4,), 2), {"devices": ["cpu", "gpu"]}, "devices=[cpu,gpu]: "),
    ],
)
def test_models_that_cannot_be_split_are_refused(model, options, message):
    with pytest.raises(ValueError) as raised:
        Split(model, **options)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
