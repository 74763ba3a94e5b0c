"""Inputs and arguments for the goldens of the built-in rewards: each branch of each, and what broke published rewards.

`record_rewards.py` keeps what the rewards make of them, `test_rewards_golden.py` compares. Add to these lists freely.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from task_cases import TASK_CASES

Input = dict[str, Any]
"""Fields of a RewardInput: response, truth, columns, finish, num_tokens."""
Args = dict[str, Any]

LEVELS = ["order", "family", "genus"]
AGES = {"tag": "age-group", "labels": ["Infant", "Juvenile", "SubAdult", "Adult"], "aliases": {"Juvenil": "Juvenile"}}
SPECIES = {
    "tag": "species",
    "labels": ["Asterias rubens", "Anthenea australiae"],
    "aliases": {"Asru": "Asterias rubens", "Anau": "Anthenea australiae"},
    "levels_decide": "different",
}


def pair(same: Any, order: Any, family: Any, genus: Any, **more: Any) -> dict[str, Any]:
    return {"same": same, "order": order, "family": family, "genus": genus, **more}


ALIKE = pair(True, ["Passeriformes"] * 2, ["Corvidae"] * 2, ["Corvus"] * 2, distance=0)
ORDERS_DIFFER = pair(False, ["Passeriformes", "Piciformes"], ["Corvidae", "Picidae"], ["Corvus", "Picus"], distance=3)
GENERA_DIFFER = pair(False, ["Passeriformes"] * 2, ["Corvidae"] * 2, ["Corvus", "Pica"], distance=1)
GENERA_ALIKE = pair(False, ["Passeriformes"] * 2, ["Corvidae"] * 2, ["Corvus"] * 2)
PARTLY_KNOWN = pair(False, ["nan", "nan"], ["Corvidae", "Picidae"], None, distance=3)
NOTHING_KNOWN = {"same": True, "distance": 0}
PAIR_TRUTHS = (ALIKE, ORDERS_DIFFER, GENERA_DIFFER, GENERA_ALIKE, PARTLY_KNOWN, NOTHING_KNOWN)
BROKEN_TRUTHS = (
    {},
    {"same": "yes"},
    {"same": 1.0},
    pair(True, ["a", "b"], None, None),
    pair(False, "a", None, None),
    pair(False, ["a"], None, None),
    pair(1, [7, 7], [math.nan, "x"], [None, "x"]),
    pair(True, [[1], [1]], None, None),
    pair(False, None, None, None, distance=-1),
    pair(False, None, None, None, distance=True),
    pair(False, None, None, None, distance=0),
    pair(False, ["a", "a"], None, None, distance="sameGenus"),
)

FULL = "<order>Passeriformes; Passeriformes</order><family>Corvidae; Corvidae</family><genus>Corvus; Corvus</genus>"
PARTED = "<order>Passeriformes; Piciformes</order>"
LAST_PARTS = FULL.replace("Corvus; Corvus", "Corvus; Pica")
ANSWERS = (
    "1.0000",
    "0.0000",
    "0.5",
    "0.9",
    "0.1",
    "1",
    "0",
    "0.3679",
    "7.0000",
    "-1",
    "1e0",
    "0_1",
    "nan",
    "",
    "x",
    "0.99999",
    "\u0661.\u0660",
    " 0.25 ",
    "00.5",
    "1/2",
    "True",
    "0.50001",
)
TAGGED = (
    FULL,
    PARTED,
    LAST_PARTS,
    "so alike",
    PARTED + "<genus>Corvus; Picus</genus>",
    FULL.replace("Passeriformes; Passeriformes", "Order Passeriformes; PASSERIFORMES."),
    FULL.replace("Corvus; Corvus", "Corvus; Corvus; Parus"),
    FULL.replace("; ", ", "),
    FULL.replace("Corvus; Corvus", "; "),
    FULL.replace("Corvus; Corvus", "Corvus; Other"),
    FULL.replace("Corvus; Corvus", "Pica; Corvus"),
    FULL.replace("Corvus; Corvus", "Corvus\u200b; Corvus"),
    FULL + FULL,
    FULL.upper(),
    FULL.replace("genus", "Genus"),
    FULL.replace("<", "\\<"),
    FULL.replace("<", "&lt;"),
    "<genus>Corvus; Corvus</genus>" + PARTED,
    "<order>P; P",
    FULL.replace("Corvus; Corvus", "nan; nan"),
    FULL.replace("Corvus; Corvus", "x" * 700 + "; y"),
    "<order></order>",
    "<order>Passeriformes; Passeriformes</order>",
    "<family>Corvidae; Picidae</family>",
    " \u00a0\u200b",
    "",
)
WORDS = (
    ("Same", "Same", "Same"),
    ("Different",),
    ("Same", "Different"),
    ("Same", "Same", "Different"),
    ("Uncertain", "Uncertain", "Uncertain"),
    ("same", "DIFFERENT"),
    ("Same",),
    ("Different", "Same", "Same"),
    ("Same", "Uncertain", "Same"),
    ("Diff",),
    ("", "Same", "Same"),
    ("Different", "Different", "Different"),
    ("Order Same", "Same.", "Same"),
    ("Unsure",),
)
FRAMES = (
    "<think>{}</think><answer>1.0000</answer>",
    "<think>{}</think><answer>0.0000</answer>",
    "<think>{}</think>\n<answer>0.8</answer>\n",
)
SLIPS = (
    "<think>{}</think><answer>1.0000<answer>",
    "<think>{}<think><answer>1.0000</answer>",
    "<think>{}<answer>1</answer>",
    "<think>{}<think><answer>0<answer>",
    "{}",
    "<answer>1</answer>",
    "<think>{}</think>",
    "<think>{}",
    "1",
    "",
    "x<think>{}</think><answer>1</answer>",
    "<think>{}</think><answer>1</answer>x",
    "<THINK>{}</THINK><ANSWER>1</ANSWER>",
    "<think>{}</think>junk<think>b</think><answer>1</answer>",
    "<think>{}</think><answer>1</answer><answer>0</answer>",
    "<think><answer>1</answer>{}</think><answer>0</answer>",
    "<answer>1</answer><think>{}</think>",
    "<think>{}</think><answer><answer>1</answer>",
    "\ufeff<think>{}</think><answer>1</answer>",
    "<think><think>{}</think></think><answer>1</answer>",
    "<think></think>{}<answer>1</answer>",
    "<think>{}</think><answer>1\u202e</answer>",
    "\\<think\\>{}\\</think\\>\\<answer\\>1.0000\\</answer\\>",
)


def given(response: str, truth: Mapping[str, Any], finish: str = "stop", tokens: int = 0, **columns: Any) -> Input:
    return {"response": response, "truth": dict(truth), "columns": columns, "finish": finish, "num_tokens": tokens}


def pair_inputs(bodies: tuple[str, ...], body: str, parted: str) -> Iterator[Input]:
    """Inputs of a reward for pairs. `body`, `parted`: what is right of ALIKE and of ORDERS_DIFFER."""
    for text in bodies:
        for truth in PAIR_TRUTHS[:4]:
            yield given(FRAMES[0].format(text), truth)
        for truth in PAIR_TRUTHS[1:3]:
            yield given(FRAMES[1].format(text), truth)
    for truth in PAIR_TRUTHS:
        yield given(FRAMES[2].format(body), truth)
        yield given(FRAMES[1].format(parted), truth)
    for answer in ANSWERS:
        for text, truth in ((body, ALIKE), (parted, ORDERS_DIFFER)):
            yield given(f"<think>{text}</think><answer>{answer}</answer>", truth)
    for frame in SLIPS:
        yield given(frame.format(body), ALIKE)
    for truth in BROKEN_TRUTHS:
        yield given(FRAMES[0].format(body), truth)
        yield given("no", truth)
    yield given(FRAMES[0].format(body), ALIKE, "length")
    yield given(FRAMES[0].format(body), ALIKE, "length", 900)
    yield given(FRAMES[0].format(body), pair(False, ["\u0130" * 300, "i" * 300], None, None))


def relation_inputs() -> Iterator[Input]:
    bodies = tuple(
        "".join(f"<{level}>{word}</{level}>" for level, word in zip(LEVELS, words, strict=False) if word)
        for words in WORDS
    )
    yield from pair_inputs((*bodies, "", "so alike", "<genus>Same</genus>"), bodies[0], bodies[1])
    for distance in range(6):
        for body in bodies[:4]:
            yield given(FRAMES[1].format(body), {"same": distance == 0, "distance": distance})


def label_inputs() -> Iterator[Input]:
    truths = [
        {"same": False, "age_group": ["SubAdult", "Adult"], "species": ["Asterias rubens", "Anthenea australiae"]},
        {"same": True, "age_group": ["Adult", "Adult"], "species": ["Asru", "Asru"]},
        {"same": False, "age_group": None, "species": ["nan", "nan"]},
        {"same": False, "age_group": ["Juvenil", "adult"], "species": ["Anau", "asru"]},
        {"same": True, "age_group": ["Teen", "Adult"], "species": ["Asteria", "Asru"]},
        {"same": True, "age_group": ["Infant", "Adult"], "species": ["Asru", "Anau"]},
    ]
    written = (
        "SubAdult; Adult",
        "sub-adult; ADULT",
        "Sub Adult; Sub_Adult",
        "Adult; Adult",
        "Adult;SubAdult",
        "Adult",
        "Teen; Adult",
        "Adult or Juvenile; Adult",
        "Image1=SubAdult; Image2=Adult",
        "image 1 = SubAdult; IMAGE2=Adult",
        "; ",
        "",
        "Image2=SubAdult; Image1=Adult",
        "Juvenil; Adult",
        "SubAdult; Adult; Infant",
        "Asru; Anau",
        "Asterias rubens; asru",
        "not Asterias but Anthenea; Asru",
        "Image1=Asru; Image2=Anau",
        "unlike Asterias, Anthenea australiae; Anau",
    )
    for text in written:
        for tag in ("age-group", "species"):
            for truth in truths[:3]:
                yield given(f"<think>so <{tag}>{text}</{tag}></think><answer>0.1</answer>", truth)
    for truth in truths:
        yield given("<think>x <age-group>SubAdult; Adult</age-group></think><answer>0.9</answer>", truth)
        yield given("<think>x <species>Asru; Asru</species></think><answer>0</answer>", truth)
    for frame in SLIPS:
        yield given(frame.format("<species>Asru; Asru</species>"), truths[1])
    yield given("<think><type>Adult; Adult</age-group></think><answer>1</answer>", truths[1])
    yield given("<think><species>Asru; Asru</species></think><answer>1</answer>", truths[1], "length")


def published_inputs() -> Iterator[Input]:
    texts = {
        "answer": ["1", "0", "0.7", "", "x"],
        "bird": ["1;sameSpecies;Corvus;Corvidae;Passeriformes;Corvus;Corvidae;Passeriformes"],
        "fungi": ["0;Corvidae;Corvus;Passeriformes;sameOrder;Picidae;Picus;Passeriformes", "1"],
        "chimp": ["1;Adult;Adult", "0;SubAdult;Adult"],
        "gorilla": ["0;Silverback;Infant", "1;Adult;M;Infant"],
        "sea_star": ["1;Asru;Asru", "0;Asru;Anau"],
    }
    spec = importlib.util.spec_from_file_location("generate", Path(__file__).parent / "taxonrl" / "generate.py")
    assert spec and spec.loader
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    for domain, truths in texts.items():
        for response, truth in generate.samples(domain, 5, seed=16):
            yield given(response, {"ground_truth": truth})
        for truth in truths:
            for text in (
                FULL,
                "<age-group>Adult; Adult</age-group>",
                "<type>Silverback; Infant</type>",
                "<species>Image1=Asru; Image2=Anau</species>",
                "<order>Same</order>",
            ):
                yield given(f"<think>{text}</think><answer>1.0000</answer>", {"ground_truth": truth})
    for frame in SLIPS:
        yield given(frame.format(FULL).replace(">1<", ">1.0000<"), {"ground_truth": "1"})
    for truth in (None, True, 1, 0.3, "1;sameSpecies;a"):
        yield given("<think>a</think><answer>1.0000</answer>", {"ground_truth": truth, "same": True})
    typed: tuple[dict[str, Any], ...] = (
        ALIKE,
        ORDERS_DIFFER,
        {"same": True},
        {"same": "yes"},
        {},
        {"same": False, "species": ["Asru", "Anau"]},
        {"same": True, "age_group": ["Adult", "SubAdult"]},
        {"same": False, "type": ["Silverback", "Infant"]},
        {"same": True, "age_group": ["Adult", "Teen"]},
        {"same": True, "distance": 7},
        pair(True, "a", None, None),
        pair(True, ["a;b", "a"], None, None),
        pair(False, ["a", "b"], ["c", "c"], None),
        {"same": False, "species": ["Asterias rubens", "Anthenea australiae"]},
        pair(True, ["a", "b"], None, None),
        {"same": False, "species": ["Corvus", "Corvus"], "genus": ["Corvus", "Corvus"]},
        pair(False, None, None, None, distance=0),
    )
    for truth in typed:
        yield given(FRAMES[0].format(FULL), truth)
        yield given("<think><species>Asru; Anau</species></think><answer>0.2000</answer>", truth)


def answer_inputs() -> Iterator[Input]:
    answers = (
        "42",
        " 42 ",
        "042",
        "42.0",
        "1,042",
        "1,42",
        "-42",
        "+42",
        "4 2",
        "forty-two",
        "Paris",
        "paris  ",
        "PARIS",
        "",
        "\u0664\u0662",
        "4e1",
        "inf",
        "42%",
        "42.4",
        "41.6",
        "0x2a",
        "4_2",
        "9" * 320,
    )
    for truth in ("42", 42, 42.0, "Paris", ["Paris", "42"], ["no"], "", "1,042", "inf", None, True):
        for answer in answers[:17]:
            yield given(f"<answer>{answer}</answer>", {"answer": truth})
    for answer in answers:
        yield given(answer, {"answer": "42"})
    for text in (
        "<answer>42</answer><answer>42</answer>",
        "<answer>42",
        "42</answer>",
        "<ANSWER>42</ANSWER>",
        "so <answer>42</answer> ok",
    ):
        yield given(text, {"answer": "42"})
        yield given(text, {"answer": "42"}, "length")
    places: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
        ({}, {}),
        ({}, {"solution": "42"}),
        ({}, {"reward_model": {"ground_truth": "42"}}),
        ({"only": "42"}, {}),
        ({"only": None}, {}),
        ({"target": "42", "label": "7"}, {}),
        ({}, {"mine": "42"}),
        ({"a": "42", "b": "42"}, {}),
    )
    for truth, columns in places:
        yield given("<answer>42</answer>", truth, **columns)


def tag_inputs() -> Iterator[Input]:
    for text in (
        "<think>a</think><answer>b</answer>",
        " <think>a</think>\n<answer>b</answer>\n",
        "<think></think><answer>b</answer>",
        "<think>\u200b</think><answer>b</answer>",
        "x<think>a</think><answer>b</answer>",
        "<answer>b</answer><think>a</think>",
        "<think>a</think>",
        "<think>a</think><answer>b",
        "<think>a<think>c</think></think><answer>b</answer>",
        "",
        "b",
        "<Think>a</Think><answer>b</answer>",
        "<think>a</think><answer>b</answer><answer>b</answer>",
        "<a>1</a><b>2</b>",
        "<a>1</a>",
        "<think>a</think>\u200b<answer>b</answer>",
    ):
        yield given(text, {})
        yield given(text, {}, "length")


def length_inputs() -> Iterator[Input]:
    for tokens in (0, 1, 5, 10, 11, 12, 15, 19, 20, 21, 1000):
        for finish in ("stop", "length"):
            yield given("x", {}, finish, tokens)


def rules_inputs() -> Iterator[Input]:
    """Two labelled boxes with an arrow: whole, moved, without the arrow, with another label, broken."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 400 200">'
    tip = '<path d="M0 0L9 5L0 9Z"/>'
    mark = f'<defs><marker id="m" markerWidth="10" markerHeight="10" orient="auto">{tip}</marker></defs>'
    box = '<rect x="{x}" y="60" width="90" height="60" fill="#ff0000" stroke="#000000"/>'
    box += '<text x="{t}" y="95">{name}</text>'
    arrow = '<line x1="120" y1="90" x2="250" y2="90" stroke="#000000" stroke-width="2" marker-end="url(#m)"/>'
    first, second = box.format(x=30, t=60, name="one"), box.format(x=250, t=280, name="two")
    truth = f"{head}{mark}{first}{second}{arrow}</svg>"
    responses = [
        truth,
        f"{head}{mark}{first}{second}</svg>",
        truth.replace("two", "three"),
        truth.replace('x="250" y="60"', 'x="250" y="110"'),
        truth.replace("#ff0000", "#0000ff"),
        truth.replace("</svg>", "<rect"),
        "no code",
    ]
    for response in responses:
        yield {"response": response, "truth": {"svg": truth}}


def svg_inputs() -> Iterator[Input]:
    """Figures of shapes, a line, a word and a framed page: each truth beside each response."""
    head = '<svg xmlns="http://www.w3.org/2000/svg" width="60" height="40">'
    box, disc = '<rect x="5" y="5" width="20" height="15" fill="red"/>', '<circle cx="45" cy="25" r="10" fill="blue"/>'
    line = '<line x1="10" y1="35" x2="40" y2="35" stroke="black" stroke-width="2"/>'
    word = '<text x="5" y="20" font-size="14">axis</text>'
    page = '<rect width="60" height="40" fill="white" stroke="gray" stroke-width="4"/>'
    contents = (box, box + disc, box + disc + line, disc + box.replace("red", "green"), word, page + box)
    figures = [f"{head}{content}</svg>" for content in contents]
    responses = [
        *figures,
        f"```svg\n{figures[1]}\n```",
        figures[1].replace('x="5"', 'x="9"'),
        figures[1].replace("<rect", "<rect opacity='0.01'"),
        f"{head}</svg>",
        f"{head}{page}</svg>",
        figures[0][:-6],
        "no code",
        f"{head}<script/></svg>",
        f'{head}<image href="data:image/png;base64,AA=="/>{box}</svg>',
    ]
    for truth in figures:
        for response in responses:
            yield {"response": response, "truth": {"svg": truth}}


def response_inputs() -> Iterator[Input]:
    for text in (
        "<think>so</think>It is 5.", "<think></think>5", "<think>so</think>", "a<think>so</think>5", "<think>so", "",
        "5",
        "<think>a</think><think>b</think>5", "\u043e\u0442\u0432\u0435\u0442 5", "so \u7b54\u6848 \u03b1 = 5",
        "\uc815\ub2f5",
    ):  # fmt: skip
        yield given(text, {"answer": "5"})
        yield given(text, {"answer": "5"}, "length", 3)


def math_inputs() -> Iterator[Input]:
    """Answers on which the arguments of `math` disagree; tests/golden/math/pairs.jsonl has the default's verdicts."""
    pairs = (
        ("20", "20"), ("20", "21"), ("12 cm", "12"), ("12 cm", "12 in"), ("12 cm", "0.12 m"), ("45^\\circ", "45"),
        ("45^\\circ", "45^\\circ"), ("20\\%", "20"), ("20\\%", "0.2"), ("20", "20\\%"), ("\\$20", "20"), ("\\$20",
        "\u20ac20"),
        ("6\\sqrt{5}", "13.4"), ("6\\sqrt{5}", "13.416"), ("\\{1,2\\}", "(1,2)"), ("\\{1,2\\}", "2,1"), ("[1,2)",
        "(1,2)"),
        ("[1,2)", "[1,2)"), ("B", "B. 45"), ("B", "B"), ("2.5", "2\\frac{1}{2}"), ("1", "2\\frac{1}{2}"), ("x+1",
        "1+x"),
    )  # fmt: skip
    for gold, answer in pairs:
        yield given(f"<think>so</think>It is \\boxed{{{answer}}}.", {"answer": gold})
    for text in ("It is <answer>20</answer>.", "20", "<think>\\boxed{20}</think>", "<answer>\\boxed{20}</answer>", ""):
        yield given(text, {"answer": "20"})
        yield given(text, {"answer": ["19", "20"]}, "length", 2)
    yield given("\u043e\u0442\u0432\u0435\u0442 \\boxed{20}", {"answer": "20"})
    yield given("\\boxed{20}", {"answer": ""})
    yield given("\\boxed{20}", {"answer": "So \\boxed{20}."})


def maye_inputs() -> Iterator[Input]:
    texts = (
        "So \\boxed{20}.", "So \\boxed{21}.", "<think>a</think> \\boxed{20}", "<think></think> no", "",
        "\u7b54\u6848 \\boxed{20}",
        "\\boxed{20}. I hope this boxed answer helps.", "\\boxed{20^3}", "\\boxed{1, 200, 3}",
    )  # fmt: skip
    for text in texts:
        for gold in ("\\boxed{20}", "So it is \\boxed{20^\\circ}.", "\\boxed{1, 2, 3}", "20"):
            yield given(text, {"solution": gold}, "stop", 12)
        yield given(text, {"solution": "\\boxed{20}"}, "length", 12)
        yield given(text, {"solution": "\\boxed{20}"}, "stop", 1)


CASES: dict[str, tuple[list[Args], list[Input]]] = {
    **TASK_CASES,
    "taxonomy": (
        [
            {"levels": LEVELS},
            {"levels": LEVELS, "levels_decide": "different"},
            {"levels": LEVELS, "levels_decide": False},
            {"levels": LEVELS, "partial": False, "answer": "truncated_bce", "complete": False},
            {"levels": LEVELS, "consistency": "part", "relaxed": True, "levels_weight": 0.6, "format_weight": 0.1},
            {"levels": ["family", "genus"], "consistency": "off", "aliases": {"Other": "Corvus"}},
        ],
        list(pair_inputs(TAGGED, FULL, PARTED)),
    ),
    "taxonomy_relations": (
        [
            {"levels": LEVELS},
            {"levels": LEVELS, "levels_decide": "different", "answer": "truncated_bce"},
            {"levels": LEVELS, "consistency": "part", "relaxed": True, "aliases": {"Pica": "Corvus"}},
            {
                "levels": LEVELS,
                "consistency": "off",
                "levels_decide": False,
                "levels_weight": 0.2,
                "format_weight": 0.0,
            },
        ],
        list(relation_inputs()),
    ),
    "pair_answer": (
        [{}, {"answer": "truncated_bce", "format_weight": 0.5}, {"relaxed": True}],
        list(pair_inputs(TAGGED[:6], "so alike", "so other")),
    ),
    "pair_labels": (
        [
            AGES,
            AGES | {"named": True},
            AGES | {"partial": False, "consistency": "off", "answer": "truncated_bce"},
            SPECIES,
            SPECIES | {"levels_decide": True, "consistency": "part", "relaxed": True},
            SPECIES | {"field": "age_group"},
            AGES | {"levels_weight": 0.1, "format_weight": 0.3, "named": True, "relaxed": True},
        ],
        list(label_inputs()),
    ),
    "taxonrl": (
        [
            *({"function": f"{file}:compute_score"} for file in ("lfw", "lfw_relax_format", "lfw_bird_im_basic")),
            {"function": "lfw_bird_im_basic:compute_score_gemini"},
            *(
                {"function": f"lfw_bird_im_concrete{share}:compute_score_gemini"}
                for share in ("", "_20p", "_60p", "_80p")
            ),
            {"function": "lfw_bird_im_concrete:compute_score", "format_weight": 0.5},
            {"function": "lfw_fungi_im:compute_score"},
            {"function": "lfw_fungi_im:compute_score_gemini", "layout": "answer"},
            {"function": "lfw_fungi_im:compute_score_gemini"},
            *(
                {"function": f"{file}:compute_score_{kind}"}
                for kind in ("gemini", "chatgpt")
                for file in ("lfw_intermediate", "lfw_intermediate_gorilla", "lfw_sea_star_im")
            ),
            {"function": "lfw_sea_star_im:compute_score_chatgpt", "format_weight": 0.5},
        ],
        list(published_inputs()),
    ),
    "exact_match": (
        [{}, {"tag": None}, {"require_tag": True}, {"key": "mine"}, {"tag": "think", "key": "target"}],
        list(answer_inputs()),
    ),
    "token_f1": (
        [{}, {"tag": None}, {"require_tag": True}, {"key": "mine"}],
        list(answer_inputs()),
    ),
    "number_match": (
        [{}, {"tolerance": 0.5}, {"tag": None}, {"require_tag": True, "key": "answer"}],
        list(answer_inputs()),
    ),
    "format_tags": ([{}, {"tags": ["a", "b"]}, {"tags": ["answer"]}], list(tag_inputs())),
    "length": ([{"soft_tokens": 10, "max_tokens": 20}, {"soft_tokens": 1, "max_tokens": 2}], list(length_inputs())),
    "think_format": ([{}], list(response_inputs())),
    "language": ([{}, {"script": "cyrillic"}, {"script": "han"}], list(response_inputs())),
    "ending": ([{}, {"min_tokens": 4}], list(response_inputs())),
    "math": (
        [
            {},
            {"place": "tag"},
            {"place": "text", "thought": "read"},
            {"units": "required", "degrees": "required"},
            {"units": "ignored", "degrees": "ignored", "money": "ignored", "percent": "ignored"},
            {"percent": "value", "money": "required"},
            {"decimals": 0},
            {"decimals": 5},
            {"sets": "loose"},
            {"intervals": "ends"},
            {"choices": "exact"},
            {"mixed": "product"},
            {"key": "answer", "min_tokens": 4},
        ],
        list(math_inputs()),
    ),
    "svg": ([{}, {"key": "svg", "images": "drop"}], list(svg_inputs())),
    "vfig_rules": ([{}, {"key": "svg"}], list(rules_inputs())),
    "maye": ([{}, {"min_tokens": 0, "penalty": -0.5}], list(maye_inputs())),
    "rllava_math": ([{}, {"key": "answer", "format_weight": 0.5}], list(maye_inputs())),
}
"""Built-in -> (arguments, inputs): each is scored with each."""
