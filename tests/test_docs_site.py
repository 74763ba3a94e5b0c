"""The documentation as a site: it builds strictly, loads nothing from elsewhere, and its generated parts are whole."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
from readme_commands import ROOT, all_commands, read_page

SITE = ROOT / "scripts" / "docs_site" / "mkdocs.yml"


def build_site(config_file: Path, out: Path, **changes: object) -> None:
    """Build a site into `out`. Raises: mkdocs.exceptions.Abort for any warning."""
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    build(load_config(str(config_file), site_dir=str(out), **changes))


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Name -> HTML, of every page of the built site and every style sheet."""
    out = tmp_path_factory.mktemp("site")
    build_site(SITE, out)
    files = [*out.rglob("*.html"), *out.rglob("*.css")]
    return {path.relative_to(out).as_posix(): path.read_text("utf-8") for path in files}


def test_every_page_is_built(pages: Mapping[str, str]) -> None:
    sources = {p.relative_to(ROOT / "docs").with_suffix(".html").as_posix() for p in (ROOT / "docs").rglob("*.md")}
    assert sources == {name for name in pages if name.endswith(".html")} - {"404.html"}


def test_nothing_is_loaded_from_elsewhere(pages: Mapping[str, str]) -> None:
    """Links that a reader may follow are no loading: `<a href>` and the names of XML namespaces."""
    loaded = re.compile(
        r"(?:<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=|url\(|@import )\s*[\"']?(?:https?:)?//[^\"')\s>]+"
    )
    assert {name: loaded.findall(text) for name, text in pages.items() if loaded.search(text)} == {}


def test_comments_between_commands_look_like_comments(pages: Mapping[str, str]) -> None:
    assert '<span class="c1"># continues from the last complete checkpoint</span>' in pages["runs.html"]
    assert [name for name, text in pages.items() if '<span class="gp">#' in text] == []


def test_no_drawing_is_left_out(pages: Mapping[str, str]) -> None:
    assert [name for name, text in pages.items() if "<!-- drawing:" in text] == []


def test_the_pages_hold_what_the_code_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs_site"))
    from generated import PARTS, write_pages

    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    assert write_pages(tmp_path / "docs") == [], "run scripts/docs write"
    pages = [page.read_text("utf-8") for page in (tmp_path / "docs").rglob("*.md")]
    assert [name for name in PARTS if sum(f"<!-- generated: {name} -->" in page for page in pages) != 1] == []
    (tmp_path / "docs" / "old.md").write_text("<!-- generated: tasks -->\nan old table\n<!-- end: tasks -->\n")
    assert [page.name for page in write_pages(tmp_path / "docs")] == ["old.md"]


@pytest.mark.parametrize("text", ["[gone](gone.md)", "[gone](index.md#gone)", "[gone](/index.md)"])
def test_a_broken_link_stops_the_build(tmp_path: Path, text: str) -> None:
    from mkdocs.exceptions import Abort

    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{text}\n")
    shutil.copytree(ROOT / "scripts" / "docs_site", tmp_path / "scripts" / "docs_site")
    with pytest.raises(Abort):
        build_site(tmp_path / SITE.relative_to(ROOT), tmp_path / "site", nav=[{"A page": "index.md"}], extra_css=[])


def test_the_reference_has_every_command_with_its_options(pages: Mapping[str, str]) -> None:
    page = pages["reference/commands.html"]
    for words, command in all_commands().items():
        section = page.partition(f'id="vlmrl-{"-".join(words)}"')[2].partition("<h2")[0]
        options = {option for p in command.params for option in p.opts if option.startswith("--") and not p.hidden}
        assert section and [option for option in options if option not in section] == [], words


def test_the_reference_has_every_recipe_key_with_its_rule(pages: Mapping[str, str]) -> None:
    from vlmrl.recipe.changes import rule_of
    from vlmrl.recipe.explain import all_keys

    page = pages["reference/recipe.html"]
    for key in all_keys():
        section = page.partition(f"<code>{key}</code><a")[2].partition("<h3")[0]
        assert f"<em>on resume</em>: {rule_of(tuple(key.split('.'))).kind}:" in section, key


def test_the_index_of_papers_has_every_row_and_every_paper() -> None:
    from vlmrl.algo.algorithms import ALGORITHMS

    index = read_page("docs/algorithms.md").partition("## From a paper")[2].partition("\n## ")[0]
    named = re.findall(r'`name = "([^"]+)"`', index)
    assert set(named) == set(ALGORITHMS)
    papers = {paper for row in ALGORITHMS.values() for paper in re.findall(r"\d{4}\.\d{5}", row.summary)}
    assert papers <= set(re.findall(r"\[(\d{4}\.\d{5})\]", index))
    for line in index.splitlines():
        rows, cited = re.findall(r'`name = "([^"]+)"`', line), re.findall(r"\[(\d{4}\.\d{5})\]", line)
        if rows and rows[0] != "easyr1":  # the row is EasyR1's; the paper is that of the runs made with it
            assert cited[0] in ALGORITHMS[rows[0]].summary, line


def test_the_drawing_has_every_package_on_its_level(pages: Mapping[str, str]) -> None:
    from test_layers import LEVELS

    drawing = pages["design/index.html"].partition('aria-label="The levels')[2].partition("</svg>")[0]
    height = {name: float(y) for y, name in re.findall(r'y="([\d.]+)"[^>]*class="name">([^<]+)<', drawing)}
    packages = [name for name, level in LEVELS.items() if level > 0 and not name.startswith("__")]
    assert packages and set(packages) <= height.keys()
    words = (ROOT / "scripts" / "docs_site" / "drawings.py").read_text("utf-8").split("HOLDS = {")[1].split("}")[0]
    assert set(re.findall(r'"(\w+)":', words)) == set(packages), "words for packages that do not exist"
    below = [(a, b) for a in packages for b in packages if LEVELS[a] < LEVELS[b] and height[a] <= height[b]]
    assert below == []
