"""Images of prompts during training: latents of the live model, which are decoded later.

The text encoders are never loaded here: embeddings come from the cache. The latents are written to
files; another process decodes them, or this one if `decode` is `inline`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from zerotrain.cache.reader import Cache
from zerotrain.cache.record import Prompts
from zerotrain.data.draws import IMAGE_SEEDS, generator
from zerotrain.errors import PipelineError
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.machine.child_process import SUPERVISOR, supervisor_mark
from zerotrain.machine.processes import cpu_seconds
from zerotrain.machine.regular_file import make_folder, write_bytes
from zerotrain.training import ranks
from zerotrain.training.engines.engine import Engine
from zerotrain.training.reporting.decode_samples import FOLDER, PROGRAM, decode, list_undecoded
from zerotrain.training.reporting.heartbeat import Heartbeat
from zerotrain.training.reporting.log import Log

if TYPE_CHECKING:
    from zerotrain.models.families.diffusion import DiffusionFamily

LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher sets for a training process, removed for the decoding process."""
POLL_SECONDS = 0.2


class LatentSampler:
    """Sampler that samples each prompt separately, with the seeds that evaluate uses."""

    def __init__(
        self,
        engine: Engine,
        family: DiffusionFamily,
        base: Path,
        cache: Cache,
        phase: ResolvedPhase,
        progress: Path,
        log: Log,
    ) -> None:
        settings = phase.derived.validation
        assert settings is not None
        assert phase.train.resolution is not None
        self._engine, self._family, self._base, self._log = engine, family, base, log
        self._folder = progress / FOLDER
        self._decode, self._resolution = settings["decode"], phase.train.resolution
        self._settings: Any = SimpleNamespace(**settings)
        self._prompts: list[str] = settings["prompts"]
        self._columns: int = settings["images_per_prompt"]
        embedded = Prompts(cache.artifact)
        images = settings.get("conditioning_images")
        self._asked = [
            embedded.tensors(prompt if images is None else (prompt, tuple(images[number])))
            for number, prompt in enumerate(self._prompts)
        ]
        self._seeds = [
            int(generator(phase.seed, IMAGE_SEEDS, number, column).integers(2**63))
            for number in range(len(self._prompts))
            for column in range(self._columns)
        ]
        self._shape = _square_shape(cache, self._resolution)
        # Under ZeRO-3 the weights are partitioned, so all processes run each forward pass together.
        self._together = phase.derived.zero_stage == 3
        self._pipeline: Any = None
        self._process: subprocess.Popen[bytes] | None = None
        if engine.rank == 0:
            make_folder(self._folder)
            self._start_decoding()  # latents that an earlier start left

    def sample(self, step: int) -> None:
        """Write step-<step>.safetensors: latents float32 [N, C, h, w], in the grid's row order."""
        engine, own = self._engine, range(len(self._seeds))
        if not self._together:
            own = own[engine.rank :: engine.world_size]
        latents = {number: self._latents(number) for number in own}
        if not self._together:
            latents = {n: one for part in ranks.gather(latents) for n, one in part.items()}
        if engine.rank == 0:
            self._write(step, torch.stack([latents[number] for number in sorted(latents)]))
            self._start_decoding()

    def close(self, finished: bool) -> None:
        """Wait for the images in progress, unless the training is to stop."""
        if self._process is not None and not finished:
            self._process.terminate()
        elif self._process is not None:
            if self._wait_for_decoding(self._process) == 0 and list_undecoded(self._folder):
                self._start_decoding()
                self._wait_for_decoding(self._process)
            if self._process.returncode:
                self._log.say(
                    f"{self._folder}: its latents were not decoded (exit code "
                    f"{self._process.returncode}); the training is not touched by it"
                )

    def _wait_for_decoding(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for a decoding process and return its exit code; its CPU use counts as a move."""
        used = 0.0
        while (code := process.poll()) is None:
            before, used = used, cpu_seconds(process.pid)
            if used > before:
                Heartbeat.moves += 1
            time.sleep(POLL_SECONDS)
        return code

    def _latents(self, number: int) -> torch.Tensor:
        # Built at the first use; a pipeline takes the model without DDP's or DeepSpeed's wrapper.
        model = getattr(self._engine.model, "module", self._engine.model)
        asked = self._asked[number // self._columns]
        if self._pipeline is None:
            self._pipeline = self._family.live_pipeline(
                self._base,
                model,
                self._resolution,
                self._shape,
                self._settings,
                conditioned=asked.conditioning is not None,
            )
        dtype, device = next(model.parameters()).dtype, self._engine.device
        embeds, empty, conditioning = (
            {name: tensor[None].to(device, dtype) for name, tensor in (one or {}).items()}
            for one in (asked.text, asked.empty, asked.conditioning)
        )
        return self._family.sample_latents(
            self._pipeline,
            embeds,
            empty,
            self._seeds[number],
            self._settings,
            resolution=self._resolution,
            shape=self._shape,
            conditioning=conditioning or None,
        )

    def _write(self, step: int, latents: torch.Tensor) -> None:
        path = self._folder / f"step-{step:08d}.safetensors"
        new = path.with_name(f".{path.name}.new")
        about = {
            "prompts": json.dumps(self._prompts),
            "columns": str(self._columns),
            "step": str(step),
        }
        try:
            write_bytes(new, save({"latents": latents.contiguous()}, metadata=about))
            new.replace(path)
        except OSError as error:
            # An image must not end a training; the next save reports a full disk.
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            self._log.say(f"{path}: not written: {error}; training continues")

    def _start_decoding(self) -> None:
        if not list_undecoded(self._folder):
            return
        if self._decode == "inline":
            try:
                decode(self._folder, self._family, self._base, str(self._engine.device))
            except (OSError, PipelineError) as error:
                why = error.what if isinstance(error, PipelineError) else error
                self._log.say(f"{self._folder}: images not written: {why}; training continues")
        elif self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", PROGRAM, str(self._folder)),
                    *("--family", self._family.name, "--base", str(self._base)),
                ],
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if k not in LAUNCHERS}
                | {SUPERVISOR: supervisor_mark()},
                start_new_session=True,  # it kills its process group, which must not be ours
            )


def _square_shape(cache: Cache, resolution: int) -> tuple[int, int, int]:
    """Return the shape of the latents of a square of this side, C, h and w."""
    channels, height, _ = cache.latents_shape(0)
    side = resolution * height // cache.entries[0].target_size[0]
    return channels, side, side
