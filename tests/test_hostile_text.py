"""Text and names that come with other people's data are shown and never obeyed, on pages and on terminals."""

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from browser import opened
from texts import some_text

import bench
import compare
import heads
import prepare

pytestmark = pytest.mark.usefixtures("handlers_come_back")
TEXT = """</script><img src=x onerror="document.title='pwned'"><!--<script>]]>\u2028\u2029\u202e\\'"&amp;\u009b"""
TEXT += "\x1b]0;pwned\x07\n"
NAME = """a"><img src=x onerror=document.title=1>[red] :x: '&amp; ]]> url(#b"""  # a file's name, so without a slash
TITLE = "\x1b]0;pwned\x07\u202e"  # of a window, as terminals read it
CODED = r"\x1b]0;pwned\x07\u202e"
TINY = ["--n_layer", "1", "--n_head", "2", "--n_embd", "8", "--block_size", "128", "--batch_size", "1", "--max_steps",
        "4", "--eval_tokens", "200", "--threads", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A comparison of two designs, one of them of that name, on texts that hold that text; and the folder of all."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "texts").mkdir()
    (folder / "texts" / f"{TITLE}.txt").write_text(TEXT * 30 + some_text(300), encoding="utf-8")
    prepare.main([str(folder / "set"), "--files", str(folder / "texts")])
    for name in ("mha", NAME):
        (folder / f"{name}.toml").write_text(f"learning_rate = 0.00{len(name)}")
    files = [str(folder / f"{name}.toml") for name in ("mha", NAME)]
    words = ["--dataset", str(folder / "set"), "--out_dir", str(folder / "out"), "--seeds", "1", "--no-speed", *TINY]
    assert compare.main([*files, *words]) == 0
    return folder


def test_a_report_shows_names_and_samples_as_text(browser, compared):
    with opened(browser, compared / "out" / "report.html", drawn="light") as page:
        assert page.title() == f"Head designs compared: mha and {NAME}"
        assert page.locator("img").count() == 0
        assert page.locator("li b").first.inner_text().startswith(f"{NAME}: ")
        assert NAME in page.locator("h3").all_inner_texts()  # above its sample
        page.locator("th button").first.click()  # tables still sort
        assert page.locator("th[aria-sort]").count() == 1
    assert not (compared / "out" / "report.md").read_text(encoding="utf-8").count("<img")
    pictures = list((compared / "out").glob("*.svg"))
    tags = {element.tag.split("}")[1] for path in pictures for element in ET.parse(path).iter()}
    assert len(pictures) >= 2 and tags <= {"svg", "g", "path", "text", "defs", "clipPath", "rect", "line"}


def test_a_page_of_heads_shows_text_and_the_runs_name(browser, compared, command):
    run = Path(shutil.copytree(compared / "out" / f"{NAME}-1", compared / (TITLE + NAME)))
    status, out, err = command(heads, run, "--text", TEXT[:120], "--eval_tokens", 128)
    assert status == 0 and "\x1b" not in out + err and f"{CODED}{NAME}: loss" in out
    with opened(browser, run / "heads.html", drawn="yes") as page:
        assert page.title().endswith(CODED + NAME) and page.locator("img").count() == 0
        assert page.locator(".run h3").inner_text() == str(compared / (CODED + NAME))
        tokens = page.locator(".strip span").all_inner_texts()
        assert "".join(tokens).startswith("</script><img src=x onerror=\"document.title='pwned'\"><!--<script>]]>")
        for mark in (r"\u2028", r"\u202e", r"\u009b", r"\u001b", r"\u0007", "\\"):
            assert mark in tokens
        page.locator(".strip span").nth(tokens.index(r"\u202e")).hover()
        assert r"'\u202e'" in page.locator(".run .told").inner_text()


def test_a_terminal_is_told_names_and_not_moved_by_them(compared, command):
    status, out, err = command(prepare, compared / "again", "--files", compared / "texts")
    assert status == 0 and f"{CODED}.txt" in out and "\x1b" not in out + err
    status, out, err = command(prepare, compared / "none", "--files", compared / TITLE)
    assert status == 2 and f"{CODED} does not exist" in err and "\x1b" not in out + err
    (compared / "[red]:x:.toml").write_text("n_head = 2")
    assert command(bench, compared / "[red]:x:.toml", "--describe")[1].count(" [red]:x: ") == 3


def test_a_design_is_not_named_by_control_characters(compared, command):
    (compared / f"{TITLE}.toml").write_text("n_head = 2")
    status, _, err = command(compare, compared / f"{TITLE}.toml")
    assert status == 2 and f"{CODED}.toml cannot name a design" in err and err.count("\n") == 1
