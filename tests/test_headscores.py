"""Every score on patterns made by hand, whose score is known."""

import math

import numpy as np
import pytest
import scipy.spatial
import torch

from lab import headscores as hs

IDS = torch.tensor([5, 7, 5, 7, 9, 5])  # 5 at 0, 2, 5; 7 at 1, 3


def looking(*keys):
    """The pattern in which query i gives all its weight to keys[i]."""
    pattern = torch.zeros(len(keys), len(keys), dtype=torch.float64)
    for query, key in enumerate(keys):
        pattern[query, key] = 1.0
    return pattern


PREVIOUS = looking(0, 0, 1, 2, 3, 4)
DUPLICATE = looking(0, 0, 0, 1, 0, 2)
INDUCTION = looking(0, 0, 1, 2, 0, 3)
FIRST = looking(0, 0, 0, 0, 0, 0)
SELF = looking(0, 1, 2, 3, 4, 5)
EVEN = hs.even(6)


def harmonic(*places):
    """Mean of 1 / (i + 1) over queries i: what an even spread gives to one key."""
    return sum(1 / (i + 1) for i in places) / len(places)


def test_an_even_spread_is_causal_and_sums_to_one():
    assert torch.equal(EVEN.tril(), EVEN) and torch.allclose(EVEN.sum(-1), torch.ones(6, dtype=torch.float64))


def test_previous_token():
    target = hs.distance_back(6, 1)
    assert hs.found(PREVIOUS, target) == 1 and hs.found(SELF, target) == 0
    assert hs.found(EVEN, target).item() == pytest.approx(harmonic(1, 2, 3, 4, 5))
    assert hs.found(FIRST, target).item() == pytest.approx(1 / 5)  # only query 1's previous token is the first


def test_largest_at_counts_queries_and_not_weight():
    soft = 0.6 * PREVIOUS + 0.4 * SELF
    assert hs.largest_at(soft, 1) == 1 and hs.largest_at(soft, 2) == 0
    assert hs.found(soft, hs.distance_back(6, 1)).item() == pytest.approx(0.6)
    assert hs.largest_at(looking(0, 0, 1, 0, 3, 4), 1).item() == pytest.approx(4 / 5)


def test_duplicate_token_asks_only_queries_whose_token_came_before():
    target = hs.duplicates(IDS)
    assert target.nonzero().tolist() == [[2, 0], [3, 1], [5, 0], [5, 2]]
    assert hs.found(DUPLICATE, target) == 1 and hs.found(PREVIOUS, target) == 0
    assert hs.found(EVEN, target).item() == pytest.approx((1 / 3 + 1 / 4 + 2 / 6) / 3)


def test_induction_looks_behind_the_earlier_place():
    target = hs.after_duplicates(IDS)
    assert target.nonzero().tolist() == [[2, 1], [3, 2], [5, 1], [5, 3]]
    assert hs.found(INDUCTION, target) == 1 and hs.found(DUPLICATE, target) == 0
    assert hs.found(EVEN, target).item() == pytest.approx((1 / 3 + 1 / 4 + 2 / 6) / 3)


def test_preceding_token_is_told_apart():
    target = hs.before_duplicates(IDS)
    assert target.nonzero().tolist() == [[3, 0], [5, 1]]
    assert hs.found(looking(0, 0, 0, 0, 0, 1), target) == 1 and hs.found(INDUCTION, target) == 0


def test_a_text_without_repeats_has_no_duplicate_score():
    assert math.isnan(hs.found(EVEN, hs.duplicates(torch.arange(6))))


def test_class_ratio_is_weight_over_frequency():
    of_class = IDS == 7
    assert hs.class_ratio(EVEN, of_class).item() == pytest.approx(1)
    share = (1 / 2 + 1 / 3 + 2 / 4 + 2 / 5 + 2 / 6) / 5
    assert hs.class_ratio(looking(0, 1, 1, 1, 3, 1), of_class).item() == pytest.approx(1 / share)
    assert hs.class_weight(looking(0, 1, 1, 1, 3, 1), of_class) == 1
    assert hs.class_ratio(FIRST, of_class) == 0
    assert math.isnan(hs.class_ratio(FIRST, IDS == 1))


def test_first_token():
    assert hs.first_token(FIRST) == 1 and hs.first_token(SELF) == 0
    assert hs.first_token(EVEN).item() == pytest.approx(harmonic(1, 2, 3, 4, 5))


def test_entropy_is_normalised_by_what_a_query_sees():
    assert hs.entropy(EVEN).item() == pytest.approx(1) and hs.entropy(FIRST) == 0
    half = 0.5 * FIRST + 0.5 * SELF  # two keys from query 1 on: ln 2 of log(i + 1)
    assert hs.entropy(half).item() == pytest.approx(sum(math.log(2) / math.log(i + 1) for i in range(1, 6)) / 5)


def test_distance_in_tokens():
    assert hs.distance(SELF) == 0
    assert hs.distance(FIRST).item() == pytest.approx(15 / 6)
    assert hs.distance(PREVIOUS).item() == pytest.approx(5 / 6)
    assert hs.distance(EVEN).item() == pytest.approx(15 / 6 / 2)


def test_confidence():
    assert hs.confidence(PREVIOUS) == 1
    assert hs.confidence(0.7 * PREVIOUS + 0.3 * SELF).item() == pytest.approx(0.7)
    assert hs.confidence(EVEN).item() == pytest.approx(harmonic(1, 2, 3, 4, 5))


def test_effective_rank():
    assert hs.effective_rank(torch.eye(8)[:, :5]).item() == pytest.approx(5)
    assert hs.effective_rank(torch.ones(8, 1) * torch.randn(5)).item() == pytest.approx(1, abs=1e-5)
    values = torch.tensor([0.75, 0.25], dtype=torch.float64)
    expected = math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert hs.effective_rank(torch.diag(values)).item() == pytest.approx(expected)


def test_divergence_runs_from_0_to_ln_2():
    matrix = hs.divergence(torch.stack((PREVIOUS, PREVIOUS, SELF, EVEN)))
    assert matrix[0, 1] == 0 and torch.equal(matrix, matrix.T) and matrix.diagonal().abs().max() == 0
    assert matrix[0, 2].item() == pytest.approx(math.log(2))
    # One key of two against that key alone: H(3/4, 1/4) - (0 + ln 2) / 2, at query 1 of a text of two.
    two = torch.stack((torch.tensor([[1.0, 0], [1, 0]]), torch.tensor([[1.0, 0], [0.5, 0.5]]))).double()
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) - math.log(2) / 2
    assert hs.divergence(two)[0, 1].item() == pytest.approx(expected)


def test_divergence_is_the_square_of_scipys_distance_and_of_long_texts_a_mean_over_some_queries():
    patterns = []
    for T in (9, 40):
        later = torch.ones(T, T, dtype=torch.bool).triu(1)
        drawn = torch.randn(2, T, T, generator=torch.Generator().manual_seed(T), dtype=torch.float64)
        patterns.append(drawn.masked_fill(later, -math.inf).softmax(dim=-1))
    for pattern, queries, at in ((patterns[0], 128, range(1, 9)), (patterns[1], 3, (1, 20, 39))):
        one, two = pattern.numpy()
        expected = np.mean([scipy.spatial.distance.jensenshannon(one[i], two[i]) ** 2 for i in at])
        found = hs.divergence(pattern, queries)
        assert found[0, 1] == found[1, 0] == pytest.approx(expected) and found[0, 0] == found[1, 1] == 0


def test_arcs_and_the_best_fixed_distance():
    assert hs.arc_weight(EVEN, 5, [0, 1]).item() == pytest.approx(2 / 6)
    assert hs.best_distance([(5, [2]), (4, [1]), (3, [2])]) == (3, 2 / 3)
    assert hs.best_distance([(5, [2, 3]), (4, [2])]) == (2, 1.0)


def test_scores_take_all_heads_at_once():
    patterns = torch.stack((PREVIOUS, EVEN)).view(1, 2, 6, 6)
    assert hs.found(patterns, hs.distance_back(6, 1)).shape == (1, 2)
    for score in (hs.first_token, hs.entropy, hs.distance, hs.confidence):
        assert torch.allclose(score(patterns)[0], torch.stack((score(PREVIOUS), score(EVEN))))
