"""Statistics tested as statistics: what they promise of 100 sweeps holds in 10,000 simulated ones; and by hand."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from scipy.special import chdtri, ndtr

from benchmarks.coverage import simulate
from lab.stats import analyse, detectable_multiple, holm, mean_and_sd, not_settled, read_curve, t_quantile
from runtime.errors import UserError

STEPS = (100, 200, 300, 400)


def write(path, losses, final=None):
    """A finished run: evaluations over 1,000 tokens at STEPS, then, if given, one over the whole split."""
    rows = [{"step": 50, "tokens": 5000, "train_loss": 3.0, "lr": 0.1}]
    rows += [
        {"step": step, "tokens": 100 * step, "val_loss": loss, "val_bits_per_byte": 2 * loss, "val_tokens": 1000}
        for step, loss in zip(STEPS, losses, strict=False)
    ]
    if final is not None:
        rows.append({**rows[-1], "val_loss": final, "val_bits_per_byte": 2 * final, "val_tokens": 5000})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def sweep(tmp_path):
    """Write {design: {seed: final loss, or the losses at STEPS}}, analyse against the first, see that it is JSON."""

    def analysed(losses):
        runs = {}
        for name, by_seed in losses.items():
            runs[name] = {}
            for seed, loss in by_seed.items():
                curve = loss if isinstance(loss, list) else [loss] * 4
                runs[name][seed] = write(tmp_path / f"{name}-{seed}.jsonl", curve)
        result = analyse(runs, next(iter(losses)))
        json.dumps(result, allow_nan=False)
        return result

    return analysed


# The largest first: two workers then end together.
@pytest.mark.parametrize("seeds, designs", [(10, 5), (5, 5), (10, 2), (3, 5), (5, 2), (3, 2)])
def test_of_10_000_simulated_sweeps_intervals_verdicts_and_detections_keep_their_promises(seeds, designs):
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a disk would take as long again
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        shares = simulate("normal", seeds, designs, 10_000, Path(folder))
    assert len(shares["coverage"]) == designs - 1
    assert shares["coverage"] == pytest.approx([0.95] * (designs - 1), abs=0.01)
    assert shares["pooled_coverage"] == pytest.approx(0.95, abs=0.01)
    assert shares["false_verdict"] <= 0.06
    assert shares["detected"] == pytest.approx(0.80, abs=0.03)


def power_by_integration(difference, n, level):
    """P(|T| > t) for n paired differences of deviation 1: over 200,000 equally likely sample variances."""
    parts = (np.arange(200_000) + 0.5) / 200_000
    sd = np.sqrt(chdtri(n - 1, parts) / (n - 1))  # what a sample's deviation may come out as
    bound = t_quantile(n - 1, level) * sd
    return np.mean(ndtr(difference * math.sqrt(n) - bound) + ndtr(-difference * math.sqrt(n) - bound))


@pytest.mark.parametrize("comparisons", [1, 2, 4, 9, 30])
@pytest.mark.parametrize("n", [3, 4, 5, 10, 20, 50])
def test_the_smallest_detectable_difference_has_power_80_percent_by_another_integration(n, comparisons):
    multiple = detectable_multiple(n, comparisons)
    assert power_by_integration(multiple, n, 0.05 / comparisons) == pytest.approx(0.8, abs=1e-4)


def test_ten_seeds_and_no_fewer_find_a_difference_of_one_deviation():
    # Power tables of the paired t-test (Cohen 1988, and G*Power): d = 1, two-sided 5%, power 80% needs n = 10.
    assert detectable_multiple(10, 1) < 1 < detectable_multiple(9, 1)


def test_a_sweep_calculated_by_hand(sweep):
    # Differences of a: 0.01, 0.02, 0.03: mean 0.02, sd 0.01, error 0.01 / sqrt(3) = 0.0057735, t(2) = 4.302653:
    # interval 0.02 -+ 0.024841. |t| = 3.464102, p = 1 - t / sqrt(2 + t^2) = 1 - 3.464102 / sqrt(14) = 0.0741799.
    # b: -0.1, -0.1, -0.1 + 0.003: mean -0.099, sd 0.001732, error 0.001: t = 99, p = 1 - 99 / sqrt(9803) = 0.000102.
    result = sweep(
        {"base": {1: 1.7, 2: 1.8, 3: 1.6}, "a": {1: 1.71, 2: 1.82, 3: 1.63}, "b": {1: 1.6, 2: 1.7, 3: 1.503}}
    )
    base, a, b = (result["designs"][name] for name in ("base", "a", "b"))
    assert base["loss"] == pytest.approx({"n": 3, "mean": 1.7, "sd": 0.1}) and base["against_baseline"] is None
    assert base["bits_per_byte"] == pytest.approx(3.4)
    a, b = a["against_baseline"], b["against_baseline"]
    assert a["seeds"] == [1, 2, 3] and a["differences"] == pytest.approx([0.01, 0.02, 0.03])
    assert (a["mean"], a["sd"]) == pytest.approx((0.02, 0.01))
    assert a["interval"] == pytest.approx([0.02 - 0.024841, 0.02 + 0.024841], abs=1e-6)
    assert a["p"] == pytest.approx(0.0741799, abs=1e-6) and b["p"] == pytest.approx(1 - 99 / math.sqrt(9803))
    assert result["comparisons"] == 2
    assert b["p_holm"] == pytest.approx(2 * b["p"]) and a["p_holm"] == a["p"]
    assert (a["verdict"], b["verdict"]) == ("no difference detected", "better")
    assert a["smallest_detectable"] == pytest.approx(detectable_multiple(3, 2) * 0.01)
    assert len(a["curve"]) == 4 and a["curve"][-1] == pytest.approx(
        {"step": 400, "tokens": 40000, "mean": 0.02, "low": 0.02 - 0.024841, "high": 0.02 + 0.024841, "n": 3}, abs=1e-6
    )
    point = {"step": 100, "tokens": 10000, "mean": 1.7, "low": 1.6, "high": 1.8, "n": 3}
    assert base["curve"][0] == pytest.approx(point)


def test_the_verdict_goes_by_the_adjusted_p(sweep):
    # 0.018, 0.028, 0.038: t = 0.028 sqrt(3) / 0.01 = 4.84974, p = 1 - t / sqrt(2 + t^2) = 0.0400; of two, 0.0800.
    base, a = {1: 1.7, 2: 1.8, 3: 1.6}, {1: 1.718, 2: 1.828, 3: 1.638}
    alone = sweep({"base": base, "a": a})["designs"]["a"]["against_baseline"]
    of_two = sweep({"base": base, "a": a, "b": {1: 1.69, 2: 1.83, 3: 1.6}})["designs"]["a"]["against_baseline"]
    assert alone["p"] == alone["p_holm"] == of_two["p"] == pytest.approx(0.0400, abs=1e-4)
    assert of_two["p_holm"] == pytest.approx(0.0800, abs=1e-4)
    assert (alone["verdict"], of_two["verdict"]) == ("worse", "no difference detected")
    assert alone["interval"] == of_two["interval"] and of_two["interval"][0] > 0  # the interval is not adjusted


def test_the_pooled_analysis_calculated_by_hand(sweep):
    # Differences to base in hundredths: base 0, 0, 0; a 1, 2, 3; b 0, 0, 3. Means of designs 0, 2, 1, of seeds 1/3,
    # 2/3, 2, of all 1. Residuals (less both means, plus that of all): base 2/3, 1/3, -1; a -1/3, 1/3, 0; b -1/3, -2/3,
    # 1. Their squares sum to 14/9 + 2/9 + 14/9 = 30/9; df = 2 x 2; residual sd = sqrt(30/36), times sqrt(2/3) the
    # error of a difference of means.
    losses = {"base": {1: 1.7, 2: 1.8, 3: 1.6}, "a": {1: 1.71, 2: 1.82, 3: 1.63}, "b": {1: 1.7, 2: 1.8, 3: 1.63}}
    losses["a"][4] = losses["base"][4] = 1.5  # no pooling over a seed that b has not finished
    result = sweep(losses)
    pooled = result["pooled"]
    assert (pooled["df"], pooled["seeds"], pooled["note"]) == (4, [1, 2, 3], None)
    assert pooled["residual_sd"] == pytest.approx(0.01 * math.sqrt(30 / 36))
    by_hand = {name: 0.01 * math.sqrt(squares / 9 * 3 / 4) for name, squares in (("base", 14), ("a", 2), ("b", 14))}
    assert pooled["design_sd"] == pytest.approx(by_hand)
    a, b = (result["designs"][name]["against_baseline"]["pooled"] for name in "ab")
    half = 2.776445 * 0.01 * math.sqrt(30 / 36 * 2 / 3)  # t(4), 97.5%
    assert a["interval"] == pytest.approx([0.02 - half, 0.02 + half], abs=1e-7)
    # p under t(4) with x = t / sqrt(4 + t^2): 1 - x (3 - x^2) / 2
    t = 2 / math.sqrt(30 / 36 * 2 / 3)
    x = t / math.sqrt(4 + t * t)
    assert a["p"] == pytest.approx(1 - x * (3 - x * x) / 2) and a["p_holm"] == pytest.approx(2 * a["p"])
    assert b["p_holm"] == b["p"] > a["p_holm"]


def test_with_two_designs_the_pooled_analysis_is_the_paired_t_test(sweep):
    against = sweep({"base": {1: 1.7, 2: 1.8, 3: 1.6, 4: 1.65}, "a": {1: 1.71, 2: 1.77, 3: 1.63, 4: 1.7}})
    against = against["designs"]["a"]["against_baseline"]
    assert against["pooled"]["interval"] == pytest.approx(against["interval"])
    assert against["pooled"]["p"] == pytest.approx(against["p"])


def test_a_design_far_noisier_than_the_others_brings_a_note(sweep):
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(4, 10)) * np.array([[0.001], [0.001], [0.02], [0.001]])
    names = ["base", "a", "wild", "c"]
    result = sweep({name: dict(enumerate(row)) for name, row in zip(names, (1.7 + noise).tolist(), strict=True)})
    assert "(wild)" in result["pooled"]["note"]
    noise = rng.normal(size=(4, 10))
    result = sweep({name: dict(enumerate(row)) for name, row in zip(names, (1.7 + noise).tolist(), strict=True)})
    assert result["pooled"]["note"] is None


def test_holm_calculated_by_hand():
    # 0.01 x 4; 0.02 x 3; 0.03 x 2 = 0.06 again; 0.04 x 1 is not below the one before.
    adjusted = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02}, 4)
    assert adjusted == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})
    assert holm({"a": 0.5, "b": 0.02}, 3) == pytest.approx({"b": 0.06, "a": 1.0})  # the third had too few seeds


@pytest.mark.parametrize("third", [{}, {"other": {1: 1.75, 2: 1.81, 3: 1.69}}])
def test_the_same_losses_twice_are_no_difference_at_all(sweep, third):
    losses = {1: 1.7031, 2: 1.7123, 3: 1.6987}
    result = sweep({"mha": losses, "again": losses, **third})
    again = result["designs"]["again"]["against_baseline"]
    assert again["differences"] == [0, 0, 0] and (again["mean"], again["sd"]) == (0, 0)
    assert again["interval"] == [0, 0] and (again["p"], again["p_holm"]) == (1, 1)
    assert again["smallest_detectable"] == 0
    assert again["verdict"] == again["detected"] == "no difference detected"
    assert all((point["low"], point["mean"], point["high"]) == (0, 0, 0) for point in again["curve"])
    if not third:
        assert again["pooled"] == {"interval": [0, 0], "p": 1, "p_holm": 1} and result["pooled"]["residual_sd"] == 0


def test_a_difference_whose_sign_turns_after_half_length_is_not_settled(sweep):
    base = {seed: [2.0, 1.8 + seed / 1000, 1.71, 1.70] for seed in (1, 2, 3)}
    turned = {seed: [2.0, 1.79 + seed / 1000, 1.72, 1.72 + seed / 1e5] for seed in (1, 2, 3)}
    kept = {seed: [1.9, 1.81 + seed / 1000, 1.70, 1.72 + seed / 1e5] for seed in (1, 2, 3)}
    same = {seed: [2.0, 1.8 + seed / 1000, 1.72, 1.70 - seed / 1e3] for seed in (1, 2, 3)}
    designs = sweep({"base": base, "turned": turned, "kept": kept, "same": same})["designs"]
    turned, kept, same = (designs[name]["against_baseline"] for name in ("turned", "kept", "same"))
    assert (turned["verdict"], turned["detected"]) == ("not settled at this length", "worse")
    assert turned["not_settled"] == "the mean difference was -0.0100 at step 200 and +0.0200 at step 400"
    assert (kept["verdict"], kept["not_settled"]) == ("worse", None)  # what it did at other steps does not count
    assert same["not_settled"] is None  # exactly 0 at half length is no sign


def test_nothing_is_settled_while_the_baseline_still_falls(sweep):
    base = {seed: [2.0, 1.85, 1.76, 1.70 + seed / 1e4] for seed in (1, 2, 3)}
    losses = {"base": base, "worse": {s: [x + 0.3 + s / 1e4 for x in c] for s, c in base.items()}, "same": base}
    designs = sweep(losses)["designs"]
    assert designs["worse"]["against_baseline"]["detected"] == "worse"
    assert designs["same"]["against_baseline"]["detected"] == "no difference detected"
    for name in ("worse", "same"):
        assert designs[name]["against_baseline"]["verdict"] == "not settled at this length"
        reason = designs[name]["against_baseline"]["not_settled"]
        assert reason == "the baseline's loss still fell by 0.060 from step 300 to 400"
    losses["base"] = {seed: [2.0, 1.85, 1.748, curve[3]] for seed, curve in base.items()}
    assert sweep(losses)["designs"]["worse"]["against_baseline"]["verdict"] == "worse"


def test_half_and_three_quarters_are_the_evaluations_nearest_to_them():
    # Evaluated every 90 of 400 steps: 180 is nearest to 200, 270 to 300; the last, at 360, stands for the end.
    flat = [{"step": step, "mean": 1.7} for step in (90, 180, 270, 360)]
    turning = [{"step": step, "mean": mean} for step, mean in ((90, -1.0), (180, 0.5), (270, -1.0), (360, 0.5))]
    assert not_settled(turning, flat, 400) is None
    turning[1]["mean"] = -0.5
    assert "-0.5000 at step 180" in not_settled(turning, flat, 400)
    falling = [{"step": step, "mean": mean} for step, mean in ((90, 9.0), (180, 9.0), (270, 1.76), (360, 1.70))]
    assert "0.060 from step 270 to 360" in not_settled(flat, falling, 400)


def test_a_run_with_three_evaluations_is_too_short_to_be_settled(sweep):
    short = {seed: [2.0, 1.9, 1.7 + seed / 1e3] for seed in (1, 2, 3)}
    worse = {seed: [2.1, 2.0, 1.8 + seed / 1e3 + seed**2 / 1e4] for seed in (1, 2, 3)}
    against = sweep({"base": short, "worse": worse})["designs"]["worse"]["against_baseline"]
    assert (against["verdict"], against["detected"]) == ("not settled at this length", "worse")
    assert against["not_settled"] == "too few evaluations to tell"


@pytest.mark.parametrize("n", [1, 2])
def test_fewer_than_three_seeds_give_no_interval_and_no_verdict(sweep, n):
    base = {seed: 1.7 + seed / 100 for seed in range(n)}
    result = sweep({"base": base, "a": {seed: loss + 0.1 + seed / 1000 for seed, loss in base.items()}})
    against = result["designs"]["a"]["against_baseline"]
    assert against["mean"] == pytest.approx(0.1 + (n - 1) / 2000)
    for key in ("interval", "p", "p_holm", "smallest_detectable", "detected", "pooled"):
        assert against[key] is None
    assert against["verdict"] == "too few seeds for a verdict"
    assert result["pooled"] is None
    assert (against["curve"][0]["low"], against["curve"][0]["high"], against["curve"][0]["n"]) == (None, None, n)
    band, sd = result["designs"]["base"]["curve"][0], result["designs"]["base"]["loss"]["sd"]
    assert (sd, band["low"]) == (None, None) if n == 1 else sd == pytest.approx(band["high"] - band["mean"])


def test_designs_are_paired_over_the_seeds_that_both_finished(sweep):
    base = {1: 1.70, 2: 1.71, 3: 1.72, 4: 1.60}
    part, two = {9: 5.0, 4: 1.63, 3: 1.73, 2: 1.72}, {1: 1.7, 4: 1.7}
    result = sweep({"base": base, "part": part, "two": two, "other": {8: 1.0}, "none": {}})
    part, two, other, none = (result["designs"][name] for name in ("part", "two", "other", "none"))
    assert part["against_baseline"]["seeds"] == [2, 3, 4]
    assert part["against_baseline"]["differences"] == pytest.approx([0.01, 0.01, 0.03])
    assert part["loss"]["n"] == 4
    assert two["against_baseline"]["verdict"] == "too few seeds for a verdict"
    assert other["against_baseline"] is None and other["loss"] == {"n": 1, "mean": 1.0, "sd": None}
    assert none == {
        "loss": {"n": 0, "mean": None, "sd": None}, "bits_per_byte": None, "curve": [], "against_baseline": None
    }  # fmt: skip
    # What was set out to be compared counts, whether or not it came to a p.
    assert result["comparisons"] == 4
    assert part["against_baseline"]["p_holm"] == pytest.approx(min(1, 4 * part["against_baseline"]["p"]))


def test_a_baseline_without_runs_leaves_nothing_to_compare(sweep):
    result = sweep({"base": {}, "a": {1: 1.7, 2: 1.8, 3: 1.6}})
    assert result["designs"]["a"]["against_baseline"] is None and result["pooled"] is None
    assert sweep({"base": {1: 1.7, 2: 1.8, 3: 1.6}})["comparisons"] == 0


def test_a_run_is_its_last_evaluation_and_the_curve_of_equal_parts(tmp_path):
    run = read_curve(write(tmp_path / "metrics.jsonl", [2.0, 1.9, 1.8, 1.7], final=1.75))
    assert (run.step, run.loss, run.bits_per_byte, run.val_tokens) == (400, 1.75, 3.5, 5000)
    assert run.curve == {100: 2.0, 200: 1.9, 300: 1.8, 400: 1.7}
    assert run.tokens == {100: 10_000, 200: 20_000, 300: 30_000, 400: 40_000}


def test_torn_and_damaged_lines_are_skipped(tmp_path):
    path = write(tmp_path / "metrics.jsonl", [2.0, 1.9, 1.8, 1.7], final=1.75)
    whole, lines = read_curve(path), path.read_bytes().splitlines(keepends=True)
    rubbish = [
        b"\n", b"\xff\xfe\x00\n", b"[1, 2]\n", b"null\n", b"[" * 100_000 + b"\n", b'{"step": 250, "val_loss": \n',
        b'{"step": 250, "tokens": 9, "val_loss": NaN}\n', b'{"step": 250, "tokens": 9, "val_loss": null}\n',
        b'{"step": null, "tokens": 9, "val_loss": 1.0}\n', b'{"val_loss": 1.0}\n',
    ]  # fmt: skip
    path.write_bytes(b"".join(lines[:3] + rubbish + lines[3:]) + b'{"step": 500, "tokens": 50000, "val_l')
    assert read_curve(path) == whole
    path.write_bytes(b"".join(rubbish))
    with pytest.raises(UserError, match="holds no evaluation"):
        read_curve(path)


def test_a_run_that_lost_its_last_evaluation_is_not_compared(tmp_path):
    runs = {"base": {}, "a": {}}
    for seed in (1, 2, 3):
        runs["base"][seed] = write(tmp_path / f"base-{seed}", [2.0, 1.9, 1.8, 1.7], final=1.75)
        runs["a"][seed] = write(tmp_path / f"a-{seed}", [2.0, 1.9, 1.8, 1.7], final=1.75 if seed < 3 else None)
    with pytest.raises(UserError, match="a-3 over 1000 tokens"):
        analyse(runs, "base")


def test_a_deviation_is_over_n_minus_one():
    assert mean_and_sd([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, math.sqrt(5 / 3)))
    assert mean_and_sd([1.0]) == (1.0, None)
