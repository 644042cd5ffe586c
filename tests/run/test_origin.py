"""The report's chapter about what a run was made of."""

from __future__ import annotations

from io import BytesIO

from PIL import Image

from zerotrain.data.figures import Section
from zerotrain.run.report.origin import Sources, trace_origin
from zerotrain.run.view import RunView


def test_sizes_and_aspects_are_drawn_next_to_their_rows() -> None:
    """One kind alone is no comparison, and kinds without a sample have no bar."""
    rows = [("32x32", "3 images")]
    sections = [
        Section("Crops", rows, [("32x32", 3), ("40x24", 2), ("24x40", 0)]),
        Section("Sizes", rows),
        Section("Aspect ratios", rows, [("square", 5), ("wide", 0)]),
    ]
    found = trace_origin(RunView("r", folders=[]), [], Sources(data=sections), is_text=True).chapter
    panels = {panel.title: panel for panel in found.panels}
    picture = panels["Crops"].picture
    assert picture is not None
    assert picture.alt == "Crops: number of images"
    with Image.open(BytesIO(picture.light)) as light:
        assert light.height < 300  # two bars, not three
    assert panels["Sizes"].picture is panels["Aspect ratios"].picture is None
    assert all(panels[one.title].table for one in sections)
