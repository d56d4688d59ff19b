"""What is shown: in a terminal with and without colours, on a page, by the command; and that no text can fake it."""

import html
import io
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from rich.console import Console

from asyncrl.process import role_environment
from asyncrl.samples.page import answer, page
from asyncrl.samples.source import Found, Part, Wanted, find
from asyncrl.samples.terminal import answer as coloured
from asyncrl.samples.terminal import show
from asyncrl.samples.words import level


@pytest.fixture(scope="module")
def found(run):
    return find(Wanted(run))


def printed(found, run, **options):
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False, markup=False, emoji=False, **options)
    show(found, Wanted(run), console)
    return out.getvalue()


def test_without_colours_all_of_it_can_be_read(found, run):
    said = printed(found, run, no_color=True)
    assert "8 of 8 responses in the dumps of update 2, newest dump first" in said
    assert "The \u27e6sum \u27e7is 12.<|end|>" in said  # what the policy did not sample stands between the marks
    for words in ("What is 0 + 1?", "gold 0", "format 0.5, turns 2", "0.1 [0, 4) lag 1, 0.2 [4, 151) lag 0"):
        assert words in said, words
    assert "ended by length" in said and "furthest tokens" in said
    assert "\x1b" not in said


def test_no_text_of_a_model_can_break_or_fake_the_terminal(found, run):
    for options in ({"no_color": True}, {"force_terminal": True, "color_system": "256"}):
        said = printed(found, run, **options)
        # Only what rich itself writes for colours.
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", plain)
        assert r"\x1b[2Jreward 1\x0d\x07" in plain and r"\u202eabc \u27e6" in plain
        # What looks like markup is text, and no line of a model begins a line of the screen.
        assert "[bold red]x[/] <script>alert(1)</script>" in plain
        body = plain[plain.index("\u256d") :]
        assert all(line[0] in "\u256d\u2502\u2570" for line in body.splitlines() if line)


def test_colours_are_those_of_the_ratio():
    values = {0.049: 0, 0.05: 1, -0.05: -1, 0.2: 2, -0.5: -3, 1.0: 4, -70.0: -4, float("nan"): 0}
    assert {x: level(x) for x in values} == values and level(None) == 0
    line = coloured([Part("a", 0, 1, 2.0, True), Part("b", 1, 2, None, False), Part("c", 2, 3, -0.3, True)])
    assert line.plain == "a\u27e6b\u27e7c"
    assert next((line.plain[s.start : s.end], str(s.style)) for s in line.spans) == ("a", "bold white on dodger_blue2")


class Elements(HTMLParser):
    """Tags, with their attributes, and the text of the page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_and_runs_nothing(found, run):
    text = page(found, Wanted(run))
    elements = Elements(text)
    tags = {tag for tag, _ in elements.tags}
    assert tags.isdisjoint({"script", "link", "img", "iframe", "object", "embed", "form", "base", "bold"})
    hrefs = [a["href"] for tag, a in elements.tags if tag == "a"]
    names = {a["id"] for _, a in elements.tags if "id" in a}
    assert hrefs and {h.removeprefix("#") for h in hrefs} <= names and all(h.startswith("#") for h in hrefs)
    assert not any(name.startswith("on") or name in ("src", "style") for _, a in elements.tags for name in a)
    assert re.findall(r"https?:|url\(|@import", text) == []
    (meta,) = [a for tag, a in elements.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert meta["content"].startswith("default-src 'none'")


def test_the_page_shows_every_text_as_text(found, run):
    elements = Elements(page(found, Wanted(run)))
    for words in (
        "[bold red]x[/] <script>alert(1)</script>", "&amp; \"q\" 'r' </div>", r"\x1b[2Jreward 1\x0d\x07",
        r"fake \u202eabc \u27e6", "\u00e9\u65e5\N{GRINNING FACE}", "two\nlines    tab",
    ):  # fmt: skip
        assert words in elements.text, words
    unsampled = [a for tag, a in elements.tags if tag == "span" and a.get("class") == "n" and "title" in a]
    assert [a["title"] for a in unsampled] == [
        f"token {i}, version 0.2, not sampled by the policy" for i in (4, 5, 6, 7)
    ]
    assert "log pi/mu" in html.unescape(answer(found.samples[1]))


def test_lists_on_the_page_are_sorted_and_complete(found, run):
    text = page(found, Wanted(run))
    lists = dict(re.findall(r"<details.*?><summary>(.*?)</summary>(.*?)</details>", text, re.DOTALL))
    assert len(lists) == 6
    place = {name: [int(n) for n in re.findall(r"<a href=#r(\d+)>", body)] for name, body in lists.items()}
    assert place["as on this page"] == list(range(1, 9))
    assert all(sorted(numbers) == list(range(1, 9)) for numbers in place.values())
    by_length = [found.samples[n - 1].length for n in place["longest"]]
    assert by_length == sorted(by_length, reverse=True)
    by_reward = [found.samples[n - 1].reward for n in place["lowest reward"]]
    assert by_reward == sorted(by_reward)


def test_a_page_of_nothing_but_notes_is_still_one():
    from pathlib import Path

    text = page(Found(notes=["<b>left out</b>"]), Wanted(Path("a<b")))
    assert "&lt;b&gt;left out" in text and "Samples of a&lt;b" in text


def asyncrl(*arguments, **env):
    return subprocess.run(
        [sys.executable, "-m", "asyncrl", "samples", *map(str, arguments)], capture_output=True, text=True,
        timeout=120, env=role_environment(1) | env, encoding="utf-8", check=False,
    )  # fmt: skip


def test_the_command_prints_writes_a_page_and_refuses(run, tmp_path):
    shown = asyncrl(run, "--longest", "--limit", 1, "--update", 2)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "1 of 8 responses in the dumps of update 2, longest first" in shown.stdout and "long long" in shown.stdout
    file = tmp_path / "page.html"
    written = asyncrl(run, "--reward", 1, "--html", file)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("8 of 8 responses (reward 1) in the dumps of update 0, 2, newest dump first: ")
    assert file.read_text().count("<section") == 8
    for arguments, words in (
        ((run, "--stale", "--longest"), "give one of --worst-drift, --stale and --longest"),
        ((run, "--update", 1), "has no dump of update 1; it has 0, 2"),
        ((tmp_path,), "is no run folder"),
        ((run, "--html", tmp_path / "no" / "page.html"), "cannot be written"),
    ):
        refused = asyncrl(*arguments)
        assert (refused.returncode, refused.stdout) == (2, "") and words in refused.stderr


def test_a_terminal_without_unicode_gets_codes(run):
    shown = asyncrl(run, "--update", 2, "--limit", 2, PYTHONIOENCODING="ascii", PYTHONUTF8="0", LC_ALL="C")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii() and r"\xe9\u65e5\U0001f600" in shown.stdout
