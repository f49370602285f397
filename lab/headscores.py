"""What an attention pattern does, as numbers: pure functions of patterns, each with its chance level.

A pattern is (..., T, T), float, row i the weights that query i gives to keys 0 .. i; rows sum to 1. `ids` are the T
tokens. A score is a mean over the queries that it can be asked of, nan if there are none. Chance is what the same
score gives for a head that spreads its weight evenly over all that it sees: `score(even(T, window), ...)`.

TransformerLens' head_detector (its measure "mul") divides by all T queries, also by those that have nothing to find,
such as the first; here they are left out, so that a perfect head scores 1 on every text.
"""

import math

import torch
from torch import Tensor


def even(T: int, window: int | None = None) -> Tensor:
    """The pattern of a head that looks at all it sees alike, (T, T); with a window it sees the last so many tokens."""
    seen = torch.ones(T, T, dtype=torch.float64).tril().triu(1 - (window or T))
    return seen / seen.sum(dim=-1, keepdim=True)


def found(pattern: Tensor, target: Tensor) -> Tensor:
    """Mean weight on the target keys, over the queries that have one; target is bool (T, T). Shape (...)."""
    asked = target.any(dim=-1)
    return (pattern * target).sum(dim=-1)[..., asked].mean(dim=-1)


def distance_back(T: int, distance: int) -> Tensor:
    """Target: the key `distance` tokens back; 1 is the previous token."""
    return torch.ones(T, T, dtype=torch.bool).tril(-distance).triu(-distance)


def duplicates(ids: Tensor) -> Tensor:
    """Target: earlier places of the query's own token (TransformerLens' duplicate token head)."""
    return (ids[:, None] == ids[None, :]).tril(-1)


def after_duplicates(ids: Tensor) -> Tensor:
    """Target: the places right after those, where an induction head looks.

    This is prefix matching (Olsson et al. 2022): the sum over all earlier places. Their text says that the head looks
    at the token that "preceded"; what they measure, and TransformerLens too, is the one that followed.
    """
    return duplicates(ids).roll(1, dims=1).index_fill(1, torch.tensor([0]), False)


def before_duplicates(ids: Tensor) -> Tensor:
    """Target: the places right before those; reported so that both readings of "preceded" can be told apart."""
    return duplicates(ids).roll(-1, dims=1).index_fill(1, torch.tensor([len(ids) - 1]), False)


def largest_at(pattern: Tensor, distance: int) -> Tensor:
    """Share of queries whose largest weight lies `distance` back (Voita et al. 2019 ask for 0.9). Shape (...)."""
    T = pattern.shape[-1]
    place = torch.arange(T)
    return (pattern.argmax(dim=-1) == place - distance)[..., distance:].double().mean(dim=-1)


def class_weight(pattern: Tensor, of_class: Tensor) -> Tensor:
    """Mean weight on the keys of a class, such as line ends; of_class is bool (T,). Over queries from 1 on."""
    return (pattern * of_class).sum(dim=-1)[..., 1:].mean(dim=-1)


def class_ratio(pattern: Tensor, of_class: Tensor) -> Tensor:
    """class_weight over the mean share of the class in what is seen; chance is 1. nan where no key is of the class."""
    weight, share = class_weight(pattern, of_class), class_weight(even(len(of_class)), of_class)
    return weight / share if share > 0 else torch.full_like(weight, math.nan)


def first_token(pattern: Tensor) -> Tensor:
    """Mean weight on the first token, over queries from 1 on: a sink where it is above 0.3 (Gu et al. 2024)."""
    return pattern[..., 1:, 0].mean(dim=-1)


def entropy(pattern: Tensor) -> Tensor:
    """Entropy of a query's weights over that of an even spread, log(i + 1); 0 one key, 1 even. Queries from 1 on."""
    T = pattern.shape[-1]
    nats = torch.special.entr(pattern).sum(dim=-1)[..., 1:]
    return (nats / torch.arange(2, T + 1, dtype=torch.float64).log()).mean(dim=-1)


def distance(pattern: Tensor) -> Tensor:
    """Mean distance looked back, in tokens: the sum of weight times (i - j)."""
    place = torch.arange(pattern.shape[-1], dtype=torch.float64)
    return (pattern * (place[:, None] - place)).sum(dim=-1).mean(dim=-1)


def confidence(pattern: Tensor) -> Tensor:
    """Mean of a query's largest weight (Voita et al. 2019), over queries from 1 on."""
    return pattern.amax(dim=-1)[..., 1:].mean(dim=-1)


def effective_rank(output: Tensor) -> Tensor:
    """exp of the entropy of the singular values' shares (Roy and Vetterli 2007) of a head's outputs (..., N, width).

    Between 1 and width: how many directions the head writes in.
    """
    values = torch.linalg.svdvals(output.double())
    shares = values / values.sum(dim=-1, keepdim=True)
    return torch.special.entr(shares).sum(dim=-1).exp()


def divergence(pattern: Tensor, queries: int = 128) -> Tensor:
    """Jensen-Shannon divergence between all pairs of heads, nats in [0, ln 2], mean over queries from 1 on.

    (N, T, T) patterns -> (N, N). Of a long text so many queries, evenly spread: pairs of heads are many.
    """
    T = pattern.shape[-1]
    at = torch.linspace(1, T - 1, min(queries, T - 1)).round().long()
    pattern = pattern[:, at]  # (N, queries, T)
    entropies = torch.special.entr(pattern).sum(dim=-1)  # (N, queries)
    found = torch.zeros(len(pattern), len(pattern), dtype=pattern.dtype)
    for n, (one, own) in enumerate(zip(pattern, entropies, strict=True)):  # all pairs at once would be large
        middle = torch.special.entr((one + pattern[:n]) / 2).sum(dim=-1)
        found[n, :n] = found[:n, n] = (middle - (own + entropies[:n]) / 2).mean(dim=-1)
    return found.clamp(min=0)


def arc_weight(pattern: Tensor, later: int, earlier: list[int]) -> Tensor:
    """Weight that the last token of a word gives to all tokens of an earlier one. Shape (...)."""
    return pattern[..., later, earlier].sum(dim=-1)


def best_distance(arcs: list[tuple[int, list[int]]]) -> tuple[int, float]:
    """The fixed distance that meets the most arcs, and the share that it meets: what a head blind to words could score.

    An arc is the place of its later token, and those of its earlier word.
    """
    met: dict[int, int] = {}
    for later, earlier in arcs:
        for key in earlier:
            met[later - key] = met.get(later - key, 0) + 1
    best = max(met, key=lambda back: (met[back], -back))
    return best, met[best] / len(arcs)
