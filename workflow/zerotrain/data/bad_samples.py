"""The one count of bad samples without opening an image, and the sentences that have it.

`zerotrain new`, `zerotrain check` and the plan count here. `prepare_dataset` and `zerotrain data
show` begin with the same entries and open the images as well, so they may find more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerotrain.data.open import open_source
from zerotrain.data.source import Found
from zerotrain.errors import PipelineError

if TYPE_CHECKING:
    from zerotrain.config.data import DataConfig

NO_CAPTION = "no caption: "
"""The beginning of the reason against an image without one."""
SOURCES = "data.sources"
"""The name of several sources together, which is a key and no place."""


@dataclass(frozen=True)
class Counted:
    """The entries of a source that were looked at.

    Attributes:
        name: The source.
        usable: Those without a reason against them: entries of images, or conversations.
        bad: Those with a reason.
    """

    name: str
    usable: Sequence[Any]
    bad: Sequence[Found]

    @property
    def total(self) -> int:
        """Return the number of all entries."""
        return len(self.usable) + len(self.bad)

    def describe(self) -> str:
        """Return the count as part of a sentence."""
        of = "" if self.name == SOURCES else f" of {self.name}"
        return f"{len(self.bad)} of {self.total} samples{of} are bad"

    def describe_first(self) -> str:
        """Return the first bad sample with its reason, and how many more there are."""
        first, more = self.bad[0], len(self.bad) - 1
        return f"{first.file} ({first.reason})" + (f" and {more} more" if more else "")

    def check(self, key: str, most: int, hint: str) -> None:
        """Check that there are not too many bad samples.

        Args:
            key: The key that names the source.
            most: The value of data.max_bad_samples.
            hint: What else there is to do.

        Raises:
            PipelineError: there are, or no other sample is left.
        """
        if not self.bad or (self.usable and len(self.bad) <= most):
            return
        allowed = f"{most} may be bad" if self.usable else "none is left"
        raise PipelineError(
            f"{key}: {self.describe()}, and {allowed} (data.max_bad_samples): "
            f"{self.describe_first()}",
            hint=hint,
        )


def count_bad(data: DataConfig, *, captions: bool = True) -> Counted | None:
    """Count the samples of a source that cannot be used, without opening an image.

    Args:
        data: The `data` section of a run's configuration.
        captions: Whether to read rows of text, and caption files next to images.

    Returns:
        The count; None of a built-in source, of a dataset of the hub, and of text that is not to be
        read.

    Raises:
        PipelineError: the source cannot be used.
    """
    if data.is_text:
        from zerotrain.data.text import hub_id, read_conversations_of

        if data.source != "text" or hub_id(data) is not None or not captions:
            return None
        entries: Sequence[Any] = read_conversations_of(data)
        name = data.path or data.source
        bad = [one for one in entries if isinstance(one, Found)]
        return Counted(name, [one for one in entries if not isinstance(one, Found)], bad)
    if not data.has_image_files:
        return None
    source = open_source(data)
    if captions:
        from zerotrain.data.captions import edit_captions

        entries, _ = edit_captions(source.found(), data.part_of)
    else:
        entries = source.listed()
    bad = [one for one in entries if one.reason is not None]
    return Counted(source.name, [one for one in entries if one.reason is None], bad)
