"""The sources that a rule depends on are those that its module imports, however it does."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.artifact import sources
from zerotrain.artifact.declared_code import NOT_FOLLOWED, WITHOUT_EFFECT
from zerotrain.config.families import FAMILIES
from zerotrain.models.encoding_code import BATCHES, BUCKETS, CROP, ENCODING, PIXELS, encoding_code

STAGES = sorted(path.stem for path in (sources.PACKAGE / "stages").glob("[a-z]*.py"))


@pytest.fixture
def package(tmp_path: Path, monkeypatch) -> Path:
    """An empty package of its own, in place of the real one."""
    folder = tmp_path / "zerotrain"
    folder.mkdir()
    (folder / "__init__.py").touch()
    monkeypatch.setattr(sources, "PACKAGE", folder)
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.fixture
def copied(package: Path) -> Callable[[], str]:
    """A copy of the real package; calling it gives the digest of what training runs on."""
    shutil.copytree(Path(sources.__file__).parents[1], package, dirs_exist_ok=True)

    def digest() -> str:
        sources._imports.cache_clear()
        sources._code.cache_clear()
        return sources.training_digest("sdxl")

    return digest


def module(package: Path, name: str, text: str) -> None:
    """Write a module, and the packages above it."""
    path = package / f"{name.replace('.', '/')}.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent != package:
        (path.parent / "__init__.py").touch()
    path.write_text(text)


def files_of(name: str) -> list[str]:
    """The sources of a module, without the package's folder and its __init__.py."""
    found = [path.removeprefix("zerotrain/") for path in sources.source_files(f"zerotrain.{name}")]
    assert found[0] == "__init__.py"
    return found[1:]


@pytest.mark.parametrize(
    "line",
    [
        "import zerotrain.leaf",
        "import zerotrain.leaf as other",
        "from zerotrain.leaf import thing",
        "from zerotrain import leaf",
        "def act():\n    from zerotrain.leaf import thing",
        "class A:\n    def act(self):\n        import zerotrain.leaf",
        "try:\n    import zerotrain.leaf\nexcept ImportError:\n    pass",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import zerotrain.leaf",
        "if not TYPE_CHECKING:\n    import zerotrain.leaf",
    ],
)
def test_every_import_that_runs_is_followed(package: Path, line: str) -> None:
    """At the top, inside functions, as a module or by a name in it."""
    module(package, "root", line)
    module(package, "leaf", "thing = 1")
    assert files_of("root") == ["leaf.py", "root.py"]


@pytest.mark.parametrize("test", ["TYPE_CHECKING", "typing.TYPE_CHECKING"])
def test_imports_for_types_only_are_not_followed(package: Path, test: str) -> None:
    """What is imported for the type checker changes no number."""
    module(package, "root", f"if {test}:\n    from zerotrain.leaf import thing\nimport os")
    module(package, "leaf", "thing = 1")
    assert files_of("root") == ["root.py"]


def test_packages_bring_their_init(package: Path) -> None:
    """Importing a module runs the __init__ of the packages above it, and what that imports."""
    module(package, "part.leaf", "thing = 1")
    module(package, "part.other", "import zerotrain.far")
    module(package, "far", "import zerotrain.root")
    (package / "part" / "__init__.py").write_text("from zerotrain.part.other import x")
    module(package, "root", "from zerotrain.part import leaf")
    expected = ["far.py", "part/__init__.py", "part/leaf.py", "part/other.py", "root.py"]
    assert files_of("root") == expected


def test_packages_bring_their_tables(package: Path) -> None:
    """A TOML file next to an __init__.py is read by it, so an edit counts as one of the code."""
    module(package, "root", "import zerotrain.inner")
    module(package, "inner.other", "")
    (package / "inner" / "keys.toml").write_text("[keys]\n")
    assert "inner/keys.toml" in files_of("root")
    before = sources.source_digest("zerotrain.root")
    (package / "inner" / "keys.toml").write_text("[keys]\na = { default = 1 }\n")
    assert sources.source_digest("zerotrain.root") != before


def test_a_module_that_does_not_exist_is_refused(package: Path) -> None:
    """A rule that names a stage which is gone fails when the graph is built."""
    with pytest.raises(ModuleNotFoundError, match=r"zerotrain\.stages\.gone"):
        sources.source_files("zerotrain.stages.gone")


def test_paths_are_relative_to_the_working_directory(package: Path) -> None:
    """As Snakemake and DVC write inputs down; otherwise they are absolute."""
    module(package, "root", "")
    assert sources.source_files("zerotrain.root") == ["zerotrain/__init__.py", "zerotrain/root.py"]
    (package / "elsewhere").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(package / "elsewhere")
        assert sources.source_files("zerotrain.root")[1] == str(package / "root.py")


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("data/draws.py", "BATCHES = 1, 2, 3, 4, 5, 6, 7, 8", "BATCHES = 2, 1, 3, 4, 5, 6, 7, 8"),
        ("models/families/ddpm.py", "/ (snr + 1)", "/ (snr + 2)"),
        ("state/checkpoint.py", "if covered != size:", "if covered > size:"),
    ],
)
def test_code_changes_the_digest_and_words_do_not(
    package: Path, copied: Callable[[], str], file: str, old: str, new: str
) -> None:
    """What code is to it says code_tokens."""
    before = copied()
    path = package / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, f"{old}  # Why."))
    assert copied() == before
    path.write_text(text.replace(old, new))
    assert copied() != before


def test_other_parts_do_not_touch_training(package: Path, copied: Callable[[], str]) -> None:
    """Configuration, stages, evaluation, command line, display, trackers, log."""
    before = copied()
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        other = name.startswith(("stages/", "evaluation/", "cli/", "pipeline/", "launch/planner/"))
        if other or name.startswith(WITHOUT_EFFECT):
            path.write_text(path.read_text() + "\nSOMETHING = 1\n")
    assert copied() == before


DECIDING = {
    "artifact": "columns tensor_file",
    "cache": "__init__ layout mapped_shard reader token_layout",
    "config": "__init__ adapters optimizers parameter_patterns token_routes",
    "data": "__init__ draws order shares",
    "launch": "__init__ resolved schedules",
    "machine": "__init__ device",
    "models": "__init__ nf4 quantized_linear quanto trainable",
    "models/families": "__init__ adapters causal_lm conditioning ddpm diffusion flow_matching flux "
    "flux_conditioning flux_inputs flux_redux language lora loss_functions model_family "
    "model_tensors patches qwen_image sd3 sdxl seq2seq_lm token_routing tokens",
    "state": "__init__ checkpoint position state",
    "training": "__init__ batches loop not_finite rank ranks setup step_counter",
    "training/engines": "__init__ deepspeed_start determinism ema engine "
    "gradient_checkpointing loss_scale partitioned_model torch_compile torch_engine "
    "zero_corrections zero_engine zero_partitions",
    "training/optim": "__init__ adam_bf16_states adamw_8bit block_codes lion optimizer "
    "param_groups prodigy",
}
"""What counts for the trainings of all families: a new module is added here, or to the list of
those without effect."""


def test_every_module_of_a_training_counts_or_is_declared_without_effect() -> None:
    """None is forgotten, and none leaves the digest by a change of somebody's imports."""
    found = {name for family in FAMILIES for name in sources._training_closure(family)}
    assert found == {
        f"{folder}/{n}.py" for folder, names in DECIDING.items() for n in names.split()
    }


def test_what_is_declared_without_effect_is_imported_by_what_counts() -> None:
    """No entry of the list outlives the import for which it was made."""
    imported = {
        file
        for family in FAMILIES
        for name in sources._training_closure(family)
        for file in sources._imports(sources.PACKAGE, name)
    }
    for entry in WITHOUT_EFFECT:
        assert any(name.startswith(entry) for name in imported), entry
    for module, entry in NOT_FOLLOWED.items():
        text = (sources.PACKAGE / module).read_text()
        assert f"from zerotrain.{entry.strip('/').replace('/', '.')} import" in text, module


def test_imports_by_a_string_are_of_registries_alone() -> None:
    """Families, formats and libraries are found by their names; every other import is ordinary."""
    found = {
        path.relative_to(sources.PACKAGE).as_posix()
        for path in sources.PACKAGE.rglob("*.py")
        if "import_module(" in path.read_text()
    }
    families = {f"models/families/{name}.py" for name in ("__init__", "diffusion", "language")}
    assert found == families | {
        "export/formats/conversion.py", "launch/planner/model.py", "launch/planner/architecture.py",
        "training/engines/deepspeed_start.py",
    }  # fmt: skip


def test_declared_encoding_is_that_of_the_families() -> None:
    """The list that is read without torch, and what each family says; of sources of images too."""
    from zerotrain.data import digits, folder
    from zerotrain.models.families import conditioning, load_family

    more = {"flux": ("zerotrain.models.families.flux_redux",)}
    assert more["flux"][0] in Path(conditioning.__file__).read_text(encoding="utf-8")
    for name in FAMILIES:
        family = load_family(name)
        said = {*family.encoding_code, *getattr(family, "prompt_code", ()), *more.get(name, ())}
        assert set(ENCODING[name]) == said
        images = set(encoding_code(name)) - said
        assert images == ({*PIXELS, *BATCHES} if family.modality == "image" else set())
    pixels = {*digits.DigitsSource.pixel_modules, *folder.FolderSource.pixel_modules, CROP, BUCKETS}
    assert pixels == {*PIXELS}


@pytest.mark.slow
def test_every_stage_has_sources() -> None:
    """Each stage's own file is among them; no relative import escapes the search."""
    for stage in STAGES:
        found = sources.source_files(f"zerotrain.stages.{stage}")
        assert any(path.endswith(f"stages/{stage}.py") for path in found)
    for path in sources.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


@pytest.mark.parametrize(
    "code",
    [
        "from zerotrain.artifact.sources import source_files, training_digest\n"
        "source_files('zerotrain.stages.evaluate', 'zerotrain.models.families.sdxl')\n"
        "training_digest('sdxl')",
        "from zerotrain.cli import command_line\ncommand_line(())\nimport zerotrain.importers",
    ],
    ids=["sources", "help"],
)
def test_finding_sources_and_help_import_little(code: str) -> None:
    """Building the graph takes no second: neither torch nor a stage is imported. Each command pays
    for what all of them import; the models of a configuration take 0.2 s."""
    heavy = "{'torch', 'numpy', 'pydantic', 'yaml', 'zerotrain.training.rank'}"
    words = [sys.executable, "-c", f"import sys\n{code}\nprint({heavy} & sys.modules.keys())"]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_parsing_the_snakefile_imports_no_torch() -> None:
    """What Snakefile and rules import, and reading and checking a configuration."""
    rules = [Path("Snakefile"), *Path("rules").glob("*.smk")]
    text = "\n".join(path.read_text() for path in rules)
    lines = re.findall(r"^from zerotrain\S* import .+$", text, re.M)
    assert len(lines) >= 5
    code = [
        "import sys", "from pathlib import Path", *lines,
        "from zerotrain.pipeline.checks import read_checked_runs",
        "read_checked_runs(Path('config/config.yaml'))", "import zerotrain.importers.reading",
        "print(sorted({'torch', 'deepspeed', 'accelerate', 'diffusers'} & sys.modules.keys()))",
    ]  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


def test_a_class_counts_with_its_own_code_alone(package):
    """Whatever else stands in its module may change, and may not be used."""
    text = "import torch\n\nclass One:\n    a = 1\n\nclass Two:\n    a = 2\n"

    def digest(text: str) -> str:
        sources._code.cache_clear()
        module(package, "families.one", text)
        return sources.code_digest("zerotrain.families.one:One")

    first = digest(text)
    assert digest(text.replace("a = 2", "a = 3")) == first
    assert digest(text.replace("a = 1", "a = 3")) != first
    for other in ("b = 4\n\nclass One:\n    a = b\n", "class Two: ...\n\nclass One(Two): ...\n"):
        with pytest.raises(ValueError, match=r"One uses (b|Two) of its own module"):
            digest(other)


def test_text_is_read_and_written_as_utf_8() -> None:
    """Prompts and manifests are the same on a machine with another locale."""
    for path in sources.PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(getattr(node, "func", None), "attr", "")
            if name in ("read_text", "write_text"):
                named = {keyword.arg for keyword in node.keywords}
                assert "encoding" in named, f"{path}:{node.lineno}"
