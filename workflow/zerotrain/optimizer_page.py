"""The tables of docs/optimizers.md, from zerotrain.optimizers; pytest --fix writes them."""

from __future__ import annotations

from zerotrain.optimizers import TABLE, Optimizer, continues, plain_adam

BEGIN, END = "<!-- optimizers: generated -->", "<!-- optimizers: end -->"


def page(text: str) -> str:
    """The page with its tables written again."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{_tables()}{END}{after}"


def _tables() -> str:
    works = [optimizer for optimizer in TABLE if not optimizer.refused]
    lines = [
        "| `optimizer` | what it is | packages | engines, stages | optimizer offload | slots | "
        "a switch keeps |",
        "|---|---|---|---|---|---|---|",
        *(_row(optimizer) for optimizer in works),
        "",
        "| `optimizer` | `optimizer_args` with their defaults | default weight decay |",
        "|---|---|---|",
        *(_arguments(optimizer) for optimizer in works),
        "",
        "| refused | packages | why | nearest that works |",
        "|---|---|---|---|",
    ]
    for optimizer in TABLE:
        if optimizer.refused:
            needs = optimizer.packages or "torch"
            why = f"{optimizer.about}: {optimizer.refused}"
            lines.append(f"| {optimizer.title} | {needs} | {why} | `{optimizer.instead}` |")
    return "\n".join(lines) + "\n"


def _row(optimizer: Optimizer) -> str:
    slots = [f"`{slot}`" for slot in optimizer.slots]
    slots += [f"`{s}` (with `{a}`)" for s, a in optimizer.optional_slots.items()]
    where = "torch alone" if optimizer.whole else "torch, ZeRO 1, 2, 3"
    offload = "none" if optimizer.whole else "cpu"
    if plain_adam(optimizer.name, {}):
        offload = "cpu, nvme (without `optimizer_args`)"
    keeps = "all"
    if optimizer.scalars:
        keeps += f", with {', '.join(f'`{scalar}`' for scalar in optimizer.scalars)}"
    if others := [
        f"`{o.name}`" for o in TABLE if o is not optimizer and continues(o.name, optimizer.name)
    ]:
        keeps += f"; from and to {', '.join(others)}, too"
    packages = optimizer.packages or "torch"
    return (
        f"| `{optimizer.name}` | {optimizer.about} | {packages} | {where} | {offload} | "
        f"{', '.join(slots) or 'none'} | {keeps} |"
    )


def _arguments(optimizer: Optimizer) -> str:
    given = [f"`{key}: {_yaml(value)}`" for key, value in optimizer.arguments.items()]
    decay = "has none" if optimizer.weight_decay is None else f"{optimizer.weight_decay:g}"
    return f"| `{optimizer.name}` | {', '.join(given)} | {decay} |"


def _yaml(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_yaml, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else f"{value:g}"
