"""This part of the workflow says what a phase's rules take in.

OUTPUTS: none; functions for the other parts.
"""

import importlib.util

from zerotrain.data.source import source_files as data_files
from zerotrain.composed_base import local_folders
from zerotrain.sources import source_files

FAMILY = f"zerotrain.families.{RUN.family}"


def code(stage, *chosen):
    """The sources that a stage's numbers depend on, its rule among them."""
    return [*source_files(f"zerotrain.stages.{stage}", *chosen), f"rules/{stage}.smk"]


def config_file(wildcards, input):
    """The file that stages read. By its second argument it is no parameter to rerun for: what a
    stage takes from the file stands in its other parameters, and the file may be renamed.
    """
    return CONFIG


def images():
    """Every file of the dataset; empty for the built-in example."""
    return checked(data_files, RUN.data)


def preset_code():
    """The module that builds a small model, where a preset is the base and the family has one."""
    builder = f"{FAMILY}_nano"
    return [builder] if RUN.is_preset and importlib.util.find_spec(builder) else []


def base_dataset():
    """A preset is built for its dataset; a real model is not."""
    return f"{DATA}/manifest.json" if RUN.is_preset else []


def base_files():
    """The files of a base model that lies in folders of the user's; a preset has none."""
    if RUN.is_preset:
        return []
    folders = checked(local_folders, RUN.base)
    found = sorted(
        str(path) for folder in folders for path in folder.rglob("*") if path.is_file()
    )
    checked(refuse_braces, found, "base")
    return found


def refuse_braces(files, key):
    """Names that cannot be inputs."""
    braced = [name for name in files if "{" in name or "}" in name]
    if braced:
        raise PipelineError(
            f"{key}: {braced[0]}: its name holds a brace, which Snakemake takes for a wildcard",
            hint="rename it, or move it out of that folder",
        )


def phase_cache(wildcards):
    """The cache at the phase's resolution, or of its longest rows of text."""
    return f"{DATA}/cache/{RUN.cache_size(RUN.phase(wildcards.phase))}/manifest.json"


def launch_cache(wildcards):
    """The cache of a text family, whose rows an epoch counts; of images the dataset tells."""
    return phase_cache(wildcards) if RUN.is_text else []


def phase_preset(wildcards):
    """The launch preset of the phase."""
    return f"config/launch/{RUN.phase(wildcards.phase).launch.preset}.yaml"


def preset_choice(wildcards):
    """The presets that `auto` chooses from; none for a phase that names its own."""
    if RUN.phase(wildcards.phase).launch.preset != "auto":
        return []
    return sorted(str(path) for path in Path("config/launch").glob("*.yaml"))


def launch_code(wildcards):
    """The sources of rendering, and the planner's for `auto`."""
    auto = RUN.phase(wildcards.phase).launch.preset == "auto"
    return code("render_launch", *(["zerotrain.plan.planner"] if auto else []))


def launch_base(wildcards):
    """The base model, whose sizes ZeRO's buckets follow; plain PyTorch has none."""
    preset = RUN.phase(wildcards.phase).launch.preset
    return [] if preset == "torch" else f"{RESULTS}/base/manifest.json"


def phase_start(wildcards):
    """The state that the phase continues; none for the first of a run that begins from nothing."""
    before = RUN.phase_before(wildcards.phase)
    return [f"{RESULTS}/{before.name}/state/manifest.json"] if before else run_start()


def run_start(wildcards=None):
    """The state that the run begins with, where it goes on from a checkpoint of elsewhere."""
    return (
        [f"{RESULTS}/imported/state/manifest.json"]
        if RUN.resume_from_checkpoint
        else []
    )


def elsewhere_files(wildcards):
    """The files of the checkpoint of elsewhere."""
    path = Path(RUN.resume_from_checkpoint).expanduser()
    return (
        str(path)
        if path.is_file()
        else checked(files_below, path, "resume_from_checkpoint")
    )


def files_below(folder, key):
    """Every file of a folder of the user's."""
    found = sorted(str(path) for path in folder.rglob("*") if path.is_file())
    if not found:
        raise PipelineError(
            f"{key}: {folder}: no such folder, or nothing in it",
            hint=f"name a folder that exists, or remove `{key}`",
        )
    refuse_braces(found, key)
    return found


def phase_threads(wildcards):
    """CPU threads of the phase's processes."""
    launch = RUN.phase(wildcards.phase).launch
    threads = launch.num_cpu_threads_per_process
    return threads * launch.num_processes if threads else os.cpu_count()


def phases_so_far(wildcards):
    """All that is set for the phase and those before it; what comes later does not change it."""
    upto = RUN.phases.index(RUN.phase(wildcards.phase)) + 1
    return [phase.model_dump(mode="json") for phase in RUN.phases[:upto]]
