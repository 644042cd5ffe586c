"""What people's folders hold: each entry is used, or listed with its reason; none hangs or is left
out without a word."""

from __future__ import annotations

import io
import os
import socket
import stat
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from PIL import Image
from tests.builders.refusals import refused

from zerotrain.config.data import DataConfig
from zerotrain.data.caption_file import MOST_BYTES
from zerotrain.data.dataset import Sample, read_dataset
from zerotrain.data.dataset_folder import read_bad
from zerotrain.data.files import DatasetFiles, walk
from zerotrain.data.source import MOST_IMAGE_BYTES, Found
from zerotrain.stages.prepare_dataset import prepare_dataset

Reasons = dict[str, str | None]


def picture(number: int = 0) -> bytes:
    """The bytes of a PNG that no other number gives."""
    stream = io.BytesIO()
    Image.new("RGB", (8, 8), (number, 9, 7)).save(stream, "PNG")
    return stream.getvalue()


NOBODY = 65534
"""A user without rights."""


def write_good(place: Path) -> Path:
    """A folder with one good image and its caption."""
    folder = place / "images"
    folder.mkdir()
    (folder / "good.png").write_bytes(picture())
    (folder / "good.txt").write_text("a good one")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One good image with its caption."""
    return write_good(tmp_path)


@pytest.fixture
def folder_of_nobody(folder: Path) -> Iterator[Path]:
    """The same in another place, whose files' modes hold for this process: root is nobody."""
    prepare(folder)  # imports what nobody may have no right to read
    with TemporaryDirectory() as place:
        if os.geteuid() != 0:
            yield write_good(Path(place))
            return
        os.chown(place, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield write_good(Path(place))
        finally:
            os.seteuid(0)


@pytest.fixture
def reasons(found: Callable[..., dict[str, Found]]) -> Callable[..., Reasons]:
    """Call with a folder and data options to get the reason against each entry but the good one."""

    def find(folder: Path, **options: object) -> Reasons:
        entries = found(folder, **options)
        assert entries.pop("good.png").reason is None
        return {file: entry.reason for file, entry in entries.items()}

    return find


def prepare(
    folder: Path, *, bad: int = 0, **options: object
) -> tuple[list[Sample], dict[str, str]]:
    """Prepare a folder with that many bad samples, which one less refuses: samples and reasons."""
    output = folder.parent / "dataset"
    data = {"images": str(folder), "num_workers": 0, **options}
    if bad:
        short = DataConfig.model_validate({**data, "max_bad_samples": bad - 1})
        assert f"{bad} of " in refused(prepare_dataset, short, output).what
    prepare_dataset(DataConfig.model_validate({**data, "max_bad_samples": bad}), output)
    dataset = read_dataset(output)
    listed = {entry["file"]: entry["reason"] for entry in read_bad(dataset.artifact)}
    assert len(listed) == bad
    return list(dataset.samples), listed


def test_pipes_sockets_and_links_to_devices_are_not_opened(folder: Path, reasons) -> None:
    """Reading a pipe waits for a writer, and a device may never end."""
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "good.caption")
    (folder / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(folder / "s.png"))
    listed = {
        "pipe.png": "a named pipe, not a file",
        "s.png": "a socket, not a file",
        "zero.png": "a device, not a file",
    }
    assert reasons(folder, follow_symlinks=True) == listed
    assert prepare(folder, bad=3, follow_symlinks=True)[1] == listed
    found = reasons(folder)
    assert found["zero.png"] == (
        "a link that leads out of the folder, to /dev/zero (data.follow_symlinks: true would take "
        "it)"
    )


def test_a_caption_that_is_a_pipe_is_not_opened(folder: Path, reasons) -> None:
    """Both the pipe and the image that lacks its caption are listed."""
    (folder / "a.png").write_bytes(picture(1))
    os.mkfifo(folder / "a.txt")
    assert reasons(folder) == {
        "a.png": "no caption: no a.txt next to it",
        "a.txt": "a named pipe, not a file",
    }


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_a_device_of_the_name_of_an_image(folder: Path, reasons) -> None:
    """Itself, not through a link."""
    try:
        os.mknod(folder / "null.png", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("devices cannot be made here")
    assert reasons(folder) == {"null.png": "a device, not a file"}


@pytest.mark.parametrize("follow", [False, True])
def test_links_that_lead_nowhere_are_listed(folder: Path, reasons, follow: bool) -> None:
    """To themselves, to one another, to what is gone, and to a target that is not UTF-8."""
    (folder / "self.png").symlink_to("self.png")
    (folder / "one.png").symlink_to("two.png")
    (folder / "two.png").symlink_to("one.png")
    (folder / "gone.png").symlink_to("lost.png")
    os.symlink(b"caf\xe9.png", os.fsencode(folder / "latin.png"))
    looped = "a link that cannot be followed (Too many levels of symbolic links)"
    assert reasons(folder, follow_symlinks=follow) == {
        "self.png": looped,
        "one.png": looped,
        "two.png": looped,
        "gone.png": "a link to lost.png, which does not exist",
        "latin.png": r"a link to caf\udce9.png, which does not exist",
    }
    assert len(prepare(folder, bad=5, follow_symlinks=follow)[1]) == 5


def test_files_without_permission_are_listed(folder_of_nobody: Path) -> None:
    """An image and a caption; a subfolder is refused by its name, for what it holds is unknown."""
    folder = folder_of_nobody
    for number, name in enumerate(("a", "b"), 1):
        (folder / f"{name}.png").write_bytes(picture(number))
        (folder / f"{name}.txt").write_text("a house")
    (folder / "a.png").chmod(0)
    (folder / "b.txt").chmod(0)
    assert prepare(folder, bad=2)[1] == {
        "a.png": "Permission denied",
        "b.png": "caption b.txt: Permission denied",
    }
    (folder / "sub").mkdir(mode=0)
    said = refused(prepare, folder).what
    (folder / "sub").chmod(0o700)
    assert said == f"data.images: {folder}: {folder}/sub/: Permission denied"


def test_files_that_are_too_large_are_not_read(folder: Path) -> None:
    """An image of terabytes and a caption of hundreds of megabytes, both holes in the disk; the
    image is not hashed, and an unchanged dataset still has its digest."""
    for name, size in (("huge.png", 2**42), ("long.txt", 300 * 2**20)):
        with (folder / name).open("wb") as stream:
            stream.truncate(size)
    (folder / "huge.txt").write_text("a caption")
    (folder / "long.png").write_bytes(picture(1))
    assert prepare(folder, bad=2)[1] == {
        "huge.png": f"has {2**42:,} bytes; images are read up to {MOST_IMAGE_BYTES:,}",
        "long.png": f"caption long.txt has 314,572,800 bytes; captions are read up to "
        f"{MOST_BYTES:,}",
    }
    dataset = folder.parent / "dataset"
    data = DataConfig(images=str(folder), num_workers=0, max_bad_samples=2)
    before = DatasetFiles(data, dataset, walk(data)).update()
    os.utime(folder / "good.png", (1, 1))  # hashed again, with all others as they were
    assert DatasetFiles(data, dataset, walk(data)).update() == before


CAPTIONS = {
    "arabic": "قطة حمراء على السطح",
    "hebrew": "חתול אדום",
    "mixed": "a cat \u200fقطة\u200e named \u202bحمراء\u202c",  # noqa: RUF001
    "hindi": "लाल बिल्ली",
    "chinese": "屋顶上的红猫",
    "thai": "แมวสีแดง",
    "combining": "cafe\u0301 n\u0303 Z\u0361a\u0489\u0332",
    "emoji": "👩‍🚀🏽 and 🏳️‍🌈 and 👨‍👩‍👧‍👦",
    "ancient": "𓃠 𒀀 𐍈",
    "hundred kilobytes": "a red house, " * 8000,
}


def test_captions_of_every_script_are_kept_to_the_character(folder: Path) -> None:
    """No normalisation, and no direction or joiner is lost."""
    for number, (name, caption) in enumerate(CAPTIONS.items(), 1):
        (folder / f"{name}.png").write_bytes(picture(number))
        (folder / f"{name}.txt").write_text(caption, encoding="utf-8")
    samples, _ = prepare(folder)
    kept = {sample.file: sample.caption for sample in samples}
    assert kept == {
        "good.png": "a good one",
        **{f"{name}.png": caption.strip() for name, caption in CAPTIONS.items()},
    }


def test_caption_files_of_other_programs(folder: Path) -> None:
    """A byte order mark and line ends are no part of a caption; other encodings are listed."""
    used = {
        "mark": b"\xef\xbb\xbfa cat",
        "windows": b"a cat\r\n",
        "both": b"\xef\xbb\xbfa cat\r\n\r\n",
    }
    bad = {
        "little": "a cat".encode("utf-16"),
        "big": b"\xfe\xff" + "a cat".encode("utf-16-be"),
        "unmarked": "a cat".encode("utf-16-le"),
        "nul": b"a \0 cat",
        "latin": "un été".encode("latin1"),
        "blank": b"\xef\xbb\xbf\r\n\t ",
        "zero": b"",
    }
    for number, (name, content) in enumerate({**used, **bad}.items(), 1):
        (folder / f"{name}.png").write_bytes(picture(number))
        (folder / f"{name}.txt").write_bytes(content)
    samples, listed = prepare(folder, bad=len(bad))
    assert [sample.caption for sample in samples if sample.file != "good.png"] == ["a cat"] * 3
    utf_16 = "is UTF-16; save it as UTF-8"
    assert listed == {
        f"{name}.png": f"caption {name}.txt {reason}"
        for name, reason in {
            "little": utf_16,
            "big": utf_16,
            "unmarked": "holds a NUL byte at position 1, which no text has",
            "nul": "holds a NUL byte at position 2, which no text has",
            "latin": "is not UTF-8 (byte 0xe9 at position 3); data.caption_encoding: latin-1 would "
            "read 'un été'",
            "blank": "is empty",
            "zero": "is empty",
        }.items()
    }


NAMES = [
    "with spaces  twice", "a\nline", "a\ttab", "a\r", "'single' \"double\" `back`", "back\\slash",
    "-leading", "--rm", "~", "$HOME", "a;b&c|d", "*?[x]", "#hash", "%s %(x)d", "a:b", "\\", "con",
    "a" * 251, "é" * 125, unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é"),
    "\u202egnp", "\U0001f469\u200d\U0001f680", "قطة", "\x1b[31mred", "a\u2028b", "a.png", "a.txt",
    "CAPITAL", "capital", "{b}", "{wildcards.run}", "{{c}}",
]  # fmt: skip


@pytest.mark.parametrize("table", [False, True])
def test_every_name_is_used_under_itself(folder: Path, capfd, table: bool) -> None:
    """Two spellings of a letter are two files; a name of 255 bytes is one as well."""
    rows = ["file_name,text", "good.png,a good one"]
    for number, name in enumerate(NAMES, 1):
        (folder / f"{name}.png").write_bytes(picture(number))
        if table:
            rows.append(f'"{name.replace(chr(34), chr(34) * 2)}.png",number {number}')
        else:
            (folder / f"{name}.txt").write_text(f"number {number}")
    if table:
        (folder / "metadata.csv").write_text("\n".join(rows), newline="")
    samples, _ = prepare(folder)
    found = {sample.file: sample.caption for sample in samples if sample.file != "good.png"}
    assert found == {f"{name}.png": f"number {number}" for number, name in enumerate(NAMES, 1)}
    assert len({sample.image_sha256 for sample in samples}) == len(samples)
    assert "\x1b" not in "".join(capfd.readouterr())


def test_bad_files_are_named_on_one_line_each(folder: Path, capfd) -> None:
    """Whatever the names hold: line ends, sequences that direct a terminal, turned text."""
    names = ["a\nb", "\x1b[2J", "\u202egnp", "x\u2028y"]
    for name in names:
        (folder / f"{name}.png").write_bytes(b"")
        (folder / f"{name}.txt").write_text("a caption")
    (folder / "good\n.png").write_bytes(picture())
    (folder / "good\n.txt").write_text("a copy")
    data = DataConfig(images=str(folder), num_workers=0)
    listed = refused(prepare_dataset, data, folder.parent / "dataset").what.splitlines()[1:]
    assert sorted(line.strip() for line in listed) == [
        rf"{name}.png: empty file (0 bytes)"
        for name in (r"\u202egnp", r"\x1b[2J", r"a\nb", r"x\u2028y")
    ]
    prepare(folder, bad=4)
    said = capfd.readouterr()
    assert "\x1b" not in said.out + said.err
    assert r"(good.png = good\n.png)" in said.out
