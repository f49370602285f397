"""What each head of a trained model does and is worth: scores, names, ablations, pruning."""

import math
import string
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from data import Dataset
from data.probes import Sentence, draw_sentences
from data.tokenfile import IGNORED
from data.tokenizer import Tokenizer
from lab import headscores as scores
from lab.taps import changed, look, losses, mean_outputs, open_model, put, share_right
from model import GPT
from runtime.errors import UserError
from runtime.generate import default_start

TOKENS = 8192  # of a validation text that heads are measured on; of a probe all are
SAMPLES = 16  # windows of text, and random texts, that scores are means over
WEIGHTS = 300_000_000  # of all heads that these windows may have; a large model is looked at on fewer, at least two
SENTENCES = 100
RANDOM, REPEATS = 25, 4  # tokens that are written so many times (Olsson et al. 2022)
NAMED_FROM, TIMES_CHANCE = 0.4, 2.0  # a head is called by a score of at least this, and this many times chance
UNNAMED = "no known type"
# Or by an arc that it meets this much more often than the best fixed distance (Voita et al. 2019) and the best fixed
# word do. Of 648 heads that were never trained one met an arc 0.18 more often than the best distance.
OVER_BLIND = 0.25

DEFINITIONS = {
    "previous token": "Mean weight on the token before (TransformerLens: previous_token_head).",
    "largest on previous": "Share of queries whose largest weight is on the token before (Voita et al. 2019).",
    "duplicate token": f"On {RANDOM} random tokens written {REPEATS} times: weight on earlier places of the token.",
    "induction": "On the same: weight on what followed those places (prefix matching, Olsson et al. 2022).",
    "preceding": "On the same: weight on what stood before those places.",
    "newline": "Weight on line ends over their share of what a query sees: 1 is no preference.",
    "space": "The same for white space within a line.",
    "punctuation": "The same for punctuation marks.",
    "first token": "Mean weight on the first token of the window; a sink from 0.3 on (Gu et al. 2024).",
    "entropy": "Entropy of the weights over that of an even spread: 0 is one token, 1 all alike.",
    "distance": "Mean distance looked back, in tokens.",
    "confidence": "Mean of the largest weight (Voita et al. 2019).",
    "rank": "Effective rank of the head's outputs (Roy and Vetterli 2007); chance is its full width.",
    "newline weight": "Weight on line ends; likewise for white space and punctuation.",
    "zeroed": "Change of the validation loss, nats, with the head's output at zero; 95% bootstrap over windows.",
    "mean": "The same when the output is replaced by its mean over the validation tokens.",
    "repeats": "Change of the loss on the repeats of random text when the head is zeroed.",
    "arcs": "On generated sentences: weight from the later word of an arc to the earlier one, the share of arcs where "
    "the largest weight is there, and beside it the shares that the best fixed distance and the best fixed word meet.",
    "verb to subject": 'Arc from "cross" to "animal" in "the animal did not cross the street".',
    "preposition to object": 'Arc from "dog" to "near" in "near the dog".',
    "pronoun to noun": 'Arc from "tired" to "animal" in "... because it was too tired": what "it" means.',
    "pronoun to cause": 'Arc from "tired" to "it" in the same sentence.',
    "answer": 'Arc from "?" to "animal" if the animal is asked for: to the word that answers.',
    "name": f"A head is named by a score of at least {NAMED_FROM:g} that is {TIMES_CHANCE:g} times what an even spread "
    f"of attention scores, or by a kind of arc that it meets at least that often and {100 * OVER_BLIND:g} points more "
    "often than the blind ways, the best fixed distance and the best fixed word. A name says what a head does on these "
    "texts, not what it is for.",
}  # fmt: skip


class Windows(NamedTuple):
    """Tokens and their targets, int64 (N, T) both; targets that do not count are IGNORED."""

    x: Tensor
    y: Tensor


def validation(dataset: Dataset, block_size: int, tokens: int) -> Windows:
    """The first windows of the validation split, at most that many tokens of them."""
    count = max(1, min(tokens, len(dataset.val) - 1) // block_size)
    length = min(block_size, len(dataset.val) - 1)
    rows = [dataset.val.window(start * length, length) for start in range(count)]
    x, y = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
    return Windows(x, y)


def of_text(ids: Sequence[int], block_size: int, tokens: int) -> Windows:
    """A text cut into windows; what is left over is dropped unless it is all there is."""
    length = min(block_size, len(ids) - 1)
    count = max(1, min(tokens, len(ids) - 1) // length)
    block = torch.tensor(ids[: count * length + 1])
    return Windows(block[:-1].view(count, length), block[1:].view(count, length))


def repeated(tokenizer: Tokenizer, text: Windows, block_size: int, seed: int) -> tuple[Windows, int]:
    """Random tokens written again and again behind a start, (SAMPLES, 1 + REPEATS * n); and n.

    Tokens are those of the text without its commonest and rarest tenth, each once in a stretch. Only the repeats
    count as targets, from the second token of the first one on.
    """
    seen, counts = text.x.flatten()[:TOKENS].unique(return_counts=True)
    ranked = seen[counts.argsort()]
    tenth = len(ranked) // 10
    middle = ranked[tenth : len(ranked) - tenth]
    n = min(RANDOM, len(middle), (block_size - 1) // REPEATS)
    generator = torch.Generator().manual_seed(seed)
    rows = [middle[torch.randperm(len(middle), generator=generator)[:n]].repeat(REPEATS) for _ in range(SAMPLES)]
    block = torch.stack(rows)
    start = torch.full((SAMPLES, 1), default_start(tokenizer)[-1])
    x, y = torch.cat((start, block), dim=1)[:, :-1], block.clone()
    y[:, : n + 1] = IGNORED  # that the stretch begins again cannot be known at its first token
    return Windows(x, y), n


def token_classes(tokenizer: Tokenizer) -> dict[str, Tensor]:
    """Which ids are line ends, other white space, punctuation: bool (vocab_size,) each."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    kinds = {
        "newline": ["\n" in text for text in texts],
        "space": [text != "" and text.isspace() and "\n" not in text for text in texts],
        "punctuation": [text.strip() != "" and set(text.strip()) <= set(string.punctuation) for text in texts],
    }
    return {name: torch.tensor(of_kind) for name, of_kind in kinds.items()}


def written(sentence: Sentence, tokenizer: Tokenizer) -> tuple[list[int], list[list[int]]] | None:
    """Ids of a sentence and the places of every word's tokens; None if the tokenizer lacks one of its characters."""
    words = sentence.words if tokenizer.kind == "word" else ["", *sentence.words[1:]]  # <s> is a word of ours alone
    ids: list[int] = []
    places = []
    for number, word in enumerate(words):
        spaced = f" {word}" if number > 1 else word
        if tokenizer.unknown(spaced):
            return None
        new = tokenizer.encode(spaced).tolist() if spaced else []
        places.append(list(range(len(ids), len(ids) + len(new))))
        ids += new
    return ids, places


def arc_scores(model: GPT, tokenizer: Tokenizer, seed: int) -> dict[str, dict[str, Any]]:
    """By kind of arc: weight and share met for every head, (n_layer, n_head); best fixed distance and fixed word."""
    found: dict[str, list[tuple[Tensor, Tensor, tuple[int, list[int]]]]] = {}
    words: dict[str, Counter[str]] = {}
    for sentence in draw_sentences(np.random.default_rng(seed), SENTENCES):
        spelled = written(sentence, tokenizer)
        if spelled is None or len(spelled[0]) - 1 > model.config.block_size:
            return {}
        ids, places = spelled
        weights = look(model, torch.tensor(ids[: places[-1][0]])).weights  # up to the answer, which is not shown
        largest = weights.argmax(dim=-1)
        for kind, later, earlier in sentence.arcs:
            at, keys = places[later][-1], places[earlier]
            met = torch.isin(largest[..., at], torch.tensor(keys)).double()
            found.setdefault(kind, []).append((scores.arc_weight(weights, at, keys), met, (at, keys)))
            words.setdefault(kind, Counter())[sentence.words[earlier]] += 1
    result = {}
    for kind, rows in found.items():
        arcs = [row[2] for row in rows]
        back, share = scores.best_distance(arcs)
        word, times = words[kind].most_common(1)[0]
        result[kind] = {
            "weight": torch.stack([row[0] for row in rows]).mean(0),
            "met": torch.stack([row[1] for row in rows]).mean(0),
            "chance": sum(float(scores.arc_weight(scores.even(at + 1, model.config.window), at, keys))
                          for at, keys in arcs) / len(arcs),
            "best_distance": back, "best_distance_met": share, "arcs": len(arcs),
            "best_word": word, "best_word_met": times / len(arcs),
        }  # fmt: skip
    return result


def pattern_scores(
    model: GPT, tokenizer: Tokenizer, text: Windows, random: Windows, progress: Callable[[float], None]
) -> tuple[dict[str, tuple[Tensor, float]], Tensor]:
    """Every score of every head with its chance level: name -> ((n_layer, n_head), chance); and the divergences.

    Divergences are (n_layer * n_head, n_layer * n_head), nats, means over the windows of text.
    """
    classes = {name: of_kind for name, of_kind in token_classes(tokenizer).items() if of_kind.any()}
    sums: dict[str, list[Tensor]] = {}
    chances: dict[str, list[float]] = {}

    def add(name: str, score: Callable[[Tensor], Tensor], T: int) -> None:
        sums.setdefault(name, []).append(score(weights))
        chances.setdefault(name, []).append(float(score(scores.even(T, model.config.window))))

    apart, outputs = [], []
    most = WEIGHTS // (model.config.n_layer * model.config.n_head * text.x.shape[1] ** 2)
    windows = text.x[: min(SAMPLES, max(2, most))]
    for number, ids in enumerate(windows):
        progress(number / len(windows))
        weights, out = look(model, ids)
        T = len(ids)
        back = scores.distance_back(T, 1)
        add("previous token", partial(scores.found, target=back), T)
        add("largest on previous", partial(scores.largest_at, distance=1), T)
        chances["largest on previous"][-1] = chances["previous token"][-1]  # an even spread has no largest
        for name, of_kind in classes.items():
            add(name, partial(scores.class_ratio, of_class=of_kind[ids]), T)
            add(f"{name} weight", partial(scores.class_weight, of_class=of_kind[ids]), T)
        for name, score in (("first token", scores.first_token), ("entropy", scores.entropy),
                            ("distance", scores.distance), ("confidence", scores.confidence)):  # fmt: skip
            add(name, score, T)
        apart.append(scores.divergence(weights.flatten(0, 1)))
        outputs.append(out)
    for ids in random.x:
        weights = look(model, ids).weights
        targets = {"duplicate token": scores.duplicates(ids), "induction": scores.after_duplicates(ids),
                   "preceding": scores.before_duplicates(ids)}  # fmt: skip
        for name, target in targets.items():
            add(name, partial(scores.found, target=target), len(ids))
    named = {name: (torch.stack(rows).nanmean(0), float(np.nanmean(chances[name]))) for name, rows in sums.items()
             if not torch.stack(rows).isnan().all()}  # fmt: skip
    joined = torch.cat(outputs, dim=2)  # (n_layer, n_head, N, width)
    named["rank"] = scores.effective_rank(joined), float(joined.shape[-1])
    return named, torch.stack(apart).mean(0)


def types_of(
    of_head: dict[str, tuple[float, float]], arcs: dict[str, dict[str, Any]], layer: int, head: int
) -> list[tuple[str, str]]:
    """What a head may be called and why, in words, strongest first; nothing if no score clears its threshold."""
    clear = []
    for name in ("previous token", "duplicate token", "induction", "first token"):
        value, chance = of_head.get(name, (0.0, 1.0))
        if value >= NAMED_FROM and value >= TIMES_CHANCE * chance:
            clear.append((value, name, f"{name.replace(' ', '-')} {value:.2f}, chance {chance:.2f}"))
    for name in ("newline", "space", "punctuation"):
        ratio, _ = of_head.get(name, (0.0, 1.0))
        weight = of_head.get(f"{name} weight", (0.0, 0.0))[0]
        if weight >= NAMED_FROM and ratio >= TIMES_CHANCE:
            clear.append((weight, name, f"{name} {weight:.2f}, {ratio:.1f} times its frequency"))
    for kind, arc in arcs.items():
        met, best = float(arc["met"][layer, head]), max(arc["best_distance_met"], arc["best_word_met"])
        if met >= NAMED_FROM and met >= best + OVER_BLIND:
            clear.append((met, kind, f"{kind} {met:.2f}, blind {best:.2f}"))
    return [(name, text) for _, name, text in sorted(clear, reverse=True)]


def interval(differences: Tensor) -> list[float] | None:
    """95% percentile bootstrap of the mean over windows (1,000 resamples); None for a single window."""
    if len(differences) < 2:
        return None
    if differences.max() - differences.min() < 1e-12:  # resamples would not differ
        return [float(differences.mean())] * 2
    found = scipy.stats.bootstrap((differences.numpy(),), np.mean, n_resamples=1000, method="percentile",
                                  rng=np.random.default_rng(0)).confidence_interval  # fmt: skip
    return [float(found.low), float(found.high)]


class Ablation(NamedTuple):
    """Change of the loss, nats: its mean over windows and a 95% bootstrap interval."""

    mean: float
    interval: list[float] | None


Heads = Sequence[tuple[int, int]]  # (layer, head) each


def without(model: GPT, heads: Heads, values: Tensor) -> AbstractContextManager[None]:
    """Within the block the outputs of these heads are `values` (n_layer, n_head, width)."""
    gone: dict[int, list[int]] = {}
    for layer, head in heads:
        gone.setdefault(layer, []).append(head)
    return changed(model, {layer: put(some, values[layer]) for layer, some in gone.items()})


def ablations(
    model: GPT, text: Windows, groups: Sequence[Heads], values: Tensor, whole: Tensor | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Ablation]:  # fmt: skip
    """What each group of heads is worth: its outputs become `values`, zeros or means, (n_layer, n_head, width).

    `whole` is the unchanged model's loss by window, if it is known already.
    """
    whole = losses(model, *text) if whole is None else whole
    found = []
    for number, heads in enumerate(groups):
        progress(number / len(groups))
        with without(model, heads, values):
            difference = losses(model, *text) - whole
        found.append(Ablation(float(difference.mean()), interval(difference)))
    return found


def pruning(model: GPT, text: Windows, order: Heads, values: Tensor) -> list[dict[str, float]]:
    """Loss against the share of heads removed, in the given order: none, then every tenth, to all."""
    counts = sorted({round(len(order) * tenth / 10) for tenth in range(11)})
    curve = []
    for count in counts:
        with without(model, order[:count], values):
            curve.append({"removed": count, "share": count / len(order), "loss": float(losses(model, *text).mean())})
    return curve


def study(
    model: GPT, tokenizer: Tokenizer, text: Windows, progress: Callable[[float, str], None] = lambda share, what: None
) -> dict[str, Any]:
    """Everything about the heads of an opened model, as plain numbers for heads.json.

    UserError if the model's loss is not a number. `progress` is told the share done and what is done.
    """
    config, seed = model.config, 1
    n_layer, n_head = config.n_layer, config.n_head
    n_kv_head = config.n_kv_head or n_head
    group = n_head // n_kv_head
    fused = open_model(model, "fused")  # faster where no weights are looked at
    whole = losses(fused, *text)
    if not whole.isfinite().all():
        raise UserError(f"its loss is {float(whole.mean())}: the training diverged, or the weights are damaged")

    def part(begin: float, end: float, what: str) -> Callable[[float], None]:
        return lambda share: progress(begin + (end - begin) * share, what)

    random, n = repeated(tokenizer, text, config.block_size, seed)
    named, apart = pattern_scores(model, tokenizer, text, random, part(0.0, 0.25, "looking at patterns"))
    progress(0.25, "reading sentences")
    arcs = arc_scores(model, tokenizer, seed)
    means = mean_outputs(fused, text.x)
    zeros = torch.zeros_like(means)
    each = [[(layer, head)] for layer in range(n_layer) for head in range(n_head)]
    zeroed = ablations(fused, text, each, zeros, whole, part(0.3, 0.5, "removing heads"))
    averaged = ablations(fused, text, each, means, whole, part(0.5, 0.7, "replacing heads by their means"))
    on_random = losses(fused, *random)
    repeats = ablations(fused, random, each, zeros, on_random, part(0.7, 0.85, "removing heads on random text"))
    first = Windows(random.x[:, :n], random.x[:, 1 : n + 1])
    heads: list[dict[str, Any]] = []
    for number, ((layer, head),) in enumerate(each):
        of_head = {name: (float(value[layer, head]), chance) for name, (value, chance) in named.items()}
        names = types_of(of_head, arcs, layer, head)
        heads.append({
            "layer": layer, "head": head, "kv_head": head // group, "types": [name for name, _ in names],
            "label": "; ".join(text for _, text in names) or UNNAMED,
            "scores": {name: {"value": value, "chance": chance} for name, (value, chance) in of_head.items()},
            "arcs": {kind: {"weight": float(arc["weight"][layer, head]), "met": float(arc["met"][layer, head])}
                     for kind, arc in arcs.items()},
            "zeroed": zeroed[number]._asdict(), "mean": averaged[number]._asdict(),
            "repeats": repeats[number]._asdict(),
        })  # fmt: skip
    progress(0.85, "removing many")
    order = [(h["layer"], h["head"]) for h in sorted(heads, key=lambda h: h["zeroed"]["mean"])]
    kv_heads = []
    if group > 1:
        groups = [
            [(layer, head) for head in range(kv * group, (kv + 1) * group)]
            for layer in range(n_layer) for kv in range(n_kv_head)
        ]
        for members, zero, mean in zip(groups, ablations(fused, text, groups, zeros, whole),
                                       ablations(fused, text, groups, means, whole), strict=True):  # fmt: skip
            kv_heads.append({"layer": members[0][0], "kv_head": members[0][1] // group,
                             "query_heads": [head for _, head in members],
                             "zeroed": zero._asdict(), "mean": mean._asdict()})  # fmt: skip
    # Heads of one type may stand in for each other, so that none of them is missed alone: what are all of them worth?
    types: dict[str, list[tuple[int, int]]] = {}
    for h in heads:
        for name in h["types"]:
            types.setdefault(name, []).append((h["layer"], h["head"]))
    together = zip(types.items(), ablations(fused, text, list(types.values()), zeros, whole),
                   ablations(fused, random, list(types.values()), zeros, on_random), strict=True)  # fmt: skip
    return {
        "types": [{"type": name, "heads": members, "zeroed": zero._asdict(), "repeats": repeat._asdict()}
                  for (name, members), zero, repeat in together],
        "loss": float(whole.mean()), "tokens": int((text.y != IGNORED).sum()), "windows": len(text.x),
        "right": share_right(fused, *text) if (text.y == IGNORED).any() else None,  # of a probe's answers
        "random": {"first": float(losses(fused, *first).mean()), "repeats": float(on_random.mean()), "length": n,
                   "foretold": bool(on_random.mean() < math.log(config.vocab_size))},  # better than by even guessing
        "heads": heads, "kv_heads": kv_heads, "divergence": apart.tolist(),
        "apart": layer_means(apart, n_layer, n_head, group),
        "arcs": {kind: {key: value for key, value in arc.items() if key not in ("weight", "met")}
                 for kind, arc in arcs.items()},
        "pruning": pruning(fused, text, order, zeros),
    }  # fmt: skip


def layer_means(apart: Tensor, n_layer: int, n_head: int, group: int) -> dict[str, float | None]:
    """Mean divergence between two heads of one layer: all pairs, those that share a K/V head, and those that do not."""
    pairs = [(layer * n_head + a, layer * n_head + b) for layer in range(n_layer)
             for a in range(n_head) for b in range(a)]  # fmt: skip
    same = [(a, b) for a, b in pairs if a % n_head // group == b % n_head // group]

    def mean(some: list[tuple[int, int]]) -> float | None:
        return sum(float(apart[a, b]) for a, b in some) / len(some) if some else None

    return {"all": mean(pairs), "same_kv": mean(same), "other_kv": mean([p for p in pairs if p not in set(same)])}
