"""This part of the workflow says what jobs take of a machine; a profile says where it is found.

OUTPUTS: none; functions for the other parts. docs/sweeps.md tells how to change them.
"""

GIB = 2**30
UNKNOWN = 32 * GIB  # of one process, where the planner does not know the model
LIGHT = GIB  # hashes, lists, decoded images of one process: 0.2 GiB; Snakemake in the job: 0.4
BUILD = 3 * GIB  # torch with the shards of a base model, of which one is held at a time
MEMORY = {"mem_mb", "mem_mib"}  # who says memory by the core, says it of every job
NO_GPU = ("none", "", "0")
MOST = 2  # times what was forecast: beyond, nodes and limits do not suffice for what never fits


def memory(stage):
    """mem_mb: MiB of one machine, twice as much after a failure. Nothing where nobody asks: without
    a cluster all jobs share the machine, and no forecast is worth a second.
    """
    if not memory_is_asked():
        return {}
    mebibytes = lambda wildcards: -(-bytes_of(stage, wildcards) // 2**20)
    times = (
        times_of_training
        if stage == "train_phase"
        else lambda wildcards, attempt: min(attempt, MOST)
    )
    return {
        "mem_mb": lambda wildcards, attempt: mebibytes(wildcards)
        * times(wildcards, attempt)
    }


def times_of_training(wildcards, attempt):
    """One that was warned of its time limit goes on with the memory that it had: a node may have
    no more."""
    run = run_of(wildcards)
    killed = killed_before(f"results/{run.run}/{wildcards.phase}/progress", attempt)
    return min(1 + killed, MOST)


@cache
def killed_before(progress, attempt):
    """Attempts of a training that left no word of how they ended, as those leave none that the
    system ends for memory; asked before each attempt, of the one before it."""
    if attempt == 1:
        return 0
    return killed_before(progress, attempt - 1) + (
        not Path(progress, "exit.json").exists()
    )


def memory_is_asked():
    """Whether profile or command line speak of a job's memory; a job on its node has got its own."""
    settings = workflow.resource_settings
    asked = [*(settings.default_resources or ()), *(settings.resources or ())]
    return not workflow.remote_exec and not MEMORY.isdisjoint(asked)


def bytes_of(stage, wildcards):
    """Bytes of one machine: of a stage without a model a constant, else the forecast's."""
    run = run_of(wildcards)
    if stage == "prepare_dataset":
        return LIGHT * (1 + max(1, run.data.num_workers) // 4)
    if stage == "build_base":
        return BUILD
    phases = [phase_of(wildcards)] if wildcards.get("phase") else run.phases
    return max(forecast_of(run, phase, stage) for phase in phases)


def forecast_of(run, phase, stage):
    """The planner's forecast, or what stands for it; said once for each run."""
    found = all_forecasts()[run.run, phase.name, not has_gpu()]
    if "bytes" in found:
        return found["bytes"][stage]
    launch = phase.launch
    processes = launch.num_processes // launch.machines if stage == "train_phase" else 1
    warn_once(run.run, found["unknown"])
    return UNKNOWN * processes


@cache
def all_forecasts():
    """The forecasts of all phases, made together when the first is asked for."""
    from zerotrain.forecasts import forecasts  # nobody else waits for it

    cpu = not has_gpu()
    phases = [(run, phase) for run in RUNS.values() for phase in run.phases]
    return forecasts((FILES[run.run], run, phase, cpu) for run, phase in phases)


@cache
def warn_once(run, why):
    """Say that a run's memory is not known."""
    print(
        f"WARNING: run {run}: its memory cannot be forecast, {UNKNOWN // GIB} GiB a process is "
        f"asked for; set it in the profile (set-resources): {why}",
        file=sys.stderr,
    )


@cache
def has_gpu():
    """Whether trainings take GPUs; a profile says that they do not by `gres: none`."""
    chosen = (workflow.resource_settings.overwrite_resources or {}).get("train_phase")
    gres = chosen.get("gres") if chosen else None
    return gres is None or str(gres.raw) not in NO_GPU


def phase_gres(wildcards):
    """The GPUs of one machine, one a process."""
    launch = phase_of(wildcards).launch
    return f"gpu:{launch.num_processes // launch.machines}"


def of_several(value):
    """A resource of a phase of several machines; nothing of one."""

    def of_job(wildcards):
        machines = phase_of(wildcards).launch.machines
        return None if machines == 1 else value(machines)

    return of_job


def minutes(count):
    """Minutes of a stage that begins anew after a failure, with twice the time."""
    return lambda wildcards, attempt: count * min(attempt, MOST)
