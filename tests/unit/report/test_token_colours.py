"""Responses on the page with tokens coloured by how much they depend on the images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from report_builders import group, make_run

from vlmrl.report.page import render_report
from vlmrl.report.token_colours import FILE, TokenTexts, colour_legend
from vlmrl.store.rollouts import write_rollouts
from vlmrl.types import ScoredSample, Segment


@pytest.fixture
def texts(tiny_folder: Path, tmp_path: Path) -> TokenTexts:
    """Those of a run with one checkpoint, of the tiny model."""
    folder = tmp_path / "step-000001" / "hf"
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes((tiny_folder / FILE).read_bytes())
    run: Any = SimpleNamespace(checkpoint_dirs=lambda: [folder.parent], dir=tmp_path)
    return TokenTexts(run)


def response(ids: tuple[int, ...], text: str, dependency: tuple[float, ...] | None) -> ScoredSample:
    one = group("p", [1.0]).samples[0]
    trajectory = replace(one.trajectory, segments=(Segment("assistant", ids, True),))
    return replace(one, trajectory=trajectory, text=text, dependency=dependency)


@pytest.mark.parametrize("text", ["yes <b>or</b> no", "na\u00efve \u2603 \U0001f600 end", "", " two  spaces \n"])
def test_the_pieces_of_a_text_are_the_text(texts, tiny_processor, text):
    ids = tiny_processor.tokenizer.encode(text, add_special_tokens=False)
    pieces = texts.pieces(ids, 1000)
    assert len(pieces) == len(ids) and "".join(pieces) == text
    assert "".join(texts.pieces(ids, 3))[:3] == text[:3] and len(texts.pieces(ids, 3)) <= len(ids)


def test_each_token_has_the_colour_of_its_dependency_and_is_escaped(texts, tiny_processor):
    text = "a<&\u2603"
    ids = tuple(tiny_processor.tokenizer.encode(text, add_special_tokens=False))
    assert len(ids) == 6  # three letters, and three bytes of the last one
    shown = texts.coloured(response(ids, text, (0.0099, 0.01, 0.1, 0.0, 5.0, 2.0)))
    assert shown == (
        'a<span class="k1" title="0.010 nats">&lt;</span><span class="k2" title="0.100 nats">&amp;</span>'
        '<span class="k4" title="2.000 nats">\u2603</span>'
    )


def test_without_the_same_text_there_are_no_colours(texts, tiny_processor, tmp_path):
    ids = tuple(tiny_processor.tokenizer.encode("a key", add_special_tokens=False))
    values = (1.0,) * len(ids)
    assert texts.coloured(response(ids, "a key", values)) is not None
    assert texts.coloured(response(ids, "a ***", values)) is None  # a secret that is hidden in the text alone
    assert texts.coloured(response(ids, "a key", None)) is None
    assert texts.coloured(response(ids, "a key", values[1:])) is None
    assert texts.coloured(response((-1, *ids[1:]), "a key", values)) is None
    (tmp_path / "step-000001" / "hf" / FILE).write_text("{}")
    assert TokenTexts(texts.run).coloured(response(ids, "a key", values)) is None


def test_the_page_has_colours_and_their_legend_only_where_something_was_measured(tmp_path, tiny_folder, tiny_processor):
    run = make_run(tmp_path)
    assert "depend on the images" not in render_report([run])
    ids = tuple(tiny_processor.tokenizer.encode("yes", add_special_tokens=False))
    samples = (response(ids, "yes", (0.6,) * len(ids)), response(ids, "no", (0.2,) * len(ids)))
    step, path = max(run.rollout_files().items())
    one = replace(group("p", [1.0]), samples=samples)
    one = replace(
        one, samples=tuple(replace(s, trajectory=replace(s.trajectory, sample=k)) for k, s in enumerate(samples))
    )
    write_rollouts(path, [one], step=step)
    without = render_report([run])
    assert "Tokens are coloured" not in without and "<b>0.200</b> nats per token" in without
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / FILE).write_bytes((tiny_folder / FILE).read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run), "checkpoint_dirs", lambda self: [tmp_path])
        page = render_report([run])
    assert "Tokens are coloured" in page and '<span class="k3" title="0.600 nats">' in page
    assert all(f'class="swatch {colour}"' in page and ends in page for colour, ends in colour_legend())
