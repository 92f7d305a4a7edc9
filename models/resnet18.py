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

        net = resnet18(weights=None, num_classes=num_outputs)
        drawn = net.conv1
        if small_images and max(sample_shape[1:]) < 64:
            net.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=3, stride=1, padding=1, bias=False)
            net.maxpool = nn.Identity()
        elif sample_shape[0] != 3:
            net.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
        if net.conv1 is not drawn:
            # As torchvision draws all convolutions, after the whole network is made.
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        # Under torchvision's names, by which its weights fit.
        self.conv1, self.bn1, self.relu, self.maxpool = net.conv1, net.bn1, net.relu, net.maxpool
        self.layer1, self.layer2, self.layer3, self.layer4 = net.layer1, net.layer2, net.layer3, net.layer4
        self.avgpool, self.fc = net.avgpool, net.fc

    def forward(self, images: Tensor) -> Tensor:
        features = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        features = self.layer4(self.layer3(self.layer2(self.layer1(features))))
        return self.fc(self.avgpool(features).flatten(1))

    def stages(self) -> list[nn.Module]:
        return [
            nn.Sequential(self.conv1, self.bn1, self.relu, self.maxpool),
            *(self.layer1, self.layer2, self.layer3, self.layer4),
            nn.Sequential(self.avgpool, nn.Flatten(), self.fc),
        ]

    def tensor_plan(self) -> Plan:
        return {"fc": "rowwise"}  # the rest stays whole: torch has no sharded convolution
