"""What the checkpoint tests train on."""

from __future__ import annotations

import pytest
from tinyworld import encoded, items_of


@pytest.fixture(scope="module")
def items(tiny_encoder):
    """Two groups of two responses: text alone, and two images of different sizes."""
    prompts = [
        encoded(tiny_encoder, "same?", name="a"),
        encoded(tiny_encoder, "yes no", [(56, 84), (56, 56)], name="b"),
    ]
    return items_of([(prompts[0], [3, 4]), (prompts[1], [5, 2])])
