"""Batches: tensors for positions in the run's endless sequence of samples, read ahead by threads.

A batch depends only on the number of its first sample (zerotrain.data.draws), so reading ahead
changes no result. The threads use none of the model's random generators.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from queue import SimpleQueue

import numpy as np
import torch
from numpy.typing import NDArray

from zerotrain.cache.layout import Entry
from zerotrain.cache.reader import ON_HOST, Cache, TokenCache, stacked
from zerotrain.config.token_routes import TokenRoute, kept_tokens
from zerotrain.data.draws import (
    SampleOrder,
    draw_routes,
    draw_sample,
    draw_variant,
    repeat_in_rounds,
)
from zerotrain.launch.resolved import ResolvedPhase
from zerotrain.models.families import Batch

HOST = torch.device("cpu")
READERS = 2
"""Threads that read batches. Most of the time of an image is the draw of its noise, 0.7 ms at 1024
pixels a side, in which numpy holds no lock."""
FEWEST_AHEAD, MOST_AHEAD, BYTES_AHEAD = 2, 8, 64 * 1024 * 1024
"""Batches that are read before they are asked for: as many as BYTES_AHEAD of host memory hold. The
smaller a batch, the shorter its step, and the more steps pass while a reader waits for a processor
or for the disk."""


class Batches:
    """The training samples of a cache, drawn by position.

    Sample number p of a run is the same for every world size and micro batch size, and after a
    resume. The samples of a step are of one size.

    Args:
        cache: The cache to draw from.
        phase: The resolved phase.
        image_tokens: Counts the tokens that the model makes of latents [B, C, h, w], for
            tread_config.
        first: The position at which training starts or continues.
    """

    def __init__(
        self,
        cache: Cache | TokenCache,
        phase: ResolvedPhase,
        image_tokens: Callable[[torch.Tensor], int] | None = None,
        first: int = 0,
    ) -> None:
        self._cache = cache
        self._phase = phase
        self._image_tokens = image_tokens
        self._train = cache.entries.places("split", "train")
        buckets = [np.arange(phase.derived.epoch_size)]
        self._counts: dict[tuple[float, int], int] = {}
        """Number of training images by share and size, in the order of their buckets."""
        if not isinstance(cache, TokenCache):
            repeats = cache.entries.numbers("repeats")[self._train]
            partial = cache.entries.numbers("share")[self._train] != 1
            self._counts = _count_kinds(cache, self._train)
            parts = self._train[partial]
            self._train = repeat_in_rounds(self._train[~partial], repeats[~partial])
            if len(parts):  # there are several sources, and the dataset's repeats are 1
                self._train = np.concatenate([self._train, parts])
                buckets = [np.arange(len(self._train))]
            buckets = self._split_by_kind(cache, buckets[0])
        shares = [share for share, _ in self._counts] or [1.0]
        batch = phase.train.global_batch_size
        self._order = SampleOrder(phase.seed, buckets, batch, first, shares)
        self._ordering = threading.Lock()

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Return samples `first` to `first + size` of the run, on the device; see `placed`."""
        return move_to_device(self.read(first, size), device)

    def read(self, first: int, size: int, *, pinned: bool = False) -> Batch:
        """Return the same batch in host memory, page-locked if a CUDA GPU will copy it.

        Any thread may call this: it uses no shared random generator and computes only in the
        calling thread.
        """
        samples = [self._sample(p) for p in range(first, first + size)]
        return stacked(samples, HOST, pinned=pinned)

    def _sample(self, position: int) -> dict[str, torch.Tensor]:
        if isinstance(self._cache, TokenCache):
            return self._row(self._cache, position)
        return self._image(self._cache, position)

    def _place(self, position: int) -> tuple[int, int]:
        """Return epoch and place of a sample; a new epoch's order is drawn by one thread only."""
        with self._ordering:
            return self._order.place(position)

    def name(self, position: int) -> str:
        """Return the name that a user knows a sample by: its file, or its row in the cache."""
        _, place = self._place(position)
        number = int(self._train[place % len(self._train)])
        entry = self._cache.entries[number]
        return entry.file if isinstance(entry, Entry) else f"row {number} of the cache"

    def describe_small_buckets(self) -> str | None:
        """Describe the sizes of which a batch holds images more than once; None without any.

        A dataset of one size is as small as the user made it.
        """
        batch = self._phase.train.global_batch_size
        sizes = {size: count for (share, size), count in self._counts.items() if share == 1}
        small = [size for size in sizes if sizes[size] < batch]
        found = []
        if len(sizes) > 1 and small:
            least = min(small, key=lambda size: (sizes[size], size))
            found.append(
                f"{len(small)} of {len(sizes)} sizes of images have fewer than a batch of {batch}, "
                f"{_describe_size(least)} has {sizes[least]}: such a batch holds images more than "
                f"once, each with other noise; data.aspect_buckets.merge_below: {batch} avoids it"
            )
        found += [
            f"images with repeats: {share:g} have batches of their own, and {count} of "
            f"{_describe_size(size)} are fewer than a batch of {batch}: it holds them more than "
            "once, each with other noise"
            for (share, size), count in self._counts.items()
            if share != 1 and count < batch
        ]
        return "\n".join(found) or None

    def _split_by_kind(self, cache: Cache, places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Split the places by the shares and sizes of their samples, in the order of _counts."""
        if len(self._counts) == 1:
            return [places]
        rows = places % len(self._train)
        sizes = _name_sizes(cache, self._train)[rows]
        shares = cache.entries.numbers("share")[self._train][rows]
        return [places[(shares == share) & (sizes == size)] for share, size in self._counts]

    def _row(self, cache: TokenCache, position: int) -> dict[str, torch.Tensor]:
        _, place = self._place(position)
        return cache.sample(int(self._train[place % len(self._train)]))

    def _image(self, cache: Cache, position: int) -> dict[str, torch.Tensor]:
        epoch, place = self._place(position)
        number = int(self._train[place % len(self._train)])
        draw = draw_sample(
            self._phase.seed,
            epoch,
            place,
            shape=cache.latents_shape(number),
            caption_dropout=self._phase.train.caption_dropout_probability or 0.0,
            noise_offset=self._phase.derived.objective.get("noise_offset", 0.0),
            random_flip=cache.is_mirrored(number),
        )
        sample = {
            **cache.sample(
                number,
                captioned=not draw.drop_caption,
                flipped=draw.flip,
                **self._variants(cache.variants(number), epoch, place),
            ),
            "noise": torch.from_numpy(draw.noise),
            "uniform": torch.tensor(draw.uniform, dtype=torch.float64),
        }
        if self._phase.train.tread_config is not None:
            sample["route"] = self._routes(
                self._phase.train.tread_config.routes, epoch, place, sample
            )
        return sample

    def _variants(self, counts: tuple[int, int], epoch: int, place: int) -> dict[str, int]:
        """Return the stored variants of a sample that its turn draws, if it has several."""
        captions, views = counts
        if captions == views == 1:
            return {}
        draw = draw_variant(self._phase.seed, epoch, place)
        return {"caption": int(draw.caption * captions), "view": int(draw.view * views)}

    def _routes(
        self,
        routes: Sequence[TokenRoute],
        epoch: int,
        place: int,
        sample: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        """Return the order of a sample's tokens for each route (models.families.token_routing)."""
        assert self._image_tokens
        tokens = self._image_tokens(sample["latents"][None])
        if (others := sample.get("conditioning_latents")) is not None:  # they follow the image's
            tokens += len(others) * self._image_tokens(others)
        orders = draw_routes(
            self._phase.seed,
            epoch,
            place,
            kept=[kept_tokens(tokens, route.selection_ratio) for route in routes],
            tokens=tokens,
        )
        return torch.from_numpy(orders)


def _name_sizes(cache: Cache, samples: NDArray[np.int64]) -> NDArray[np.int64]:
    """Name the size of each sample by one number: height << 32 | width."""
    found = cache.entries.numbers("target_size")[samples]
    names: NDArray[np.int64] = found[:, 0].astype(np.int64) << 32 | found[:, 1]
    return names


def _count_kinds(cache: Cache, samples: NDArray[np.int64]) -> dict[tuple[float, int], int]:
    """Count samples by share and size, sorted, with those of whole repeats first."""
    shares, sizes = cache.entries.numbers("share")[samples], _name_sizes(cache, samples)
    found: dict[tuple[float, int], int] = {}
    for share in sorted(np.unique(shares).tolist(), key=lambda one: (one != 1, one)):
        names, counts = np.unique(sizes[shares == share], return_counts=True)
        found |= {(share, int(name)): int(n) for name, n in zip(names, counts, strict=True)}
    return found


def _describe_size(name: int) -> str:
    return f"{name & 0xFFFFFFFF}x{name >> 32}"


def move_to_device(batch: Batch, device: torch.device) -> Batch:
    """Return a host batch on the device.

    ON_HOST moves to CUDA GPUs only: they have float64. If it stayed on the host, each timestep's
    copy would wait for the GPU; a copy from pinned memory does not.
    """
    if device.type == "cpu":
        return batch  # even a `to` that copies nothing gives Python's lock away to a reader
    if device.type == "cuda":
        return {n: t.pin_memory().to(device, non_blocking=True) for n, t in batch.items()}
    return {name: one if name in ON_HOST else one.to(device) for name, one in batch.items()}


def stay_behind() -> None:
    """Let this thread, when it wakes, take no processor from the thread that wakes it.

    The training thread wakes a reader for each batch that it takes. Linux often starts the reader
    at once on the same processor, even if another one is free, and the training waits for the read.
    SCHED_BATCH leaves the reader its share of the processors. Other systems, and containers that
    forbid it, keep their scheduling.
    """
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # of this thread alone


class _Run:
    """A sequence of batches, each `stride` samples after the one before, read by its threads.

    What `take` does is done while the training waits: all else is left to the readers.
    """

    def __init__(
        self, batches: Batches, first: int, size: int, stride: int, *, pinned: bool
    ) -> None:
        self.first, self.size = first, size
        """`first` is that of the next batch to be taken."""
        self._pinned = pinned
        self._batches, self._stride = batches, stride
        self._ended = False
        self._coming: SimpleQueue[SimpleQueue[Batch | BaseException]] = SimpleQueue()
        """Where each batch that is being read will be, in order."""
        self._used: SimpleQueue[list[Batch | BaseException] | None] = SimpleQueue()
        """For each batch that may be read, one that is to be freed, or none."""
        self._taken: list[list[Batch | BaseException]] = [[]]
        """The batches that were taken, the one in use last. A reader frees the others: their pages
        go back to the system, which takes milliseconds while other readers touch new ones."""
        self._firsts = count(first, stride)
        self._ordering = threading.Lock()
        self._ahead, self._wanted = 0, FEWEST_AHEAD
        """Batches that are ahead of the loop, and how many there should be."""
        self._allow_more()
        self._threads = [
            threading.Thread(target=self._read, name=f"read ahead {number}", daemon=True)
            for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> Batch | BaseException:
        """Return the next batch, or why it cannot be read, and let others be read.

        A reader that waits for Python's lock slows each operation of a step, so that several
        batches are read one after another, for several that were taken.
        """
        if len(self._taken) >= self._wanted // 2 or self._coming.empty():
            for used in self._taken:
                self._used.put(used)
            self._taken = []
        found = self._coming.get().get()
        self.first += self._stride
        self._taken.append([found])
        return found

    def end(self) -> None:
        """End the threads after the batches that they are reading."""
        self._ended = True
        for _ in self._threads:
            self._used.put(None)
        for thread in self._threads:
            thread.join()

    def _allow_more(self) -> None:
        while self._ahead < self._wanted:
            self._ahead += 1
            self._used.put([])

    def _read(self) -> None:
        stay_behind()
        while (used := self._used.get()) is not None and not self._ended:
            used.clear()
            with self._ordering:
                if self._ahead > self._wanted:
                    self._ahead -= 1
                    continue
                first = next(self._firsts)
                place: SimpleQueue[Batch | BaseException] = SimpleQueue()
                self._coming.put(place)
            try:
                batch = self._batches.read(first, self.size, pinned=self._pinned)
                held = sum(tensor.nbytes for tensor in batch.values())
                place.put(batch)
                del batch
            except BaseException as error:  # `batch` raises it when the loop reaches this batch
                place.put(error)
                continue
            with self._ordering:
                self._wanted = max(FEWEST_AHEAD, min(MOST_AHEAD, BYTES_AHEAD // held))
                self._allow_more()


class ReadAhead:
    """Batches in the order of a training loop. A context manager: its threads end with its block.

    Args:
        batches: Reads single batches.
        stride: Samples from the start of a batch to the start of the next one: what all processes
            take at a time.
    """

    def __init__(self, batches: Batches, stride: int) -> None:
        self._batches = batches
        self._stride = stride
        self._run: _Run | None = None

    def batch(self, first: int, size: int, device: torch.device) -> Batch:
        """Return samples `first` to `first + size` of the run, on the device.

        Raises whatever reading this batch raised.
        """
        run = self._run
        if run is None or (run.first, run.size) != (first, size):
            self.close()
            pinned = device.type == "cuda"
            run = self._run = _Run(self._batches, first, size, self._stride, pinned=pinned)
        batch = run.take()
        if isinstance(batch, BaseException):
            self.close()
            raise batch
        return move_to_device(batch, device)

    def name(self, position: int) -> str:
        """Return the name that a user knows a sample by."""
        return self._batches.name(position)

    def close(self) -> None:
        """End the threads after the batches that they are reading."""
        if self._run is not None:
            self._run.end()
        self._run = None

    def __enter__(self) -> ReadAhead:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
