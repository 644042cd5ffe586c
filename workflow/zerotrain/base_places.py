"""Where the files of a base lie: which of them the family needs, place by place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from zerotrain.base import check_inside, choose_files, list_others
from zerotrain.composed_base import listing, read_selections
from zerotrain.model_place import Place, open_place, refuse_revision

if TYPE_CHECKING:
    from zerotrain.config import RunConfig
    from zerotrain.families import ImageFamily, TextFamily


@dataclass(frozen=True)
class BaseFiles:
    """The files that a base is made of.

    Attributes:
        source: What messages call it.
        places: Of each place, its own name of every wanted file, by the name in the base.
        others: Files among them that are no part of the model and are not taken.
    """

    source: str
    places: list[tuple[Place, dict[str, str]]]
    others: list[str]


def base_files(config: RunConfig, family: ImageFamily | TextFamily) -> BaseFiles:
    """Look up the files that the family needs; nothing is downloaded.

    Raises:
        PipelineError: a place is not there or cannot be reached, a part is missing, or a file is a
            link to another place.
    """
    selections = read_selections(config.base)
    if len({selection.place for selection in selections}) > 1:
        refuse_revision(config.base, config.revision)
    names = [selection.place for selection in selections] or [config.base]
    places = {name: open_place(name, config.revision) for name in names}
    if selections:
        listed, source = listing(selections, places, family), "base"
    else:
        (place,) = places.values()
        listed, source = {name: (place, name) for name in place.names}, place.name
    taken = choose_files(listed, family, source)
    chosen = {name: listed[file] for name, file in taken.items()}
    by_place = [
        (place, {name: file for name, (other, file) in chosen.items() if other is place})
        for place in places.values()
    ]
    for place, wanted in by_place:
        if place.folder is not None:
            check_inside(place.folder, wanted.values(), place.name)
    return BaseFiles(source, by_place, list_others(listed, taken.values(), family))
