"""Reading a cache of images: millions of samples opened, random samples read, a step kept fed.

    python benchmarks/loader.py            # from the project's root, in its environment
    python benchmarks/loader.py --samples 1000000 --files 500 --rounds 5

A sample has the tensors of SDXL at 1024 pixels in bf16, 450 KB. `open` maps the index of --samples
synthetic samples in a process of its own, then prepares the order of a training. `dataset` does the
same with the samples of a dataset. `read` takes random samples on one core, warm, of a cache and of
one file each with torch.load, in turns: `views`, which touch no byte of a tensor, and `loads`;
`cache` and `files`, which copy every byte into the tensors of a batch; and with the float32 batch
that a training makes of them. `feed` trains steps that sleep for 5 ms, and measures how long they
wait for a batch. Ratios are of one round, given are medians. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SHAPES = {"latents": (4, 128, 128), "prompt_embeds": (77, 2048), "pooled_prompt_embeds": (1280,)}
STEP_SECONDS = 0.005
SIZES = [(1024, 1024), (832, 1216), (1216, 832)]


NOT_CACHED = ("size", "crop", "caption")
"""Columns of a dataset that a cache's index does not have."""


def make_columns(samples: int) -> dict[str, Any]:
    """Return columns that caches and datasets have: samples of three sizes, 1 % held out."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    draw = np.random.default_rng(0)
    numbers = np.arange(samples)

    def digests() -> Any:
        data = pa.py_buffer(draw.bytes(32 * samples))
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), samples, [None, data])

    def lists(values: Any) -> Any:
        flat = pa.array(values.astype(np.int32).ravel())
        return pa.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def joined(*parts: Any) -> Any:
        return pc.binary_join_element_wise(*(pa.scalar(p, pa.large_string()) if isinstance(p, str)
                                             else p for p in (*parts, "")))  # fmt: skip

    split = pa.DictionaryArray.from_arrays(
        pa.array((numbers % 100 == 7).astype(np.int8)), pa.array(["train", "holdout"])
    )
    folders, images = (
        pc.utf8_lpad(pa.array(values).cast(pa.large_string()), width, "0")
        for values, width in ((numbers // 1000, 5), (numbers, 8))
    )
    sizes = np.array(SIZES)[draw.integers(len(SIZES), size=samples)]
    return {
        "file": joined("folder-", folders, "/image-", images, ".jpg"),
        "caption": joined("a photo of number ", images, ", from the folder ", folders),
        **{name: digests() for name in ("image_sha256", "caption_sha256", "latents", "text")},
        **{name: lists(sizes) for name in ("original_size", "target_size", "size")},
        **{name: lists(np.zeros((samples, n))) for name, n in (("crop_top_left", 2), ("crop", 3))},
        "split": split,
    }


def make_index(folder: Path, samples: int) -> None:
    """Publish a cache without shards."""
    import pyarrow as pa

    from zerotrain import artifact
    from zerotrain.artifact.columns import Columns
    from zerotrain.cache.layout import Entry, Index, Series, write_index

    columns = make_columns(samples)
    table = pa.table({name: columns[name] for name in columns if name not in NOT_CACHED})
    series = Series(2**14, ("latents",), ())
    with artifact.publish(folder, "cache") as draft:
        index = Index(
            *(1024, "bf16", 1, Columns(Entry, table), "0" * 64, series, series),
            data_sha256="0" * 64,
        )
        write_index(draft.folder, index)


def make_dataset(folder: Path, samples: int) -> None:
    """Publish a dataset of images."""
    import pyarrow as pa

    from zerotrain import artifact
    from zerotrain.artifact.columns import Columns
    from zerotrain.data.dataset import KIND, Sample
    from zerotrain.data.dataset_folder import SAMPLES

    columns = make_columns(samples)
    names = [name for name in Sample.__dataclass_fields__ if name in columns]
    table = Columns(Sample, pa.table({name: columns[name] for name in names}))
    (folder / SAMPLES).parent.mkdir(parents=True)
    table.write(folder / SAMPLES)
    content = {"count": {}, "repeats": 1, "identity": "0" * 64}
    artifact.publish_manifest(folder, KIND, content, files=(SAMPLES,))


def make_cache(folder: Path, count: int) -> None:
    """Publish a cache of random samples, and next to it a file of each sample for torch.load."""
    import torch

    from zerotrain import artifact
    from zerotrain.cache.layout import LATENTS, TEXT, Entry, Index, write_index
    from zerotrain.cache.writer import StoredShards, place, write_series

    torch.manual_seed(0)
    keys = {
        series: [artifact.digest([series, number]) for number in range(count)]
        for series in (LATENTS, TEXT)
    }
    tensors = [
        {name: torch.randn(shape).bfloat16() for name, shape in SHAPES.items()}
        for _ in range(count)
    ]
    cache, files = folder / "cache", folder / "files"
    files.mkdir()
    stored = StoredShards(cache)
    written = []
    for series, names in ((LATENTS, [*SHAPES][:1]), (TEXT, [*SHAPES][1:])):
        places = {key: place for place, key in enumerate(keys[series])}

        def encode(wanted: Any, names: Any = names, places: Any = places) -> Any:
            return ({name: tensors[places[key]][name] for name in names} for key in wanted)

        written.append(write_series(series, places, encode, stored, folder=cache, shard_size=2**28))
    side = (1024, 1024)
    entries = [
        Entry(f"{one}.png", one, two, one, two, side, (0, 0), side, "train")
        for one, two in zip(keys[LATENTS], keys[TEXT], strict=True)
    ]
    with artifact.publish(cache, "cache") as draft:
        for one in written:
            draft.known |= place(one, draft.folder)
        write_index(
            draft.folder,
            Index(
                *(1024, "bf16", 1, entries, keys[TEXT][0], written[0].series, written[1].series),
                data_sha256="0" * 64,
            ),
        )
    for number, sample in enumerate(tensors):
        torch.save(sample, files / f"{number}.pt")


def phase(epoch_size: int, batch: int) -> Any:
    """Return the part of a resolved phase that batches read."""
    train = SimpleNamespace(
        global_batch_size=batch, caption_dropout_probability=0.1, tread_config=None
    )
    derived = SimpleNamespace(epoch_size=epoch_size, objective={})
    return SimpleNamespace(seed=1, train=train, derived=derived)


def open_index(folder: Path) -> dict[str, Any]:
    """Open a cache's index, then prepare a training's order: seconds, and MB of this process."""
    import torch  # noqa: F401

    from zerotrain.cache.reader import read_cache
    from zerotrain.training.batches import Batches

    spent = Spent()
    cache = spent.on("open", lambda: read_cache(folder, verify=False))
    train = len(cache.entries.places("split", "train"))
    batches = spent.on("prepare", lambda: Batches(cache, phase(train, 64)))
    spent.on("epoch_order", lambda: batches.name(10**9))
    return {**spent.found, "entry_microseconds": time_of_one(cache.entries)}


def open_dataset(folder: Path) -> dict[str, Any]:
    """Open a dataset, count an epoch, and hash its files."""
    from zerotrain.data.dataset import read_dataset

    spent = Spent()
    dataset = spent.on("dataset_open", lambda: read_dataset(folder, verify=False))
    spent.on("dataset_epoch_size", lambda: dataset.epoch_size)
    spent.on("dataset_open_hashed", lambda: read_dataset(folder))
    return {**spent.found, "sample_microseconds": time_of_one(dataset.samples)}


class Spent:
    """Seconds of works, and the most MB of this process at their ends."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"import_mb": self._memory()}

    def on(self, name: str, work: Callable[[], Any]) -> Any:
        """Measure a work, and return what it made."""
        clock, processor = time.perf_counter(), time.process_time()
        made = work()
        self.found[f"{name}_seconds"] = round(time.perf_counter() - clock, 3)
        self.found[f"{name}_cpu_seconds"] = round(time.process_time() - processor, 3)
        self.found[f"{name}_peak_mb"] = self._memory()
        return made

    def _memory(self) -> int:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) // 1000


def time_of_one(records: Any) -> float:
    """Return the microseconds in which a random record is built."""
    places = random.Random(0).sample(range(len(records)), 10_000)
    start = time.process_time()
    for place in places:
        records[place]
    return round(1e6 * (time.process_time() - start) / len(places), 1)


def rate(work: Callable[[int], object], places: list[int]) -> float:
    """Return the calls of a second, of the processor: other work on the machine does not count."""
    start = time.process_time()
    for place in places:
        work(place)
    return len(places) / (time.process_time() - start)


def read(folder: Path, count: int, rounds: int) -> dict[str, Any]:
    """Read random samples from the cache and from files, in turns."""
    import torch

    from zerotrain.cache.reader import read_cache, stacked

    cpu = torch.device("cpu")
    cache: Any = read_cache(folder / "cache", verify=False)

    def load(place: int) -> dict[str, Any]:
        found: dict[str, Any] = torch.load(folder / "files" / f"{place}.pt")
        return found

    batch = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}

    def copy(sample: Mapping[str, Any]) -> None:
        for name, tensor in batch.items():
            tensor.copy_(sample[name])

    arms: dict[str, Callable[[int], object]] = {
        "cache": lambda place: copy(cache.sample(place)),
        "files": lambda place: copy(load(place)),
        "views": cache.sample,
        "loads": load,
        "cache_batch": lambda place: stacked([cache.sample(place)], cpu),
        "files_batch": lambda place: stacked([load(place)], cpu),
    }
    found: dict[str, list[float]] = {name: [] for name in arms}
    draw = random.Random(0)
    for number in range(rounds + 1):
        places = draw.sample(range(count), count)
        for name in [*arms][:: 1 if number % 2 else -1]:
            speed = rate(arms[name], places)
            if number:
                found[name].append(speed)
    middles = {f"{name}_per_second": round(statistics.median(all_)) for name, all_ in found.items()}
    return {
        **middles,
        **{
            name: round(statistics.median(a / b for a, b in zip(*pair, strict=True)), 1)
            for name, pair in {
                "read_ratio": (found["cache"], found["files"]),
                "views_ratio": (found["views"], found["loads"]),
                "batch_ratio": (found["cache_batch"], found["files_batch"]),
            }.items()
        },
    }


def feed(folder: Path, count: int, batch: int, steps: int) -> dict[str, Any]:
    """Return the share of the time in which steps that sleep wait for their batch."""
    import torch

    from zerotrain.cache.reader import read_cache
    from zerotrain.training.batches import Batches, ReadAhead

    cpu = torch.device("cpu")
    batches = Batches(read_cache(folder / "cache", verify=False), phase(count, batch))
    waits = []
    with ReadAhead(batches, batch) as ahead:
        ahead.batch(0, batch, cpu)
        for number in range(1, steps + 1):
            time.sleep(STEP_SECONDS)
            start = time.perf_counter()
            ahead.batch(number * batch, batch, cpu)
            waits.append(time.perf_counter() - start)
    start = time.process_time()
    for number in range(50):
        batches.read(number * batch, batch)
    spent = (time.process_time() - start) / 50
    total = sum(waits) + steps * STEP_SECONDS
    return {
        f"waiting_percent_{batch}": round(100 * sum(waits) / total, 2),
        f"waiting_median_microseconds_{batch}": round(1e6 * statistics.median(waits), 1),
        f"batch_read_ms_{batch}": round(1e3 * spent, 2),
    }


def in_a_process(option: str, folder: Path) -> dict[str, Any]:
    """Call this script, so that its memory is that of one work."""
    command = [sys.executable, __file__, option, str(folder)]
    found: dict[str, Any] = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    )
    return found


def overhead(folder: Path, count: int) -> float:
    """Return the percentage by which a cache's files exceed its tensors."""
    import math

    stored = sum(path.stat().st_size for path in (folder / "cache").iterdir() if path.is_file())
    tensors = count * 2 * sum(math.prod(shape) for shape in SHAPES.values())
    return round(100 * (stored / tensors - 1), 3)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10**7, help="samples of the index")
    parser.add_argument("--files", type=int, default=1000, help="samples that are read")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, help="where the data is made; default: /tmp")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--open-dataset", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(open_index(options.open)))
        return
    if options.open_dataset:
        print(json.dumps(open_dataset(options.open_dataset)))
        return
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_index(folder / "large", options.samples)
        size = (folder / "large" / "index.arrow").stat().st_size
        result = in_a_process("--open", folder / "large")
        result |= {"index_bytes_per_sample": round(size / options.samples, 1)}
        print("open", result, flush=True)
        make_dataset(folder / "dataset", options.samples)
        size = (folder / "dataset/samples/samples.arrow").stat().st_size
        opened = in_a_process("--open-dataset", folder / "dataset")
        del opened["import_mb"]
        result |= {**opened, "dataset_bytes_per_sample": round(size / options.samples, 1)}
        print("dataset", opened, flush=True)
        make_cache(folder, options.files)
        result |= {"overhead_percent": overhead(folder, options.files)}
        for batch in (1, 4):
            result |= feed(folder, options.files, batch, options.steps)
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        result |= read(folder, options.files, options.rounds)
    sizes = {"samples": options.samples, "files": options.files, "rounds": options.rounds}
    print(json.dumps({**result, **sizes, "load": round(os.getloadavg()[0], 1)}))


if __name__ == "__main__":
    main()
