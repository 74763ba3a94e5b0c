"""`vlmrl generate --images`: a user's own images, the files that responses contain, broken images, kills."""

from __future__ import annotations

import io
import json
import os
import signal
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import own_process, settings, started, this_process
from endpoint_server import Reply, completion, prompt_of, serve_endpoint
from PIL import Image

from vlmrl.model.tiny import build_tiny

GREEN = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10"><rect width="20" height="10" fill="#0f0"/></svg>'
)
PROMPT = "Write the SVG code that draws this figure. Answer with the code alone, from <svg to </svg>."


def picture(path: Path, colour: int = 90) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (56, 56), (colour, 90, 200)).save(path)


def noise() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((80, 80), 50).save(file, "PNG")
    return file.getvalue()


def header_of_png(width: int, height: int) -> bytes:
    """The beginning of a PNG of this size, with 1 bit per pixel."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (head, b"IDAT")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def sent(body: dict[str, Any]) -> bytes:
    """The image of a request, as it was sent."""
    import base64

    (part,) = (p for p in body["messages"][-1]["content"] if p["type"] == "image_url")
    return base64.b64decode(part["image_url"]["url"].partition(",")[2])


def asked(address: str, *more: Any) -> list[Any]:
    return ["generate", "--endpoint", address, "--model", "m", *more]


def test_a_folder_of_images_becomes_a_folder_of_files(tmp_path: Path) -> None:
    for place in ("a.png", "sub/a.png", "b.jpg", "b.gif"):
        picture(tmp_path / "figs" / place)
    with serve_endpoint(lambda n, b: completion(f"So:\n```svg\n{GREEN}\n```")) as endpoint:
        done = this_process(
            *asked(endpoint.address, "--images", "figs/", "--task", "figures", "--out", "o", "--json"), cwd=tmp_path
        )
        assert {prompt_of(body) for body in endpoint.bodies} == {f"\n{PROMPT}"}
    expected = {"out": "o", "rows": 4, "responses": 4, "refused": 0, "left_out": [], "files": 4}
    assert done.json == {**expected, "no_file": {}, "not_drawn": {}}
    stems = ("a", "b.gif", "b.jpg", "sub/a")
    assert files_in(tmp_path / "o") == sorted(
        [f"{s}{e}" for s in stems for e in (".svg", ".png")] + ["responses.jsonl"]
    )
    assert (tmp_path / "o/sub/a.svg").read_text() == GREEN
    drawn = np.asarray(Image.open(tmp_path / "o/b.gif.png"))
    assert drawn.shape == (10, 20, 3) and (drawn == (0, 255, 0)).all()
    written = lines(tmp_path / "o/responses.jsonl")
    assert [w["prompt_id"] for w in written] == ["figs/a.png", "figs/b.gif", "figs/b.jpg", "figs/sub/a.png"]
    assert written[3]["files"] == ["sub/a.svg", "sub/a.png"] and written[3]["response"].startswith("So:")
    assert list((tmp_path / "runs" / "unfinished").iterdir()) == [] and not list(tmp_path.glob(".tmp-*"))


BROKEN_IMAGE = '<image width="9" height="9" href="data:image/png;base64,AAAA"/>'


def test_responses_without_code_or_picture_are_counted_and_kept(tmp_path: Path) -> None:
    for colour, name in enumerate("abc"):
        picture(tmp_path / f"{name}.png", colour)
    texts = {0: "no code", 1: f"<svg>{BROKEN_IMAGE}</svg>", 2: "<svg width='9'><rect"}

    def answer(number: int, body: dict[str, Any]) -> Reply:
        return completion(texts[Image.open(io.BytesIO(sent(body))).getpixel((0, 0))[0]])  # pyright: ignore

    words = ["--images", "a.png", "--images", "b.png", "--images", "c.png", "--images", "./a.png"]
    with serve_endpoint(answer) as endpoint:
        done = this_process(*asked(endpoint.address, *words, "--task", "figures", "--out", "o"), cwd=tmp_path)
    assert done.code == 0 and "3 responses to 3 images\n1 with SVG code\n2 without SVG code:\n" in done.out
    written = lines(tmp_path / "o/responses.jsonl")
    assert [w["response"] for w in written] == [texts[i] for i in range(3)]
    assert written[0]["no_file"] == "there is no svg element" and "no end tag" in written[2]["no_file"]
    assert written[1]["files"] == ["b.svg"] and "picture" in written[1]["not_drawn"]
    assert files_in(tmp_path / "o") == ["b.svg", "responses.jsonl"]


def test_several_responses_per_image_have_numbers(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    words = ["--images", "a.png", "--task", "figures", "--out", "o", "--sample", "1", "--n", "2"]
    with serve_endpoint(lambda n, b: completion(GREEN)) as endpoint:
        assert this_process(*asked(endpoint.address, *words), cwd=tmp_path).code == 0
    assert files_in(tmp_path / "o") == ["a-0.png", "a-0.svg", "a-1.png", "a-1.svg", "responses.jsonl"]


def test_a_question_of_the_user_s_own_is_asked_as_it_is(tmp_path: Path) -> None:
    picture(tmp_path / "a.png")
    (tmp_path / "ask.jinja").write_text("{{ 1 + 1 }} of <image>?")
    for words, prompt in (
        (["--prompt", 'Is it {{ blue }} or "red"?\n{% raw %} \\n \u00e9\U0001f600'], None),
        (["--template", "ask.jinja"], "2 of ?"),
    ):
        with serve_endpoint(lambda n, b: completion("yes")) as endpoint:
            done = this_process(
                *asked(endpoint.address, "--images", "a.png", "--out", "o.jsonl", "--force", *words), cwd=tmp_path
            )
            assert done.code == 0, done.err
            assert prompt_of(endpoint.bodies[0]) == (prompt or words[1])
    (line,) = lines(tmp_path / "o.jsonl")
    assert (line["prompt_id"], line["response"]) == ("a.png", "yes") and "files" not in line


def test_broken_images_are_left_out_and_the_others_answered(tmp_path: Path) -> None:
    folder = tmp_path / "figs"
    odd = ["-dash.png", 'it\'s "q" \u00e9.png', "new\nline.png"]
    for name in odd:
        picture(folder / name)
    (folder / "text.png").write_text("hello")
    (folder / "notes.txt").write_text("hello")
    (folder / ".hidden.png").write_text("hello")
    (folder / "cut.png").write_bytes(noise()[:2000])
    (folder / "huge.png").write_bytes(header_of_png(30_000, 30_000))
    (folder / "loop").symlink_to("../figs")
    os.mkfifo(folder / "pipe.png")
    words = ["--images", "figs", "--prompt", "what?", "--out", "o", "--json"]
    with serve_endpoint(lambda n, b: completion("x")) as endpoint:
        done = this_process(*asked(endpoint.address, *words), cwd=tmp_path)
        assert len(endpoint.requests) == 3
    assert done.code == 4 and "5 images left out" in done.err
    reasons = {one["image"]: one["reason"] for one in json.loads(done.out)["left_out"]}
    assert reasons.keys() == {f"figs/{name}" for name in ("text.png", "cut.png", "huge.png", "loop", "pipe.png")}
    assert "truncated" in reasons["figs/cut.png"] and "100,000,000 pixels" in reasons["figs/huge.png"]
    assert [w["prompt_id"] for w in lines(tmp_path / "o/responses.jsonl")] == [f"figs/{name}" for name in sorted(odd)]
    assert {one["image"]: one["reason"] for one in lines(tmp_path / "o/left_out.jsonl")} == reasons


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--images", "none", "--prompt", "x"], "there is no image or folder none"),
        (["--images", "empty", "--prompt", "x"], "there is no image"),
        (["--images", "bad.png", "--prompt", "x"], "no image that can be read: bad.png: not an image"),
        (["--images", "cut.png", "--prompt", "x"], "no image could be shown to the model: broken image"),
        (["--images", "a.png"], "there is no question to ask"),
        (["--images", "a.png", "--prompt", " "], "the prompt is empty"),
        (["--images", "a.png", "--prompt", "x", "--template", "t"], "both give the prompt"),
        (["--images", "a.png", "--task", "counting"], "task `counting` needs the column `problem` of a row"),
        (["--images", "a.png", "--template", "two.jinja"], "needs the columns `first`, `second` of a row"),
        (["--images", "a.png", "--prompt", "<image><image>"], "shows 2 images together"),
        (["--images", "a.png", "--task", "figure"], "figures"),
        (["--images", "a.png", "--prompt", "x", "--data", "rows.jsonl"], "--images and --data both"),
        (["--data", "rows.jsonl", "--prompt", "x"], "--prompt is for --images"),
    ],
)
def test_mistakes_of_the_user_are_errors(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_text("hello")
    (tmp_path / "cut.png").write_bytes(noise()[:2000])
    (tmp_path / "two.jinja").write_text("{{ first }} {{ columns }} {{ second }}")
    picture(tmp_path / "a.png")
    done = this_process(*asked("http://127.0.0.1:9/v1", *words, "--out", "o"), cwd=tmp_path)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done.err
    assert not (tmp_path / "o").exists()


def test_only_a_folder_of_an_earlier_command_is_replaced(tmp_path: Path) -> None:
    picture(tmp_path / "figs/a.png")
    with serve_endpoint(lambda n, b: completion(GREEN)) as endpoint:
        words = asked(endpoint.address, "--task", "figures", "--images", "figs", "--out")
        done = this_process(*words, "figs", "--force", cwd=tmp_path)
        assert done.code == 2 and "are in the folder to write" in done.err
        assert this_process(*words, "o", cwd=tmp_path).code == 0
        done = this_process(*words, "o", cwd=tmp_path)
        assert done.code == 2 and "o exists" in done.err
        (tmp_path / "o/b.svg").write_text("mine")
        done = this_process(*words, "o", "--force", cwd=tmp_path)
        assert done.code == 2 and "b.svg in it is not from" in done.err
        (tmp_path / "o/b.svg").unlink()
        (tmp_path / "figs/a.png").rename(tmp_path / "figs/c.png")
        # A folder of results within the folder of images is not read.
        assert this_process(*words, "figs/o", cwd=tmp_path).code == 0
        assert this_process(*words, "figs/o", "--force", cwd=tmp_path).code == 0
        assert this_process(*words, "o", "--force", cwd=tmp_path).code == 0
    assert files_in(tmp_path / "figs/o") == ["c.png", "c.svg", "responses.jsonl"]
    # The drawing in figs/o is an image of figs for another folder of results.
    assert files_in(tmp_path / "o") == ["c.png", "c.svg", "o/c.png", "o/c.svg", "responses.jsonl"]


@pytest.mark.slow
def test_after_a_kill_only_what_is_missing_is_asked(tmp_path: Path) -> None:
    for i in range(6):
        picture(tmp_path / f"figs/{i}.png", 10 * i)

    unfinished = tmp_path / "runs/unfinished"

    def answer(number: int, body: dict[str, Any]) -> Reply:
        if number == 3 and process.poll() is None:
            while sum(kept.read_text().count("\n") for kept in unfinished.glob("*.jsonl")) < 4:
                time.sleep(0.01)  # the first line of the file and the responses to the images 0, 1, 2
            process.kill()
        return completion(f"{GREEN} {number}")

    words = ["--images", "figs", "--task", "figures", "--out", "o", "--concurrency", "1"]
    with serve_endpoint(answer) as endpoint:
        process = started(*asked(endpoint.address, *words), cwd=tmp_path)
        process.communicate(timeout=100)
        assert process.returncode == -signal.SIGKILL and not (tmp_path / "o").exists()
        picture(tmp_path / "figs/1.png", 255)  # replaced
        (tmp_path / "figs/2.png").unlink()
        picture(tmp_path / "figs/00.png", 77)  # before all others
        # Another prompt has nothing of the old answers.
        other = this_process(
            *asked(endpoint.address, "--images", "figs/0.png", "--prompt", "x", "--out", "x.jsonl"), cwd=tmp_path
        )
        assert other.code == 0 and lines(tmp_path / "x.jsonl")[0]["response"] == f"{GREEN} 4"
        del endpoint.requests[:5]
        again = this_process(*asked(endpoint.address, *words), cwd=tmp_path)
        assert again.code == 0, again.err
        asked_again = {Image.open(io.BytesIO(sent(b))).getpixel((0, 0))[0] for b in endpoint.bodies}  # pyright: ignore
        assert asked_again == {77, 255, 30, 40, 50} and len(endpoint.requests) == 5
    written = lines(tmp_path / "o/responses.jsonl")
    assert [w["prompt_id"] for w in written] == [f"figs/{n}.png" for n in ("0", "00", "1", "3", "4", "5")]
    assert written[0]["response"] == f"{GREEN} 0"
    assert list((tmp_path / "runs/unfinished").iterdir()) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose greedy responses to images of different colours differ."""
    return build_tiny(tmp_path_factory.mktemp("tiny") / "model", [PROMPT, GREEN])


LOCAL = ["rollout.max_new_tokens=6", "rollout.engine=torch", "model.dtype=float32"]


@pytest.mark.slow
def test_a_local_model_gets_the_prompt_of_training(tmp_path: Path, model: Path) -> None:
    """The responses equal those to rows of a dataset with the same images and prompt."""
    for i in range(3):
        picture(tmp_path / f"figs/{i}.png", 80 * i)
    Image.new("RGBA", (56, 56), (200, 0, 0, 0)).save(tmp_path / "figs/3.png")  # laid on white
    Image.new("RGB", (56, 56), "white").save(tmp_path / "white.png")
    Image.new("RGB", (4000, 10)).save(tmp_path / "figs/long.png")
    rows = [{"prompt": f"<image>\n{PROMPT}", "images": [f"figs/{i}.png"]} for i in range(3)]
    rows.append({"prompt": f"<image>\n{PROMPT}", "images": ["white.png"]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--images", "figs", "--task", "figures", "--out", "o"]
    done = this_process("generate", model, *words, *settings(*LOCAL), cwd=tmp_path)
    assert done.code == 4 and "4000 x 10 pixels" in done.err, done.err
    of_rows = this_process(
        "generate", model, "--data", "rows.jsonl", "--out", "r.jsonl", *settings(*LOCAL), cwd=tmp_path
    )
    assert of_rows.code == 0, of_rows.err
    responses = [w["response"] for w in lines(tmp_path / "o/responses.jsonl")]
    assert responses == [w["response"] for w in lines(tmp_path / "r.jsonl")] and len(set(responses)) > 2


@pytest.mark.slow
def test_several_processes_write_the_folder_of_one(tmp_path: Path, model: Path) -> None:
    for i in range(4):
        picture(tmp_path / f"figs/{i}.png", 60 * i)
    (tmp_path / "figs/cut.png").write_bytes(noise()[:2000])
    words = ["generate", model, "--images", "figs", "--task", "figures", "--json", *settings(*LOCAL), "--out"]
    alone = this_process(*words, "one", cwd=tmp_path)
    shared = own_process(*words, "two", "--gpus", "2", cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert (alone.code, shared.code) == (4, 4), shared.err
    assert json.loads(shared.out) == json.loads(alone.out) | {"out": "two"}
    assert (tmp_path / "two/responses.jsonl").read_bytes() == (tmp_path / "one/responses.jsonl").read_bytes()
    assert list((tmp_path / "runs/unfinished").iterdir()) == []


@pytest.mark.slow
def test_a_killed_local_model_goes_on(tmp_path: Path, model: Path) -> None:
    """A kill while the files are written: the responses are there, and no file of the killed attempt is left."""
    for i in range(3):
        picture(tmp_path / f"figs/{i}.png", 80 * i)
    words = ["generate", model, "--images", "figs", "--task", "figures", "--out", "o", *settings(*LOCAL)]
    killed = own_process(*words, cwd=tmp_path, env={"VLMRL_CRASH_AT": "mid-answers"})
    assert killed.code == 137 and not (tmp_path / "o").exists()
    (left_over,) = tmp_path.glob(".tmp-o-*")
    (left_over / "old.svg").write_text("of the killed attempt")
    (journal,) = (tmp_path / "runs/unfinished").glob("*.jsonl")
    first, *others = journal.read_text().splitlines()
    marked = [json.dumps(json.loads(line) | {"text": GREEN}) for line in others]
    journal.write_text("\n".join([first, *marked]) + "\n")
    assert this_process(*words, cwd=tmp_path).code == 0
    assert files_in(tmp_path / "o") == [f"{i}.{end}" for i in range(3) for end in ("png", "svg")] + ["responses.jsonl"]
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.vllm
@pytest.mark.slow
def test_vllm_answers_images(tmp_path: Path, model: Path) -> None:
    for i in range(3):
        picture(tmp_path / f"figs/{i}.png", 80 * i)
    words = ["--images", "figs", "--task", "figures", "--out", "o", "--json"]
    limits = settings("rollout.max_new_tokens=6", "rollout.engine=vllm", "rollout.kv_cache_gib=0.25")
    limits += settings("rollout.max_prompt_tokens=300")
    done = own_process("generate", model, *words, *limits, cwd=tmp_path)
    assert done.json["responses"] == 3 and sum(done.json["no_file"].values()) == 3
    assert [w["prompt_id"] for w in lines(tmp_path / "o/responses.jsonl")] == [f"figs/{i}.png" for i in range(3)]
