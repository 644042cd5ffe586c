"""Only the image formats that the documentation names are opened, wherever an image is opened."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import datasets
import pytest
from PIL import EpsImagePlugin, Image

from zerotrain.config.data import DataConfig
from zerotrain.data.decode import FORMATS, decode
from zerotrain.data.hub_datasets import hub_rows
from zerotrain.data.listing import EXTENSIONS
from zerotrain.data.open import open_source
from zerotrain.data.source import BadImageError
from zerotrain.errors import PipelineError

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "workflow" / "zerotrain"
EPS = (
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(victim) deletefile\n%%EOF\n"
)
BINARY_EPS = b"\xc5\xd0\xd3\xc6" + (30).to_bytes(4, "little") + bytes(22) + EPS
READ = "AVIF, BMP, GIF, JPEG, JPEG 2000, PNG, PPM, PSD, QOI, TGA, TIFF and WebP"


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of the PostScript interpreter, none of which is carried out."""
    calls: list[str] = []

    def run(*arguments: object, **options: object) -> Image.Image:
        calls.append("gs")
        return Image.new("RGB", (9, 9))

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", run)
    return calls


@pytest.mark.parametrize("data", [EPS, BINARY_EPS], ids=["text", "binary"])
def test_postscript_is_not_run(data: bytes, interpreted: list[str]) -> None:
    """PostScript under another name is a program: it is named and not handed to Ghostscript."""
    with pytest.raises(BadImageError) as caught:
        decode(data)
    assert interpreted == []
    assert str(caught.value) == f"of the format EPS, which is not opened; images are {READ}"


def test_the_refusal_names_file_and_format(tmp_path: Path, interpreted: list[str]) -> None:
    """Whoever opens an image of a dataset learns which file holds PostScript."""
    (tmp_path / "a.png").write_bytes(EPS)
    source = open_source(DataConfig(images=str(tmp_path)))
    with pytest.raises(PipelineError) as caught:
        source.image_of("a.png", source.sha256("a.png"))
    assert caught.value.what.startswith(
        f"{tmp_path}: a.png: of the format EPS, which is not opened"
    )
    assert interpreted == []


def test_images_in_a_dataset_of_text_are_not_decoded(
    tmp_path: Path, interpreted: list[str]
) -> None:
    """Cells of a saved dataset that hold images, in a column or within one, stay as they are: the
    library would open them in any format."""
    image = datasets.Image()
    features = datasets.Features(
        {
            "prompt": datasets.Value("string"),
            "response": datasets.Value("string"),
            "page": image,
            "pages": datasets.List(image),
            "parts": {"scan": image, "name": datasets.Value("string")},
        }
    )
    cell = {"bytes": EPS, "path": None}
    row = {"prompt": "a", "response": "b", "page": cell, "pages": [cell]}
    row["parts"] = {"scan": cell, "name": "c"}
    rows = datasets.Dataset.from_list([row], features=features)
    rows.save_to_disk(tmp_path / "rows")
    data = DataConfig(source="text", path=str(tmp_path / "rows"))
    assert [found for _, found in hub_rows(data)[0]] == [{"prompt": "a", "response": "b"}]
    assert interpreted == []


def test_other_known_formats_are_named(tmp_path: Path) -> None:
    """A format that Pillow knows and the documentation does not is named, none is opened."""
    stream = io.BytesIO()
    Image.new("RGB", (2, 2)).save(stream, "PCX")
    with pytest.raises(BadImageError, match="of the format PCX, which is not opened"):
        decode(stream.getvalue())


def test_every_extension_of_images_has_its_format() -> None:
    """What counts as an image by its name is opened by its content, but what Pillow cannot read."""
    known = Image.registered_extensions()
    assert {known[ending] for ending in EXTENSIONS if ending in known} == set(FORMATS)


@pytest.mark.parametrize("form", [form for form in FORMATS if form not in ("PSD", "QOI")])
def test_documented_formats_are_opened(form: str) -> None:
    """Each format that is named is read."""
    stream = io.BytesIO()
    Image.new("RGB", (4, 2), "white").save(stream, form)
    assert decode(stream.getvalue()).size == (4, 2)


def test_the_documentation_names_the_formats() -> None:
    """The page names what is opened."""
    assert READ in (ROOT / "docs" / "security.md").read_text().replace("\n", " ")


@pytest.mark.slow
def test_no_image_is_opened_without_its_formats() -> None:
    """Pillow tries every format that it knows, PostScript among them, unless it is given one."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "PIL.Image":
                assert "open" not in [name.name for name in node.names], path
            if (
                isinstance(node, ast.Call)
                and ast.unparse(node.func) in ("Image.open", "PIL.Image.open")
                and "formats" not in [keyword.arg for keyword in node.keywords]
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []
