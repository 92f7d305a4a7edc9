"""The models: shapes, sizes, initial weights, refused input, and their configuration."""

import math
from pathlib import Path

import pytest
import torch
from runner.shipped.models.convnet import ConvNet
from runner.shipped.models.gpt import GPT
from runner.shipped.models.linear import Linear
from runner.shipped.models.mlp import MLP
from runner.shipped.models.net import Net
from runner.shipped.models.resnet18 import ResNet18
from runner.shipped.models.toy import Toy
from runner.shipped.models.transformer import Transformer
from runner.shipped.models.unet import UNet
from torch import nn

CONF = Path(__file__).parents[2] / "conf" / "model"
MODELS = {
    "toy": Toy,
    "linear": Linear,
    "mlp": MLP,
    "convnet": ConvNet,
    "net": Net,
    "resnet18": ResNet18,
    "transformer": Transformer,
    "unet": UNet,
    "gpt": GPT,
}


@pytest.mark.parametrize(("kind", "sample_shape"), [(ConvNet, (2, 4, 7)), (ConvNet, (1, 30, 29)), (Net, (2, 16, 17))])
def test_convolutions_accept_images_of_any_size(kind, sample_shape):
    outputs = kind(sample_shape, 10)(torch.rand(2, *sample_shape))
    assert outputs.shape == (2, 10)
    if kind is Net:
        torch.testing.assert_close(outputs.exp().sum(1), torch.ones(2))


@pytest.mark.parametrize(("name", "least"), [("convnet", 4), ("net", 16), ("resnet18", 1)])
def test_models_of_images_refuse_other_samples(name, least):
    for sample_shape in ((28, 28), *([(1, least, least - 1)] if least > 1 else [])):
        with pytest.raises(ValueError) as raised:
            MODELS[name](sample_shape, 10)
        assert str(raised.value).startswith(
            f"{name} needs image samples (channels, height, width) of at least {least} x {least}, but the samples have "
            f"shape {sample_shape}; choose a dataset of images"
        )


def test_transformer_splits_an_image_row_by_row():
    images = torch.arange(2 * 4 * 6.0).view(1, 2, 4, 6)
    patches = Transformer([2, 4, 6], 3, patch_size=2).patches(images)
    assert patches.shape == (1, 6, 8)
    assert patches[0, 4].tolist() == images[0, :, 2:4, 2:4].flatten().tolist()  # the second of the second row


@pytest.mark.parametrize(
    ("sample_shape", "small_images", "kernel", "pixels"),
    [((1, 28, 28), True, 3, 28), ((3, 64, 32), True, 7, 16), ((3, 28, 28), False, 7, 7)],
)
def test_resnet18_keeps_small_images_in_its_stem(sample_shape, small_images, kernel, pixels):
    model = ResNet18(sample_shape, 10, small_images).eval()
    assert model.conv1.in_channels == sample_shape[0]
    assert model.conv1.kernel_size == (kernel, kernel)
    images = torch.rand(1, *sample_shape)
    assert model.stages()[0](images).shape[1:3] == (64, pixels)
    assert model(images).shape == (1, 10)


def test_resnet18_is_torchvisions():
    from torchvision.models import resnet18

    torch.manual_seed(3)
    ours = ResNet18([3, 64, 64], 10)
    torch.manual_seed(3)
    theirs = resnet18(weights=None, num_classes=10)
    images = torch.rand(2, 3, 64, 64)
    assert torch.equal(ours(images), theirs(images))
    assert list(ours.state_dict()) == list(theirs.state_dict())  # so that torchvision's weights match by name
    stem = ResNet18([1, 64, 64], 10).conv1.weight
    assert stem.std().item() == pytest.approx(math.sqrt(2 / (7 * 7 * 64)), rel=0.1)  # initialized like the others


def test_mlp_options_define_the_layers():
    model = MLP([6], 2, hidden=[5, 4, 3], batch_norm=True, dropout=0.5)
    kinds = [type(layer) for layer in model.layers]
    assert kinds == [nn.Linear, nn.BatchNorm1d, nn.ReLU, nn.Dropout] * 3
    assert [layer.out_features for layer in model.layers if isinstance(layer, nn.Linear)] == [5, 4, 3]
    assert [type(layer) for layer in MLP([6], 2, hidden=[5]).layers] == [nn.Linear, nn.ReLU]


@pytest.mark.parametrize("kind", MODELS.values())
@pytest.mark.parametrize(
    ("sample_shape", "num_outputs", "message"),
    [
        ((), 5, r"sample_shape=\[\] must be one or more sizes of at least 1"),
        ((1, 0, 8), 5, r"sample_shape=\[1, 0, 8\] must be"),
        ((1, 8, 8), 0, "num_outputs=0 must be at least 1"),
    ],
)
def test_empty_sizes_are_refused(kind, sample_shape, num_outputs, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind(sample_shape, num_outputs)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Toy, {"hidden": 0}, "hidden=0 must be at least 1; try 10"),
        (MLP, {"hidden": []}, r"hidden=\[\] must be one or more sizes of at least 1; try \[256, 128\]"),
        (MLP, {"dropout": 1.5}, "dropout=1.5 must be at least 0 and below 1; try 0.1"),
        (ConvNet, {"channels": [16]}, r"channels=\[16\] must be two sizes of at least 1; try \[16, 32\]"),
        (Net, {"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1; try 0.1"),
        (Transformer, {"patch_size": 5}, "patch_size=5 must divide the height and width 28 x 28 of the .*; try 4$"),
        (Transformer, {"heads": 3}, "heads=3 must divide dim=64; try heads=1, or dim=66"),
        (Transformer, {"mlp_ratio": 0.001}, "mlp_ratio=0.001 must give at least one hidden unit for dim=64; try 4.0"),
    ],
)
def test_options_out_of_range_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        kind((1, 28, 28), 10, **options)
