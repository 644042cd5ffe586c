"""A name that no reader uses is refused or named, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.accounting import modules
from tests.accounting.data_readers import DATA_READERS
from tests.accounting.model_readers import MODEL_READERS
from tests.accounting.modules import OWN, READ_FOR, find_modules
from tests.accounting.reader import NAMED, Reader
from tests.accounting.settings_readers import SETTINGS_READERS
from tests.pages.tables import replace_generated, table

READERS: dict[str, Reader] = {**SETTINGS_READERS, **DATA_READERS, **MODEL_READERS}
NAME = "leftover_of_mine"
PAGE = Path("docs/foreign-files.md")


@pytest.mark.parametrize("reader", READERS)
def test_a_name_that_nothing_uses_is_told(reader: str, tmp_path: Path) -> None:
    """And of an input without it, only what is told beside the name."""
    for folder in ("without", "with"):
        (tmp_path / folder).mkdir()
    before = READERS[reader].tell(tmp_path / "without", None)
    said = READERS[reader].tell(tmp_path / "with", NAME).replace(f"{tmp_path}/with", "")
    assert NAME not in before
    further = {*said.splitlines()} - {*before.replace(f"{tmp_path}/without", "").splitlines(), ""}
    assert further, "nothing is told"
    assert NAME in "".join(further)
    if READERS[reader].leftover == NAMED:
        assert len(further) == 1, further


def test_every_module_that_reads_is_part_of_a_reader() -> None:
    """A new one gets an entry, with a leftover name; one that is gone loses it."""
    own = [module for modules in OWN.values() for module in modules]
    assert len(own) == len({*own})
    assert not {*own} & READ_FOR.keys()
    assert {*own} | READ_FOR.keys() == find_modules()
    assert {*READ_FOR.values()} <= READERS.keys()


def test_a_module_that_reads_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it imports."""
    monkeypatch.setattr(modules, "PACKAGE", tmp_path)
    for name, text in {
        "a.py": "from zerotrain.artifact.documents import Names, read_yaml",
        "b.py": "def read():\n    import tarfile",
        "c.py": "from pyarrow import parquet",
        "d.py": "from zerotrain.artifact.documents import Names",
    }.items():
        (tmp_path / name).write_text(text)
    assert find_modules() == {"a.py", "b.py", "c.py"}


def test_the_page_has_every_reader(generated: Callable[[Path, str], None]) -> None:
    """As tests/accounting has them."""
    rows = [(what, one.names, one.leftover, one.where) for what, one in READERS.items()]
    page = table(("read", "names", "a name that nothing uses", "said by"), rows)
    generated(PAGE, replace_generated(PAGE.read_text(encoding="utf-8"), "readers", page))
