"""Modules that read documents: for which reader of tests/accounting, or of what is our own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "workflow" / "zerotrain"
DOCUMENTS = "zerotrain.artifact.documents"
FUNCTIONS = ("read_", "parse_", "compose_")
"""Begin the names of its functions that read."""
LIBRARIES = ("csv", "datasets", "pyarrow", "tarfile", "zipfile")
"""Others that read what somebody wrote."""


def find_modules() -> set[str]:
    """List the modules that call such functions, by their paths in the package."""
    return {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if any(_reads(path))
    }


def _reads(path: Path) -> Iterator[bool]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield any(name.name.partition(".")[0] in LIBRARIES for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0] in LIBRARIES
            yield node.module.startswith(DOCUMENTS) and any(
                name.name.startswith(FUNCTIONS) for name in node.names
            )
            yield any(name.name == "pickles" for name in node.names)


FOLDER, TABLES = "folder of images", "metadata.csv"
READ_FOR = {
    "artifact/whole_file.py": "configuration of a run",
    "builder/draft.py": "configuration of a run",
    "builder/writing.py": "configuration of a run",
    "config/problems.py": "configuration of a run",
    "config/read.py": "configuration of a run",
    "config/text.py": "configuration of a run",
    "graph/checks/__init__.py": "configuration of a run",
    "graph/new_run.py": "configuration of a run",
    "graph/sweep.py": "configuration of several runs",
    "graph/switch/command.py": "configuration of a run",
    "graph/switch/edit.py": "configuration of a run",
    "graph/switch/plan.py": "configuration of a run",
    "launch/preset.py": "launch preset",
    "importers/files.py": "accelerate's YAML",
    "importers/key_values.py": "command of HF's Trainer",
    "importers/simpletuner.py": "SimpleTuner's config.json",
    "importers/simpletuner_captions.py": "SimpleTuner's datasets",
    "importers/simpletuner_data.py": "SimpleTuner's datasets",
    "data/caption_file.py": FOLDER,
    "data/conditioning.py": FOLDER,
    "data/folder.py": FOLDER,
    "export/sample.py": FOLDER,
    "data/metadata.py": TABLES,
    "data/table.py": TABLES,
    "data/shards.py": "tar shard",
    "data/hub_datasets.py": "saved or Parquet dataset of images",
    "data/chat_rows.py": "rows of a chat",
    "data/conversation.py": "calls of tools",
    "export/formats/opening.py": "part of a model for `sample`",
    "export/formats/original_base.py": "base in one file",
    "models/base_places.py": "base in one file",
    "graph/checks/base.py": "base in one file",
    "launch/planner/architecture.py": "base in diffusers' layout",
    "models/families/diffusion.py": "base in diffusers' layout",
    "models/pretrained.py": "base in diffusers' layout",
    "models/sizes.py": "base in diffusers' layout",
    "stages/build_base.py": "base in diffusers' layout",
    "models/adapter_config.py": "adapter_config.json",
    "stages/import_checkpoint.py": "file of weights",
    "state/external/accelerate.py": "checkpoint of accelerate",
    "state/external/weight_files.py": "checkpoint of accelerate",
    "state/external/other_files.py": "checkpoint of accelerate",
    "state/external/ranks.py": "model file of DeepSpeed",
    "state/external/deepspeed.py": "model file of DeepSpeed",
    "state/external/pickles.py": "model file of DeepSpeed",
    "state/external/universal.py": "optimizer of DeepSpeed",
}
"""The reader of which a module is a part."""
OWN = {
    "documents themselves": (
        "artifact/documents/__init__.py", "artifact/documents/json_text.py",
        "artifact/documents/names.py", "artifact/documents/tensor_header.py",
        "artifact/documents/yaml_text.py",
    ),
    "artifacts and their records, checked by type": (
        "artifact/__init__.py", "artifact/columns.py", "artifact/layout.py",
        "artifact/manifest.py", "artifact/tensor_file.py", "artifact/verdicts.py",
        "artifact/leftovers.py", "config/stage_settings.py", "graph/currency.py",
        "cache/layout.py", "cache/reader.py", "cache/record.py", "data/dataset_folder.py",
        "data/files.py", "evaluation/results.py", "launch/files.py", "state/checkpoint.py",
        "state/open.py", "state/position.py", "state/state.py", "stages/evaluate.py",
    ),
    "records of a run, checked by type": (
        "builder/processes.py", "builder/run_pages.py",
        "launch/planner/forecasts.py",
        "launch/planner/trace_store.py", "run/doctor/report.py", "graph/fetch.py",
        "run/lineage/chain.py",
        "run/lineage/compare_source.py",
        "run/lineage/walk.py", "graph/remove.py",
        "graph/switch/point.py",
        "graph/verify_resume.py", "graph/why/estimates.py", "run/phase.py",
        "run/report/origin.py", "training/checkpointing/conditions.py",
        "training/checkpointing/preflight.py", "training/checkpointing/progress_folder.py",
        "training/engines/zero_corrections.py", "training/engines/partitioned_model.py",
        "training/engines/zero_engine.py", "training/process/ending.py",
        "training/process/lock.py", "training/process/machine_check.py",
        "training/process/nvme_check.py", "training/process/swap_folder.py",
        "training/reporting/decode_samples.py", "training/reporting/heartbeat.py",
        "training/reporting/log.py", "training/reporting/log_lines.py",
        "training/reporting/trackers.py",
        "training/reporting/validation_history.py",
    ),
    "DVC's files, by DVC's keys; what they have besides is DVC's": (
        "graph/dvc/files.py",
    ),
    "files and answers of this program and its libraries": (
        "config/adapters.py", "export/publish.py", "machine/detect.py",
        "models/families/nano.py",
        "models/families/tokens.py", "graph/cluster/trial.py",
        "graph/cluster/trial_node.py",
    ),
}  # fmt: skip
"""Modules that read what this program or a tool of it wrote, whose other keys are its own."""
