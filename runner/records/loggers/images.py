"""Images of predictions, drawn in milliseconds: a confusion matrix, and samples with their predicted classes."""

import math
from typing import Any

import torch

TEXT_HEIGHT = 14
RIGHT, WRONG = (0, 100, 0), (190, 0, 0)


def draw_confusion(counts: torch.Tensor) -> Any:
    """Draw a row for each true class and a column for each predicted one, shaded by fractions of the row's sum.

    Returns an array (H, W, 3) of uint8.
    """
    import numpy
    from PIL import Image, ImageDraw  # installed with torchvision

    num_classes = len(counts)
    size, margin = max(min(600 // num_classes, 30), 3), 44
    is_numbered = size == 30  # smaller cells have no space for numbers
    image = Image.new("RGB", (margin + num_classes * size + 4, margin + num_classes * size + 4), "white")
    draw = ImageDraw.Draw(image)
    draw.text((margin, 2), "predicted", fill="black")
    draw.text((2, margin - TEXT_HEIGHT), "true", fill="black")
    fractions = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    for true in range(num_classes):
        if is_numbered:
            draw.text((6, margin + true * size + 9), str(true), fill="black")
            draw.text((margin + true * size + 9, margin - TEXT_HEIGHT), str(true), fill="black")
        for predicted in range(num_classes):
            fraction = float(fractions[true, predicted])
            left, top = margin + predicted * size, margin + true * size
            shade = (round(255 - 220 * fraction), round(255 - 160 * fraction), 255)
            draw.rectangle((left, top, left + size - 1, top + size - 1), fill=shade)
            if is_numbered and (count := int(counts[true, predicted])):
                draw.text((left + 4, top + 9), str(count), fill="white" if fraction > 0.5 else "black")
    return numpy.asarray(image)


def draw_samples(samples: list[tuple[torch.Tensor, int, int]], min_size: int = 56) -> Any:
    """Draw a grid of images (1 or 3, H, W), each above `class > prediction`, in red if the prediction is wrong.

    Returns an array (H, W, 3) of uint8.
    """
    import numpy
    from PIL import Image, ImageDraw

    columns = math.ceil(math.sqrt(len(samples)))
    height, width = samples[0][0].shape[-2:]
    factor = max(math.ceil(min_size / min(height, width)), 1)
    cell_width, cell_height = width * factor + 4, height * factor + TEXT_HEIGHT + 4
    image = Image.new("RGB", (columns * cell_width, math.ceil(len(samples) / columns) * cell_height), "white")
    draw = ImageDraw.Draw(image)
    for number, (sample, true, predicted) in enumerate(samples):
        left, top = number % columns * cell_width, number // columns * cell_height
        low, high = float(sample.min()), float(sample.max())  # samples may be normalized
        scaled = (sample.float() - low) / max(high - low, 1e-9) * 255
        pixels = scaled.expand(3, -1, -1).permute(1, 2, 0).to(torch.uint8).numpy()  # (C, H, W) -> (H, W, 3)
        scaled_up = Image.fromarray(pixels).resize((width * factor, height * factor), Image.Resampling.NEAREST)
        image.paste(scaled_up, (left + 2, top + 2))
        text = str(true) if predicted == true else f"{true} > {predicted}"
        draw.text((left + 4, top + height * factor + 2), text, fill=RIGHT if predicted == true else WRONG)
    return numpy.asarray(image)


def is_image(sample: Any) -> bool:
    """Return True for what `draw_samples` can draw."""
    if not isinstance(sample, torch.Tensor) or sample.is_complex() or not sample.numel():
        return False
    return sample.dim() == 3 and sample.shape[0] in (1, 3)
