"""What the planner foresees of a phase that nothing here has trained or exported before."""

from __future__ import annotations

from dataclasses import dataclass

from zerotrain.config.run import RunConfig
from zerotrain.errors import PipelineError


@dataclass(frozen=True)
class PhaseForecast:
    """The planner's forecast of a phase.

    Attributes:
        step: Seconds of a step on this machine's GPU; None if the planner does not know it.
        checkpoints: Bytes of all rolling checkpoints that are kept.
        exports: Bytes of weights and state.
    """

    step: float | None
    checkpoints: int
    exports: int


def forecast_phase(run: RunConfig, name: str) -> PhaseForecast | None:
    """Forecast a phase; this takes seconds, as it traces a step of the model without weights.

    Returns:
        None if the planner does not know the model, or the preset is `auto`.
    """
    from zerotrain.launch.planner.forecasts import made_base
    from zerotrain.launch.planner.planner import plan, this_machine  # imports torch

    phase = run.phase(name)
    if phase.launch.preset == "auto":
        return None
    machine = this_machine(phase)
    try:
        made = plan(run, name, machine, base=made_base(run), only=(phase.launch.preset,))
    except PipelineError:
        return None
    [predicted] = made.column(made.mode)
    sizes = {one.name: one.bytes for one in predicted.disk}
    trained = made.traced.model.trained_parameters
    step = predicted.time(machine.gpu, trained).seconds if machine.gpu else None
    return PhaseForecast(step, sizes["rolling checkpoints"], sizes["weights"] + sizes["state"])
