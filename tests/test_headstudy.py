"""What is said of a head is true of a model that was wired by hand to have it."""

import html
import json
import math
import re
import shutil
import string
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import switches

import heads
import prepare
import sample
import train
from attention import DESIGNS
from data.probes import EXAMPLE, PREPOSITIONS, SENTENCE_WORDS
from data.tokenfile import IGNORED
from data.tokenizer import CharTokenizer, WordTokenizer
from lab.headreport import Part, page_content, saved
from lab.headstudy import (
    DEFINITIONS,
    Windows,
    ablations,
    arc_scores,
    interval,
    of_text,
    pruning,
    repeated,
    study,
    token_classes,
    types_of,
    written,
)
from lab.taps import changed, look, losses, mean_outputs, open_model, put, shares
from model import GPT, ModelConfig
from runtime.checkpoint import load_model, read_meta, write_meta
from runtime.errors import UserError

LETTERS = CharTokenizer(string.ascii_letters)
V, PLACES = LETTERS.vocab_size, 110
TOKEN, PLACE, BEFORE, GUESS = 0, V, V + PLACES, 2 * V + PLACES  # where in the stream what is written
WIDTH = 3 * V + PLACES
SHARP = 40.0


def copier(source, target, size):
    """A matrix that takes `size` numbers from one place of the stream to another."""
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[torch.arange(target, target + size), torch.arange(source, source + size)] = 1.0
    return matrix


@pytest.fixture(scope="module")
def wired():
    """An induction head by construction; head 1 of both layers does nothing.

    Head 0 of layer 0 looks one place back and writes the token it finds there; head 0 of layer 1 looks for a place
    before which the current token stands, and guesses the token that it finds.
    """
    model = GPT(ModelConfig(vocab_size=V, n_layer=2, n_head=2, head_dim=WIDTH, n_embd=WIDTH, d_ff=1, block_size=PLACES,
                            positions="learned", norm="rmsnorm"))  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.zero_()
        model.embed.weight[:, TOKEN : TOKEN + V] = torch.eye(V)
        model.embed_position.weight[:, PLACE : PLACE + PLACES] = torch.eye(PLACES)
        first, second = (block.attn for block in model.blocks)
        back = torch.zeros(WIDTH, WIDTH)
        back[torch.arange(PLACE, PLACE + PLACES - 1), torch.arange(PLACE + 1, PLACE + PLACES)] = SHARP
        first.w_q.weight[:WIDTH] = back
        first.w_k.weight[:WIDTH] = copier(PLACE, PLACE, PLACES)
        first.w_v.weight[:WIDTH] = copier(TOKEN, BEFORE, V) / math.sqrt(WIDTH / 2)  # as the norm stretched it
        first.w_o.weight[:, :WIDTH] = torch.eye(WIDTH)
        second.w_q.weight[:WIDTH] = SHARP * copier(TOKEN, BEFORE, V)
        second.w_k.weight[:WIDTH] = copier(BEFORE, BEFORE, V)
        second.w_v.weight[:WIDTH] = copier(TOKEN, GUESS, V)
        second.w_o.weight[:, :WIDTH] = torch.eye(WIDTH)
        model.head.weight[:, GUESS : GUESS + V] = 20 * torch.eye(V)
    return open_model(model)


@pytest.fixture(scope="module")
def found(wired):
    draw = np.random.default_rng(1)
    text = of_text(draw.integers(0, V, 1201).tolist(), 100, 8192)
    return study(wired, LETTERS, text)


def scores_of(found, layer, head):
    (one,) = [h for h in found["heads"] if (h["layer"], h["head"]) == (layer, head)]
    return one


def test_the_wired_heads_are_found_and_named(found):
    previous, induction = scores_of(found, 0, 0), scores_of(found, 1, 0)
    assert previous["scores"]["previous token"]["value"] == pytest.approx(1, abs=1e-4)
    assert previous["scores"]["largest on previous"]["value"] == 1
    assert induction["scores"]["induction"]["value"] == pytest.approx(1, abs=1e-3)
    assert induction["scores"]["duplicate token"]["value"] < 0.01
    assert previous["label"].startswith("previous-token 1.00, chance 0.0")
    assert induction["label"].startswith("induction 1.00, chance 0.0")
    for layer in (0, 1):
        idle = scores_of(found, layer, 1)
        assert idle["label"] == "no known type"
        assert idle["scores"]["entropy"]["value"] == pytest.approx(1)
        assert idle["scores"]["previous token"]["value"] == pytest.approx(idle["scores"]["previous token"]["chance"])


def test_the_induction_head_is_worth_the_repeats_and_an_idle_head_nothing(found):
    assert found["random"]["length"] == 25
    assert found["random"]["repeats"] < 0.1 and found["random"]["first"] > 2
    assert scores_of(found, 1, 0)["repeats"]["mean"] > 3
    assert scores_of(found, 0, 0)["repeats"]["mean"] > 3  # without it the other finds nothing
    for layer in (0, 1):
        assert scores_of(found, layer, 1)["repeats"] == {"mean": 0, "interval": [0, 0]}
    worth = sorted(h["repeats"]["mean"] for h in found["heads"])
    assert worth[-1] > 100 * max(abs(worth[1]), 0.01)


def part_of(model, study):
    ids, meta = torch.tensor([1, 2, 3, 1]), {"step": 1, "dataset": {"name": "letters"}}
    return Part("run", model, LETTERS, meta, ids, "a text", look(model, ids), study)


def test_what_is_not_a_number_is_none_in_the_file(wired, found):
    kept = saved([part_of(wired, found | {"loss": math.nan, "apart": {"all": [1.5, math.inf]}})])
    assert kept["runs"][0]["loss"] is None and kept["runs"][0]["apart"] == {"all": [1.5, None]}


def test_random_text_is_told_of_only_where_it_is_foretold(wired, found):
    assert found["random"]["foretold"]  # 0.1 nats, where even guessing costs 3.95
    for foretold in (True, False):
        content = page_content([part_of(wired, found | {"random": found["random"] | {"foretold": foretold}})])
        every, types = content["tables"]
        assert ["again and again" in line for line in content["lead"]] == [foretold]
        assert ["repeats" in table["rows"][0] for table in (every, types)] == [foretold, foretold]


def test_heads_of_one_type_are_also_taken_away_together(wired, found):
    types = {t["type"]: t for t in found["types"]}
    assert types["induction"]["heads"] == [(1, 0)] and types["previous token"]["heads"] == [(0, 0)]
    assert types["induction"]["repeats"] == scores_of(found, 1, 0)["repeats"]
    text = of_text([1, 2, 3, 1, 2, 3, 1, 2, 3], 8, 8192)
    (both,) = ablations(wired, text, [[(0, 0), (1, 0)]], torch.zeros(2, 2, WIDTH))
    before = float(losses(wired, *text).mean())
    assert before + both.mean == pytest.approx(math.log(V), abs=1e-3)  # without them every letter is as likely


def test_unlike_heads_are_far_apart_and_idle_ones_alike(found):
    apart = np.array(found["divergence"])
    assert apart[1, 3] == pytest.approx(0, abs=1e-9)  # both even
    assert apart[0, 1] > 0.3
    assert found["apart"]["all"] == pytest.approx((apart[0, 1] + apart[2, 3]) / 2)
    assert found["apart"]["same_kv"] is None


def small(**settings):
    model = GPT(ModelConfig(**{"vocab_size": 30, "n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12} | settings))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.4, generator=generator))
    return open_model(model)


LAYOUTS = {"grouped": [{"n_kv_head": 2}, {"n_kv_head": 1}]}  # beside what every design is tried with
EACH = [
    {"design": design} | layout
    for design in DESIGNS
    for layout in [{}, {"head_dim": 8}, {"bias": True}, *LAYOUTS.get(design, []), *switches(design).values()]
]
IDS = torch.randint(0, 30, (10,), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_every_design_shows_weights_outputs_and_exact_shares(settings):
    model = small(**settings)
    out = []
    hooks = [block.attn.register_forward_hook(lambda m, a, o: out.append(o[0])) for block in model.blocks]
    seen = look(model, IDS)
    for hook in hooks:
        hook.remove()
    assert seen.weights.shape == (2, 4, 10, 10)
    assert torch.equal(seen.weights.tril(), seen.weights)
    assert torch.allclose(seen.weights.sum(-1), torch.ones(2, 4, 10, dtype=torch.float64), atol=1e-6)
    for layer, block in enumerate(model.blocks):
        joined = seen.outputs[layer].transpose(0, 1).flatten(1)
        assert torch.allclose(block.attn.w_o(joined), out[layer], atol=1e-6)
    bias = [getattr(block.attn.w_o, "bias", None) for block in model.blocks]
    for place in (0, 9):
        total = shares(model, seen.outputs, place).sum(dim=1)
        for layer in range(2):
            rest = 0 if bias[layer] is None else bias[layer]
            assert torch.allclose(total[layer] + rest, out[layer][place], atol=1e-5)


def test_opening_a_model_changes_nothing_of_what_it_says():
    model = GPT(ModelConfig(vocab_size=30, n_layer=1, n_head=2, n_embd=16, block_size=12, dropout=0.3), seed=2).eval()
    with torch.no_grad():
        model.blocks[0].attn.w_o.weight.normal_(0, 0.3)
        assert torch.allclose(open_model(model)(IDS[None]), model(IDS[None]), atol=1e-5)


@pytest.mark.parametrize("settings", EACH, ids=str)
def test_the_study_holds_of_every_design(settings):
    """One of its own numbers is checked on the way: zeroing all heads leaves what the stream alone says."""
    model = small(**settings, vocab_size=V)
    text = of_text(np.random.default_rng(2).integers(0, V, 80).tolist(), 12, 8192)
    found = study(model, LETTERS, text)
    assert [(h["layer"], h["head"]) for h in found["heads"]] == [(layer, head) for layer in (0, 1) for head in range(4)]
    assert all(math.isfinite(h["zeroed"]["mean"]) for h in found["heads"])
    assert all(0 <= h["scores"]["previous token"]["value"] <= 1 + 1e-9 for h in found["heads"])
    for block in model.blocks:
        bias = getattr(block.attn.w_o, "bias", None)
        rest = 0 if bias is None else bias  # which is no head's
        block.attn.register_forward_hook(lambda m, a, out, rest=rest: 0 * out + rest)
    with torch.no_grad():
        assert found["pruning"][-1]["loss"] == pytest.approx(float(losses(model, *text).mean()), abs=1e-5)


def test_chance_is_that_of_what_a_window_lets_be_seen():
    """Heads whose queries are zero spread their weight evenly, so that every score is what chance gives."""
    model = small(window=3, vocab_size=V)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.w_q.weight.zero_()
    text = of_text(np.random.default_rng(2).integers(0, V, 80).tolist(), 12, 8192)
    for head in study(model, LETTERS, text)["heads"]:
        previous = head["scores"]["previous token"]
        seen = [2] + [3] * 10  # keys that queries 1 to 11 see
        assert previous["chance"] == pytest.approx(sum(1 / n for n in seen) / 11)
        for name in ("previous token", "distance", "entropy", "confidence", "duplicate token"):
            if name in head["scores"]:
                assert head["scores"][name]["value"] == pytest.approx(head["scores"][name]["chance"], abs=1e-6)


@pytest.mark.parametrize("settings", EACH, ids=str)
@torch.no_grad()
def test_a_head_put_to_zero_takes_exactly_its_slice_away(settings):
    model = small(**settings)
    out = []
    hook = model.blocks[1].attn.register_forward_hook(lambda m, a, o: out.append(o[0]))
    seen = look(model, IDS)
    with changed(model, {1: put([2], torch.zeros(4, seen.outputs.size(-1)))}):
        model(IDS[None])
    hook.remove()
    for place in range(10):
        gone = shares(model, seen.outputs, place)[1, 2]
        assert torch.allclose(out[0][place] - out[1][place], gone, atol=1e-5)
    assert torch.equal(look(model, IDS).outputs, seen.outputs)  # and no hook is left behind


def test_mean_ablation_puts_the_mean_over_the_tokens_there():
    model = small()
    x = torch.randint(0, 30, (5, 12), generator=torch.Generator().manual_seed(4))
    means = mean_outputs(model, x, batch_size=2)
    by_hand = torch.stack([look(model, row).outputs for row in x]).mean(dim=(0, 3))
    assert torch.allclose(means, by_hand, atol=1e-6)
    text = Windows(x[:, :-1], x[:, 1:])
    (one,) = ablations(model, text, [[(0, 1), (0, 3)]], means)
    weight = model.blocks[0].attn.w_o.weight
    moved = sum(weight[:, h * 4 : h * 4 + 4] @ means[0, h] for h in (1, 3))
    with torch.no_grad():
        before = losses(model, *text)
        hook = model.blocks[0].attn.w_o.register_forward_pre_hook(
            lambda m, args: torch.cat([args[0][..., :4] * 1, args[0][..., 4:8] * 0, args[0][..., 8:12] * 1,
                                       args[0][..., 12:] * 0], dim=-1))  # fmt: skip
        other = model.blocks[0].attn.w_o.register_forward_hook(lambda m, a, out: out + moved)
        after = losses(model, *text)
    hook.remove(), other.remove()
    assert one.mean == pytest.approx(float((after - before).mean()), abs=1e-5)


def test_losses_are_means_over_the_targets_that_count():
    model = small()
    y = IDS[None, 1:].clone()
    y[:, :5] = IGNORED
    with torch.no_grad():
        logs = model(IDS[None, :-1])[0].log_softmax(-1)
    expected = -sum(logs[i, IDS[i + 1]] for i in range(5, 9)) / 4
    assert losses(model, IDS[None, :-1], y).item() == pytest.approx(expected.item(), abs=1e-6)
    x, other = IDS[None, :-1].repeat(2, 1), IDS[None, 1:]
    every = -sum(logs[i, IDS[i + 1]] for i in range(9))  # a window of nine targets beside one of four
    both = losses(model, x, torch.cat((y, other))).mean()
    assert both.item() == pytest.approx((4 * expected + every).item() / 13, abs=1e-6)


def test_pruning_runs_from_none_to_all_in_the_given_order():
    model = small()
    text = Windows(IDS[None, :-1], IDS[None, 1:])
    order = [(1, 3), (0, 0), (1, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2)]
    curve = pruning(model, text, order, torch.zeros(2, 4, 4))
    assert curve[0] == {"removed": 0, "share": 0.0, "loss": pytest.approx(float(losses(model, *text)))}
    (single,) = ablations(model, text, [[(1, 3)]], torch.zeros(2, 4, 4))
    assert curve[1]["removed"] == 1
    assert curve[1]["loss"] - curve[0]["loss"] == pytest.approx(single.mean)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.w_o.weight.zero_()
    assert curve[-1]["removed"] == 8 and curve[-1]["loss"] == pytest.approx(float(losses(model, *text)))


def test_the_bootstrap_interval_is_as_wide_as_the_standard_error_says():
    differences = torch.randn(400, generator=torch.Generator().manual_seed(1)).double() * 2 + 5
    low, high = interval(differences)
    half = 1.96 * float(differences.std()) / 20
    assert (low + high) / 2 == pytest.approx(float(differences.mean()), abs=0.03)
    assert (high - low) / 2 == pytest.approx(half, rel=0.1)
    assert interval(torch.tensor([1.0])) is None and interval(torch.ones(3)) == [1, 1]


def test_random_text_repeats_tokens_that_the_text_has_and_asks_for_the_repeats():
    text = of_text([i % 40 for i in range(500)], 100, 8192)
    random, n = repeated(LETTERS, text, 128, seed=1)
    assert n == 25 and random.x.shape == (16, 100)
    for x, y in zip(random.x, random.y, strict=True):
        assert len(set(x[1:26].tolist())) == 25 and max(x[1:]) < 40
        assert torch.equal(x[26:51], x[1:26]) and torch.equal(x[76:], x[1:25])
        assert (y[:26] == IGNORED).all() and torch.equal(y[26:99], x[27:]) and y[99] == x[25]
    short, n = repeated(LETTERS, text, 32, seed=1)
    assert n == 7 and short.x.shape == (16, 28)


def test_classes_of_tokens():
    tokenizer = CharTokenizer("a\n .\t")
    classes = token_classes(tokenizer)
    assert classes["newline"].tolist() == [False, True, False, False, False]
    assert classes["space"].tolist() == [False, False, True, False, True]
    assert classes["punctuation"].tolist() == [False, False, False, True, False]
    assert token_classes(WordTokenizer(["a", "?"]))["punctuation"].tolist() == [False, True]


@pytest.mark.parametrize(
    "tokenizer", [WordTokenizer(SENTENCE_WORDS), CharTokenizer(string.printable)], ids=lambda t: t.kind
)
def test_the_places_of_a_words_tokens_spell_the_word(tokenizer):
    ids, places = written(EXAMPLE, tokenizer)
    for word, at in zip(EXAMPLE.words[1:], places[1:], strict=True):
        assert tokenizer.decode([ids[i] for i in at]).strip() == word
    assert written(EXAMPLE, CharTokenizer("abc")) is None


def test_arcs_are_met_by_a_head_that_looks_at_them():
    """A model whose heads look 1 back and evenly meets none of the arcs and an even spread of them."""
    tokenizer = WordTokenizer(SENTENCE_WORDS)
    model = small(vocab_size=tokenizer.vocab_size, block_size=24)
    with torch.no_grad():
        for block in model.blocks:
            block.attn.w_q.weight.zero_()
    arcs = arc_scores(model, tokenizer, seed=1)
    assert set(arcs) == {"verb to subject", "preposition to object", "pronoun to noun", "pronoun to cause", "answer"}
    for arc in arcs.values():
        assert torch.allclose(arc["weight"], torch.full((2, 4), arc["chance"], dtype=torch.float64), atol=1e-6)
        assert (arc["met"] == 0).all()  # the largest of equal weights is the first, <s>, which no arc leads to
    assert set(arcs) <= set(DEFINITIONS)
    for kind, later, earlier in EXAMPLE.arcs:  # told on the words that they join
        assert f'from "{EXAMPLE.words[later]}" to "{EXAMPLE.words[earlier]}"' in DEFINITIONS[kind]
    assert arcs["pronoun to cause"]["best_distance"] == 3 and arcs["pronoun to cause"]["best_distance_met"] == 1
    assert arcs["verb to subject"]["best_distance_met"] < 0.9
    assert (arcs["pronoun to cause"]["best_word"], arcs["pronoun to cause"]["best_word_met"]) == ("it", 1)
    assert arcs["preposition to object"]["best_word"] in PREPOSITIONS
    assert 1 / 3 <= arcs["preposition to object"]["best_word_met"] < 0.6


def test_a_label_needs_its_threshold_and_twice_chance():
    def label(*of):
        return "; ".join(text for _, text in types_of(*of))

    def named(value, chance, name="previous token"):
        return label({name: (value, chance)}, {}, 0, 0)

    assert named(0.41, 0.04) == "previous-token 0.41, chance 0.04"
    assert named(0.39, 0.04) == named(0.41, 0.3) == ""
    both = {"induction": (0.8, 0.1), "duplicate token": (0.5, 0.1)}
    assert label(both, {}, 0, 0) == "induction 0.80, chance 0.10; duplicate-token 0.50, chance 0.10"
    assert label({"space": (1.5, 1.0), "space weight": (0.6, 0.4)}, {}, 0, 0) == ""
    assert label({"space": (3.0, 1.0), "space weight": (0.6, 0.2)}, {}, 0, 0) == "space 0.60, 3.0 times its frequency"
    for distance, word, expected in ((0.5, 0.3, ""), (0.3, 0.5, ""), (0.4, 0.3, "verb to subject 0.70, blind 0.40")):
        arc = {"met": torch.tensor([[0.7]]), "best_distance_met": distance, "best_word_met": word}
        assert label({}, {"verb to subject": arc}, 0, 0) == expected


@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_a_model_that_was_never_trained_has_no_head_that_meets_arcs(positions):
    tokenizer = CharTokenizer(string.printable)
    for seed in (1, 2):
        config = ModelConfig(n_layer=2, n_head=4, n_embd=64, positions=positions, vocab_size=tokenizer.vocab_size)
        arcs = arc_scores(open_model(GPT(config, seed)), tokenizer, seed=1)
        names = [types_of({}, arcs, layer, head) for layer in range(2) for head in range(4)]
        assert len(arcs) == 5 and names == [[]] * 8


def test_a_model_whose_loss_is_not_a_number_is_refused():
    model = small(vocab_size=V)
    with torch.no_grad():
        model.blocks[1].attn.w_v.weight[0, 0] = math.inf
    with pytest.raises(UserError, match="its loss is nan"):
        study(model, LETTERS, of_text(list(range(V)) * 3, 12, 8192))


def test_groups_of_query_heads_go_with_their_kv_head():
    model = small(n_kv_head=2, vocab_size=V)
    draw = np.random.default_rng(2)
    text = of_text(draw.integers(0, V, 200).tolist(), 12, 8192)
    kv_heads = study(model, LETTERS, text)["kv_heads"]
    assert [(k["layer"], k["kv_head"], k["query_heads"]) for k in kv_heads] == [
        (0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0, 1]), (1, 1, [2, 3])]  # fmt: skip
    (both,) = ablations(model, text, [[(1, 2), (1, 3)]], torch.zeros(2, 4, 4))
    assert kv_heads[3]["zeroed"]["mean"] == pytest.approx(both.mean)
    apart = study(model, LETTERS, text)["apart"]
    assert apart["same_kv"] is not None and apart["other_kv"] is not None
    assert apart["all"] == pytest.approx((apart["same_kv"] * 4 + apart["other_kv"] * 8) / 12)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, dataset):
    """Two small trained runs on text and two on sentences, the second with one head."""
    folder = tmp_path_factory.mktemp("runs")
    prepare.main([str(folder / "probe-sentences")])
    small = ["--n_layer", "2", "--n_head", "4", "--n_embd", "32", "--max_steps", "20", "--threads", "1"]
    for name, extra in (("mha", []), ("mqa", ["--n_kv_head", "1"])):
        train.main(["--dataset", dataset, "--block_size", "48", *small, *extra, "--out_dir", str(folder / name)])
    for name, extra in (("sentences", []), ("single", ["--n_layer", "1", "--n_head", "1"])):
        words = ["--dataset", str(folder / "probe-sentences"), *small, *extra]
        train.main([*words, "--out_dir", str(folder / name)])
    return folder


@pytest.mark.usefixtures("handlers_come_back")
def test_heads_writes_a_page_and_its_figures(runs, capsys):
    threads = torch.get_num_threads()
    heads.main([str(runs / "mha"), "--eval_tokens", "500", "--threads", str(threads + 1)])
    assert torch.get_num_threads() == threads + 1
    torch.set_num_threads(threads)
    printed, said = capsys.readouterr()
    assert "looking at its heads" in said
    assert "heads.html" in printed and "chance" in printed and "nats a token (480 tokens in" in printed
    saved = json.loads((runs / "mha" / "heads.json").read_text())
    (run,) = saved["runs"]
    assert len(run["heads"]) == 8 and run["tokens"] == 480 and run["arcs"] == {}
    page = (runs / "mha" / "heads.html").read_text()
    assert "previous token" in page and len(page) < 5e6


@pytest.mark.usefixtures("handlers_come_back")
def test_heads_compares_runs_side_by_side(runs, tmp_path):
    heads.main(
        [str(runs / "mha"), "--compare", str(runs / "mqa"), "--text", "abc abc abc", "--out_dir", str(tmp_path / "new")]
    )
    one, two = json.loads((tmp_path / "new" / "heads.json").read_text())["runs"]
    assert one["kv_heads"] == [] and len(two["kv_heads"]) == 2
    assert one["apart"]["same_kv"] is None and two["apart"]["other_kv"] is None
    assert "Side by side" in (tmp_path / "new" / "heads.html").read_text()


@pytest.mark.usefixtures("handlers_come_back")
def test_sentences_are_shown_on_the_well_known_one(runs, tmp_path):
    heads.main([str(runs / "sentences"), "--eval_tokens", "480", "--out_dir", str(tmp_path)])
    (run,) = json.loads((tmp_path / "heads.json").read_text())["runs"]
    assert set(run["arcs"]) >= {"verb to subject", "pronoun to noun"}
    scores = run["heads"][0]["scores"]
    assert "punctuation weight" in scores and "newline weight" not in scores  # no word is a line end
    page = (tmp_path / "heads.html").read_text()
    (tokens,) = re.findall(r'"tokens": ?(\[.*?\])', page)
    assert " ".join(json.loads(tokens)).split()[-4:] == ["tired", ".", "who", "?"]  # the answer is not given away


def leads(folder):
    """The paragraphs that a page begins with."""
    found = re.findall('<p class="lead">(.*?)</p>', (folder / "heads.html").read_text())
    return [html.unescape(part) for part in found]


@pytest.mark.usefixtures("handlers_come_back")
def test_a_probes_page_begins_with_what_training_measured_and_what_sampling_writes(runs, tmp_path, capsys):
    run, question = runs / "sentences", " ".join(EXAMPLE.words[1:-1])
    heads.main([str(run), "--out_dir", str(tmp_path)])
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    measured = f"loss {logged['val_loss']:.4f} nats an answer, {logged['val_accuracy']:.1%} right (1,000 answers in"
    assert measured in capsys.readouterr().out
    sample.main([str(run), "--prompt", question, "--temperature", "0", "--max_new_tokens", "1"])
    said = capsys.readouterr().out.split()[-1]
    model, tokenizer, _ = load_model(str(run), "best", torch.device("cpu"))
    with torch.no_grad():
        chances = model(torch.tensor(tokenizer.encode(f"<s> {question}"))[None])[0, -1].softmax(-1)
    (lead,) = leads(tmp_path)
    answer = f'Asked "<s> {question}", it answers "{said}" with a probability of {chances.max():.3f}.'
    assert lead.index(measured) < lead.index(answer) < lead.index("Zeroing head") < lead.index("Heads with a name")


@pytest.mark.usefixtures("handlers_come_back")
def test_one_head_is_called_one_and_is_not_told_apart_from_others(runs, tmp_path, capsys):
    heads.main([str(runs / "single"), "--eval_tokens", "24", "--out_dir", str(tmp_path)])
    text = (tmp_path / "heads.html").read_text() + capsys.readouterr().out
    assert "1 layer, 1 head of width 32" in text and "(1 answer in" in text
    assert not re.search(r"\b1 (layer|head|answer|target|token)s", text)
    heads.main([str(runs / "single"), "--compare", str(runs / "sentences"), "--out_dir", str(tmp_path)])
    page = (tmp_path / "heads.html").read_text()
    assert re.findall("How different the heads are: (.*?)<", page) == [str(runs / "sentences")]
    assert "K/V head</button>" not in page and "right</button>" in page  # no column without a value


@pytest.mark.usefixtures("handlers_come_back")
def test_a_probe_is_drawn_as_far_as_its_last_question(runs, tmp_path):
    prepare.main([str(tmp_path / "probe-klookup-2")])
    words = ["--dataset", str(tmp_path / "probe-klookup-2"), "--n_layer", "1", "--n_head", "1", "--n_embd", "16"]
    train.main([*words, "--max_steps", "1", "--threads", "1", "--out_dir", str(tmp_path / "run")])
    heads.main([str(tmp_path / "run"), "--eval_tokens", "64"])
    example = json.loads((tmp_path / "probe-klookup-2" / "examples.jsonl").read_text().splitlines()[0])
    (answer,) = example["counted"]
    assert f'Asked "{" ".join(example["words"][:answer])}", it answers' in leads(tmp_path / "run")[0]


@pytest.mark.usefixtures("handlers_come_back")
def test_a_narrow_terminal_does_not_squeeze_the_table(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    heads.main([str(runs / "single"), "--eval_tokens", "24", "--out_dir", str(tmp_path)])
    assert re.search(r"0\.0( +\d\.\d\d){5} +[+-]\d\.\d{4} ", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["mha", "--text", "ab~"], "the text has '~'"),
        (["mha", "--text", "a"], "fewer than two tokens"),
        (["mha", "--compare", "mha"], "a run is named twice"),
        (["mha", "--compare", "mha/."], "a run is named twice"),
        (["nothing"], "no run in"),
        (["mha", "--text", "ab", "--text_file", "x"], "leave one of them out"),
        (["mha", "--eval_tokens", "1"], "eval_tokens must be at least 2"),
        (["mha", "--threads", "0"], "threads must be from 1 to 1024"),
    ],
)
def test_a_mistake_is_one_sentence(runs, words, told):
    words = [f"{runs}/{word}" if word in ("mha", "mha/.", "nothing") else word for word in words]
    with pytest.raises(UserError, match=told):
        heads.main(words)


def rename_data(checkpoint, name):
    meta = read_meta(checkpoint)
    meta["dataset"]["name"] = str(name)
    write_meta(checkpoint, meta)


def test_a_run_without_its_data_needs_a_text(runs, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(runs / "mha" / "last", moved / "last")
    rename_data(moved / "last", "gone")
    with pytest.raises(UserError, match="cannot be read, so give --text: no data set in .*gone"):
        heads.main([str(moved)])
    heads.main([str(moved), "--text", "abcd abcd efgh abcd " * 5])
    assert (moved / "heads.html").exists()


def test_data_that_are_no_longer_those_of_the_training_are_refused(runs, tmp_path):
    shutil.copytree(runs / "sentences", tmp_path / "run")
    meta = json.loads((tmp_path / "run" / "last" / "meta.json").read_text())
    folder = Path(meta["dataset"]["name"])
    shutil.copytree(folder, tmp_path / "data")
    for name in ("last", "best"):
        rename_data(tmp_path / "run" / name, tmp_path / "data")
    heads.main([str(tmp_path / "run"), "--eval_tokens", "48"])
    content = bytearray((tmp_path / "data" / "val.bin").read_bytes())
    content[-5] ^= 1
    (tmp_path / "data" / "val.bin").write_bytes(content)
    with pytest.raises(UserError, match="so give --text: .*not the ones prepared"):
        heads.main([str(tmp_path / "run"), "--eval_tokens", "48"])
    prepare.main([str(tmp_path / "data" / ".." / "probe-sentences"), "--seed", "2"])
    for name in ("last", "best"):
        rename_data(tmp_path / "run" / name, tmp_path / "probe-sentences")
    with pytest.raises(UserError, match="so give --text: .*has changed since"):
        heads.main([str(tmp_path / "run"), "--eval_tokens", "48"])


def test_names_are_printed_as_they_are_and_a_long_text_is_said_to_be_cut(runs, tmp_path, capsys):
    run = tmp_path / "a[bold][" / "b]:smile:"
    shutil.copytree(runs / "mha", run)
    heads.main([str(run), "--text", "abc " * 40, "--eval_tokens", "64"])
    out, err = capsys.readouterr()
    assert f"{run}: loss" in out.replace("\n", "")
    assert "show the first 48 of the text's 160 tokens" in err
