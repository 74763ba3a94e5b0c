"""What the checkpoint tests train on."""

from __future__ import annotations

import subprocess

import pytest
from tinyworld import two_groups

from vlmrl.checkpoint import merge, proof


@pytest.fixture
def second_process(monkeypatch) -> None:
    """Asked for by the tests in which a merge is proven by a process of its own, which takes seconds to start."""
    monkeypatch.setattr(proof, "subprocess", subprocess)


@pytest.fixture(autouse=True)
def proven_in_this_process(request, monkeypatch) -> None:
    if "second_process" not in request.fixturenames:
        monkeypatch.setattr(merge, "prove_elsewhere", lambda asked: proof.check_gap(asked, proof.prove(asked)))


@pytest.fixture(scope="module")
def items(tiny_encoder):
    return two_groups(tiny_encoder)
