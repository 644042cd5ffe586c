"""The optimizers: names, arguments, what each keeps, and where each works; without torch.

The one table behind the configuration, the importers, the checks before a launch and
docs/optimizers.md. A test holds it to torch.optim's own classes and signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerotrain.config.suggestions import nearest

ENGINES_OWN = ("foreach", "fused", "capturable", "differentiable")
"""Arguments of torch's classes that choose an implementation: the engine's choice, no user's."""


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """A line of the table."""

    title: str
    """The name of the class, and the user's in any case."""
    about: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of what the class takes beyond lr, weight_decay and ENGINES_OWN."""
    weight_decay: float | None = 0.0
    """Its own default; None where it has no weight decay."""
    slots: tuple[str, ...] = ()
    """Tensors that it keeps of every parameter, by its own names."""
    optional_slots: Mapping[str, str] = field(default_factory=dict)
    """Further ones, with the argument that must be set for each."""
    scalars: tuple[str, ...] = ()
    """Numbers that it keeps of every group, in addition to its count of steps."""
    whole: bool = False
    """It needs each parameter whole, and cannot step a part of one."""
    eight_bit: bool = False
    """Its slots are codes of 8 bits in memory, and float32 in a checkpoint."""
    refused: str = ""
    """Why no engine steps it."""
    instead: str = "adamw"
    """The nearest optimizer that works where this one does not."""
    packages: str = ""
    """What it needs beyond torch."""

    @property
    def name(self) -> str:
        """Its name in run.yaml and in a state."""
        return normalise(self.title)

    @property
    def adam_keys(self) -> bool:
        """Whether adam_beta1, adam_beta2 and adam_epsilon mean something to it."""
        return self.title in ADAM_LIKE


ADAM_LIKE = ("AdamW", "AdamW8bit", "Adam", "Adamax", "NAdam", "RAdam", "Muon", "Prodigy")
_ADAM = {"betas": (0.9, 0.999), "eps": 1e-8}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_AMSGRAD = {"max_exp_avg_sq": "amsgrad"}
_COMPRESSED = (
    "it sends compressed gradients through a communication of DeepSpeed's own, at stage 0 or 1 and "
    "over weights that are not sharded, which none of the engines has"
)
_MU = (
    "it scales rates by the widths that mup has noted in the model, and none of the models here is "
    "built with its parametrisation"
)

TABLE = (
    Optimizer(
        title="AdamW",
        about="Adam with decoupled weight decay",
        arguments={**_ADAM, "amsgrad": False, "maximize": False},
        weight_decay=0.01,
        slots=_MOMENTS,
        optional_slots=_AMSGRAD,
    ),
    Optimizer(
        title="AdamW8bit",
        about="AdamW with 8-bit moments, except for parameters of fewer than `min_8bit_size` "
        "elements",
        arguments={**_ADAM, "min_8bit_size": 4096},
        weight_decay=0.01,
        slots=_MOMENTS,
        whole=True,
        eight_bit=True,
        packages="bitsandbytes",
    ),
    Optimizer(
        title="Adam",
        about="Adam; weight decay is added to the gradient (L2)",
        arguments={
            **_ADAM, "amsgrad": False, "maximize": False, "decoupled_weight_decay": False,
        },
        slots=_MOMENTS,
        optional_slots=_AMSGRAD,
    ),
    Optimizer(
        title="Adadelta",
        about="rates from running averages of squared gradients and updates",
        arguments={"rho": 0.9, "eps": 1e-6, "maximize": False},
        slots=("square_avg", "acc_delta"),
    ),
    Optimizer(
        title="Adafactor",
        about="second moments by rows and columns; weight decay is decoupled",
        arguments={"beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "maximize": False},
        slots=("row_var", "col_var", "variance"),
        whole=True,
        instead="lion",
    ),
    Optimizer(
        title="Adagrad",
        about="rates from the sum of squared gradients",
        arguments={
            "lr_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10, "maximize": False,
        },
        slots=("sum",),
    ),
    Optimizer(
        title="Adamax",
        about="Adam with the infinity norm",
        arguments={**_ADAM, "maximize": False},
        slots=("exp_avg", "exp_inf"),
    ),
    Optimizer(
        title="ASGD",
        about="averaged SGD; the average is carried as `ax`, exported are the weights themselves",
        arguments={"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "maximize": False},
        slots=("ax",),
        scalars=("eta", "mu"),
    ),
    Optimizer(
        title="LBFGS",
        about="limited-memory BFGS",
        refused="it evaluates the loss several times a step through a closure, and a step here has "
        "one evaluation",
        instead="sgd",
    ),
    Optimizer(
        title="Lion",
        about="the sign of an interpolated momentum; weight decay is decoupled",
        arguments={"betas": (0.9, 0.99)},
        slots=("exp_avg",),
    ),
    Optimizer(
        title="Muon",
        about="orthogonalised momentum for matrices (parameters of two dimensions), AdamW with "
        "adam_beta1, adam_beta2 and adam_epsilon for the rest",
        arguments={
            "momentum": 0.95, "nesterov": True, "ns_coefficients": (3.4445, -4.775, 2.0315),
            "eps": 1e-7, "ns_steps": 5, "adjust_lr_fn": None,
        },
        weight_decay=0.1,
        slots=("momentum_buffer", *_MOMENTS),
        whole=True,
    ),
    Optimizer(
        title="NAdam",
        about="Adam with Nesterov momentum",
        arguments={
            **_ADAM, "momentum_decay": 4e-3, "decoupled_weight_decay": False, "maximize": False,
        },
        slots=_MOMENTS,
        scalars=("mu_product",),
    ),
    Optimizer(
        title="Prodigy",
        about="Adam with a step size that it estimates itself: learning_rate: 1 is meant; "
        "beta3: 0 is the root of the second beta",
        arguments={
            **_ADAM, "beta3": 0.0, "decouple": True, "use_bias_correction": False,
            "safeguard_warmup": False, "d0": 1e-6, "d_coef": 1.0,
        },
        slots=("s", "p0", *_MOMENTS),
        scalars=("d", "d_numerator"),
        whole=True,
    ),
    Optimizer(
        title="RAdam",
        about="Adam with a rectified variance",
        arguments={**_ADAM, "decoupled_weight_decay": False, "maximize": False},
        slots=_MOMENTS,
    ),
    Optimizer(
        title="RMSprop",
        about="rates from a running average of squared gradients",
        arguments={
            "alpha": 0.99, "eps": 1e-8, "momentum": 0.0, "centered": False, "maximize": False,
        },
        slots=("square_avg",),
        optional_slots={"momentum_buffer": "momentum", "grad_avg": "centered"},
    ),
    Optimizer(
        title="Rprop",
        about="step sizes from the signs of gradients; learning_rate is the first size alone",
        arguments={"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False},
        weight_decay=None,
        slots=("prev", "step_size"),
    ),
    Optimizer(
        title="SGD",
        about="stochastic gradient descent",
        arguments={"momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False},
        optional_slots={"momentum_buffer": "momentum"},
    ),
    Optimizer(
        title="SparseAdam",
        about="Adam for sparse gradients",
        refused="it takes sparse gradients alone, and those of the models here are dense",
        instead="adam",
    ),
    Optimizer(
        title="CPUOffloadOptimizer",
        about="torchao's AdamW with weights and moments in host memory",
        refused="launch: zero2_offload keeps and steps them there, also on one GPU, and every "
        "other launch continues from its state",
        packages="torchao",
    ),
    Optimizer(
        title="Lamb",
        about="DeepSpeed's FusedLamb",
        refused="DeepSpeed has it only as CUDA code, and not under ZeRO: its trust ratio needs "
        "the norm of each whole parameter",
        packages="deepspeed, compiled for CUDA",
    ),
    Optimizer(
        title="OneBitAdam", about="DeepSpeed's 1-bit Adam", refused=_COMPRESSED,
        instead="adam", packages="deepspeed, cupy or mpi4py",
    ),
    Optimizer(
        title="OneBitLamb", about="DeepSpeed's 1-bit Lamb", refused=_COMPRESSED,
        packages="deepspeed, cupy or mpi4py",
    ),
    Optimizer(
        title="ZeroOneAdam", about="DeepSpeed's 0/1 Adam", refused=_COMPRESSED,
        instead="adam", packages="deepspeed, cupy or mpi4py",
    ),
    Optimizer(title="MuAdam", about="mup's Adam", refused=_MU, instead="adam", packages="mup"),
    Optimizer(title="MuAdamW", about="mup's AdamW", refused=_MU, packages="mup"),
    Optimizer(title="MuSGD", about="mup's SGD", refused=_MU, instead="sgd", packages="mup"),
)  # fmt: skip
"""torch.optim's classes, Lion, Prodigy, bitsandbytes' AdamW, and further names that users know."""

ALIASES = {
    **dict.fromkeys(("cpuadam", "deepspeedcpuadam", "fusedadam", "adamwtorch", "adamwtorchfused"),
                    "adamw"),
    **dict.fromkeys(("adamwbnb8bit", "bnbadamw8bit", "pagedadamw8bit", "adamw8bitbnb",
                     "adamwtorch8bit", "adamwtorchao", "aoadamw8bit"), "adamw8bit"),
    **dict.fromkeys(("cpulion", "deepspeedcpulion", "fusedlion"), "lion"),
    **dict.fromkeys(("cpuadagrad", "deepspeedcpuadagrad"), "adagrad"),
}  # fmt: skip
"""Names of implementations, normalised, to the optimizer that they compute."""

DEEPSPEED_NAMES = (
    "AdamW", "Adam", "Adagrad", "Lamb", "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",
    "MuAdamW", "MuSGD", "Lion", "Muon",
)  # fmt: skip
"""What a DeepSpeed file may name in addition to torch.optim's classes."""


def normalise(name: str) -> str:
    """Write a name without case, - and _, and without `torch.optim.` before it."""
    plain = name.strip().lower().removeprefix("torch.optim.")
    return plain.replace("-", "").replace("_", "").replace(" ", "")


_BY_NAME = {optimizer.name: optimizer for optimizer in TABLE}


def find(name: str) -> tuple[Optimizer, str]:
    """Find the optimizer that a name means, and why if it is another one's name.

    Raises:
        ValueError: no such optimizer; the message has the nearest names.
    """
    plain = normalise(name)
    if plain in _BY_NAME:
        return _BY_NAME[plain], ""
    if plain in ALIASES:
        found = _BY_NAME[ALIASES[plain]]
        return found, f"{name} is {found.title}; where it is stepped, and how, follows the launch"
    near = nearest(plain, [*_BY_NAME, *ALIASES], most=3, cutoff=0.5)
    titles = dict.fromkeys(_BY_NAME[ALIASES.get(n, n)].title for n in near)
    known = ", ".join(titles) or ", ".join(o.title for o in TABLE if not o.refused)
    raise ValueError(
        f"optimizer {name!r} is not known; {'nearest' if titles else 'known'}: {known}"
    )


def deepspeed_meaning(name: str, adam_w_mode: bool = True) -> tuple[Optimizer, str]:
    """Find what an optimizer's name in a DeepSpeed file means, and why if it is another one.

    DeepSpeed's `Adam` decays as AdamW does, unless its params have `adam_w_mode: false`
    (runtime/engine.py, _configure_basic_optimizer); ours is torch's, with L2.

    Raises:
        ValueError: no such optimizer.
    """
    found, reason = find(name)
    if found.name == "adam" and not reason and adam_w_mode:
        return _BY_NAME["adamw"], "DeepSpeed's Adam is AdamW unless adam_w_mode is false"
    return found, reason


def slots(name: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the tensors that an optimizer keeps with these arguments."""
    found = _BY_NAME[name]
    return [*found.slots, *(s for s, key in found.optional_slots.items() if arguments.get(key))]


def state_bytes(name: str, arguments: Mapping[str, Any], numel: int) -> int:
    """Return the bytes that an optimizer keeps of a parameter of so many elements."""
    each, found = len(slots(name, arguments)), _BY_NAME[name]
    least = arguments.get("min_8bit_size", found.arguments.get("min_8bit_size"))
    if not found.eight_bit or numel < least:
        return 4 * each * numel
    return each * (numel + 4 * -(-numel // 256))  # a code each, and a float32 a block


def slot_shape(name: str, slot: str, shape: list[int]) -> list[int] | None:
    """Return the shape of a slot of a parameter of this shape; None without such a slot."""
    matrix = len(shape) == 2
    if name == "muon" and slot in _BY_NAME[name].slots:
        return shape if matrix == (slot == "momentum_buffer") else None
    if name == "adafactor" and slot in _BY_NAME[name].slots:
        factored = len(shape) > 1
        if factored == (slot == "variance"):
            return None
        rows, columns = [*shape[:-1], 1], [*shape[:-2], 1, *shape[-1:]]
        return {"row_var": rows, "col_var": columns}.get(slot, shape)
    return shape


def continues(first: str, second: str) -> bool:
    """Return whether an optimizer continues from another's slots.

    Adam's moments are AdamW's, too; fewer bits only round them.
    """
    adam = {"adam", "adamw", "adamw8bit"}
    return first == second or {first, second} <= adam


def is_plain_adam(name: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether DeepSpeed's compiled Adam can step it, as it does for an offloaded optimizer.

    The numeric check of a disk covers that one alone.
    """
    return name in ("adamw", "adam") and not arguments


def first_beta(name: str, arguments: Mapping[str, Any]) -> str:
    """Return what a schedule of the momentum changes: betas, momentum, or "" for neither."""
    known = _BY_NAME[name].arguments
    if "betas" in known:
        return "betas"
    return "momentum" if arguments.get("momentum", known.get("momentum")) else ""


def refusal(
    name: str, arguments: Mapping[str, Any], *, engine: str, offload_optimizer: str
) -> tuple[str, str]:
    """Return why an optimizer cannot work under a launch, and what to do; "" if it can."""
    found = _BY_NAME[name]
    hint = f"the nearest that works here: optimizer: {found.instead}"
    if found.refused:
        return f"optimizer {found.title}: {found.refused}", hint
    if found.whole and engine != "torch":
        return (
            f"optimizer {found.title} needs each parameter whole, and ZeRO steps flat parts",
            f"{hint}; or launch: torch",
        )
    if offload_optimizer == "nvme" and not is_plain_adam(name, arguments):
        given = f" with optimizer_args {', '.join(arguments)}" if arguments else ""
        return (
            f"optimizer {found.title}{given} and offload_optimizer nvme: what is swapped to a disk "
            "is checked for plain AdamW and Adam alone",
            "offload to cpu, or choose optimizer: adamw without optimizer_args",
        )
    return "", ""
