"""The judge: a nearest-neighbour classifier of images, with each caption as a class.

It is fitted on the held-out images, which training never sees, and sees only pixels: grey, scaled
to 16 x 16, brightness in [0, 1]. Its own accuracy is measured on the images of the train split.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

if TYPE_CHECKING:
    from PIL.Image import Image

SIDE = 16
NEIGHBOURS = 3


class Judge:
    """A classifier of images by caption: the nearest neighbours vote, weighted by distance."""

    def __init__(self, images: Iterable[Image], captions: Sequence[str]) -> None:
        from sklearn.neighbors import KNeighborsClassifier

        neighbours = min(NEIGHBOURS, len(captions))
        self._classifier = KNeighborsClassifier(neighbours, weights="distance")
        self._classifier.fit(pixel_vectors(images), list(captions))

    @property
    def captions(self) -> list[str]:
        """The captions that it distinguishes, sorted."""
        return [str(caption) for caption in self._classifier.classes_]

    def accuracy(self, images: Iterable[Image], captions: Sequence[str]) -> float:
        """Return the share of the images to which it assigns their caption."""
        found = self._classifier.predict(pixel_vectors(images))
        return float(np.mean(found == np.asarray(captions)))


def pixel_vectors(images: Iterable[Image]) -> NDArray[np.float32]:
    """Return grey pixels of images scaled to SIDE x SIDE (box filter), float32 [N, SIDE * SIDE]."""
    small = [image.convert("L").resize((SIDE, SIDE), Resampling.BOX) for image in images]
    return np.stack([np.asarray(image, dtype=np.float32).ravel() / 255 for image in small])
