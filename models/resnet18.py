"""torchvision's ResNet-18, for images of any size and number of channels."""

from collections.abc import Sequence

from torch import Tensor, nn

from .checks import Plan, check_images


class ResNet18(nn.Module):
    """ResNet-18 without trained weights, (N, C, H, W) -> (N, num_outputs).

    With small_images, images of less than 64 x 64 pixels get a stem of one 3 x 3 convolution that keeps their size. The
    usual stem, a 7 x 7 convolution and pooling, would reduce 28 x 28 pixels to 7 x 7 before the first block.
    Raises ValueError if the samples are not images or a size is below 1.
    Source: He et al., "Deep Residual Learning for Image Recognition", 2015; section 4.2 for small images
    """

    def __init__(self, sample_shape: Sequence[int], num_outputs: int, small_images: bool = True) -> None:
        super().__init__()
        check_images("resnet18", sample_shape, num_outputs)
        from torchvision.models import resnet18  # takes 1 s, so only this model imports it

        net = resnet18(weights=None, num_classes=num_outputs)
        drawn = net.conv1
        if small_images and max(sample_shape[1:]) < 64:
            net.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=3, stride=1, padding=1, bias=False)
            net.maxpool = nn.Identity()
        elif sample_shape[0] != 3:
            net.conv1 = nn.Conv2d(sample_shape[0], 64, kernel_size=7, stride=2, padding=3, bias=False)
        if net.conv1 is not drawn:
            # As torchvision initializes convolutions, after the whole network is built.
            nn.init.kaiming_normal_(net.conv1.weight, mode="fan_out", nonlinearity="relu")
        # torchvision's names, so that its weights can be loaded
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
        return {"fc": "rowwise"}  # the rest is replicated, because torch cannot shard convolutions
