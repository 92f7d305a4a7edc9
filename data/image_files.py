"""Image files of any format and mode that Pillow decodes, converted to 8 bits per channel."""

from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.transforms import functional as F

MODES = {1: "L", 3: "RGB"}  # of Pillow, by the number of channels
NOT_DECODED = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}  # Pillow only identifies them, or starts another program
FULL_RANGE = {"JPEG2000", "PNG", "PPM", "TIFF"}  # formats in which 65535 is white in gray images of 16 bits
BITS_PER_SAMPLE, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0  # tags of TIFF 6.0, and a value
ORIENTATION, TURNED = 274, 5  # tag of EXIF, and its lowest value for an image that is turned by 90 degrees


def image_endings() -> set[str]:
    """Return the endings, such as .png, of the files that Pillow decodes."""
    formats = Image.registered_extensions()  # imports all plugins
    decoded = {*Image.OPEN, "MPO"} - NOT_DECODED  # the plugin of JPEG opens MPO
    return {ending for ending, name in formats.items() if name in decoded}


def read_image(path: str | Path, mode: str) -> Image.Image:
    """Return the image of a file as `decode_image` does. Raise ValueError with the path if it cannot be decoded."""
    try:
        # An open file, because Pillow maps the file of a path, and then scrambles TIFF that EXIF rotates by 90 degrees.
        with open(path, "rb") as opened:
            return decode_image(opened, mode)
    except Exception as error:  # decoders raise anything for a damaged file, and seldom name it
        reason = "unknown format" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        raise ValueError(
            f"{path} cannot be decoded ({reason or type(error).__name__}); replace or remove it"
        ) from error


def decode_image(file: IO[bytes], mode: str) -> Image.Image:
    """Return the first image of an open file in mode L or RGB, upright according to its EXIF data.

    Transparent pixels are blended with white. Gray images of 16 bits keep their higher 8 bits, as color images of
    16 bits do in Pillow. Floating-point pixels must be in [0, 1].
    Raise an exception if the file cannot be decoded, or if the range of its pixels is unknown.
    """
    with Image.open(file) as image:
        ImageOps.exif_transpose(image, in_place=True)
        pixels = _as_gray_bytes(image) if image.mode.startswith(("I", "F")) else image
        if pixels.has_transparency_data:
            pixels = pixels.convert("RGBA")
            pixels = Image.alpha_composite(Image.new("RGBA", pixels.size, "white"), pixels)
        elif pixels.mode == "LAB":
            pixels = pixels.convert("RGB")  # Pillow converts LAB to no other mode
        return pixels.convert(mode)


def image_shape(file: IO[bytes]) -> list[int]:
    """Return the channels, height and width of the image in an open JPEG or PNG file, without decoding its pixels.

    Raise an exception if the file is no image.
    """
    with Image.open(file) as image:
        is_turned = "exif" in image.info and image.getexif().get(ORIENTATION, 1) >= TURNED
        size = image.size if is_turned else (image.height, image.width)
        return [1 if image.mode.startswith(("1", "L", "I", "F")) and image.mode != "LAB" else 3, *size]


def scale_and_crop(image: Image.Image, height: int, width: int) -> Tensor:
    """Return the center of an image that is scaled until it covers height x width, (C, height, width) uint8."""
    scale = max(height / image.height, width / image.width)
    size = [max(height, round(image.height * scale)), max(width, round(image.width * scale))]
    pixels: Tensor = F.pil_to_tensor(F.center_crop(F.resize(image, size), [height, width]))
    return pixels


def _as_gray_bytes(image: Image.Image) -> Image.Image:
    """Return an image of floating-point numbers, or of integers of more than 8 bits, in mode L or LA."""
    pixels, tags = np.asarray(image), getattr(image, "tag_v2", {})  # (H, W)
    if image.mode == "F":
        low, high = pixels.min(), pixels.max()
        if not (low >= 0 and high <= 1):  # also if they are NaN
            raise ValueError(f"floating-point pixels must be in [0, 1], not in [{low:g}, {high:g}]")
        values = np.rint(pixels * 255)
    elif image.format in FULL_RANGE and (image.mode.startswith("I;16") or image.format in ("PNG", "PPM")):
        # Pillow scales 12 bits to 16 in JPEG 2000, but not in TIFF. Its older versions read 16 bits of PNG in mode I.
        values = pixels >> (4 if tags.get(BITS_PER_SAMPLE) == (12,) else 8)
    else:
        raise ValueError(f"the range of the integers of mode {image.mode} in {image.format} is unknown")
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts only pixels of up to 8 bits
        values = 255 - values
    gray = Image.fromarray(values.astype(np.uint8))
    if "transparency" in image.info:  # the value of transparent pixels in PNG
        gray.putalpha(Image.fromarray(np.where(pixels == image.info["transparency"], 0, 255).astype(np.uint8)))
    return gray
