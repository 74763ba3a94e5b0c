"""Tools that show a part of a picture, cut from the picture as it is stored. Each process of an episode runs this file.

Pictures are numbered: those of the prompt from 0, then those that the tool has shown. A part of a part is cut from the
stored picture too, so that it loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrl.environments.base import Start
from vlmrl.environments.python_tool import Python as Python
from vlmrl.environments.tools import ToolError
from vlmrl.rewards.boxes.planes import Box, Plane, Space, check_space, convert, plane_of
from vlmrl.types import Size


class _Pictures:
    """Pictures of an episode, and the cut of a part.

    Args:
        space: coordinate space of boxes; of a part that was shown, `pixels` are those of the stored picture, counted
            from the corner of the part.
        least_side: least width and height of a part, in pixels of the stored picture.
        most_aspect: largest ratio of the sides of a part.
    """

    def __init__(self, space: str = "thousand", least_side: int = 28, most_aspect: float = 100.0) -> None:
        self._space: Space = check_space(space)
        self._least_side, self._most_aspect = least_side, most_aspect
        self._shown: list[tuple[Any, Box]] = []

    def reset(self, images: Sequence[Any]) -> None:
        self._shown = [(image, Box(0, 0, image.width, image.height)) for image in images]

    def _cut(self, box: Sequence[float], image: int, seen_sizes: Sequence[Size]) -> Any:
        """Return a part of a shown picture, and number it. Raises: ToolError for a box that shows nothing useful."""
        if len(box) != 4:
            raise ToolError(f"the box has {len(box)} numbers, not 4")
        if not 0 <= image < len(self._shown):
            raise ToolError(f"there is no image {image}; the last one is {len(self._shown) - 1}")
        if self._space == "seen" and image >= len(seen_sizes):
            raise ToolError(f"image {image} has not been shown yet")
        picture, (left, top, right, bottom) = self._shown[image]
        size = int(right - left), int(bottom - top)
        seen = seen_sizes[image] if self._space == "seen" else None
        plane = Plane("pixels", *size)
        x1, y1, x2, y2 = convert(Box(*box), plane_of(self._space, size, seen), plane)
        x1, x2 = (round(max(0.0, min(x, plane.width))) for x in (x1, x2))
        y1, y2 = (round(max(0.0, min(y, plane.height))) for y in (y1, y2))
        width, height = x2 - x1, y2 - y1
        if width <= 0 or height <= 0:
            raise ToolError(f"the box {list(box)} holds no pixel of image {image}: it is left, top, right, bottom")
        if min(width, height) < self._least_side:
            raise ToolError(f"the part is {width} x {height} pixels; each side needs {self._least_side}")
        if max(width, height) > self._most_aspect * min(width, height):
            raise ToolError(
                f"the part is {width} x {height} pixels; one side is over {self._most_aspect:g} x the other"
            )
        part = Box(left + x1, top + y1, left + x2, top + y2)
        self._shown.append((picture, part))
        return picture.crop(tuple(map(int, part)))


class Zoom(_Pictures):
    """The tool `zoom`."""

    def zoom(self, start: Start, box: list[float], image: int = 0) -> list[Any]:
        """Show a part of an image at full size.

        Args:
            box: left, top, right and bottom edge of the part.
            image: number of the image; 0 is the first one.
        """
        return [self._cut(box, image, start.seen_sizes), f"image {len(self._shown) - 1}"]


class DeepEyes(_Pictures):
    """The tool of DeepEyes (arXiv:2505.14362) with its arguments. It cuts from the first image of the prompt."""

    def image_zoom_in_tool(self, start: Start, bbox_2d: list[float], label: str = "") -> Any:
        """Zoom in on a specific region of an image by cropping it based on a bounding box.

        Args:
            bbox_2d: The bounding box of the region to zoom in, as [x1, y1, x2, y2].
            label: The name or label of the object in the box.
        """
        return self._cut(bbox_2d, 0, start.seen_sizes)
