"""A model's own Python code is never run, and nobody is asked whether it may."""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path

import pytest
import transformers
from tests.builders.refusals import refused

import zerotrain
from zerotrain.export.generate import open_language_model
from zerotrain.models.pretrained import from_config, from_pretrained

PACKAGE = Path(zerotrain.__file__).parent
LOADERS = {"from_pretrained", "from_config"}
SWITCHES = {"trust_remote_code", "use_kernels"}
ALLOWED = {("models/pretrained.py", "cls"), ("models/pretrained.py", "PeftModel")}
"""The wrapper's own calls."""
CODE = "import pathlib\npathlib.Path('ran').touch()\n"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose class, configuration and tokenizer are in a file of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda text: pytest.fail(f"asked: {text}"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "own.py").write_text(CODE)
    names = ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM")
    config = {"model_type": "own", "auto_map": {name: "own.Own" for name in names}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


def test_no_loader_runs_the_files_of_a_folder(model: Path) -> None:
    """Configuration, tokenizer, model and answers: one sentence, nothing is run."""
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"):
        found = refused(from_pretrained, getattr(transformers, name), model)
        assert found.what == f"{model}: is a model with Python code of its own, which is not run"
    assert "is not run" in refused(open_language_model, model, None, "cpu").what
    config = transformers.GPT2Config()
    config.auto_map = {"AutoModelForSeq2SeqLM": "own.Own"}  # type: ignore[attr-defined]
    config.name_or_path = str(model)
    assert "is not run" in refused(from_config, transformers.AutoModelForSeq2SeqLM, config).what
    assert not (model.parent / "ran").exists()


def test_what_libraries_load_themselves_asks_nothing(model: Path) -> None:
    """After the wrapper's first call, a loader without the argument refuses, too."""
    refused(from_pretrained, transformers.AutoConfig, model)
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoConfig.from_pretrained(model)


def test_kernels_from_the_hub_are_off() -> None:
    """In every process that imports the package, by the variable that transformers reads."""
    assert os.environ["USE_HUB_KERNELS"] == "NO"


def test_every_loader_is_called_by_the_wrapper() -> None:
    """No module calls a loader of transformers or diffusers itself, or lets it run code. peft's
    configurations are JSON."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text(encoding="utf-8")
        if not any(word in text for word in (*LOADERS, *SWITCHES)):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.keyword) and node.arg in SWITCHES:
                found.add((name, node.arg))
            if isinstance(node, ast.Attribute) and node.attr in LOADERS:
                receiver = ast.unparse(node.value)
                if receiver != "PeftConfig":
                    found.add((name, receiver))
    assert found == ALLOWED
