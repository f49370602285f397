"""Generated corpora: an oracle that reads only what stands before a word reaches the floor that each probe states."""

import json
import re

import numpy as np
import pytest
import torch

import data
import prepare
import train
from data.loader import Windows
from data.probes import ANIMALS, EXAMPLE, FEELINGS, PLACES, PROBES, probe, write
from data.tokenfile import IGNORED, DataError
from data.tokenizer import Tokenizer, WordTokenizer
from model import GPT, ModelConfig
from runtime.evaluate import evaluate
from runtime.settings import parse

NAMES = ["probe-copy", "probe-induction", "probe-recall", "probe-recall-16", "probe-offset", "probe-offset-2",
         "probe-offset-40", "probe-klookup-1", "probe-klookup-4", "probe-klookup-8", "probe-sentences"]  # fmt: skip
PLACES_OF_BITS = [20, 7, 13, 3, 25, 10, 17, 28]


def after_its_other_places(before):
    """What followed the last word wherever it stood before, always the same."""
    (word,) = {before[i + 1] for i, word in enumerate(before[:-1]) if word == before[-1]}
    return word


def about_a_sentence(before):
    """Answer by reading: which noun is named where, and what the adjective can be said of."""
    words = before[1:]
    at = words.index(".")
    text, question = words[:at], words[at + 1 :]
    nouns = [word for word in text if word in ANIMALS + PLACES]
    if question == ["who", "?"]:
        return nouns[0] if text[-1] in FEELINGS else nouns[-1]
    if question == ["who", "did", "?"]:
        return nouns[0]
    if question == ["why", "?"]:
        return text[-1]
    assert question[0] in ("near", "behind", "beside")
    return nouns[1]


ORACLES = {
    "copy": lambda before: before[len(before) - 32],
    "induction": after_its_other_places,
    "recall": after_its_other_places,
    "offset": None,
    "klookup": None,
    "sentences": about_a_sentence,
}


def oracle(name):
    kind, _, number = name.removeprefix("probe-").partition("-")
    if kind == "offset":
        return lambda before: before[len(before) - 1 - int(number or 8)]
    if kind == "klookup":
        return lambda before: "=" + "".join(before[place] for place in PLACES_OF_BITS[: int(number)])
    return ORACLES[kind]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("probes")
    for name in NAMES:
        prepare.main([str(folder / name), "--seed", "5"])
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_an_oracle_that_sees_only_what_came_before_reaches_the_floor(prepared, name):
    """It is certain of each word that counts, and right, so that its loss is 0, which no loss is below."""
    dataset = data.open_dataset(str(prepared / name))
    dataset.verify()
    length, count = dataset.probe["length"], 0
    ids, targets = dataset.val.window(0, len(dataset.val) - 1)
    words = [dataset.tokenizer.words[i] for i in ids]
    for at in np.flatnonzero(targets != IGNORED):
        before = words[at // length * length : at + 1]
        assert before[0] == "<s>"
        assert oracle(name)(before) == dataset.tokenizer.words[targets[at]]
        count += 1
    assert count == dataset.val_targets > 900
    assert dataset.probe["floor"] == 0.0


@pytest.mark.parametrize(
    ("name", "nats"),
    [("probe-copy", np.log(62)), ("probe-recall", np.log(31)), ("probe-klookup-1", np.log(2)),
     ("probe-klookup-4", np.log(16)), ("probe-offset", np.log(62))],
)  # fmt: skip
def test_guessing_blindly_costs_the_entropy_of_the_answers(prepared, name, nats):
    assert data.open_dataset(str(prepared / name)).probe["guess"] == pytest.approx(nats, abs=0.03)


def test_induction_cannot_be_had_from_a_fixed_distance():
    ids, counted = probe("probe-induction").draw(np.random.default_rng(1), 2000)
    hits = np.zeros(64)
    for row, marks in zip(ids, counted, strict=True):
        for at in np.flatnonzero(marks):
            hits[at - np.flatnonzero(row[:at] == row[at])] += 1
    assert hits.max() / counted.sum() < 0.15


def test_recall_draws_gaps_by_a_power_law():
    """The first slot is drawn most often, and the second about half as often before any is taken."""
    ids, counted = probe("probe-recall-8").draw(np.random.default_rng(1), 20000)
    used = counted[:, 18::2].mean(axis=0)
    assert used[0] > 0.9 and np.all(np.diff(used[:6]) < 0)
    # One key drawn by weight 1 / slot^0.99 has its first slot with this chance; the first of eight keys likewise.
    weights = np.arange(1, 24) ** -0.99
    first = (ids[:, 17] == ids[:, 1]).mean()
    assert first == pytest.approx(weights[0] / weights.sum(), abs=0.01)


def test_bits_of_klookup_are_fair_and_their_places_differ():
    ids, _ = probe("probe-klookup-8").draw(np.random.default_rng(1), 4000)
    assert np.abs((ids[:, 1:29] == 2).mean(axis=0) - 0.5).max() < 0.04
    assert len(set(PLACES_OF_BITS)) == 8 and min(PLACES_OF_BITS) >= 1 and max(PLACES_OF_BITS) <= 28


def test_twin_sentences_differ_in_one_word_and_so_in_what_it_means(prepared):
    lines = [json.loads(line) for line in (prepared / "probe-sentences" / "examples.jsonl").read_text().splitlines()]
    assert len(lines) == 1000
    turned = 0
    for one, two in zip(lines[::2], lines[1::2], strict=True):
        differ = [i for i, (a, b) in enumerate(zip(one["words"], two["words"], strict=True)) if a != b]
        answer = one["counted"][0]
        assert set(differ) <= {differ[0], answer}
        turned += one["words"][answer] in ANIMALS and two["words"][answer] in PLACES
    assert turned > 100


def test_gold_arcs_join_the_words_they_name(prepared):
    kinds = set()
    for line in map(json.loads, (prepared / "probe-sentences" / "examples.jsonl").read_text().splitlines()):
        words = line["words"]
        noun = {a for a in range(24) if words[a] in ANIMALS + PLACES}
        for kind, later, earlier in line["arcs"]:
            kinds.add(kind)
            assert earlier < later
            if kind == "verb to subject":
                assert words[later - 2 : later] == ["did", "not"] and earlier == min(noun)
            elif kind == "preposition to object":
                assert words[earlier] in ("near", "behind", "beside") and words[later] in ANIMALS
            elif kind == "pronoun to cause":
                assert words[earlier] == "it" and words[later - 1] == "too"
            elif kind == "pronoun to noun":
                assert words[later - 1] == "too"
                assert words[earlier] in (ANIMALS if words[later] in FEELINGS else PLACES)
            else:
                assert words[later] == "?" and words[earlier] == words[later + 1]
    assert kinds == {"verb to subject", "preposition to object", "pronoun to noun", "pronoun to cause", "answer"}


def test_the_example_is_the_well_known_sentence():
    assert " ".join(EXAMPLE.words) == (
        "<s> the animal did not cross the street because it was too tired . who ? animal"
    )


@pytest.mark.parametrize("name", sorted(PROBES))
def test_one_seed_gives_one_corpus(tmp_path, name):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        write(f"probe-{name}", seed, tmp_path / folder)
    a, b, c = ((tmp_path / folder / "val.bin").read_bytes() for folder in "abc")
    assert a == b != c
    assert (tmp_path / "a" / "train.bin").read_bytes()[24:64] != a[24:64]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["probe-kopy"], "there is no probe probe-kopy: take one of probe-copy"),
        (["probe-klookup-9"], "one of 1, 2, 3, 4, 5, 6, 7, 8"),
        (["probe-offset-3"], "one of 2, 4, 6"),
        (["probe-copy-3"], "takes no number"),
        (["probe-copy", "--tokenizer", "byte"], "tokenizer is for text"),
        (["probe-copy", "--val_fraction", "0.2"], "val_fraction is for text"),
        (["probe-copy", "--seed", "-1"], "seed must be at least 0"),
        (["shakespeare", "--seed", "1"], "--seed is for probes"),
    ],
)
def test_a_probe_that_cannot_be_is_told_in_one_sentence(line, told):
    with pytest.raises((DataError, Exception), match=re.escape(told)):
        prepare.main(line)


def test_words_go_in_and_out():
    tokenizer = WordTokenizer(["<s>", "who", "?"])
    assert tokenizer.encode("who ?  who\n").tolist() == [1, 2, 1]
    assert tokenizer.decode([1, 2]) == " who ?" and tokenizer.unknown("who are you ? are") == ["are", "you"]
    with pytest.raises(DataError, match="does not know 'are'"):
        tokenizer.encode("who are")
    assert Tokenizer.from_meta(tokenizer.to_meta()).to_meta() == tokenizer.to_meta()


def test_windows_hold_whole_examples_and_only_what_counts_is_a_target(prepared):
    dataset = data.open_dataset(str(prepared / "probe-copy"))
    windows = Windows(dataset.train, 64, 4, seed=3)
    starts = set()
    for step in range(5):
        x, y = windows.batch(step)
        assert (x[:, 0] == 0).all() and (x[:, 32] == 1).all()
        assert torch.equal(y[:, 32:63], x[:, 1:32])
        assert (y[:, :32] == IGNORED).all() and (y[:, 63] == IGNORED).all()
        starts |= {tuple(row.tolist()) for row in x}
    assert len(starts) == 20


def model_for(dataset, **settings):
    return GPT(ModelConfig(vocab_size=dataset.vocab_size, n_layer=1, n_head=2, n_embd=16, **settings), seed=1)


def test_evaluation_counts_the_targets_asked_for_and_no_others(prepared):
    dataset = data.open_dataset(str(prepared / "probe-recall"))
    model = model_for(dataset, block_size=32)
    with torch.no_grad():
        model.head.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    score = evaluate(model, dataset.val, dataset.tokenizer.token_bytes, 32, 50)
    nats = right = count = 0
    for example in range(1000):
        x, y = (torch.from_numpy(part)[None] for part in dataset.val.window(32 * example, 32))
        with torch.no_grad():
            logs = model(x).log_softmax(-1)[0]
        for at in torch.nonzero(y[0] != IGNORED)[:, 0].tolist():
            nats -= logs[at, y[0, at]].item()
            right += logs[at].argmax().item() == y[0, at].item()
            count += 1
    assert score.tokens == count == 4000 and score.correct == right
    assert score.loss == pytest.approx(nats / count, rel=1e-5)
    assert score.accuracy == right / 4000


def run(words, tmp_path, name="run"):
    flags = ["--n_layer", "1", "--n_head", "2", "--n_embd", "16", "--max_steps", "6", "--threads", "1"]
    assert train.main([*words, *flags, "--out_dir", str(tmp_path / name)]) == 0
    return [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("handlers_come_back")
def test_training_takes_the_examples_length_and_logs_gap_and_accuracy(prepared, tmp_path, capsys):
    rows = run(["--dataset", str(prepared / "probe-klookup-4")], tmp_path)
    assert "block_size = 32" in (tmp_path / "run" / "settings.toml").read_text()
    assert rows[-1]["val_tokens"] == 1000
    assert rows[-1]["val_gap"] == rows[-1]["val_loss"] and 0 <= rows[-1]["val_accuracy"] <= 1
    assert f"heads.py {tmp_path / 'run'}" in capsys.readouterr().out  # a probe has no text to go on with


@pytest.mark.usefixtures("handlers_come_back")
def test_training_refuses_windows_that_cut_examples(prepared, tmp_path):
    with pytest.raises(Exception, match="has 32 tokens, and block_size 48 is not a multiple of 32"):
        run(["--dataset", str(prepared / "probe-klookup-4"), "--block_size", "48"], tmp_path)


@pytest.mark.usefixtures("handlers_come_back")
def test_slices_of_a_batch_weigh_every_counted_target_alike(prepared, tmp_path):
    """Sentences have one answer each, induction many: a mean of slices' means would weigh short ones more."""
    words = ["--dataset", str(prepared / "probe-induction"), "--batch_size", "8", "--log_interval", "1"]
    whole, sliced = (
        [row["train_loss"] for row in run([*words, "--micro_batch_size", size], tmp_path, size) if "train_loss" in row]
        for size in ("8", "1")
    )
    assert whole == pytest.approx(sliced, abs=1e-5) and len(whole) == 6


def test_settings_of_a_probe_are_kept_from_text():
    (config,), _ = parse(["probe-copy"], prepare.PrepareConfig, prog="", description="", files_allowed=False)
    assert config.is_probe and config.seed is None


def test_fillers_of_recall_are_values_of_its_own_pairs():
    """Otherwise counting which values have come tells most of the answer."""
    ids, _ = probe("probe-recall").draw(np.random.default_rng(1), 500)
    for row in ids:
        keys, values = set(row[1:9:2]), set(row[2:10:2])
        assert len(keys) == len(values) == 4 and set(row[9:]) <= keys | values
        assert len(set(row[9:]) & values) == 4
