"""README and docs/ hold: commands and their options, recipe keys, files, links, the table of where things are."""

from __future__ import annotations

import re

import pytest
from readme_commands import PAGES, ROOT, all_commands, code_spans, options_of, read_page, typed_commands

COMMANDS = all_commands()
GROUPS = {command[0] for command in COMMANDS if len(command) > 1}
TYPED = sorted({(page, tuple(words)) for page in PAGES for words in typed_commands(read_page(page))})
OPTIONS = set().union(*(options_of(command) for command in COMMANDS.values()))
OTHERS_OPTIONS = {"--no-build-isolation", "--compile-bytecode"}
"""Options of pip and uv that the pages name."""


def where_table() -> list[tuple[str, str]]:
    """(what one wants, path) of each path in the table."""
    table = read_page("docs/design/index.md").split("| I want | file |")[1].split("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|") and "---" not in line]
    return [(want.strip(), path) for want, files in rows for path in re.findall(r"`([^`]+)`", files)]


@pytest.mark.parametrize(("want", "path"), where_table())
def test_every_file_of_the_table_is_there(want: str, path: str) -> None:
    assert (ROOT / path).exists(), f"the table sends those who want {want} to {path}, which is not there"


def test_the_table_is_read_whole() -> None:
    assert len(where_table()) >= 20


@pytest.mark.parametrize(
    ("page", "typed"), TYPED, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_every_command_of_a_page_exists_and_takes_its_options(page: str, typed: tuple[str, ...]) -> None:
    words = list(typed)
    names = [w for w in words if not w.startswith("-")]
    if not names:
        assert words == ["--help"]
        return
    if names[0] == "prep" and any(".py:" in name for name in names):  # a file of the reader, with options of its own
        assert {w for w in words if w.startswith("-")} <= {"--out", "--help"}
        return
    known = [n for n in (2, 1) if tuple(names[:n]) in COMMANDS]
    if len(names) == 1 and names[0] in GROUPS:
        return  # the group as a whole
    assert known, f"{page}: there is no command `vlmrl {' '.join(names[:2])}`"
    accepted = options_of(COMMANDS[tuple(names[: known[0]])])
    used = [w.split("=")[0] for w in words if w.startswith("-")]
    assert not set(used) - accepted, f"{page}: `vlmrl {' '.join(words)}`: {sorted(set(used) - accepted)} is no option"


def test_the_pages_show_the_commands_of_a_projects_life() -> None:
    shown = {words[0] for _, words in TYPED}
    assert shown >= {name for name, *_ in COMMANDS}, "commands that no page shows"


@pytest.mark.parametrize("page", PAGES)
def test_every_option_in_backticks_exists(page: str) -> None:
    """An option of a command, or of a script: then it stands in the script."""
    spans = [span for span in code_spans(read_page(page)) if not re.match(r"(?:vlmrl|pip|docker) ", span)]
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    scripts = "".join(
        p.read_text("utf-8") for p in (ROOT / "scripts").rglob("*") if p.suffix in ("", ".py") and p.is_file()
    )
    prep = (ROOT / "vlmrl" / "tasks").rglob("*.py")
    scripts += "".join(
        p.read_text("utf-8").replace("_", "-") for p in prep
    )  # options of `vlmrl prep TASK` are arguments
    unknown = {o for o in named - OPTIONS - OTHERS_OPTIONS if o not in scripts and f"{o[2:]}:" not in scripts}
    assert unknown == set()


def recipe_keys() -> tuple[set[str], set[str]]:
    """Every key of a recipe, dotted, and the names of its tables."""
    from vlmrl.recipe.explain import all_keys

    keys = set(all_keys())
    return keys, {key.partition(".")[0] for key in keys}


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_key_exists(page: str) -> None:
    """In backticks, in `--set`, and in headers of tables."""
    keys, tables = recipe_keys()
    text = read_page(page)
    spans = code_spans(text)
    dotted = rf"(?<![\w./-])((?:{'|'.join(sorted(tables))})\.[a-z_][\w.]*)(?![\w/(])"
    named = {key for span in spans for key in re.findall(dotted, span)}
    named |= set(re.findall(r"--set '?([a-z_]+\.[\w.]+)=", text))
    named |= set(re.findall(r"--grid ([a-z_]+\.[\w.]+)=", text))
    free = ("reward.args.", "reward.weights.", "data.columns.", "eval.weights.", "eval.settings.", "paper.numbers")
    files = re.compile(r"\.(json|toml|py|md)$")
    known = {*keys, *(key.rpartition(".")[0] for key in keys)}  # a list of tables, as `data.rewards`, is a key too
    assert {key for key in named if key not in known and not key.startswith(free) and not files.search(key)} == set()
    headers = {name for span in spans for name in re.findall(r"^\[\[?([a-z.]+)\]\]?(?= |$)", span)}
    assert {name for name in headers if name.partition(".")[0] not in tables} == set()


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_and_script_and_test_it_names_exists(page: str) -> None:
    named = set(re.findall(r"(?<![\w/])(?:recipes|scripts|tests|vlmrl)/[\w./-]*\w", read_page(page)))
    assert sorted(n for n in named if not (ROOT / n).exists()) == []


def test_no_page_but_the_design_names_a_module() -> None:
    named = {page: re.findall(r"vlmrl/[\w/]+\.py", read_page(page)) for page in PAGES if "design" not in page}
    assert {page: paths for page, paths in named.items() if paths} == {}


@pytest.mark.parametrize("page", PAGES)
def test_every_recipe_that_a_page_names_is_shipped(page: str) -> None:
    from vlmrl.recipe.explain import list_recipes

    shipped = {recipe.name for recipe in list_recipes()}
    of_commands = {
        words[1]
        for name, words in TYPED
        if name == page and words[0] in ("train", "sft", "check", "try") and len(words) > 1
    }
    names = {word for word in of_commands if re.fullmatch(r"[a-z_0-9]+", word)} - {"last"}
    assert names <= shipped


def test_the_page_of_taxonrl_names_every_recipe_of_it() -> None:
    from vlmrl.recipe.explain import list_recipes

    table = read_page("docs/experiments/taxonrl.md").split("| domain | question | recipes |")[1].split("\n\n")[0]
    named = re.findall(r"`([a-z_0-9]+)`", table)
    of_other_tasks = (
        "digits_", "geometry_", "omniglot_", "counting_", "grounding_", "ovd_", "maye_", "smoke", "math_", "geoqa_",
        "text_math_", "wemath_", "rllava/", "figures_", "vfig_", "crop_", "python_", "gui_", "page_",
    )  # fmt: skip
    shipped = {recipe.name for recipe in list_recipes() if recipe.kind != "base"}
    assert sorted(name for name in shipped if not name.startswith(of_other_tasks)) == sorted(named)


def test_the_page_of_maye_names_every_recipe_of_it() -> None:
    from vlmrl.recipe.explain import list_recipes

    table = read_page("docs/experiments/maye.md").split("| recipes | what they are |")[1].split("\n\n")[0]
    named = re.findall(r"`(maye_[a-z_0-9]+)`", table)
    ends = [end for end in ("_published", "_sft") if f"the same with `{end}`" in table]
    own = [name + end for name in named for end in ("", *ends) if not (end and name.endswith("_zero"))]
    recipes = [recipe.name for recipe in list_recipes() if recipe.kind != "base" and recipe.name.startswith("maye_")]
    assert sorted(recipes) == sorted(own) and len(recipes) == 13


@pytest.mark.parametrize("page", PAGES)
def test_every_script_takes_the_options_that_a_page_gives_it(page: str) -> None:
    unknown = []
    for name, words in re.findall(r"scripts/((?:bench/)?[\w.-]+)((?: [^\s`#()]+)+)", read_page(page)):
        script = (ROOT / "scripts" / name).read_text("utf-8")
        script += "".join(
            (ROOT / "scripts" / started).read_text("utf-8") for started in re.findall(r"bench/\w+\.py", script)
        )
        own = words.partition(" vlmrl ")[0]  # `scripts/vllm-cpu vlmrl ...`: the rest is looked at as a command
        unknown += [
            (name, o) for o in re.findall(r" (--[a-z-]+)", own) if f'"{o}"' not in script and f"{o})" not in script
        ]
    scripts_of_vlmrl = {("demo", "--seed"), ("demo", "--task"), ("test", "--fast")}  # of `vlmrl demo`; of bash
    assert set(unknown) <= scripts_of_vlmrl


def test_every_table_of_measurements_has_its_command() -> None:
    sections = read_page("docs/measurements.md").split("\n## ")[1:]
    assert len(sections) >= 4
    assert [s.splitlines()[0] for s in sections if "\n|" in s and "scripts/" not in s] == []


def test_every_link_of_the_readme_leads_somewhere() -> None:
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", read_page("README.md"))}
    assert len(links) > 15
    assert {link for link in links if "://" not in link and not (ROOT / link).exists()} == set()
    on_a_page = {f"docs/{name}" for name in re.findall(r"\((?:docs/)([\w/-]+\.md)\)", read_page("README.md"))}
    assert on_a_page == set(PAGES) - {"README.md"}, "pages that README does not link to"


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md"])
def test_a_page_is_ascii_in_lines_of_120(page: str) -> None:
    """Tables and code are as wide as they must be."""
    text = (ROOT / page).read_text("utf-8")
    assert text.isascii()
    prose = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.M | re.S).splitlines()
    assert [line for line in prose if len(line) > 120 and not line.startswith("|")] == []


def test_the_readme_and_the_changelog_stay_short() -> None:
    lines = {name: len((ROOT / name).read_text("utf-8").splitlines()) for name in ("README.md", "CHANGELOG.md")}
    assert lines["README.md"] <= 200 and lines["CHANGELOG.md"] < 60


def test_every_shipped_recipe_says_how_it_is_used_by_a_command_that_exists() -> None:
    texts = [p.read_text(encoding="utf-8") for p in sorted((ROOT / "recipes").glob("*.toml"))]
    commands = [words for text in texts for words in typed_commands(text.replace("# ", ""))]
    assert texts and all(any(tuple(w[:n]) in COMMANDS for n in (1, 2)) or w[0] == "prep" for w in commands)
