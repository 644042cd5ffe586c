"""Photographs, icons and emoji that lie in installed packages."""

from __future__ import annotations

import shutil
from pathlib import Path

import manimgx_fonts
import matplotlib
import sklearn.datasets
from PIL import Image, ImageDraw, ImageFont

PHOTOGRAPHS = Path(sklearn.datasets.__file__).parent / "images"
PLOTS = Path(matplotlib.get_data_path())
FILES = {
    "china.jpg": (PHOTOGRAPHS / "china.jpg", "a temple with a curved roof"),
    "flower.jpg": (PHOTOGRAPHS / "flower.jpg", "a dahlia"),
    "portrait.jpg": (PLOTS / "sample_data/grace_hopper.jpg", "Grace Hopper in uniform"),
    "logo.png": (PLOTS / "sample_data/logo2.png", "a logo with its name"),
    "home.png": (PLOTS / "images/home_large.png", "an icon of a house"),
    "hand.png": (PLOTS / "images/hand.png", "an icon of a hand"),
}
"""By name: a file, which has transparent pixels if it is a PNG, and its caption."""
EMOJI = {
    "😀": ("a grinning face", "goldenrod"),
    "🐈": ("a cat", "sienna"),
    "🍓": ("a strawberry", "crimson"),
    "🌳": ("a tree", "forestgreen"),
    "🚲": ("a bicycle", "navy"),
    "👨‍👩‍👧": ("a family", "purple"),
}
"""Of Noto's set, by their characters: caption and colour, of which the set has one."""
NOTO = Path(manimgx_fonts.__file__).with_name("NotoEmoji[wght].ttf")


def write_real_pictures(folder: Path) -> Path:
    """Write all of them with captions into a new folder, emoji as WebP in a folder in it."""
    (folder / "emoji").mkdir(parents=True)
    for name, (file, caption) in FILES.items():
        shutil.copy(file, folder / name)
        (folder / name).with_suffix(".txt").write_text(caption)
    font = ImageFont.truetype(NOTO, 54)
    for number, (emoji, (caption, ink)) in enumerate(EMOJI.items()):
        image = Image.new("RGBA", (72, 72), (0, 0, 0, 0))
        ImageDraw.Draw(image).text((36, 36), emoji, ink, font, anchor="mm")
        image.save(folder / f"emoji/{number}.webp", lossless=True)
        (folder / f"emoji/{number}.txt").write_text(f"{emoji} {caption}", encoding="utf-8")
    return folder
