"""Every kind of file under a manifest x deleted, truncated, one byte flipped x who reads it.

No reader uses one silently: each stops before it has written anything, names the file, and names
the command that makes the file again. docs/lineage.md has the table.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tests.builders.settings import write_settings
from tests.formats.conftest import published
from tests.formats.languages import PROMPT, exported
from typer.testing import CliRunner

from zerotrain import artifact, cli
from zerotrain.artifact import link_or_copy, write_json
from zerotrain.config.read import parse_config
from zerotrain.config.stage_settings import SETTINGS
from zerotrain.errors import PipelineError
from zerotrain.export.command import convert
from zerotrain.export.export import export_universal
from zerotrain.export.formats.opening import check_whole
from zerotrain.models.families import autoencoders
from zerotrain.models.families.lora import ADAPTER as LORA
from zerotrain.models.hub import open_location
from zerotrain.stages.cache_latents import CacheSettings, cache_latents
from zerotrain.stages.import_checkpoint import ImportSettings, import_checkpoint
from zerotrain.stages.prepare_dataset import prepare_dataset
from zerotrain.stages.render_launch import LaunchSettings, render_launch
from zerotrain.state.external import ExternalCheckpoint
from zerotrain.state.open import open_checkpoint
from zerotrain.state.position import MASTER
from zerotrain.state.state import State

PRESET = Path(__file__).parents[2] / "config" / "launch" / "torch.yaml"
UNET = "unet/diffusion_pytorch_model.safetensors"
WHOLE, WITH_LORA, EMA = (f"results/pics/{phase}/weights" for phase in ("whole", "lora", "ema"))
TEXT, TEXT_LORA, LOHA = (f"results/words/{phase}/weights" for phase in ("whole", "lora", "loha"))
PICTURES = "results/data/pics"
TRAIN = ["train_phase", "--launch", "results/pics/whole/launch", "--base", "results/pics/base",
         "--cache", f"{PICTURES}/cache/16", "--progress", "out/progress", "--output", "out",
         "--start", "results/words/whole/state"]  # fmt: skip
EVALUATE = ["evaluate", "--settings", "settings/pics/evaluate.json", "--dataset", PICTURES,
            "--cache", f"{PICTURES}/cache/16", "--weights", WHOLE, "--state",
            "results/words/whole/state", "--output", "out", "--metrics", "out.json"]  # fmt: skip
EXPORT_WEIGHTS = ["export_weights", "--settings", "settings/words/export_weights.json",
                  "--checkpoint", "results/words/whole/checkpoint", "--base", "results/words/base",
                  "--weights", "out/weights", "--state", "out/state"]  # fmt: skip
IMPORT = ["import_checkpoint", "--settings", "settings/words/import_checkpoint.json",
          "--base", "results/words/base", "--checkpoint", "results/words/whole/state",
          "--state", "out"]  # fmt: skip
CACHE = ["cache_latents", "--settings", "settings/pics/cache_latents.json", "--size", "16",
         "--dataset", PICTURES, "--base", "results/pics/base", "--output", "out"]  # fmt: skip
PARTS = ("unet", "text_encoder", "text_encoder_2")
TEXT_FILES = {
    TEXT: ("model.safetensors", "config.json"),
    TEXT_LORA: ("adapter_model.safetensors", "adapter_config.json", "model.safetensors"),
    LOHA: ("adapter/adapter_model.safetensors",),
}
CHECKPOINT = ("rank-00000-00000.safetensors", "rank-00001-00000.safetensors", "checkpoint.json")
STATE = ("master-00000.safetensors", "exp_avg_sq-00000.safetensors", "state.json")

READERS: list[tuple[list[str], dict[str, tuple[str, ...]]]] = [
    (["sample", WHOLE, "a house"], {WHOLE: (UNET, "vae/config.json", "model_index.json")}),
    (["sample", WITH_LORA, "a house"], {WITH_LORA: (LORA, UNET)}),
    (["sample", EMA, "a house"], {EMA: (UNET,)}),
    (
        ["sample", "outputs/kohya", "a house", "--base", "results/pics/base"],
        {"outputs/kohya": ("lora.safetensors",), "results/pics/base": (UNET,)},
    ),
    (
        ["sample", "outputs/kohya/lora.safetensors", "a house", "--base", WHOLE],
        {"outputs/kohya": ("lora.safetensors",), WHOLE: ("text_encoder/model.safetensors",)},
    ),
    *((["generate", folder, PROMPT], {folder: names}) for folder, names in TEXT_FILES.items()),
    (
        ["generate", "outputs/peft", PROMPT, "--base", "results/words/base"],
        {"outputs/peft": ("adapter_model.safetensors",), "results/words/base": ("config.json",)},
    ),
    *(
        (["export", WITH_LORA, "--to", to, "--output", "out"], {WITH_LORA: (LORA,)})
        for to in ("kohya", "peft", "diffusers_lora", "merged", "single_file", "diffusers")
    ),
    (["export", WHOLE, "--to", "ldm", "--output", "out"], {WHOLE: (UNET,)}),
    (["export", LOHA, "--output", "out"], {LOHA: TEXT_FILES[LOHA]}),
    (["export", "outputs/kohya", "--output", "out"], {"outputs/kohya": ("lora.safetensors",)}),
    *(
        (
            ["export", f"results/words/whole/{kind}", "--config", "config/words.yaml", *words],
            {f"results/words/whole/{kind}": files, "results/words/base": ("model.safetensors",)},
        )
        for kind, files in (("checkpoint", CHECKPOINT), ("state", STATE))
        for words in (["--output", "out"],)
    ),
    *(
        (
            ["export", f"results/words/whole/{kind}", *words],
            {f"results/words/whole/{kind}": files[:1]},
        )
        for kind, files in (("checkpoint", CHECKPOINT), ("state", STATE))
        for words in (["--state", "out"], ["--to", "universal", "--output", "out"])
    ),
    *(
        (["publish", folder, "me/x", "--dry-run", "--card", "out"], {folder: (name,)})
        for folder, name in ((WITH_LORA, LORA), ("outputs/kohya", "lora.safetensors"))
    ),
    *(
        (["state", "show", folder], {folder: names})
        for folder, names in (
            (WITH_LORA, (LORA,)),
            (LOHA, TEXT_FILES[LOHA]),
            ("results/words/whole/checkpoint", CHECKPOINT),
            ("results/words/whole/state", STATE),
        )
    ),
    (
        ["state", "diff", "results/words/whole/checkpoint", "results/words/whole/state"],
        {
            "results/words/whole/checkpoint": CHECKPOINT[:1],
            "results/words/whole/state": STATE[:1],
        },
    ),
    (
        TRAIN,
        {
            "results/pics/whole/launch": ("run.yaml",),
            "results/pics/base": (UNET, "scheduler/scheduler_config.json"),
            f"{PICTURES}/cache/16": ("latents-00000-of-00001.safetensors", "index.json"),
            "results/words/whole/state": STATE,
        },
    ),
    (
        EVALUATE,
        {
            f"{PICTURES}/cache/16": ("text-00000-of-00001.safetensors", "index.json"),
            WHOLE: (UNET,),
            "results/words/whole/state": STATE[:1],
        },
    ),
    (
        EXPORT_WEIGHTS,
        {
            "results/words/whole/checkpoint": CHECKPOINT,
            "results/words/base": ("model.safetensors", "tokenizer.json"),
        },
    ),
    (IMPORT, {"results/words/whole/state": STATE, "results/words/base": ("model.safetensors",)}),
    (CACHE, {"results/pics/base": ("vae/diffusion_pytorch_model.safetensors",)}),
    (
        ["build_base", "--settings", "settings/on-weights/build_base.json", "--output", "out"],
        {WHOLE: (UNET, "model_index.json", "tokenizer/tokenizer.json")},
    ),
    (
        ["build_base", "--settings", "settings/on-parts/build_base.json", "--output", "out"],
        {WHOLE: ("vae/config.json",), "results/pics/base": (UNET,)},
    ),
    (
        [
            "report",
            "--settings",
            "settings/pics/report.json",
            "--config",
            "config/pics.yaml",
            "--output",
            "out",
            "results/pics/whole",
        ],
        {
            "results/pics/whole/evaluation": ("grid.png",),
            "results/pics/whole/launch": ("run.yaml",),
        },
    ),
    (
        ["switch", "words", "--to", "torch", "--dry-run"],
        {"results/words/whole/progress/step-00000012": CHECKPOINT},
    ),
]


def damages() -> list[Any]:
    """Every kind of damage to every file that is read.

    Each is flipped, and deleted under the first call of its command; `make test-soak` has the rest.
    """
    cases = []
    seen: set[str] = set()
    for words, wanted in READERS:
        for folder, name in ((folder, name) for folder, names in wanted.items() for name in names):
            for how in ("deleted", "truncated", "flipped"):
                sample = how == "flipped" or (how == "deleted" and words[0] not in seen)
                case = f"{' '.join(words[:2])}-{folder}-{name}-{how}"
                marks = () if sample else pytest.mark.soak
                cases.append(pytest.param(words, folder, name, how, id=case, marks=marks))
        seen.add(words[0])
    return cases


CONFIGS: dict[str, dict[str, Any]] = {
    "pics": {"base": "nano", "data": {"images": "images", "holdout": 0.5, "num_workers": 0}},
    "words": {"base": "nano", "family": "causal_lm", "data": {"source": "sums"}},
    "on-weights": {"base": WHOLE, "data": {"images": "images"}},
    "on-parts": {
        "base": ",".join([*(f"results/pics/base:{part}/*" for part in PARTS), f"{WHOLE}:vae/*"]),
        "data": {"images": "images"},
    },
}


def config_of(name: str) -> dict[str, Any]:
    """The configuration of a run."""
    return {
        "run": name,
        **CONFIGS[name],
        "train": {"resolution": 16} if "images" in CONFIGS[name]["data"] else {},
        "launch": {"num_cpu_threads_per_process": 1},
        "phases": [{"name": "whole", "until": 20}],
    }


def build(base: Path, whole: Path, lora: Path) -> None:
    """Make a project in the working directory: runs of images and of text, nothing trained."""
    Path("Snakefile").touch()
    Path("config/launch").mkdir(parents=True)
    shutil.copy(PRESET, "config/launch")
    for name in CONFIGS:
        write_json(Path(f"config/{name}.yaml"), config_of(name))  # JSON is YAML
        configured = parse_config(config_of(name), f"{name}.yaml")
        for stage in SETTINGS:
            phase = "whole" if stage in ("evaluate", "render_launch") else ""
            write_settings(Path("settings", name, f"{stage}.json"), stage, configured, phase)
    Path("images").mkdir()
    for number in range(8):
        Image.new("RGB", (16, 16), (30 * number,) * 3).save(f"images/{number}.png")
        Path(f"images/{number}.txt").write_text(f"wall {number % 2}", encoding="utf-8")
    results = Path("results")
    for source, target in ((base, "base"), (whole, "whole/weights"), (lora, "lora/weights")):
        shutil.copytree(source, results / "pics" / target)
    manifest = published(base, results / "pics/ema/weights") / "manifest.json"
    listed = json.loads(manifest.read_text())
    write_json(manifest, {**listed, "content": {**listed["content"], "ema": True}})
    run = parse_config(config_of("pics"), "pics.yaml")
    data = Path(PICTURES)
    prepare_dataset(run.data, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autoencoders, "VAE_STEPS", 2)
        cache_latents(CacheSettings.of(run), 16, data, results / "pics/base", data / "cache/16")
    launch = results / "pics/whole/launch"
    settings = LaunchSettings.of(run, "whole")
    render_launch(settings, data, Path("config/launch/torch.yaml"), None, None, launch)
    with artifact.publish(results / "pics/whole/evaluation", "evaluation") as draft:
        for name in ("grid.png", "loss.png", "learning_rate.png"):
            shutil.copy("images/0.png", draft.folder / name)
        draft.content = {"prompts": ["a house"]}
    write_json(results / "pics/whole/metrics.json", {})
    exported("causal_lm", results / "words")
    rolling = artifact.read(results / "words/whole/checkpoint", "checkpoint")
    with artifact.publish(results / "words/whole/progress/step-00000012", "checkpoint") as draft:
        for name in rolling.files:
            link_or_copy(rolling.path(name), draft.folder / name)
    convert(results / "pics/lora/weights", "kohya", Path("outputs/kohya"))
    convert(results / "words/lora/weights", "peft", Path("outputs/peft"))


@pytest.fixture(scope="module")
def project(
    base: Path, whole: Path, lora: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The project, which is the working directory."""
    folder = tmp_path_factory.mktemp("damage") / "project"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        build(base, whole, lora)
        yield folder


@contextlib.contextmanager
def damaged(path: Path, how: str) -> Iterator[None]:
    """Damage a file, and give it its bytes back."""
    former = path.read_bytes()
    path.unlink()  # it may have other names
    flipped = bytearray(former)
    flipped[len(former) // 2] ^= 1
    if how != "deleted":
        path.write_bytes(former[: len(former) // 2] if how == "truncated" else flipped)
    try:
        yield
    finally:
        path.write_bytes(former)


def refusal(words: list[str]) -> str:
    """What a command says that refuses, on both streams."""
    result = CliRunner().invoke(cli.command_line(), words)
    assert isinstance(result.exception, PipelineError), result.output + repr(result.exception)
    return f"{result.output}{result.exception}"


def hint_of(folder: str) -> str:
    """What makes a folder again."""
    if folder.startswith("outputs"):
        source = WITH_LORA if folder.endswith("kohya") else TEXT_LORA
        return f"(`zerotrain export {source} --output {folder}` with the options of then)"
    name = "pics" if "/pics" in folder else "words"
    if "progress" in folder:
        return "restore one of them from a copy"
    return (
        f"Hint: `snakemake --cores all --configfile config/{name}.yaml --force -- "
        f"{folder}/manifest.json` makes it again"
    )


@pytest.mark.parametrize(("words", "folder", "name", "how"), damages())
def test_a_damaged_file_is_named_with_what_makes_it_again(
    project: Path, words: list[str], folder: str, name: str, how: str
) -> None:
    """Nothing is made of it, whichever command reads it."""
    with damaged(Path(folder, name), how):
        said = refusal(words)
    assert f"{folder}/{name}: " in said
    assert hint_of(folder) in said
    assert "zerotrain" not in said.partition("Hint:")[0]
    assert not {"out", "out.json", "samples"} & {path.name for path in Path.cwd().iterdir()}


@pytest.mark.parametrize(
    ("words", "name"),
    [(["sample", WHOLE, "a house"], LORA), (["generate", TEXT, PROMPT], "adapter_config.json")],
)
def test_an_adapter_that_no_manifest_lists_is_refused(
    project: Path, words: list[str], name: str
) -> None:
    """Whoever put it there: the weights would not be those that were trained."""
    source = WITH_LORA if name == LORA else TEXT_LORA
    added = Path(words[1], name)
    shutil.copy(Path(source, name), added)
    try:
        assert f"{words[1]}: {name} is not listed in manifest.json" in refusal(words)
    finally:
        added.unlink()


TRAINED = "results/words/whole/checkpoint"
FIRST = {folder: words for words, wanted in reversed(READERS) for folder in wanted}
UNPUBLISHED = [(FIRST[folder], folder) for folder in FIRST if "progress" not in folder] + [
    (["export", WHOLE, "--to", "ldm", "--output", "out"], WHOLE),
    (["export", TEXT_LORA, "--to", "peft", "--output", "out"], TEXT_LORA),
    (["export", TRAINED, "--output", "out"], TRAINED),
    (["state", "show", "results/words/whole/state"], "results/words/whole/state"),
    (["publish", WHOLE, "me/x", "--dry-run"], WHOLE),
]


@pytest.mark.parametrize(
    ("words", "folder", "how"),
    [
        # A file that was moved to another program's folder needs no manifest.
        (words, folder, "truncated" if folder.startswith("outputs") else "deleted")
        for words, folder in UNPUBLISHED
    ]
    + [
        pytest.param(words, folder, "truncated", marks=pytest.mark.soak)
        for words, folder in UNPUBLISHED
        if not folder.startswith("outputs")
    ],
)
def test_a_missing_or_cut_manifest_is_named(
    project: Path, words: list[str], folder: str, how: str
) -> None:
    """What is wrong is reported, and not what would be missing if the folder were another
    program's."""
    with damaged(Path(folder, "manifest.json"), how):
        said = refusal(words)
    cut = f"{folder}/manifest.json: not valid JSON"
    assert cut in said if how == "truncated" else f"{folder}: no manifest.json, so " in said
    assert "snakemake --cores all" in said or folder.startswith("outputs")


INSIDE = [
    (WHOLE, "unet", UNET),
    (WHOLE, UNET, UNET),
    (LOHA, "adapter", "adapter/adapter_model.safetensors"),
    (LOHA, "adapter/adapter_model.safetensors", "adapter/adapter_model.safetensors"),
]


@pytest.mark.parametrize("read", [open_checkpoint, lambda path: check_whole(path, None)])
@pytest.mark.parametrize(("folder", "named", "name"), INSIDE)
def test_what_is_named_inside_an_artifact_is_checked(
    project: Path, read: Callable[[Path], Any], folder: str, named: str, name: str
) -> None:
    """A folder or a file of weights is as whole as the manifest above it says, or refused."""
    assert read(Path(folder, named)) is not None
    with damaged(Path(folder, name), "flipped"), pytest.raises(PipelineError) as caught:
        read(Path(folder, named))
    assert caught.value.what.startswith(f"{folder}/{name}: sha256 ")


@pytest.mark.parametrize("listed", [None, ["lora.safetensors"], "lora.safetensors", {}])
def test_a_manifest_of_another_program_describes_nothing(tmp_path: Path, listed: Any) -> None:
    """Next to a file of its own it is no reason to stop, whatever it calls files."""
    (tmp_path / "lora.safetensors").touch()
    write_json(tmp_path / "manifest.json", {"version": 2, "files": listed})
    assert artifact.read_around(tmp_path / "lora.safetensors", ["weights"]) is None


def test_a_universal_export_is_a_start(project: Path, tmp_path: Path) -> None:
    """The folder and its tag below are the checkpoint that was exported; damaged, neither is."""
    folder, expected = tmp_path / "universal", open_checkpoint(Path(TRAINED))
    export_universal(expected, Path(TRAINED), folder)
    tag = folder / (folder / "latest_universal").read_text()
    for place in (folder, tag):
        found = open_checkpoint(place)
        assert found.position.step == expected.position.step
        assert sorted(found.names) == sorted(expected.names)
        for slot in expected.slots:
            for name in expected.names:
                assert torch.equal(found.tensor(name, slot), expected.tensor(name, slot))
    base = Path("results/words/base")
    settings = ImportSettings.of(parse_config(config_of("words"), "words.yaml"))
    import_checkpoint(settings, folder, base, tmp_path / "on")
    state, weights = State(tmp_path / "on"), {n: expected.tensor(n, MASTER) for n in expected.names}
    assert all(torch.equal(state.tensor(name, MASTER), weights[name]) for name in weights)
    file = min(tag.glob("zero/*/fp32.pt"))
    for place in (folder, tag):
        with damaged(file, "flipped"), pytest.raises(PipelineError) as caught:
            open_checkpoint(place)
        assert caught.value.what.startswith(f"{file}: sha256 ")


@pytest.mark.parametrize("file", ["peft/adapter_model.safetensors", "kohya/lora.safetensors"])
def test_an_exported_adapter_is_a_start(project: Path, file: str) -> None:
    """As other programs' adapters are: weights alone, checked by the manifest next to them."""
    path = Path("outputs", file)
    found = open_checkpoint(path.parent)
    assert isinstance(found, ExternalCheckpoint)
    assert found.slots == [MASTER]
    assert all(".lora_" in name for name in found.names)
    with damaged(path, "flipped"), pytest.raises(PipelineError) as caught:
        open_checkpoint(path.parent)
    assert caught.value.what.startswith(f"{path}: sha256 ")


def test_a_weights_folder_is_no_start_and_says_what_is(project: Path) -> None:
    """Its parts are named, since which of them was trained is not the folder's to say."""
    with pytest.raises(PipelineError) as caught:
        open_checkpoint(Path(WHOLE))
    assert caught.value.what == f"{WHOLE}: holds weights, not a checkpoint or a state"
    assert "its weights alone" in caught.value.hint


@pytest.mark.parametrize("name", ["model_index.json", "state.json", "checkpoint.json"])
def test_a_folder_of_another_program_is_none_of_ours(tmp_path: Path, name: str) -> None:
    """Names of files are shared by programs; a diffusers training ends with a model next to its
    checkpoints."""
    (tmp_path / "checkpoint-500").mkdir()
    save_file({"a.weight": torch.zeros(2)}, tmp_path / "checkpoint-500/model.safetensors")
    write_json(tmp_path / name, {"_class_name": "StableDiffusionXLPipeline", "step": 5})
    with pytest.raises(PipelineError) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.what.startswith(f"{tmp_path}: no layout that is known; it holds ")
    assert caught.value.hint.startswith("a checkpoint is one level below: ")


@pytest.mark.parametrize("found", [{"version": "1.2"}, ["a"], {"name": "sdxl", "shards": {}}])
def test_a_model_with_another_programs_manifest_is_a_base(tmp_path: Path, found: Any) -> None:
    """A manifest.json that has none of our keys does not describe a folder of ours."""
    write_json(tmp_path / "manifest.json", found)
    (tmp_path / "model_index.json").write_text("{}")
    assert set(open_location(str(tmp_path), None).names) == {"manifest.json", "model_index.json"}
