"""What the checkpoint tests train on."""

from __future__ import annotations

import pytest
from tinyworld import encoded, items_of

from vlmrl.checkpoint import merge, proof


@pytest.fixture
def second_process() -> None:
    """Asked for by the tests in which a merge is proven by a process of its own, which takes seconds to start."""


@pytest.fixture(autouse=True)
def proven_in_this_process(request, monkeypatch) -> None:
    if "second_process" not in request.fixturenames:
        monkeypatch.setattr(merge, "prove_elsewhere", lambda asked: proof.check_gap(asked, proof.prove(asked)))


@pytest.fixture(scope="module")
def items(tiny_encoder):
    """Two groups of two responses: text alone, and two images of different sizes."""
    prompts = [
        encoded(tiny_encoder, "same?", name="a"),
        encoded(tiny_encoder, "yes no", [(56, 84), (56, 56)], name="b"),
    ]
    return items_of([(prompts[0], [3, 4]), (prompts[1], [5, 2])])
