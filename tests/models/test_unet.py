"""The U-Net: shapes, sizes, the receptive field of an output, and refused input."""

import pytest
import torch
from runner.shipped.models.unet import UNet
from torch import nn


@pytest.mark.parametrize(
    ("sample_shape", "options"),
    [
        ((1, 28, 28), {}),
        ((2, 6, 10), {"width": 3, "depth": 1}),
        ((1, 4, 4), {"width": 1}),
    ],
)
@pytest.mark.parametrize("num", [2, 0])
def test_each_pixel_has_outputs(sample_shape, options, num):
    model = UNet(sample_shape, 5, **options).eval()
    assert model(torch.rand(num, *sample_shape)).shape == (num, 5, *sample_shape[1:])


def test_each_halving_doubles_the_channels():
    model = UNet([3, 16, 24], 5, width=4, depth=3)
    seen = {}
    for name, module in model.named_modules():
        if name.count(".") <= 1 and isinstance(module, (nn.Sequential, nn.ConvTranspose2d)):
            module.register_forward_hook(lambda *call, name=name: seen.update({name: tuple(call[2].shape[1:])}))
    model(torch.rand(2, 3, 16, 24))
    assert seen == {
        **{"down.0": (4, 16, 24), "down.1": (8, 8, 12), "down.2": (16, 4, 6), "bottom": (32, 2, 3)},
        **{"enlarge.0": (16, 4, 6), "up.0": (16, 4, 6), "enlarge.1": (8, 8, 12), "up.1": (8, 8, 12)},
        **{"enlarge.2": (4, 16, 24), "up.2": (4, 16, 24)},
    }


def test_outputs_use_features_from_before_the_downsampling():
    """Without the path through the bottom, an output depends only on the pixels within four 3 x 3 convolutions."""
    torch.manual_seed(0)  # with some weights the first ReLU outputs only zeros
    model = UNet([1, 8, 8], 2, width=4).eval()
    nn.init.zeros_(model.enlarge[-1].weight)
    images = torch.rand(1, 1, 8, 8, requires_grad=True)
    model(images)[0, 0, 5, 5].backward()
    reach = images.grad[0, 0].nonzero()
    assert reach.min(0).values.tolist() == [1, 1] and reach.max(0).values.tolist() == [7, 7]  # 4 pixels around


@pytest.mark.parametrize(
    ("sample_shape", "options", "message"),
    [
        ((1, 28, 28), {"depth": 0}, "depth=0 must be at least 1"),
        (
            (1, 28, 28),
            {"depth": 3},
            "depth=3 halves the images 3 times, but their height and width 28 x 28 are not both divisible by 8; "
            "try depth=2, or images of 32 x 32",
        ),
        (
            (1, 28, 27),
            {},
            "depth=2 halves the images 2 times, but their height and width 28 x 27 are not both divisible by 4; "
            "try images of 28 x 28",
        ),
        ((1, 2, 2), {}, "depth=2 .* 2 x 2 are not both divisible by 4; try depth=1, or images of 4 x 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sample_shape, options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        UNet(sample_shape, 5, **options)
