"""The files of a base that its family needs, by location."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zerotrain.config.families import FamilySpec
from zerotrain.models.base import check_inside, choose_files, list_others
from zerotrain.models.composed_base import listing, read_selections
from zerotrain.models.hub import ModelLocation, check_no_revision, open_location
from zerotrain.models.single_file_base import find_single_file, locate_configurations


@dataclass(frozen=True)
class BaseFiles:
    """The files that make up a base.

    Attributes:
        source: Name of the base in messages.
        places: Each place, with its name of every file to take by the file's name in the base.
        others: Files in the same folders that are not part of the model and are not taken.
        single_file: The file with the weights of all parts, if the base is one; the places then
            have only configurations and tokenizers.
    """

    source: str
    places: list[tuple[ModelLocation, dict[str, str]]]
    others: list[str]
    single_file: Path | None = None


def base_files(base: str, revision: str | None, family: FamilySpec) -> BaseFiles:
    """Return the files that the family needs; at most some config.json are downloaded.

    Raises:
        PipelineError: a place does not exist or cannot be reached, a part is missing, or a file is
            a link to another place.
    """
    if (file := find_single_file(base)) is not None:
        check_no_revision(base, revision)
        return BaseFiles(base, [locate_configurations(base, file, family)], [], file)
    selections = read_selections(base)
    if len({selection.place for selection in selections}) > 1:
        check_no_revision(base, revision)
    names = [selection.place for selection in selections] or [base]
    places = {name: open_location(name, revision) for name in names}
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
