"""A tiny training: a real SDXL U-Net, a real cache of random latents, and processes to train it."""

from __future__ import annotations

import faulthandler
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from tests.training.inputs import write_image_inputs
from tests.training.kill_point import KillPoint

from zerotrain import artifact
from zerotrain.cache.layout import LATENTS, TEXT, Entry, Index, write_index
from zerotrain.cache.writer import StoredShards, place, write_series
from zerotrain.config.launch import LaunchConfig
from zerotrain.launch.derive import with_files
from zerotrain.launch.files import write_launch_files
from zerotrain.launch.preset import read_preset
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.launch.run_yaml import read_run_yaml, write_run_yaml
from zerotrain.machine.ports import free_port
from zerotrain.models.families import load_family
from zerotrain.models.sizes import read_sizes
from zerotrain.models.trainable import choose_trained, trained_parameters
from zerotrain.state.checkpoint import Checkpoint
from zerotrain.state.position import MASTER
from zerotrain.training import rank
from zerotrain.training.checkpointing import progress_folder
from zerotrain.training.checkpointing.rank_writer import RankWriter

SAMPLES = 24
SEED = 7
PRESETS = Path("config/launch")


def _rank(
    number: int,
    world_size: int,
    arguments: list[str],
    port: int,
    output: Path,
    kill: KillPoint | None,
) -> None:
    # The fork server was started under another test's captured output.
    stream = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    faulthandler.dump_traceback_later(300, exit=True)
    os.environ.update(RANK=str(number), LOCAL_RANK=str(number), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if kill:
        kill.arm()
    rank.main(arguments)


class Training:
    """Phases of one tiny run, each trained in a process of its own."""

    def __init__(self, folder: Path, inputs: Path, server: Any) -> None:
        self.folder = folder
        self.base, self.cache = inputs / "base", inputs / "cache"
        self._server = server
        self.output = folder / "output.txt"
        """What the training processes said."""

    def phase(
        self, name: str, preset: str, until: int, *, zero: Any = None, **changes: Any
    ) -> ResolvedPhase:
        """A phase with its launch files written; `zero` are own values of zero_optimization."""
        phase = tiny_phase(name, preset, until)
        phase = phase.with_values(**changes)
        parts = phase.train.gradient_accumulation_steps * phase.launch.num_processes
        phase = phase.with_values(micro_batch_size=phase.train.global_batch_size // parts)
        phase = self._with_files(phase, zero)
        launch = self.folder / name / "launch"
        with artifact.publish(launch, "launch") as draft:
            write_run_yaml(phase, draft.folder / "run.yaml")
            write_launch_files(phase, draft.folder, launch)
        return phase

    def _with_files(self, phase: ResolvedPhase, zero: Any) -> ResolvedPhase:
        sizes = read_sizes(
            artifact.read(self.base, "base"),
            phase.family,
            phase.adapter,
            phase.frozen_parameters,
            phase.trainable_parameters,
        )
        own = zero or (TINY if phase.derived.zero_stage == 3 else {})
        launch = LaunchConfig(deepspeed={"zero_optimization": own} if own else {})
        return with_files(phase, launch, sizes)

    def start(
        self, name: str, *, state: Path | None = None, kill: KillPoint | None = None
    ) -> ForkServerProcess:
        """Start a phase of one process without waiting for its end."""
        return self.start_ranks(name, 1, state=state, kill=kill)[0]

    def start_ranks(
        self,
        name: str,
        processes: int,
        *,
        state: Path | None = None,
        kill: KillPoint | None = None,
    ) -> list[ForkServerProcess]:
        """Start the processes that train a phase."""
        progress = self.progress(name)
        progress.mkdir(parents=True, exist_ok=True)
        arguments = {
            "launch": self.folder / name / "launch",
            "base": self.base,
            "cache": self.cache,
            "progress": progress,
        }
        until = read_run_yaml(arguments["launch"] / "run.yaml").derived.until_step
        if resume := progress_folder.newest_intact(progress, until):
            arguments["resume"] = resume
        if state:
            arguments["start"] = state
        words = [word for key, value in arguments.items() for word in (f"--{key}", str(value))]
        port = free_port()
        started = [
            self._server.Process(
                target=_rank, args=(number, processes, words, port, self.output, kill)
            )
            for number in range(processes)
        ]
        for process in started:
            process.start()
        return started

    def train(self, name: str, *, state: Path | None = None) -> list[float]:
        """Train a phase to its end; the losses of the run so far."""
        processes = read_run_yaml(self.folder / name / "launch" / "run.yaml").launch.num_processes
        started = self.start_ranks(name, processes, state=state)
        for process in started:
            process.join(320)
        assert [p.exitcode for p in started] == [0] * processes, self.output.read_text()
        assert (self.progress(name) / "metrics.jsonl").exists(), self.output.read_text()
        return self.losses(name)

    def train_unfinished(self, name: str) -> None:
        """Train a phase of one process whose training ends by itself before its end."""
        process = self.start(name)
        process.join(320)
        assert process.exitcode == 0, self.output.read_text()

    def run(self, name: str, preset: str, until: int, **changes: Any) -> list[float]:
        """Write a phase's launch files and train it."""
        state = changes.pop("state", None)
        self.phase(name, preset, until, **changes)
        return self.train(name, state=state)

    def progress(self, name: str) -> Path:
        """The folder of a phase's progress."""
        return self.folder / name / "progress"

    def log(self, name: str) -> list[dict[str, Any]]:
        """The training log of the run so far."""
        lines = (self.progress(name) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def losses(self, name: str) -> list[float]:
        """The loss of every step of the run so far."""
        return [line["loss"] for line in self.log(name) if "loss" in line]

    def hashes(self, name: str, step: int) -> dict[str, str]:
        """sha256 of the tensors of a rolling checkpoint."""
        found = artifact.read(self.progress(name) / f"step-{step:08d}", "checkpoint")
        return {n: f["sha256"] for n, f in found.files.items() if n.endswith(".safetensors")}


def trained_model(
    family: str,
    base: Path,
    checkpoint: Path,
    adapter: Mapping[str, Any] | None = None,
    frozen: Sequence[str] = (),
) -> Any:
    """What a checkpoint holds, without any export: the base with these very master weights."""
    source, found = Checkpoint(checkpoint), load_family(family)
    model = choose_trained(found.load_model(base), adapter, frozen, seed=SEED)
    parameters = trained_parameters(model)
    assert set(source.names) == parameters.keys()
    for name, parameter in parameters.items():
        parameter.data = source.tensor(name, MASTER)
    return model.eval()


def tiny_phase(name: str, preset: str, until: int) -> ResolvedPhase:
    """A phase of one process in float32."""
    chosen = read_preset(PRESETS / f"{preset}.yaml")
    return ResolvedPhase.from_values(dict(
        run="tiny", phase=name, family="sdxl", seed=SEED, preset=preset, engine=chosen.engine,
        zero_stage=chosen.zero_stage, offload_optimizer=chosen.offload_optimizer,
        offload_param=chosen.offload_param, num_processes=1, num_cpu_threads_per_process=1,
        mixed_precision="no", start_step=0, until_step=until, epoch_size=SAMPLES,
        resolution=64, global_batch_size=4, micro_batch_size=4,
        gradient_accumulation_steps=1, gradient_checkpointing=False,
        optimizer="adamw", learning_rate=1e-3, lr_scheduler="cosine", lr_warmup_steps=3,
        lr_scheduler_steps=16, adam_beta1=0.9, adam_beta2=0.99, adam_epsilon=1e-8,
        adam_weight_decay=0.1, max_grad_norm=1.0, objective={"snr_gamma": 5.0},
        caption_dropout_probability=0.3, save_every=100, keep=2, log_every=1,
    ))  # fmt: skip


TINY = {
    "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0, "sub_group_size": 3001,
}  # fmt: skip
"""Stage 3 leaves small parameters whole and in one group: no test would see it at work."""


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model and a cache, small enough to train a step in some ten milliseconds."""
    folder = tmp_path_factory.mktemp("inputs")
    write_base(folder / "base", (9, 15))
    write_cache(folder / "cache")
    return folder


@pytest.fixture(scope="session")
def image_inputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the folder of a family's nano base and cache."""

    @cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        write_image_inputs(family, folder)
        return folder

    return make


def write_base(folder: Path, channels: tuple[int, int]) -> None:
    """Publish a base model: a U-Net of two blocks of so many channels, and a scheduler."""
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=channels,
        layers_per_block=1, norm_num_groups=3, cross_attention_dim=16, attention_head_dim=3,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        addition_embed_type="text_time", addition_time_embed_dim=4,
        projection_class_embeddings_input_dim=6 * 4 + 6,
    )  # fmt: skip
    with artifact.publish(folder, "base") as draft:
        unet.save_pretrained(draft.folder / "unet")
        DDPMScheduler(prediction_type="v_prediction").save_pretrained(draft.folder / "scheduler")
        draft.content = {"parts": {"unet": "made by hand"}}


def write_cache(folder: Path, spoilt: Sequence[int] = ()) -> None:
    """Publish a cache of random latents; those of the spoilt samples are NaN."""

    def key(number: int) -> str:
        return artifact.digest(number)

    nan = {key(number) for number in spoilt}

    def latents(keys: Any) -> Iterator[dict[str, torch.Tensor]]:
        for name in keys:
            source = torch.Generator().manual_seed(int(name[:8], 16))
            latents = torch.randn(4, 8, 8, generator=source)
            yield {LATENTS: torch.full_like(latents, torch.nan) if name in nan else latents}

    def text(keys: Any) -> Iterator[dict[str, torch.Tensor]]:
        for name in keys:
            source = torch.Generator().manual_seed(int(name[:8], 16))
            yield {
                "prompt_embeds": torch.randn(5, 16, generator=source),
                "pooled_prompt_embeds": torch.randn(6, generator=source),
            }

    entries = tuple(
        Entry(f"{i}.png", key(i), key(i % 3), key(i), key(100 + i % 3), (64, 64), (0, 0), (64, 64),
              "train" if i < SAMPLES else "holdout")
        for i in range(SAMPLES + 4)
    )  # fmt: skip
    stored = StoredShards(folder)
    size = 2**20
    written = [
        write_series(name, keys, encode, stored, folder=folder, shard_size=size)
        for name, keys, encode in (
            (LATENTS, [e.latents for e in entries], latents),
            (TEXT, [key(99), *(e.text for e in entries)], text),
        )
    ]
    with artifact.publish(folder, "cache") as draft:
        for one in written:
            draft.known |= place(one, draft.folder)
        index = Index(64, "fp32", 1, entries, key(99), written[0].series, written[1].series)
        write_index(draft.folder, index)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Semaphore]:
    """Lets the writing thread take one tensor each time that it is released."""
    semaphore = threading.Semaphore(0)
    take = RankWriter._take

    def waiting(self: RankWriter, name: str) -> torch.Tensor:
        assert semaphore.acquire(timeout=20)
        return take(self, name)

    monkeypatch.setattr(RankWriter, "_take", waiting)
    yield semaphore
    semaphore.release(100)


@pytest.fixture
def training(tmp_path: Path, inputs: Path, server: Any) -> Training:
    """A run of its own over the shared inputs."""
    return Training(tmp_path, inputs, server)
