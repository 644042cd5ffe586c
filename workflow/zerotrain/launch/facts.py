"""Values of a launch that summarize how a phase was trained."""

from __future__ import annotations

from pathlib import Path

from zerotrain.launch.run_yaml import read_run_yaml

LAUNCH_FACTS = (
    *("preset", "engine", "zero_stage", "offload_optimizer", "num_processes"),
    *("num_cpu_threads_per_process", "mixed_precision", "start_step", "until_step"),
    *(
        "resolution",
        "max_length",
        "packing",
        "global_batch_size",
        "micro_batch_size",
        "gradient_accumulation_steps",
    ),
    *("optimizer", "learning_rate", "lr_scheduler", "lr_scheduler_args", "lr_warmup_steps"),
    *("lr_scheduler_steps", "objective", "caption_dropout_probability", "long_captions"),
)


def launch_facts(path: Path) -> list[tuple[str, str, str]]:
    """Return name, value and source of each fact of a run.yaml; empty if the file is missing."""
    if not path.is_file():
        return []
    phase = read_run_yaml(path)
    return [
        (name, str(value), f"{source}: {reason}" if reason else source)
        for name, value, source, reason in phase.explain()
        if name.partition(".")[0] in LAUNCH_FACTS and value != {}
    ]
