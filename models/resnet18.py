"""torchvision's ResNet-18, for images of any size and number of channels."""

from collections.abc import Sequence

from torch import Tensor, nn

from models.checks import Plan, check_images


class ResNet18(nn.Module):
    """ResNet-18 without trained weights, (N, C, H, W) -> (N, num_outputs).

    With small_images, images under 64 pixels each way get a stem of one 3 x 3 convolution that keeps their size, since
    the usual one, 7 x 7 and two halvings, would leave 7 x 7 of 28 x 28 pixels before the first block.
    Raises ValueError where the samples are not images or a size is below 1.
    Source: He et al., "Deep Residual Learning for Image Recognition", 2015; section 4.2 for small images
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, small_images: bool = True) -> None:
        super().__init__()
        check_images("resnet18", sample_shape, num_outputs)
        from torchvision.models import resnet18  # 1 s, which the other models need not wait

        self.resnet = resnet18(weights=None, num_classes=num_outputs)
        if small_images and max(sample_shape[1:]) < 64:
            self.resnet.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=3, stride=1, padding=1, bias=False)
            self.resnet.maxpool = nn.Identity()
        elif sample_shape[0] != 3:
            self.resnet.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
        else:
            return
        # As torchvision draws all convolutions, after the whole network is made.
        nn.init.kaiming_normal_(self.resnet.conv1.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        return self.resnet(images)

    def stages(self) -> list[nn.Module]:
        net = self.resnet
        return [
            nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool),
            *(net.layer1, net.layer2, net.layer3, net.layer4),
            nn.Sequential(net.avgpool, nn.Flatten(), net.fc),
        ]

    def tensor_plan(self) -> Plan:
        return {"resnet.fc": "rowwise"}  # the rest stays whole: torch has no sharded convolution
