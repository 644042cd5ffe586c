"""This part of the workflow says what a phase's rules take in.

OUTPUTS: none; functions for the other parts.
"""

from functools import cache

from zerotrain.checkpoint_path import find_checkpoint
from zerotrain.config.find import has_owner
from zerotrain.data.source import source_files as data_files
from zerotrain.composed_base import local_folders


def config_file(wildcards, input):
    """The file that stages read. By its second argument it is no parameter to rerun for: what a
    stage takes from the file stands in its other parameters, and the file may be renamed.
    """
    return FILES[run_of(wildcards).run]


def images(wildcards):
    """Every file of the dataset; empty for the built-in example."""
    return checked(data_files, run_of(wildcards).data)


def dataset(wildcards):
    """The dataset that the run trains on."""
    return f"results/data/{run_of(wildcards).data_name}/manifest.json"


def base_dataset(wildcards):
    """A preset is built for its dataset; a real model is not."""
    return dataset(wildcards) if run_of(wildcards).is_preset else []


def base_files(wildcards):
    """The files of a base model that lies in folders of the user's; a preset has none."""
    run = run_of(wildcards)
    return [] if run.is_preset else checked(files_of_base, run.base)


@cache
def files_of_base(base):
    """The files of the folders that a base names."""
    folders = local_folders(base)
    found = sorted(
        str(path) for folder in folders for path in folder.rglob("*") if path.is_file()
    )
    refuse_braces(found, "base")
    return found


def cache_base(wildcards):
    """The base model whose encoders fill the caches of the job's dataset."""
    return base_of_data(run_of(wildcards).data_name)


@cache
def base_of_data(name):
    """The dataset's own base once there is one; else that of the run of the dataset's name, whose
    configuration need not be among those planned; else the dataset's own, which is then built. So
    it has one path, whichever run of the dataset is planned first and whichever next.
    """
    own, shared = f"results/{name}/base", f"results/data/{name}/base"
    if os.path.isdir(shared) or is_in_pipeline(shared):
        return f"{shared}/manifest.json"
    planned = name in RUNS and RUNS[name].data_name == name
    return f"{own if planned or name in OWNED else shared}/manifest.json"


def is_in_pipeline(path):
    """Whether dvc.yaml names a path: in a new clone its files are still to be brought."""
    return os.path.isfile("dvc.yaml") and path in Path("dvc.yaml").read_text()


# Of one run alone, since rules of several cannot tell such a base from one of theirs.
OWNED = (
    []
    if several
    else [
        run.data_name
        for run in RUNS.values()
        if run.data_name != run.run and checked(has_owner, run)
    ]
)
"""Datasets called like a run in config/ that is not planned and makes them alike."""


def refuse_braces(files, key):
    """Names that cannot be inputs."""
    braced = [name for name in files if "{" in name or "}" in name]
    if braced:
        raise PipelineError(
            f"{key}: {braced[0]}: its name holds a brace, which Snakemake takes for a wildcard",
            hint="rename it, or move it out of that folder",
        )


def phase_of(wildcards):
    """The phase that a job is of."""
    return run_of(wildcards).phase(wildcards.phase)


def phase_cache(wildcards):
    """The cache at the phase's resolution, or of its longest rows of text."""
    run = run_of(wildcards)
    return f"results/data/{run.data_name}/cache/{run.cache_size(phase_of(wildcards))}/manifest.json"


def launch_cache(wildcards):
    """The cache of a text family, whose rows an epoch counts; of images the dataset tells."""
    return phase_cache(wildcards) if run_of(wildcards).is_text else []


def phase_preset(wildcards):
    """The launch preset of the phase."""
    return f"config/launch/{phase_of(wildcards).launch.preset}.yaml"


def preset_choice(wildcards):
    """The presets that `auto` chooses from; none for a phase that names its own."""
    if phase_of(wildcards).launch.preset != "auto":
        return []
    return sorted(str(path) for path in Path("config/launch").glob("*.yaml"))


def launch_base(wildcards):
    """The base model, whose sizes ZeRO's buckets follow; plain PyTorch has none."""
    preset = phase_of(wildcards).launch.preset
    return (
        []
        if preset == "torch"
        else f"results/{run_of(wildcards).run}/base/manifest.json"
    )


def phase_start(wildcards):
    """The state that the phase continues; none for the first of a run that begins from nothing."""
    before = run_of(wildcards).phase_before(wildcards.phase)
    if before:
        return [f"results/{run_of(wildcards).run}/{before.name}/state/manifest.json"]
    return run_start(wildcards)


def run_start(wildcards):
    """The state that the run begins with, where it continues from an external checkpoint."""
    run = run_of(wildcards)
    imported = f"results/{run.run}/imported/state/manifest.json"
    return [imported] if run.resume_from_checkpoint else []


def elsewhere_files(wildcards):
    """The files of the external checkpoint."""
    path = find_checkpoint(
        Path(run_of(wildcards).resume_from_checkpoint.folder).expanduser()
    )
    return (
        str(path)
        if path.is_file()
        else checked(files_below, path, "resume_from_checkpoint")
    )


def names_file(wildcards):
    """The file that names the parameters of the external checkpoint's optimizer, if there is one."""
    names = run_of(wildcards).resume_from_checkpoint.names
    return [] if names in (None, "module") else os.path.expanduser(names)


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


def value(key):
    """A value of the run's configuration as a parameter; None for a section that is not there."""

    def of_job(wildcards):
        found = getattr(run_of(wildcards), key)
        return found.model_dump(mode="json") if hasattr(found, "model_dump") else found

    return of_job


def preset_value(wildcards, found):
    """A value that a preset is made from; a real model is taken as it is."""
    return found if run_of(wildcards).is_preset else None


def of_phases(*name):
    """A file of each phase of the run, or its folder."""

    def of_job(wildcards):
        run = run_of(wildcards)
        return [os.path.join("results", run.run, one.name, *name) for one in run.phases]

    return of_job


def phase_threads(wildcards):
    """CPU threads of the phase's processes on one machine."""
    launch = phase_of(wildcards).launch
    threads = launch.num_cpu_threads_per_process
    of_machine = launch.num_processes // launch.machines
    return threads * of_machine if threads else os.cpu_count()


def phases_so_far(wildcards):
    """All that is set for the phase and those before it; what comes later does not change it."""
    run = run_of(wildcards)
    upto = run.phases.index(phase_of(wildcards)) + 1
    return [phase.model_dump(mode="json") for phase in run.phases[:upto]]


def of_runs(*names, phases=slice(None)):
    """Files of each run; those that begin with {phase} of each of its phases."""
    return [
        f"results/{run.run}/{name.format(phase=phase)}"
        for run in RUNS.values()
        for name in names
        for phase in (
            [one.name for one in run.phases[phases]] if "{phase}" in name else [None]
        )
    ]


def caches():
    """The caches of every run, and the base models whose encoders fill them."""
    found = {}
    for run in RUNS.values():
        found[base_of_data(run.data_name)] = None
        for phase in run.phases:
            size = run.cache_size(phase)
            found[f"results/data/{run.data_name}/cache/{size}/manifest.json"] = None
    return [*found]
