"""A folder of photographs as users have them: of all shapes and scripts, with copies and bad files.

python -m tests.builders.photographs FOLDER

The photographs are those of scikit-learn (CC BY 2.0), and parts of them.
"""

# ruff: noqa: RUF001 (letters that look like others are what is drawn)
from __future__ import annotations

import shutil
import sys
from pathlib import Path

import sklearn
from PIL import Image

PARTS = {
    "tower.png": ("china", (230, 40, 450, 330), "a pagoda, blue sky"),
    "roof.png": ("china", (150, 120, 510, 230), "the roof of a pagoda, close-up"),
    "sky.png": ("china", (0, 0, 640, 60), "天空，蓝色，没有云"),
    "lake.png": ("china", (430, 150, 640, 300), "湖の写真。木と青い空"),
    "trees.png": ("china", (0, 240, 200, 427), "나무와 호수, 여름"),
    "column.png": ("china", (320, 60, 400, 420), "जलाशय के पास मंदिर, नीला आकाश"),
    "petals.png": ("flower", (180, 60, 480, 360), "petals, orange, close-up"),
    "centre.png": ("flower", (270, 140, 390, 260), "בתוך הפרח, כתום, close-up"),
    "leaves.png": ("flower", (0, 0, 180, 427), "أوراق داكنة خلف الزهرة (خارج التركيز)"),
    "corner.png": ("flower", (440, 280, 640, 427), "ใบไม้สีเข้มด้านหลังดอกไม้"),
    "bud.png": ("flower", (250, 330, 430, 427), "Бутон 🌼 под цветком, размыто 👀"),
}
"""Name, the photograph that it is a part of, left, upper, right and lower end, and caption."""
CONFIG = """\
run: photographs
base: nano
data: {images: IMAGES, aspect_buckets: {alignment: 64}, max_bad_samples: 3}
train: {resolution: 256}
phases: [{name: plain, until: 1}]
"""


def open_photograph(name: str) -> Image.Image:
    """The photograph `china` or `flower`, 640 x 427."""
    path = Path(sklearn.__file__).parent / "datasets" / "images" / f"{name}.jpg"
    return Image.open(path).convert("RGB")


def write_photographs(folder: Path) -> Path:
    """Write 15 usable images, of which one is a copy and one is saved again smaller, and 3 bad."""
    folder.mkdir(parents=True)
    whole = {name: open_photograph(name) for name in ("china", "flower")}
    captions = {"china.jpg": "a pagoda above a lake, summer", "flower.jpg": "a dahlia, orange"}
    for name, image in whole.items():
        image.save(folder / f"{name}.jpg", quality=95)
    for name, (of, box, caption) in PARTS.items():
        whole[of].crop(box).save(folder / name)
        captions[name] = caption
    shutil.copy(folder / "tower.png", folder / "tower copy.png")
    captions["tower copy.png"] = "a pagoda, blue sky"
    whole["flower"].resize((320, 213)).save(folder / "flower small.jpg", quality=30)
    captions["flower small.jpg"] = "an orange flower, dark leaves"
    (folder / "cut.jpg").write_bytes((folder / "china.jpg").read_bytes()[:9000])
    (folder / "empty.png").touch()
    captions |= {"cut.jpg": "a broken file", "empty.png": "an empty file"}
    whole["china"].save(folder / "no caption.png")
    for name, caption in captions.items():
        (folder / name).with_suffix(".txt").write_text(caption)
    return folder


if __name__ == "__main__":
    images = write_photographs(Path(sys.argv[1]) / "images")
    (images.parent / "run.yaml").write_text(CONFIG.replace("IMAGES", str(images)))
