"""`vlmrl eval --images`: what the model gets, what the grader gets, what is said, kept, reused and shown."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from command_line import Done, own_process, settings, this_process
from endpoint_server import Endpoint, Reply, completion, failure, serve_endpoint
from PIL import Image

from vlmrl.store import layout

ROWS = 6
REWARD = """
def score(x):
    # The true image says the answer, whatever the model saw.
    truth = str(x.images[0].getpixel((0, 0))[0] // 40) if x.images else x.truth["answer"]
    assert truth == x.truth["answer"], truth
    right = x.response == truth
    return {"reward": float(right), "accuracy": float(right)}

score.needs_images = True
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows whose answer is the colour of their image, and one without an image."""
    for i in range(ROWS):
        Image.new("RGB", (56, 28), (40 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"look <image> say {i}", "images": [f"{i}.png"], "answer": str(i)} for i in range(ROWS)]
    rows.append({"prompt": "say 6", "images": [], "answer": "6"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mine.toml").write_text(
        '[model]\npath = "no/model"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n'
        "[rollout]\nmax_new_tokens = 6\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def images_of(body: dict[str, Any]) -> list[Image.Image]:
    content = body["messages"][-1]["content"]
    urls = [part["image_url"]["url"] for part in content if part["type"] == "image_url"] if content[0] != "s" else []
    return [Image.open(io.BytesIO(base64.b64decode(url.partition("base64,")[2]))).convert("RGB") for url in urls]


def look(number: int, body: dict[str, Any]) -> Reply:
    """Answer from the image alone; 2 where it shows nothing that is known."""
    images = images_of(body)
    if not images:
        return completion("6")
    red, *rest = images[0].getpixel((0, 0))  # type: ignore[misc]
    return completion(str(red // 40) if rest == [90, 200] else "2")


def evaluate(place: Path, endpoint: Endpoint, *more: str) -> Done:
    words = ["eval", "--endpoint", endpoint.address, "--model", "m", "--recipe", "mine.toml"]
    return this_process(*words, *more, cwd=place)


def rows_of(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    return pq.read_table(Path(evaluation["folder"]) / layout.EVAL_ROWS).to_pylist()


def test_the_model_gets_changed_images_and_the_grader_the_true_ones(place: Path) -> None:
    with serve_endpoint(look) as endpoint:
        done = evaluate(place, endpoint, "--images", "blank,shuffled,noise,low:4", "--json")
        bodies = endpoint.bodies
    assert done.code == 0, done.err
    normal, blank, shuffled, noise, low = done.json["evaluations"]
    # No reward failed: each got the true image.
    assert all(e["reward_errors"] == 0 and e["prompts"] == ROWS + 1 for e in done.json["evaluations"])
    names = [e["name"] for e in done.json["evaluations"]]
    assert names == [f"train-rows{end}" for end in ("", "-blank", "-shuffled", "-noise", "-low-4")]
    assert "blind_probe" not in normal and "images" not in normal["meta"]
    assert [e["meta"]["images"] for e in (blank, shuffled, noise, low)] == ["blank", "shuffled", "noise", "low:4"]
    # Blank and noise: only row 2 is right by luck. Shuffled: none. Low: a plain colour stays as it is.
    right = {
        name: [r["outcome/accuracy"] for r in rows_of(e)][:ROWS]
        for name, e in zip(names, done.json["evaluations"], strict=True)
    }
    assert right["train-rows"] == right["train-rows-low-4"] == [1.0] * ROWS
    assert right["train-rows-blank"] == right["train-rows-noise"] == [0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    assert right["train-rows-shuffled"] == [0.0] * ROWS
    probe = blank["blind_probe"]
    assert (probe["prompts"], probe["without_images"], probe["normal"]) == (ROWS, 1, normal["folder"])
    assert probe["metrics"]["accuracy"]["difference"] == pytest.approx(5 / 6)
    assert probe["metrics"]["accuracy"]["share"]["value"] == pytest.approx(5 / 6)
    assert [image.size for body in bodies for image in images_of(body)] == [(56, 28)] * ROWS * 5
    # The rows keep their own images, and say what was shown.
    for e in (blank, shuffled, noise, low):
        own, changed = ([[m["sha256"] for m in r[key]] for r in rows_of(e)] for key in ("images", "shown_images"))
        assert own == [[m["sha256"] for m in r["images"]] for r in rows_of(normal)]
        assert all(a != b for a, b in zip(own[:ROWS], changed[:ROWS], strict=True)) and changed[ROWS] == []
    assert sorted(m["sha256"] for r in rows_of(shuffled) for m in r["shown_images"]) == sorted(
        m["sha256"] for r in rows_of(normal) for m in r["images"]
    )
    assert list((place / "runs" / "unfinished").iterdir()) == []
    manifest = json.loads((Path(normal["folder"]).parents[1] / layout.MANIFEST).read_bytes())
    assert len(manifest["datasets"]) == 1


def test_the_screen_says_what_is_done_and_what_came_out(place: Path) -> None:
    with serve_endpoint(look) as endpoint:
        done = evaluate(place, endpoint, "--images", "blank")
    assert (
        "rows: the same rows with grey images of the same size, compared with train-rows, which is evaluated first"
        in done.err
    )
    assert "The accuracy is 1.000 with the true images and 0.167 with changed ones (blank): 0.833 [" in done.out
    assert "Prompts without images, which do not count: 1." in done.out
    assert "shown: blank" in done.err and "Blind probe against" in done.err


def test_after_an_outage_nothing_is_asked_twice(place: Path) -> None:
    """The server fails within the second evaluation; the responses of the first one are kept, too."""
    left, answered = [ROWS + 1 + 4], []

    def until(number: int, body: dict[str, Any]) -> Reply:
        if len(answered) == left[0]:
            return failure(401, "no more")
        answered.append(json.dumps(body["messages"]))
        return look(number, body)

    words = ("--images", "blank,shuffled", "--concurrency", "1")
    with serve_endpoint(until) as endpoint:
        done = evaluate(place, endpoint, *words)
        assert done.code == 2 and "no more" in done.err and len(answered) == ROWS + 1 + 4
        left[0] = 1000
        whole = evaluate(place, endpoint, *words, "--json").json["evaluations"]
    # The row without an image is the same prompt three times.
    assert len(answered) == 3 * (ROWS + 1) and len(set(answered)) == 3 * ROWS + 1
    assert [e["metrics"]["accuracy"]["value"] for e in whole] == pytest.approx([1, 2 / 7, 1 / 7])
    assert list((place / "runs" / "unfinished").iterdir()) == []


def test_a_normal_evaluation_that_is_named_is_not_made_again(place: Path) -> None:
    with serve_endpoint(look) as endpoint:
        normal = evaluate(place, endpoint, "--json").json["evaluations"][0]
        count = len(endpoint.requests)
        done = evaluate(place, endpoint, "--images", "blank", "--normal", normal["folder"], "--json")
        (blank,) = done.json["evaluations"]
        assert len(endpoint.requests) == 2 * count and "which exists" in done.err
        assert blank["blind_probe"]["normal"] == normal["folder"]
        assert blank["blind_probe"]["metrics"]["accuracy"]["difference"] == pytest.approx(5 / 6)
        for words, message in (
            (["--normal", blank["folder"]], "itself made with changed images (blank)"),
            (["--normal", normal["folder"], "--max-rows", "3"], "made with another max_rows"),
            (
                ["--normal", normal["folder"], "--set", "rollout.stop=['x']"],
                "made with another setting of [model], or of rollout.engine, top_p, top_k or stop",
            ),
        ):
            refused = evaluate(place, endpoint, "--images", "noise", *words)
            assert refused.code == 2 and message in refused.err and "Traceback" not in refused.err
        assert len(endpoint.requests) == 2 * count


def test_the_page_shows_what_the_model_saw(place: Path) -> None:
    with serve_endpoint(look) as endpoint:
        done = evaluate(place, endpoint, "--images", "noise", "--json")
    evaluation = done.json["evaluations"][1]
    done = this_process("report", Path(evaluation["folder"]).parents[1].name, "-o", "page.html", cwd=place)
    assert done.code == 0, done.err
    text = (place / "page.html").read_text()
    assert "rows shown with changed images (noise)" in text and "blind probe: The accuracy is 1.000" in text
    uris = re.findall("data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    pictures = [Image.open(io.BytesIO(base64.b64decode(uri))).convert("RGB") for uri in uris]
    assert len(pictures) == ROWS and all(len(p.getcolors(10_000) or []) > 1500 for p in pictures)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--images blink", "--images cannot be `blink`"),
        ("--images low:0", "--images cannot be `low:0`"),
        ("--images blank --compare last", "--images, --tools and --compare each add a comparison"),
        ("--normal last", "--normal belongs to --images"),
        ("--images low:100", "no image of `rows` is larger than 100 pixels"),
        ("--images blank --split bare.jsonl", "no row of `rows` has an image"),
        ("--images shuffled --max-rows 1", "one row has all of the images"),
    ],
)
def test_mistakes_are_told_before_any_request(place: Path, words: str, message: str) -> None:
    (place / "bare.jsonl").write_text(json.dumps({"prompt": "say 1", "images": [], "answer": "1"}) + "\n")
    with serve_endpoint(look) as endpoint:
        done = evaluate(place, endpoint, *words.split())
        assert done.code == 2 and message in done.err and "Traceback" not in done.err
        assert not endpoint.requests and not (place / "runs" / "unfinished").exists()


@pytest.mark.slow
def test_a_local_model_in_two_processes_gives_the_probe_of_one(place: Path, tiny_folder: Path) -> None:
    small = ["--recipe", "mine.toml", "--sample", "1", "--n", "2", "--images", "shuffled,noise", "--json"]
    small += settings("model.dtype=float32", "model.max_pixels=12544", "rollout.engine=torch")
    alone = this_process("eval", str(tiny_folder), *small, "--runs", "one", cwd=place).json["evaluations"]
    words = ["eval", str(tiny_folder), *small, "--runs", "two", "--gpus", "2"]
    ranks = own_process(*words, cwd=place, env={"TMPDIR": str(place)}).json["evaluations"]
    for one, two in zip(alone, ranks, strict=True):
        assert (Path(one["folder"]) / layout.EVAL_ROWS).read_bytes() == (
            Path(two["folder"]) / layout.EVAL_ROWS
        ).read_bytes()
    assert [e["blind_probe"]["metrics"] for e in alone[1:]] == [e["blind_probe"]["metrics"] for e in ranks[1:]]
    assert len({json.dumps([r["text"] for r in rows_of(e)]) for e in alone}) == 3  # the model reads its images


@pytest.mark.slow
def test_a_killed_evaluation_of_a_model_generates_nothing_again(
    place: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C within the evaluation with changed images: the next command makes a new run, from the kept responses."""
    from vlmrl.data.blinded_images import BlindedDataset
    from vlmrl.evaluate import responses

    generated: list[bool] = []
    answer, dies = responses.answer_pieces, [True]

    def answering(engine: Any, pieces: Any, *more: Any, **settings: Any) -> Any:
        def seen() -> Any:
            for piece in pieces:
                if piece:
                    is_changed = isinstance(piece[0][1].source.dataset, BlindedDataset)
                    if is_changed and dies[0]:
                        raise KeyboardInterrupt
                    generated.append(is_changed)
                yield piece

        return answer(engine, seen(), *more, **settings)

    monkeypatch.setattr(responses, "answer_pieces", answering)
    words = ["eval", str(tiny_folder), "--recipe", "mine.toml", "--images", "noise", "--json"]
    words += settings("model.dtype=float32", "model.max_pixels=12544", "rollout.engine=torch")
    done = this_process(*words, cwd=place)
    assert done.code == 130 and generated == [False]
    dies[0] = False
    done = this_process(*words, cwd=place)
    assert done.code == 0 and generated == [False, True], done.err
    assert [e["name"] for e in done.json["evaluations"]] == ["train-rows", "train-rows-noise"]
    assert list((place / "runs" / "unfinished").iterdir()) == []
