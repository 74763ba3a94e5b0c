"""Sources of the task figures, what is left out of them and why, and how equal figures are recognised."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vlmrl.errors import DataError
from vlmrl.svg.parse import SvgLimits
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.vfig.collecting import (
    Rejected,
    Screened,
    ShapeCounts,
    code_hash,
    count_shapes,
    picture_difference,
    picture_hash,
    repetition,
    screen,
)
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.tasks.vfig.figure_sources import Filters, PictureSizes, SourceFigure, WrongRow, bench_source, named_source
from vlmrl.tasks.vfig.truth import as_label
from vlmrl.untrusted import CodeRefused

REAL = Path(__file__).parents[2] / "data" / "figures"
HEAD = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 80">'
RED = f'{HEAD}<rect x="10" y="10" width="40" height="30" fill="red"/></svg>'
BLUE = f'{HEAD}<rect x="30" y="40" width="50" height="20" fill="blue"/></svg>'
SIZES = PictureSizes(100_000, 64)


def png(
    colour: Any = "red", size: tuple[int, int] = (100, 80), box: tuple[int, ...] | None = (10, 10, 49, 39)
) -> bytes:
    image = Image.new("RGB", size, "white")
    if box:
        image.paste(Image.new("RGB", (box[2] - box[0] + 1, box[3] - box[1] + 1), colour), box[:2])
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def chat(answer: str, *, prompt: str = "<image>\nDraw it.", **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


@pytest.fixture(scope="module")
def renderer() -> Iterator[SvgRenderer]:
    with SvgRenderer(1, SvgLimits(pixels=SIZES.max_pixels)) as one:
        yield one


def screened(renderer: SvgRenderer, *texts: str | SourceFigure, **filters: Any) -> list[Screened | Rejected]:
    figures = [one if isinstance(one, SourceFigure) else SourceFigure("a", "a", one) for one in texts]
    return screen(figures, Filters(**filters), SIZES, renderer)


def kinds(results: list[Screened | Rejected]) -> list[str]:
    return [result.kind if isinstance(result, Rejected) else "" for result in results]


def test_svg_files_of_a_folder_in_order_with_their_text_unchanged(tmp_path: Path) -> None:
    (tmp_path / "icons" / "b").mkdir(parents=True)
    text = RED.replace("<rect", '<text>a\\nb &lt; \\"c\\"</text>\r\n<rect')
    (tmp_path / "icons" / "b" / "2.SVG").write_bytes(text.encode())
    (tmp_path / "icons" / "1.svg").write_text(BLUE)
    (tmp_path / "icons" / "bad.svg").write_bytes(b"<svg>\xff</svg>")
    (tmp_path / "icons" / "no.txt").write_text("x")
    rows = list(named_source("svg", str(tmp_path / "icons")).figures())
    assert [row.where for row in rows] == ["icons: 1.svg", "icons: b/2.SVG", "icons: bad.svg"]
    assert isinstance(rows[1], SourceFigure) and rows[1].text == text and rows[1].label == "icons"
    assert isinstance(rows[2], WrongRow) and rows[2].reason == "it is not UTF-8 text"


def test_names_of_sources(tmp_path: Path) -> None:
    folder = tmp_path / "my figures"
    folder.mkdir()
    assert named_source("svg", str(folder)).label == "my_figures"
    assert named_source("svg", f"arxiv={folder}").label == "arxiv"
    assert named_source("svg", f"arxiv={folder}", label="other").label == "other"
    (tmp_path / "a=b").mkdir()
    assert named_source("svg", str(tmp_path / "a=b")).label == "a_b"
    assert named_source("svg", f"arxiv={folder}").short == "svg arxiv=my figures"
    assert as_label("") == "_" and len(as_label("x" * 99)) == 60 and as_label("a/../b") == "a_.._b"


def test_chats_with_an_image(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "1.png").write_bytes(png())
    turns = [{"from": "human", "value": "<image>Draw."}, {"from": "gpt", "value": BLUE}]
    rows = [
        chat(RED, images=["pictures/1.png"]),
        {"conversations": turns, "image": "pictures/1.png"},
        chat(RED, prompt="Draw it."),  # the code alone
        chat(RED),  # a mark without an image
        chat(RED, images=["pictures/2.png"]),
        chat(RED, images=["../1.png"]),
        chat(RED, images=["pictures/1.png", "pictures/1.png"]),
        {"messages": [{"role": "user", "content": "Draw."}]},
        {"messages": 5},
        7,
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    results = list(named_source("sharegpt", f"arxiv={path}").figures())
    assert [(r.text, r.image) if isinstance(r, SourceFigure) else None for r in results[:3]] == [
        (RED, png()), (BLUE, png()), (RED, None),
    ]  # fmt: skip
    reasons = [r.reason if isinstance(r, WrongRow) else "" for r in results[3:]]
    wanted = (
        "1 <image> mark and no image", "no image file 'pictures/2.png'", "leaves", "2 images, where one", "assistant",
        "messages", "not an object",
    )  # fmt: skip
    assert [word in reason for word, reason in zip(wanted, reasons, strict=True)] == [True] * 7, reasons
    assert results[4].where == "arxiv: rows.json row 4"
    rooted = list(named_source("sharegpt", str(path), tmp_path / "pictures").figures())
    assert isinstance(rooted[0], WrongRow)


@pytest.mark.parametrize("form", ["paths", "bytes", "struct"])
def test_rows_of_a_parquet_table_in_every_form_of_images(tmp_path: Path, form: str) -> None:
    (tmp_path / "1.png").write_bytes(png())
    cell = {"paths": ["1.png"], "bytes": [{"bytes": png(), "path": None}], "struct": {"bytes": None, "path": "1.png"}}
    rows = [
        {"data_source": "molmo", "response": RED, "images": cell[form]},
        {"data_source": "star vector", "response": BLUE, "images": cell[form]},
        {"data_source": None, "response": None, "images": cell[form]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    first, second, third = named_source("parquet", str(tmp_path / "train.parquet")).figures()
    assert isinstance(first, SourceFigure) and (first.label, first.text, first.image) == ("molmo", RED, png())
    assert isinstance(second, SourceFigure) and second.label == "star_vector"
    assert third == WrongRow("train", "train: train.parquet row 2", "the code is None, not a text")


@pytest.mark.parametrize("fields", [{"ground_truth": "/x.png", "ground_truth_code": RED}, {"ground_truth": RED}])
def test_the_code_may_be_in_verls_reward_model(tmp_path: Path, fields: dict[str, str]) -> None:
    row = {"reward_model": {"style": "rule", **fields}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "t.parquet")
    (figure,) = named_source("parquet", str(tmp_path / "t.parquet")).figures()
    assert isinstance(figure, SourceFigure) and figure.text == RED and figure.image is None


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.json").write_text('{"messages": []}')
    (tmp_path / "b.json").write_text("[")
    pq.write_table(pa.table({"prompt": ["x"]}), tmp_path / "t.parquet")
    (tmp_path / "no.parquet").write_text("x")

    def refusal(kind: Any, name: str, **more: Any) -> str:
        with pytest.raises(DataError) as error:
            list(named_source(kind, str(tmp_path / name), **more).figures())
        return error.value.message

    assert "is not there" in refusal("svg", "nowhere")
    assert "is not a folder" in refusal("svg", "a.json")
    assert "holds no .svg file" in refusal("svg", "empty")
    assert "no such file" in refusal("sharegpt", "nowhere.json")
    assert "expected a list of objects" in refusal("sharegpt", "a.json")
    assert "not JSON" in refusal("sharegpt", "b.json")
    assert "none of the columns `response`" in refusal("parquet", "t.parquet")
    assert "it has: prompt" in refusal("parquet", "t.parquet")
    assert "not a readable Parquet file" in refusal("parquet", "no.parquet")
    assert "--image-root" in refusal("sharegpt", "a.json", image_root=tmp_path / "nowhere")
    with pytest.raises(DataError, match="not a source of figures"):
        bench_source(str(REAL / "LICENCES.md"))
    assert [bench_source(str(p)).kind for p in (tmp_path / "empty", tmp_path / "a.json", tmp_path / "t.parquet")] == [
        "svg", "sharegpt", "parquet",
    ]  # fmt: skip


def test_counts_of_shapes_leave_out_what_is_only_defined() -> None:
    inner = '<linearGradient id="g"/><clipPath><rect/></clipPath><symbol><path/></symbol>'
    body = f"<defs>{inner}</defs>{inner}<!-- <line/> --><g><rect/><circle/><line/><path d=''/></g><text>a</text>"
    counts = count_shapes(HEAD + body + "</svg>")
    assert counts == ShapeCounts(basic=2, connectors=1, complex=1, texts=1)
    assert counts.shapes == 4 and counts.simple_share == 0.75
    assert count_shapes(HEAD + "<text>a</text></svg>").simple_share is None
    with pytest.raises(CodeRefused):
        count_shapes("<svg><g></svg>")


def test_code_that_repeats_itself() -> None:
    line = '<line x1="10" y1="10" x2="50" y2="60" stroke="black"/>\n'
    assert repetition(HEAD + line * 40) and repetition(HEAD + (line + "<g><rect width='5' height='7'/></g>") * 20)
    assert repetition(HEAD + '<path d="' + "L 10 10 20 20 " * 2000 + '"/></svg>')  # within one attribute
    grid = "".join(f'<line x1="{10 * i}" y1="10" x2="{10 * i}" y2="60" stroke="black"/>\n' for i in range(60))
    assert repetition(HEAD + grid + "</g>" * 50 + "</svg>") == ""
    assert repetition(HEAD + line * 6) == "" and repetition("") == ""
    drawn = [draw_figure(random.Random(i), DrawnSettings(simple=i % 2 == 0)).svg for i in range(40)]
    assert [repetition(svg) for svg in drawn] == [""] * 40
    assert [repetition(path.read_text()) for path in sorted(REAL.rglob("*.svg"))] == [""] * 11


@given(st.lists(st.sampled_from(["\n", "  ", "<!-- x -->", "\t"]), min_size=1, max_size=4))
def test_white_space_around_tags_and_comments_do_not_change_the_hash(parts: list[str]) -> None:
    assert code_hash(RED.replace("><", ">" + "".join(parts) + "<")) == code_hash(RED)
    assert code_hash(RED) != code_hash(BLUE)
    assert code_hash(RED.replace("red", "redd")) != code_hash(RED)


def test_the_hash_of_many_open_comments_takes_no_time() -> None:
    assert code_hash("<!--" * 200_000) != code_hash("")


@settings(max_examples=30)
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_margins_do_not_change_the_hash_of_a_picture(top: int, left: int, bottom: int, right: int) -> None:
    inner = np.random.default_rng(0).integers(0, 255, (12, 9, 3)).astype(np.uint8)
    wide = np.pad(inner, ((top + 1, bottom), (left + 1, right), (0, 0)), constant_values=255)
    other = wide.copy()
    other[top + 4, left + 4] ^= 1
    assert picture_hash(wide) == picture_hash(np.pad(inner, ((1, 1), (1, 1), (0, 0)), constant_values=255))
    assert picture_hash(other) != picture_hash(wide)


def test_the_difference_of_pictures() -> None:
    one, other = (np.asarray(Image.open(io.BytesIO(data))) for data in (png(), png("blue", box=(60, 50, 90, 70))))
    assert picture_difference(one, one) == 0
    assert picture_difference(one, other) == pytest.approx(1, abs=1e-6)  # nothing is shared, on any size of page
    large = np.asarray(Image.fromarray(one).resize((300, 240)))
    assert picture_difference(one, large) < 0.15
    assert 0.05 < picture_difference(one, np.asarray(Image.open(io.BytesIO(png("darkred"))))) < 0.15
    white = np.full((5, 5, 3), 255, np.uint8)
    assert picture_difference(white, white) == 0 and picture_difference(white, white // 2) == 1


def test_what_passes_and_what_is_left_out(renderer: SvgRenderer) -> None:
    many = HEAD + "".join(f'<path d="M{i} 0h9v{i}z"/>' for i in range(1, 60)) + "</svg>"
    results = screened(
        renderer,
        f"Here it is:\n```svg\n{RED}\n```",
        "no code", RED[:-8], "<svg><g></svg>", HEAD + "</svg>", many, many.replace("path", "rect"),
        RED + " " * 9000,  # white space around the code does not count
        RED.replace("<rect", "<desc>" + "long words " * 300 + "</desc><rect"),
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 10"><rect width="9" height="9"/></svg>',
        RED.replace("<rect", '<image href="http://example.org/x.png" width="5" height="5"/><rect'),
        HEAD + "<text y='20'>words</text></svg>",
        min_basic=0.4, max_complex=50, max_chars=3000, max_aspect=8, repeats=True,
    )  # fmt: skip
    assert kinds(results) == [
        "", "not drawn (missing)", "not drawn (cut)", "not drawn (syntax)", "few basic shapes", "few basic shapes",
        "blank", "", "long", "long and thin",
        "not drawn (forbidden)", "few basic shapes",
    ]  # fmt: skip
    first = results[0]
    assert isinstance(first, Screened) and first.svg == RED and (first.width, first.height) == (100, 80)
    assert first.difference is None and Image.open(io.BytesIO(first.file)).getpixel((20, 20)) == (255, 0, 0)
    blank = screened(renderer, HEAD + "</svg>", many, many, max_complex=50)
    assert kinds(blank) == ["blank", "many complex shapes", "many complex shapes"]
    assert kinds(screened(renderer, HEAD + "<text y='20'>words</text></svg>", many)) == ["", ""]  # no filter


def test_images_that_come_with_the_code(renderer: SvgRenderer) -> None:
    images = [png(), png("blue", box=(60, 50, 90, 70)), png(size=(20, 20), box=(1, 1, 3, 3)), png(size=(400, 40)),
              png(box=None), b"no image", png(size=(900, 720), box=(90, 90, 449, 359))]  # fmt: skip
    figures = [SourceFigure("a", str(i), RED, data) for i, data in enumerate(images)]
    results = screened(renderer, *figures, max_difference=0.5, min_image=32, max_aspect=8)
    assert kinds(results) == ["", "other picture", "small image", "long and thin", "blank", "wrong", ""]
    same, large = results[0], results[-1]
    assert isinstance(same, Screened) and same.file == images[0] and same.difference == pytest.approx(0, abs=0.02)
    assert isinstance(large, Screened) and large.file != images[-1]
    width, height = Image.open(io.BytesIO(large.file)).size
    assert width * height <= SIZES.max_pixels and large.picture_hash == same.picture_hash
    (counted,) = screened(renderer, figures[1])
    assert isinstance(counted, Screened) and counted.difference is not None and counted.difference > 0.9


def test_one_policy_for_the_sizes_of_drawings(renderer: SvgRenderer) -> None:
    def of(size: str) -> tuple[int, int]:
        (one,) = screened(renderer, RED.replace("<svg", f"<svg {size}"))
        assert isinstance(one, Screened) and Image.open(io.BytesIO(one.file)).size == (one.width, one.height)
        return one.width, one.height

    assert (
        of("") == (100, 80) and of('width="24" height="24"') == (64, 64) and of('width="20" height="40"') == (64, 128)
    )
    width, height = of('width="5000" height="4000"')
    assert 90_000 < width * height <= 100_000 and width / height == pytest.approx(1.25, abs=0.01)
    assert SIZES.enlarged(1, 90_000) == (1, 94_868) and SIZES.enlarged(1, 200_000) == (1, 200_000)


def test_real_files_are_drawn(renderer: SvgRenderer) -> None:
    files = sorted(REAL.rglob("*.svg"))
    results = screened(renderer, *(path.read_text("utf-8") for path in files))
    assert len(files) == 11 and kinds(results) == [""] * 11
    counts = {
        name: count_shapes((REAL / f"{name}.svg").read_text("utf-8")) for name in ("icons/layout-grid", "flags/jp")
    }
    assert list(counts.values()) == [ShapeCounts(4, 0, 0, 0), ShapeCounts(1, 0, 1, 0)]
