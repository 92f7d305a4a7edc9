"""MNIST: 60,000 handwritten digits for training and 10,000 for validation."""

from collections.abc import Sequence

from .checks import check_images
from .files import open_files
from .idx_files import NAMES, IdxFiles
from .tensors import TensorData


class MNIST(TensorData):
    """28 x 28 gray images as (1, H, W) float32 in [0, 1], and their classes, from root/MNIST/raw.

    Raises ValueError unless the samples have one channel and there are 10 outputs, and if the files are missing
    and cannot be downloaded.
    Source: http://yann.lecun.com/exdb/mnist/
    """

    name = "MNIST"  # of the directory, and of torchvision's class

    def __init__(
        self,
        train: bool,
        sample_shape: Sequence[int],
        num_outputs: int,
        root: str = "datasets",
        download: bool = True,
    ) -> None:
        check_images(sample_shape, num_outputs, images=(1, 28, 28), num_classes=10)
        kind, folder = type(self.name, (IdxFiles,), {}), f"{self.name}/raw"
        archives = [f"{folder}/{name}.gz" for name in NAMES]
        files = open_files(kind, root, train, download, folder=folder, names=NAMES, archives=archives)
        super().__init__(files.data[:, None], files.targets, image_size=sample_shape[1:])  # (N, 28, 28) -> + channel
