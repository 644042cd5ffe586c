"""The code that report, README and docs show: run, it gives what `zerotrain sample` gives."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from PIL import Image
from tests.builders.adapters import LAYER_METHODS as METHODS
from tests.builders.exports import Export
from tests.builders.images import publish_nano
from tests.builders.models import move_far
from tests.conftest import ROOT
from tests.families.texts import build as build_text
from tests.formats.commands import code_of, join_lines, run_code

from zerotrain import artifact
from zerotrain.config.families import FAMILIES
from zerotrain.data.conversation import Message
from zerotrain.data.text import alpaca_prompt
from zerotrain.export.formats.loading_code import (
    DEVICE,
    loading_code,
    text_of_readme,
)
from zerotrain.export.generate import generate
from zerotrain.export.options import GenerateOptions, SampleOptions
from zerotrain.export.sample import sample
from zerotrain.machine.device import device_type
from zerotrain.models.base import README
from zerotrain.models.families import load_family
from zerotrain.models.families.pipelines import sampling_dtype

IMAGES = tuple(name for name, kind in FAMILIES.items() if kind.modality == "image")
PROMPT = {"image": "a red house", "text": "1+2="}
LAYERS = {
    "sdxl": ["to_q", "ff.net.2"],
    "sd3": ["to_q", "to_v"],
    "flux": ["to_q", "to_v"],
    "qwen_image": ["to_q", "to_v"],
    "causal_lm": ["q_proj", "down_proj"],
    "seq2seq_lm": ["q", "wo"],
}
PART = {"sdxl": "attn", "causal_lm": "self_attn", "seq2seq_lm": "SelfAttention"}
"""Of a name: what is trained of the model in the kind `part`."""
SIDE = 16
"""Pixels; Flux and Qwen-Image have no size of their own but 1024, whatever the model."""
Weights = Callable[[str, str], Path]


def settings_of(family: str, kind: str) -> dict[str, Any]:
    """The section of the configuration that trains the kind."""
    layers = {"target_modules": LAYERS[family]}
    if kind == "whole":
        return {}
    if kind == "part":
        return {"trainable_parameters": [f".*{PART.get(family, 'attn')}.*"]}
    if kind == "lora":
        return {"lora": {"rank": 4, "alpha": 6.0, "dropout": 0.5, **layers}}
    return {"peft": {"peft_type": kind, **METHODS[kind], **layers}}


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Weights of a family and kind, far from the base's and written by the export itself."""
    folder, bases = tmp_path_factory.mktemp("loading"), {}

    def base_of(family: str) -> Path:
        if family not in bases:
            bases[family] = build(family, folder / family / "base")
        return bases[family]

    def make(family: str, kind: str) -> Path:
        export = Export(folder / family / kind, base_of(family))
        if not export.weights.exists():
            text = FAMILIES[family].modality == "text"
            data = {"data": {"source": "sums"}} if text else {"train": {"resolution": SIDE}}
            export.settings = {"family": family, **data, **settings_of(family, kind)}
            export.export()
        return export.weights

    return make


def build(family: str, folder: Path) -> Path:
    """A nano base, published; its autoencoder is fitted for a few steps."""
    if FAMILIES[family].modality == "text":
        with artifact.publish(folder, "base") as draft:
            build_text(family, draft.folder)
            model: Any = load_family(family).load_model(draft.folder)
            moved = move_far(dict(model.named_parameters()), seed=2)
            model.load_state_dict(moved, strict=False)
            model.save_pretrained(draft.folder)
            draft.content = {"family": family, "base": "nano", "revision": None, "commit": None}
        return folder
    return publish_nano(family, folder)


def made_here(
    weights: Path,
    family: str,
    prompt: str,
    out: Path,
    *,
    raw: bool = False,
    system: str | None = None,
) -> Any:
    """The same by our own command, with its defaults."""
    if FAMILIES[family].modality == "text":
        return generate(GenerateOptions(weights, prompt, system=system, raw=raw))[0]
    (file,) = sample(SampleOptions(weights, prompt, resolution=str(SIDE), out=out))
    return Image.open(file).tobytes()


CASES = [
    ("sdxl", "lora"), ("sd3", "whole"), ("qwen_image", "lora"), ("flux", "whole"),
    ("causal_lm", "part"), ("seq2seq_lm", "whole"),
]  # fmt: skip
"""Each family once, and each kind."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_readmes_code_gives_what_our_own_command_gives(
    weights, tmp_path, monkeypatch, family, kind
):
    """Pixel for pixel or word for word, and not what the base gives."""
    folder = weights(family, kind)
    prompt = PROMPT[FAMILIES[family].modality]
    code = code_of((folder / README).read_text())
    for written in ("a question", "a prompt like your captions"):
        code = code.replace(written, prompt)
    side = SIDE if FAMILIES[family].modality == "image" else None
    assert join_lines(code) == join_lines(
        loading_code(folder, family, prompt, at=".", resolution=side)
    )
    inside = tmp_path / "weights"
    shutil.copytree(folder, inside)
    found = run_code(code, inside, monkeypatch)
    assert found == made_here(folder, family, prompt, tmp_path / "samples")
    base = folder.parent.parent / "base"
    assert found != made_here(base, family, prompt, tmp_path / "of-base")


DOCS = {
    "README.md": ("sdxl", "whole"),
    "docs/adapters.md": ("sdxl", "LOHA"),
    "docs/exporting.md": ("sdxl", "lora"),
    "docs/from-peft.md": ("seq2seq_lm", "lora"),
    "docs/text.md": ("causal_lm", "lora"),
}
"""Pages with code that loads weights, and weights that it is of."""


def blocks_of(page: Path) -> list[str]:
    """The indented blocks of a page that load weights."""
    blocks = re.findall(
        r"^(?:    .*\n|\n(?=    ))+", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    return [textwrap.dedent(block) for block in blocks if ".from_pretrained(" in block]


def test_every_page_with_code_is_tried():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = {page.relative_to(ROOT).as_posix(): len(blocks_of(page)) for page in pages}
    assert {name: count for name, count in found.items() if count} == dict.fromkeys(DOCS, 1)


@pytest.mark.parametrize("page", DOCS)
def test_the_docs_code_gives_what_our_own_command_gives(weights, tmp_path, monkeypatch, page):
    family, kind = DOCS[page]
    folder = weights(family, kind)
    (code,) = blocks_of(ROOT / page)
    code, replaced = re.subn(r'"results/\w+/\w+/weights"', f'"{folder}"', code)
    assert replaced == 1
    prompt = re.search(r'(?:pipeline|tokenizer)\("(.*?)(?:\\n)?"', code)[1]
    image = 'image.save("image.png")' if "image =" in code else ""
    found = run_code(f"{code}\n{image}", tmp_path, monkeypatch)
    assert found == made_here(folder, family, prompt, tmp_path / "samples")


LENGTH = "max_sequence_length"


def calls(family: str) -> Any:
    """The arguments of a family's pipeline."""
    pipeline = getattr(diffusers, FAMILIES[family].pipeline)
    return inspect.signature(pipeline.__call__).parameters


def test_the_pipelines_own_prompt_lengths_are_known():
    """The code names a length only where it is another."""
    prompts = {family: FAMILIES[family].prompt for family in IMAGES}
    for family, prompt in prompts.items():
        if prompt:
            assert calls(family)[LENGTH].default == prompt.default
            assert prompt.tokenizer in FAMILIES[family].parts
    assert {f for f in IMAGES if LENGTH in calls(f)} == {f for f in IMAGES if prompts[f]}


def test_a_trained_prompt_length_and_absent_encoders_are_in_the_code(tmp_path):
    """Of an SD3 without T5, trained with longer prompts than diffusers' own."""
    (tmp_path / "model_index.json").write_text(
        json.dumps({"text_encoder_3": [None, None], "tokenizer_3": [None, None]})
    )
    code = loading_code(tmp_path, "sd3", "p", max_sequence_length=300)
    assert "text_encoder_3=None" in code
    assert "tokenizer_3=None" in code
    assert "max_sequence_length=300" in code
    assert "max_sequence_length" not in loading_code(tmp_path, "sd3", "p")


def test_penalties_of_the_base_are_left_out_of_a_greedy_answer(weights, tmp_path, monkeypatch):
    """As `zerotrain generate` leaves them out."""
    folder = tmp_path / "weights"
    shutil.copytree(weights("causal_lm", "whole"), folder)
    (folder / "manifest.json").unlink()
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 5.0}))
    found = run_code(loading_code(folder, "causal_lm", "1+2="), tmp_path, monkeypatch)
    assert found == made_here(folder, "causal_lm", "1+2=", tmp_path)


@pytest.mark.slow
def test_prompts_are_read_in_chunks_as_they_were_in_training(weights, tmp_path, monkeypatch):
    """Of the whole text, where diffusers alone reads the first tokens; not on the hub's card."""
    folder = tmp_path / "weights"
    shutil.copytree(weights("sdxl", "lora"), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["content"]["long_captions"] = "chunk"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    prompt = "a red house, a blue house, " * 20
    settings = {"resolution": SIDE, "long_captions": "chunk"}
    found = run_code(loading_code(folder, "sdxl", prompt, **settings), tmp_path, monkeypatch)
    assert found == made_here(folder, "sdxl", prompt, tmp_path / "samples")
    (tmp_path / "image.png").unlink()
    plain = run_code(loading_code(folder, "sdxl", prompt, resolution=SIDE), tmp_path, monkeypatch)
    assert found != plain
    code = loading_code(folder, "sdxl", prompt, repo="me/houses", **settings)
    assert "from zerotrain" not in code
    assert "# diffusers reads the first 75 tokens of a prompt; the training and `zerotrain" in code
    assert "75" not in loading_code(folder, "sdxl", prompt, repo="me/houses", resolution=SIDE)


CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.mark.parametrize(
    ("form", "chat"),
    [({}, False), ({"system": "You add."}, True), ({"raw": True}, True)],
    ids=["question", "system", "raw"],
)
def test_a_prompt_is_read_in_the_form_that_was_trained(weights, tmp_path, monkeypatch, form, chat):
    """With the chat template, if there is one, the system's turn, or the prompt as it is."""
    folder = tmp_path / "weights"
    shutil.copytree(weights("causal_lm", "lora"), folder)
    (folder / "manifest.json").unlink()
    if chat:
        (folder / "chat_template.jinja").write_text(CHAT)
    code = loading_code(folder, "causal_lm", "1+2=", **form)
    assert ("apply_chat_template" in code) == (chat and "raw" not in form)
    asked = tokens_asked(code, tmp_path, monkeypatch)
    assert asked == tokens_asked_here(folder, **form)
    found = run_code(code, tmp_path, monkeypatch)
    assert found == made_here(folder, "causal_lm", "1+2=", tmp_path, **form)


def tokens_asked(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that a snippet gives to the model: answers of a nano model may be alike."""
    before_answer, _, _ = code.partition("tokens = model.generate")
    scope: dict[str, Any] = {}
    monkeypatch.chdir(folder)
    exec(compile(before_answer, "snippet", "exec"), scope)
    return scope["inputs"]["input_ids"][0].tolist()


def tokens_asked_here(folder: Path, raw: bool = False, system: str | None = None) -> list[int]:
    """The tokens that `zerotrain generate` gives to it."""
    family: Any = load_family("causal_lm")
    turns = [Message("system", system)] if system else []
    turns.append(Message("prompt" if raw else "user", "1+2="))
    return family.prompt(family.load_tokenizer(folder), turns, 10**6)


def test_a_system_turn_before_a_question_of_a_seq2seq_model(weights, tmp_path, monkeypatch):
    folder = weights("seq2seq_lm", "whole")
    code = loading_code(folder, "seq2seq_lm", "1+2=", system="You add.")
    found = run_code(code, tmp_path, monkeypatch)
    assert found == made_here(folder, "seq2seq_lm", "1+2=", tmp_path, system="You add.")
    assert r'tokenizer("You add.\n1+2=",' in code


def test_the_readme_of_alpaca_prompts_has_that_text_as_it_is(weights):
    """Neither a line break nor a chat template is put around it, and the command says --raw."""
    folder = weights("causal_lm", "lora")
    content = {"family": "causal_lm", "prompt_template": "alpaca"}
    readme = text_of_readme(folder, content)
    prompt = json.dumps(alpaca_prompt("a question").content)
    assert f'inputs = tokenizer({prompt}, return_tensors="pt")' in readme
    assert readme.endswith("### Response:' --raw\n```\n")


@pytest.mark.parametrize("kind", ["cuda", "npu", "mps", "xpu", None])
def test_code_computes_on_the_device_of_our_commands_in_their_type(monkeypatch, kind):
    found = None if kind is None else SimpleNamespace(type=kind)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: found
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
    scope: dict[str, Any] = {"torch": torch}
    exec(DEVICE, scope)
    assert (scope["device"], scope["dtype"]) == (device_type(), sampling_dtype(device_type()))


def test_code_says_what_to_do_where_memory_is_too_small(weights):
    code = loading_code(weights("sdxl", "lora"), "sdxl", "p")
    assert "pipeline.to(device)  # use pipeline.enable_model_cpu_offload() if" in code
