"""heads.html holds the weights it was given, tells them where they are pointed at, and fetches and runs nothing."""

import base64
import html
import json
import re
import zlib

import numpy as np
import pytest
from browser import opened

from lab import headpage

EVIL = """</script><img src=x onerror="document.title='pwned'"><!--<script>]]>\\"""
WORDS = ["The", " king", " said", "\n", "the", " ", EVIL, " queen", "ü\t'\"&", "", " went", " home"]
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 9 9"><rect id="a" width="9" height="9"/>'
SVG += '<text>id="b"</text></svg>'


def attention(shape, seed, sd=1.5):
    """Random causal patterns of (n_layer, n_head, T): softmax of normal logits, as rows that sum to 1."""
    n_layer, n_head, T = shape
    luck, made = np.random.default_rng(seed), np.empty((n_layer, n_head, T, T), np.float32)
    for head in made.reshape(-1, T, T):
        head[:] = np.tril(np.exp(sd * luck.standard_normal((T, T), dtype=np.float32)))
        head /= head.sum(axis=1, keepdims=True)
    return made


def make_run(name, weights, tokens, group=1, w_o=True):
    n_layer, n_head, T, _ = weights.shape
    luck = np.random.default_rng(9)
    numbers = {"bias": False, "tokens": [1, T - 1],
               "heads": luck.normal(0, 1, (2, n_layer, n_head, 3)).astype(np.float32),
               "shares": luck.normal(0, 0.2, (2, n_layer, n_head, 10)).astype(np.float32)}  # fmt: skip
    labels = [[f"name {layer}.{h} <b>" for h in range(n_head)] for layer in range(n_layer)]
    return {"name": name, "facts": "facts <b>", "tokens": tokens, "weights": weights, "labels": labels,
            "kv_head_of": [h // group for h in range(n_head)], "w_o": numbers if w_o else None}  # fmt: skip


def make_content(runs):
    table = [{"head": f"0.{i}", "worth": (f"{v:+.2f}", v)} for i, v in enumerate((0.3, -1.5, 0.12))]
    return {
        "title": "Heads & <b>", "lead": ["First <b>.", "Second."], "runs": runs,
        "tables": [{"title": "Every head <b>", "text": "All <b>.", "rows": table}],
        "matrices": [{"title": "Pairs <b>", "text": "Apart <b>.", "names": ["0.0", "0.1", "0.2"], "max": 0.7,
                      "values": [[0, 0.7, 0.1234], [0.7, 0, float("nan")], [0.1234, float("nan"), 0]]}],
        "pictures": [{"title": "Worth <b>", "caption": "A caption <b>.", "svg": SVG}] * 2,
        "definitions": [("induction", "What came after <b>.")],
    }  # fmt: skip


def told(page, run=0):
    """(query, its token, key, its token, what is said of it), from the line of text below a map."""
    line = page.locator(".run").nth(run).locator(".told").inner_text()
    query, token, key, other, rest = re.fullmatch(r"from token (\d+) '(.*)' to token (\d+) '(.*)': (.*)", line).groups()
    return int(query), token, int(key), other, rest


def place(canvas, n, i, j):
    """Where on a map's canvas the middle of a cell is, in CSS pixels."""
    edge = int(canvas.get_attribute("data-edge"))
    side = (canvas.bounding_box()["width"] - edge) / n
    return {"x": edge + (j + 0.5) * side, "y": (i + 0.5) * side}


def painted(canvas, x, y):
    """How opaque a canvas is there, 0 to 255."""
    return canvas.evaluate("(c, [x, y]) => c.getContext('2d').getImageData(x, y, 1, 1).data[3]", [int(x), int(y)])


COLOURS = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size"
FITS = "document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def weights():
    return attention((2, 4, len(WORDS)), seed=1)


@pytest.fixture(scope="module")
def one(weights, tmp_path_factory):
    path = tmp_path_factory.mktemp("one") / "heads.html"
    assert headpage.write_page(make_content([make_run("mha", weights, WORDS)]), path) == []
    return path


@pytest.fixture(scope="module")
def page_open(browser, one):
    with opened(browser, one, drawn="yes") as page:
        yield page


@pytest.fixture
def page(page_open):
    page_open.reload()
    page_open.wait_for_selector("body[data-drawn=yes]")
    return page_open


def unpack(text, dtype=np.uint8):
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)


def data_of(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script type="application/json" id="heads">(.*?)</script>', text, re.S)[1])


def test_all_weights_are_packed_head_by_head_and_row_by_row():
    rows = np.array([[1, 0, 0], [0.5, 0.5, 0], [0.2, 0, 0.8]])
    other = np.array([[1, 0, 0], [0, 1, 0], [0.25, 0.25, 0.5]])
    packed = headpage.pack_whole(np.stack([rows, other]))
    assert unpack(packed["maps"]).tolist() == [255, 128, 128, 51, 0, 204, 255, 0, 255, 64, 64, 128]


def test_the_largest_weights_of_each_row_are_packed_with_how_far_apart_they_are():
    T = 600
    rows = np.eye(T)  # all look at themselves, but
    rows[3, :4] = 0.1, 0.2, 0.3, 0.4
    rows[599] = 0
    largest = {599: 0.04, 598: 0.08, 300: 0.12, 299: 0.16, 298: 0.2, 20: 0.1, 10: 0.09, 0: 0.15}
    rows[599, list(largest)] = list(largest.values())
    rows[599, 400] = 0.03  # the ninth
    packed = headpage.pack_largest(np.stack([rows, np.eye(T)]))
    low, high, kept = unpack(packed["maps"]).astype(int).reshape(3, -1)
    entries = sum(min(8, i + 1) for i in range(T))
    assert len(low) == 2 * entries and packed["kept"] == 8
    assert (low + 256 * high)[6:10].tolist() == [0, 1, 1, 1] and kept[6:10].tolist() == [102, 76, 51, 26]  # row 3
    last = slice(entries - 8, entries)
    assert (low + 256 * high)[last].tolist() == [0, 1, 298, 1, 1, 278, 10, 10]
    assert kept[last].tolist() == [round(255 * largest[key]) for key in (599, 598, 300, 299, 298, 20, 10, 0)]


def test_an_overview_holds_the_mean_of_each_block_over_what_can_be_seen():
    T = 128  # blocks of 2 x 2
    rows = np.tril(np.full((T, T), 0.01))
    rows[2:4, :2] = [[0.9, 0.1], [0.3, 0.7]]  # a mean of 0.5, the largest
    rows[0, 0], rows[1, :2] = 0.02, (0.03, 0.04)  # 0.03 over the three that can be seen
    packed = headpage.pack_largest(rows[None])
    blocks = unpack(packed["blocks"])
    assert (packed["side"], packed["step"], len(blocks)) == (64, 2, 64 * 65 // 2)
    assert packed["peaks"] == [pytest.approx(0.5)]
    assert blocks[:3].tolist() == [round(255 * (v / 0.5) ** 0.5) for v in (0.03, 0.5, 0.01)]


def test_what_does_not_fit_is_left_out_and_said(tmp_path, monkeypatch, weights):
    run = make_run("mha", weights, WORDS)
    path = tmp_path / "heads.html"
    monkeypatch.setattr(headpage, "WHOLE", 10)
    notes = headpage.write_page(make_content([run]), path)
    assert len(notes) == 1 and "8 largest" in notes[0] and html.escape(notes[0]) in path.read_text(encoding="utf-8")
    assert data_of(path)["runs"][0]["kept"] == 8
    with monkeypatch.context() as patch:
        patch.setattr(headpage, "W_O_LIMIT", 10)
        patch.setattr(headpage, "MATRIX", 2)
        notes = headpage.write_page(make_content([run]), path)
    assert ["W_O" in n for n in notes] == [False, True, False] and "pairs" in notes[2]
    assert data_of(path)["runs"][0]["w_o"] is None and data_of(path)["matrices"] == []


def test_a_text_is_cut_where_nothing_else_helps(tmp_path, monkeypatch):
    path = tmp_path / "heads.html"
    monkeypatch.setattr(headpage, "WHOLE", 10)
    whole, tokens = attention((1, 2, 64), seed=1), [f"t{i}" for i in range(64)]
    run = make_run("mha", whole, tokens)
    sizes = {}
    for T in (64, 32):
        part = make_run("mha", whole[..., :T, :T], tokens[:T])
        headpage.write_page(make_content([part]), path)
        sizes[T] = path.stat().st_size
    monkeypatch.setattr(headpage, "LIMIT", sum(sizes.values()) // 2)
    notes = headpage.write_page(make_content([run]), path)
    assert "first 32 tokens" in notes[0] and data_of(path)["runs"][0]["T"] == 32
    assert data_of(path)["runs"][0]["w_o"]["places"] == [[1, "t1"], [63, "t63"]]  # W_O keeps its own tokens


def test_text_cannot_leave_its_place(one, page):
    text = one.read_text(encoding="utf-8")
    assert "<img" not in text and text.count("<script") == text.count("</script>") == 3
    assert "<b>" not in text and text.count('id="picture-0-a"') == text.count('id="picture-1-a"') == 1
    assert page.locator("img").count() == 0 and page.title() == "Heads & <b>"
    assert page.locator("figure text").first.text_content() == 'id="b"'
    assert page.locator(".strip span").nth(6).inner_text() == EVIL
    assert "'unsafe-eval'" not in text and not re.search("(inner|outer|Adjacent)HTML|document.write", text)


def test_every_head_is_drawn_small_and_one_large(page, weights):
    assert page.locator(".overview button canvas").count() == 8
    assert all(canvas.evaluate(COLOURS) > 10 for canvas in page.locator(".overview canvas").all())
    large = page.locator(".run .grid")
    for head, (i, j) in ((0, (3, 1)), (5, (11, 2)), (7, (8, 8))):
        page.locator(".overview button").nth(head).click()
        at = place(large, len(WORDS), i, j)
        expected = 255 * weights[head // 4, head % 4, i, j] ** 0.5
        assert painted(large, at["x"], at["y"]) == pytest.approx(expected, abs=2)
        small = page.locator(".overview canvas").nth(head)
        assert painted(small, j, i) == pytest.approx(expected, abs=2)
        assert painted(small, i + 1 if i < 11 else 11, i - 1) == 0  # nothing of what comes later


def test_pointing_at_a_cell_tells_its_weight(page, weights):
    large = page.locator(".run .grid")
    page.locator(".overview button").nth(6).click()
    for i, j in ((0, 0), (7, 6), (11, 3), (10, 9)):
        large.hover(position=place(large, len(WORDS), i, j))
        query, _, key, _, rest = told(page)
        assert (query, key) == (i, j)
        assert abs(float(rest.removeprefix("weight ")) - weights[1, 2, i, j]) <= 1 / 255
    assert told(page)[1] == "␣went"
    large.hover(position=place(large, len(WORDS), 3, 4))
    assert told(page) == (3, "↵", 4, "the", "none, because it comes later")
    large.hover(position={"x": 5, "y": place(large, len(WORDS), 5, 0)["y"]})  # the name of row 5
    query, _, key, _, rest = told(page)
    assert (query, key) == (5, weights[1, 2, 5].argmax()) and rest.endswith(", its largest")


def test_arrow_keys_move_between_heads_and_between_tokens(page, weights):
    page.keyboard.press("Tab")  # the chosen head
    assert page.evaluate("document.activeElement.title") == "name 0.0 <b>"
    title = page.locator(".run h4")
    for key, head in (("ArrowRight", "0.1"), ("ArrowDown", "1.1"), ("ArrowDown", "1.1"), ("ArrowRight", "1.2"),
                      ("ArrowUp", "0.2"), ("ArrowLeft", "0.1"), ("ArrowUp", "0.1")):  # fmt: skip
        page.keyboard.press(key)
        assert title.inner_text() == f"Layer {head[0]}, head {head[2]}: name {head} <b>"
        assert page.locator("[aria-pressed=true]").get_attribute("title") == f"name {head} <b>"
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "layer 0, head 1: name 0.1 <b>"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "grid"
    assert told(page)[0] == 11
    for key, query in (("ArrowRight", 11), ("ArrowLeft", 10), ("ArrowLeft", 9), ("ArrowRight", 10)):
        page.keyboard.press(key)
        assert told(page)[0] == query and told(page)[2] == weights[0, 1, query].argmax()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.dataset.i") == "10"
    page.keyboard.press("ArrowLeft")
    assert told(page)[0] == 9


def test_the_text_shows_where_the_chosen_token_looks(page, weights):
    strip = page.locator(".strip span")
    shades = """spans => spans.map(span => {
      const found = getComputedStyle(span).backgroundColor.match(/[\\d.]+/g).map(Number)
      return found.length > 3 ? found[3] : 1 })"""
    for query in (0, 7, 4):
        strip.nth(query).hover()
        assert told(page)[0] == query
        expected = np.sqrt(weights[0, 0, query])
        np.testing.assert_allclose(page.locator(".strip span").evaluate_all(shades), expected, atol=0.025)
        selected = page.locator(".strip [aria-selected=true]")
        assert selected.count() == 1 and selected.get_attribute("data-i") == str(query)
    strip.nth(2).focus()
    assert told(page)[0] == 2


def test_w_o_is_shown_in_three_steps_and_shares_add_up(page, one, weights):
    numbers = make_run("mha", weights, WORDS)["w_o"]
    box, line = page.locator(".w-o"), page.locator("#w_o .told")
    canvas = box.locator("canvas")
    page.get_by_label("layer", exact=True).select_option("1")
    page.get_by_label("token", exact=True).select_option(label="1 '␣king'")
    assert "Step 1" in page.locator("#w_o").inner_text() and page.get_by_text("Back").is_disabled()
    heads, shares = numbers["heads"][0, 1], numbers["shares"][0, 1]
    assert canvas.evaluate(COLOURS) > 10
    canvas.hover(position={"x": 70 + 2 * 20 + 5, "y": 20 * 3 + 10})
    assert line.inner_text() == f"head 3, number 2: {heads[3, 2]:+.3f}"
    page.get_by_text("Next").click()
    assert "4 x 3 = 12" in page.locator("#w_o").inner_text() and canvas.evaluate(COLOURS) > 10
    canvas.hover(position={"x": (3 * 2 + 1) * 20 + 5, "y": 8})
    assert line.inner_text() == f"head 2, number 1: {heads[2, 1]:+.3f}"
    box.focus()
    page.keyboard.press("ArrowRight")
    assert "Step 3" in page.locator("#w_o").inner_text() and page.get_by_text("Next").is_disabled()
    for o in (0, 7, 9):
        canvas.hover(position={"x": 56 + o * 20 + 5, "y": 50})
        parts = re.fullmatch(rf"output {o}: (.*), sum (\S+)", line.inner_text())
        given = [float(part.split()[-1]) for part in parts[1].split(", ")]
        np.testing.assert_allclose(given, shares[:, o], atol=6e-4)
        assert float(parts[2]) == pytest.approx(shares[:, o].sum(), abs=6e-4)
        top, bottom = np.maximum(shares, 0).sum(axis=0), np.maximum(-shares, 0).sum(axis=0)
        high, x = max(top.max(), bottom.max()), 56 + o * 20 + 5
        for above, total in ((1, top[o]), (-1, bottom[o])):  # the bar ends where the shares of one sign add up
            end = 120 - above * total / high * 110
            assert painted(canvas, x, end - above * 3) == 0 or abs(shares[:, o].sum() * above - total) < 0.03
            assert painted(canvas, x, end + above * 2) == 255
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert "Step 1" in page.locator("#w_o").inner_text()


def test_tables_sort_and_matrices_tell_their_values(page):
    column = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[1].textContent)"
    page.get_by_role("button", name="worth").click()
    assert page.evaluate(column) == ["-1.50", "+0.12", "+0.30"]
    page.get_by_role("button", name="worth").press("Enter")
    assert page.evaluate(column) == ["+0.30", "+0.12", "-1.50"]
    pairs, line = page.locator("#matrix-0 .grid"), page.locator("#matrix-0 .told")
    for (i, j), text in (((0, 2), "0.0 and 0.2: 0.123"), ((1, 2), "0.1 and 0.2: no value")):
        pairs.hover(position=place(pairs, 3, i, j))
        assert line.inner_text() == text
    for (i, j), value in (((0, 1), 0.7), ((2, 0), 0.1234), ((1, 1), 0)):
        at = place(pairs, 3, i, j)
        assert painted(pairs, at["x"], at["y"]) == pytest.approx(255 * value / 0.7, abs=2)
    pairs.press("ArrowLeft")
    assert line.inner_text() == "0.1 and 0.1: 0.000"


def test_a_wide_table_wraps_the_names_of_its_columns(browser, tmp_path, weights):
    content = make_content([make_run("mha", weights, WORDS)])
    content["tables"][0]["rows"] = [{f"a score of many words {i} (chance 0.12)": ("0.12", 0.12) for i in range(10)}]
    headpage.write_page(content, tmp_path / "heads.html")
    with opened(browser, tmp_path / "heads.html", drawn="yes") as page:
        assert page.locator(".scroll").evaluate("box => box.scrollWidth <= box.clientWidth")


def test_runs_stand_side_by_side_and_share_the_token_of_equal_texts(browser, tmp_path, weights):
    other, third = attention((1, 6, len(WORDS)), seed=2), attention((1, 2, 5), seed=3)
    runs = [make_run("mha", weights, WORDS), make_run("gqa", other, WORDS, group=3), make_run("x", third, WORDS[:5])]
    headpage.write_page(make_content(runs), tmp_path / "heads.html")
    with opened(browser, tmp_path / "heads.html", drawn="yes") as page:
        a, b = (page.locator(".run").nth(i).bounding_box() for i in (0, 1))
        assert a["y"] == b["y"] and a["x"] + a["width"] <= b["x"]
        groups = page.locator(".run").nth(1).locator(".kv")
        assert groups.all_inner_texts() == ["0", "1"] and page.locator(".run").nth(0).locator(".kv").count() == 0
        spans = [group.bounding_box() for group in groups.all()]
        buttons = [button.bounding_box() for button in page.locator(".run").nth(1).locator("button").all()]
        for head, box in enumerate(buttons):  # each head stands below its own K/V head
            group = spans[head // 3]
            assert group["x"] - 1 <= box["x"] and box["x"] + box["width"] <= group["x"] + group["width"] + 1
        large = page.locator(".run").nth(1).locator(".grid")
        large.hover(position=place(large, len(WORDS), 7, 2))
        for run, its in ((0, weights), (1, other)):
            query, _, key, _, rest = told(page, run)
            assert (query, key) == (7, 2)
            assert abs(float(rest.removeprefix("weight ")) - its[0, 0, 7, 2]) <= 1 / 255
        assert told(page, 2)[0] == 4  # another text: untouched
        page.get_by_label("run", exact=True).select_option("gqa")
        assert page.get_by_label("layer", exact=True).locator("option").count() == 1
        page.set_viewport_size({"width": 390, "height": 800})
        page.wait_for_timeout(500)
        assert page.evaluate(FITS)
        a, b = (page.locator(".run").nth(i).bounding_box() for i in (0, 1))
        assert a["x"] == b["x"] and a["y"] + a["height"] <= b["y"]


def test_dark_and_a_phone(browser, one):
    with opened(browser, one, drawn="yes", width=390, color_scheme="dark") as page:
        assert page.evaluate(FITS)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 29)"
        assert page.locator(".card").first.evaluate("c => getComputedStyle(c).backgroundColor") == "rgb(255, 255, 255)"
        blue = "c => c.getContext('2d').getImageData(0, 0, 1, 1).data.join()"
        assert page.locator(".overview canvas").first.evaluate(blue) == "86,180,233,255"
        page.emulate_media(color_scheme="light")
        page.wait_for_timeout(300)
        assert page.locator(".overview canvas").first.evaluate(blue) == "0,114,178,255"
        width = page.locator(".run .grid").bounding_box()
        assert width["x"] > 0 and width["x"] + width["width"] <= 390


def test_a_large_model_keeps_the_largest_weights_and_fits(browser, tmp_path):
    weights = attention((12, 12, 1024), seed=4, sd=2)
    tokens = [f" t{i}" for i in range(1024)]
    run = make_run("large", weights, tokens)
    run["w_o"] = None
    path = tmp_path / "heads.html"
    notes = headpage.write_page(make_content([run]), path)
    assert path.stat().st_size < 5_000_000 and len(notes) == 1
    with opened(browser, path, drawn="yes") as page:
        assert page.locator(".note").inner_text() == notes[0] and "8 largest" in notes[0]
        assert page.locator(".overview canvas").count() == 144
        assert all(canvas.evaluate(COLOURS) > 10 for canvas in page.locator(".overview canvas").all())
        page.locator(".overview button").nth(143).click()
        assert page.locator(".run .grid").evaluate(COLOURS) > 10
        for query in (3, 700, 1023):
            page.locator(".strip span").nth(query).focus()
            best, *others = np.argsort(-weights[11, 11, query, : query + 1])
            assert told(page)[:3] == (query, f"t{query}", best)
            shown = page.locator(".strip span").evaluate_all(
                "spans => spans.flatMap((span, i) => span.style.background ? [i] : [])"
            )
            assert sorted(shown) == sorted([best, *others[:7]])
            assert abs(float(told(page)[4].split()[1].strip(",")) - weights[11, 11, query, best]) <= 1 / 255
