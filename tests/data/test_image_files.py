"""Image files of all modes and formats, read as the same 8-bit pixels or refused."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms
from runner.shipped.data.image_folder import ImageFolder

SIZE = (6, 9)  # height, width
RANDOM = np.random.default_rng(0)
GRAY, ALPHA = RANDOM.integers(0, 256, SIZE, np.uint8), RANDOM.integers(0, 256, SIZE, np.uint8)
COLOR = RANDOM.integers(0, 256, (*SIZE, 3), np.uint8)
WIDE = GRAY.astype(np.uint16) * 257
ROTATED = 6  # EXIF orientation: to be shown rotated clockwise by 90 degrees


@pytest.fixture
def read(tmp_path):
    """Return a function that returns the pixels of a file as (H, W) or (H, W, 3) bytes."""

    def read(path, channels=1, size=SIZE):
        (tmp_path / "train" / "a").mkdir(parents=True, exist_ok=True)
        Image.fromarray(GRAY).save(tmp_path / "train" / "a" / "0.png")
        data = ImageFolder("train", (channels, *size), 1, str(tmp_path))
        data.files[0] = (str(path), 0)
        return (data[0][0] * 255).round().byte().permute(1, 2, 0).squeeze(2).numpy()

    return read


def write_png(path, pixels, color_type, transparent=None):
    """Write (H, W) or (H, W, C) pixels of 16 bits, which Pillow cannot write in color."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, color_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    key = b"" if transparent is None else chunk(b"tRNS", np.array(transparent, ">u2").tobytes())
    content = chunk(b"IHDR", header) + key + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def blended(pixels, alpha):
    """Return pixels over white. Rounding may differ by 1 from that of the reader."""
    alpha = alpha / 255 if pixels.ndim == 2 else alpha[..., None] / 255
    return np.rint(pixels * alpha + 255 * (1 - alpha))


@pytest.mark.parametrize(
    ("name", "pixels", "options"),
    [
        ("8.png", GRAY, {}),
        ("8.gif", GRAY, {}),
        ("16.png", WIDE, {}),
        ("16.tif", WIDE, {}),
        ("lzw.tif", WIDE, {"compression": "tiff_lzw"}),
        ("inverted.tif", 65535 - WIDE, {"tiffinfo": {262: 0}}),
        ("16.jp2", WIDE, {"irreversible": False}),
        ("float.tif", (GRAY / 255).astype(np.float32), {}),
    ],
)
def test_gray_images_of_any_depth_are_the_same(name, pixels, options, read, tmp_path):
    Image.fromarray(pixels).save(tmp_path / name, **options)
    np.testing.assert_array_equal(read(tmp_path / name), GRAY)


def test_gray_images_of_12_and_16_bits_that_pillow_does_not_write(read, tmp_path):
    (tmp_path / "16.pgm").write_bytes(b"P5\n9 6\n65535\n" + WIDE.astype(">u2").tobytes())
    np.testing.assert_array_equal(read(tmp_path / "16.pgm"), GRAY)
    pairs = (GRAY.astype(np.int64) << 4).reshape(-1, 2).tolist()
    packed = b"".join((first << 12 | second).to_bytes(3, "big") for first, second in pairs)
    # Width, height, bits per sample, compression, white, offset of the pixels, samples per pixel, number of bytes.
    fields = {256: GRAY.size, 257: 1, 258: 12, 259: 1, 262: 1, 273: 110, 277: 1, 279: len(packed)}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in fields.items())
    (tmp_path / "12.tif").write_bytes((b"II*\0\x08\0\0\0\x08\0" + entries).ljust(110, b"\0") + packed)
    np.testing.assert_array_equal(read(tmp_path / "12.tif", size=(1, GRAY.size)), GRAY.reshape(1, -1))


def test_color_images_of_16_bits(read, tmp_path):
    write_png(tmp_path / "rgb.png", COLOR.astype(np.uint16) * 257, 2)
    np.testing.assert_array_equal(read(tmp_path / "rgb.png", 3), COLOR)


def test_other_color_spaces(read, tmp_path):
    profiles = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
    image = Image.fromarray(COLOR)
    ImageCms.profileToProfile(image, *profiles, outputMode="LAB").save(tmp_path / "lab.tif")
    image.convert("CMYK").save(tmp_path / "cmyk.tif")
    image.quantize(54).save(tmp_path / "palette.png")
    gray = read(tmp_path / "palette.png")
    for name in ("lab.tif", "cmyk.tif", "palette.png"):
        assert np.abs(read(tmp_path / name, 3) - COLOR.astype(float)).mean() < 5, name
        assert np.abs(read(tmp_path / name) - gray.astype(float)).mean() < 5, name


def test_transparent_pixels_are_blended_with_white(read, tmp_path):
    color = Image.fromarray(np.dstack([COLOR, ALPHA]))
    color.save(tmp_path / "rgba.png"), color.save(tmp_path / "rgba.webp", lossless=True, exact=True)
    write_png(tmp_path / "wide.png", np.dstack([COLOR, ALPHA]).astype(np.uint16) * 257, 6)
    for name in ("rgba.png", "rgba.webp", "wide.png"):
        assert np.abs(read(tmp_path / name, 3) - blended(COLOR, ALPHA)).max() <= 1, name
    gray = Image.fromarray(GRAY)
    gray.putalpha(Image.fromarray(ALPHA))
    gray.save(tmp_path / "la.png")
    assert np.abs(read(tmp_path / "la.png") - blended(GRAY, ALPHA)).max() <= 1
    opaque = 255 * (GRAY[0, 0] != GRAY)  # one value of gray is transparent
    Image.fromarray(GRAY).save(tmp_path / "key.png", transparency=int(GRAY[0, 0]))
    Image.fromarray(GRAY).save(tmp_path / "key.gif", transparency=int(GRAY[0, 0]))
    write_png(tmp_path / "wide_key.png", WIDE, 0, [int(WIDE[0, 0])])
    for name in ("key.png", "key.gif", "wide_key.png"):
        np.testing.assert_array_equal(read(tmp_path / name), blended(GRAY, opaque), name)


@pytest.mark.parametrize("name", ["exif.png", "exif.webp", "raw.tif", "lzw.tif"])
def test_exif_orientation_is_applied(name, read, tmp_path):
    exif = Image.Exif()
    exif[274] = ROTATED
    options = {"exif.webp": {"lossless": True}, "lzw.tif": {"compression": "tiff_lzw"}}.get(name, {})
    pixels = GRAY if name == "raw.tif" else COLOR  # the only one that Pillow would map into memory
    Image.fromarray(pixels).save(tmp_path / name, exif=exif, **options)
    np.testing.assert_array_equal(read(tmp_path / name, pixels.size // GRAY.size, SIZE[::-1]), np.rot90(pixels, -1))


def test_the_first_image_of_an_animation_is_read(read, tmp_path):
    others = [Image.fromarray(255 - GRAY)]
    for name in ("two.gif", "two.tif"):
        Image.fromarray(GRAY).save(tmp_path / name, save_all=True, append_images=others)
        np.testing.assert_array_equal(read(tmp_path / name), GRAY)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (GRAY.astype(np.float32), r"floating-point pixels must be in \[0, 1\], not in \[\d+, \d+\]"),
        (np.full(SIZE, np.nan, np.float32), r"floating-point pixels must be in \[0, 1\], not in \[nan, nan\]"),
        (GRAY.astype(np.int32), "the range of the integers of mode I in TIFF is unknown"),
    ],
)
def test_pixels_of_an_unknown_range_are_refused(pixels, message, read, tmp_path):
    Image.fromarray(pixels).save(tmp_path / "x.tif")
    with pytest.raises(ValueError, match=rf"x\.tif cannot be decoded \({message}\); replace or remove it$"):
        read(tmp_path / "x.tif")


def test_huge_and_unknown_images_are_named(read, tmp_path, monkeypatch):
    Image.fromarray(GRAY).save(tmp_path / "x.png")
    (tmp_path / "y.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"y\.png cannot be decoded \(unknown format\); replace or remove it$"):
        read(tmp_path / "y.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 20)
    with pytest.raises(ValueError, match=r"x\.png cannot be decoded \(Image size \(54 pixels\) exceeds limit of 40 "):
        read(tmp_path / "x.png")
