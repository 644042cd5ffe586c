"""Code that does not affect the numbers of a training, and imports that digests do not follow.

A training's digest covers every module that its processes import, except for those listed here.
They only move, name, display or refuse, or they encode or sample: encoding has its own keys, and
sampling its own draws. Modules that only these import do not count either.
"""

from __future__ import annotations

from collections.abc import Iterable


def _files(folder: str, names: str) -> Iterable[str]:
    return (f"{folder}{name}.py" for name in names.split())


WITHOUT_EFFECT = (
    *_files("", "__init__ errors"),
    *_files("artifact/", "__init__ direct_io in_use"),
    "artifact/documents/",
    *_files("config/", "families launch objective section suggestions training"),
    "data/conversation.py",
    *_files("launch/", "files"),
    *_files("machine/", "child_process compiled_ops memory_watch regular_file"),
    *_files("models/", "adapter_config pretrained"),
    *_files(
        "models/families/",
        "answering chunks flux_pipeline identity layouts pipeline_sampling pipelines placement "
        "prompt_tokens qwen_image_encoding qwen_image_pipeline tokenizer_process",
    ),
    "training/checkpointing/",
    *_files("training/engines/", "buffers"),
    "training/process/",
    "training/reporting/",
)
"""Modules, and whole packages, by their paths in the package."""

NOT_FOLLOWED = {
    # Only `launch: auto` uses the planner, and its rule names it.
    "stages/render_launch.py": "launch/planner/",
    # It counts a method's additional parameters, which depend on the version of peft.
    "models/sizes.py": "models/families/",
}
"""Modules, and their imports that count for no stage that imports the module."""
