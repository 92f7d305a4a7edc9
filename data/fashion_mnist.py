"""Fashion-MNIST: 60,000 images of clothes for training and 10,000 for validation; like MNIST, but harder."""

from .mnist import MNIST


class FashionMNIST(MNIST):
    """28 x 28 gray images as (1, H, W) float32 in [0, 1], and their classes, from root/FashionMNIST/raw. See MNIST.

    Source: https://github.com/zalandoresearch/fashion-mnist
    """

    name = "FashionMNIST"
