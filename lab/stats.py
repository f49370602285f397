"""What the losses of a sweep say: differences to a baseline over seeds, and which of them are real.

Designs are compared in pairs: at one seed they saw the same tokens in the same order, so the difference at a seed is
taken first, and its spread over seeds is the error. Losses are in nats a token; a difference is design minus
baseline: positive is worse. All of it is about these seeds, this text and this training length.

Sources: Student 1908 (t-interval of a mean); Holm 1979, Scand. J. Statist. 6:65-70 (adjusted p); Johnson, Kotz and
Balakrishnan 1995, Continuous Univariate Distributions 2, ch. 31 (noncentral t); Scheffe 1959, The Analysis of
Variance, ch. 4 (two-way layout with one observation a cell).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import nctdtr, stdtr, stdtrit

from runtime.errors import UserError

LEVEL, POWER = 0.05, 0.8  # of the verdict over the whole family; of the smallest detectable difference
MIN_SEEDS = 3  # the t of two seeds is 12.7: an interval that tells nobody anything
MIN_EVALUATIONS = 4
FALL = 0.05  # nats that a settled baseline may still lose over the last quarter
NOISE_RATIO = 3  # between the designs' residual deviations, from which the pooled analysis comes with a note


@dataclass(frozen=True)
class Run:
    """One finished run, as its metrics.jsonl tells it; losses in nats a token."""

    step: int  # the last one, to which loss and bits_per_byte belong
    loss: float  # over the whole validation split
    bits_per_byte: float | None  # None where no token of the split has bytes
    val_tokens: int | None  # that loss was taken over
    curve: dict[int, float]  # step -> loss over one and the same part of the split
    tokens: dict[int, int]  # step of the curve -> training tokens seen


def evaluations(metrics: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl that are evaluations with a finite loss; torn and damaged ones are skipped."""
    rows = []
    for line in metrics.read_bytes().decode(errors="replace").splitlines():
        try:
            row = json.loads(line)
            if math.isfinite(row["val_loss"]) and row["step"] >= 0 and row["tokens"] >= 0:
                rows.append(row)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # about training, or not one of ours
            continue
    return rows


def read_curve(metrics: Path) -> Run:
    """Read a run's metrics.jsonl: its last evaluation, and the curve of all those over as many tokens as its first.

    Torn and damaged lines are skipped. UserError where no evaluation is left.
    """
    rows = evaluations(metrics)
    if not rows:
        raise UserError(f"{metrics} holds no evaluation; delete the run's folder to have it trained again")
    last, part = rows[-1], [row for row in rows if row.get("val_tokens") == rows[0].get("val_tokens")]
    return Run(
        last["step"], last["val_loss"], last.get("val_bits_per_byte"), last.get("val_tokens"),
        {row["step"]: row["val_loss"] for row in part}, {row["step"]: row["tokens"] for row in part},
    )  # fmt: skip


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1 in the denominator); None for the deviation of a single value."""
    mean = math.fsum(values) / len(values)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return mean, math.sqrt(squares / (len(values) - 1)) if len(values) > 1 else None


def t_quantile(df: int, level: float = LEVEL) -> float:
    """Student's t that is exceeded, on either side, with probability level."""
    return float(stdtrit(df, 1 - level / 2))


def t_test(mean: float, error: float, df: int) -> dict[str, Any]:
    """95% interval mean -+ t x standard error, unadjusted for other comparisons, and two-sided p of mean / error."""
    half = t_quantile(df) * error
    # Where nothing varies, a mean of 0 is no difference at all, and any other is beyond doubt.
    p = float(2 * stdtr(df, -abs(mean / error))) if error > 0 else float(mean == 0)
    return {"interval": [mean - half, mean + half], "p": p}


def holm(p_values: Mapping[str, float], comparisons: int) -> dict[str, float]:
    """Holm's step-down p: the i-th smallest of m times (m - i + 1), never below the one before, at most 1.

    m is the number of comparisons that were set out to be made: one that has no p for lack of seeds still counts.
    """
    adjusted, highest = {}, 0.0
    for rank, name in enumerate(sorted(p_values, key=p_values.__getitem__)):
        adjusted[name] = highest = max(highest, min(1.0, (comparisons - rank) * p_values[name]))
    return adjusted


@lru_cache
def detectable_multiple(n: int, comparisons: int) -> float:
    """The smallest true difference that n seeds find 8 times in 10, in paired deviations: noncentrality / sqrt(n).

    Power is P(|T| > t) for T noncentral t with n - 1 degrees of freedom and noncentrality sqrt(n) difference / sd, and
    t the two-sided quantile at 0.05 / comparisons: Holm's first step, which the smallest p has to pass.
    """
    t = t_quantile(n - 1, LEVEL / comparisons)

    def power(noncentrality: float) -> float:
        # nctdtr is NaN here and there in the far lower tail, where the probability is 0 to many digits.
        below, within = np.nan_to_num(nctdtr(n - 1, noncentrality, [-t, t]))
        return float(below + 1 - within)

    root = brentq(lambda noncentrality: power(noncentrality) - POWER, 0, 3 * t + 5)
    if abs(power(root) - POWER) > 1e-6:  # the jump at a NaN that was no tail
        raise ArithmeticError(f"no power can be calculated for {n} seeds and {comparisons} comparisons")
    return root / math.sqrt(n)


def pooled_analysis(losses: Mapping[str, Mapping[int, float]], baseline: str) -> tuple[dict, dict[str, dict]] | None:
    """Analysis of variance, loss = seed + design + noise, with all designs' noise in one deviation.

    The residuals have (designs - 1)(seeds - 1) degrees of freedom; only seeds that every design finished count.
    design_sd is each design's part of them, scaled so that its mean square over designs is residual_sd squared; it
    holds some of the other designs' noise, so true deviations differ by more than these. Returns the analysis and
    each design's t_test against the baseline, or None with fewer than 3 seeds or 2 designs.
    """
    losses = {name: by_seed for name, by_seed in losses.items() if by_seed}
    seeds = sorted(set.intersection(*map(set, losses.values()))) if baseline in losses else []
    k, n = len(losses), len(seeds)
    if n < MIN_SEEDS or k < 2:
        return None
    # Differences to the baseline have the same residuals as the losses, and are exactly 0 for identical runs.
    table = np.array([[by_seed[s] - losses[baseline][s] for s in seeds] for by_seed in losses.values()])  # (k, n)
    means = table.mean(1)  # (k,)
    squares = ((table - means[:, None] - table.mean(0) + table.mean()) ** 2).sum(1)  # (k,)
    df = (k - 1) * (n - 1)
    residual_sd = math.sqrt(squares.sum() / df)
    design_sd = dict(zip(losses, np.sqrt(squares * k / df).tolist(), strict=True))
    (low, quiet), *_, (high, noisy) = sorted((sd, name) for name, sd in design_sd.items())
    span = f"residual deviations go from {low:.4f} ({quiet}) to {high:.4f} ({noisy})"
    chance = f"; over {n} seeds that is often chance" if n < 10 else ""  # of 5 designs: 3 seeds 64%, 5 25%, 10 1%
    note = f"The pooled analysis takes all designs to be equally noisy, but their {span}{chance}."
    error = residual_sd * math.sqrt(2 / n)  # of a difference between two designs' means
    tests = {name: t_test(mean, error, df) for name, mean in zip(losses, means.tolist(), strict=True)}
    pooled = {"df": df, "residual_sd": residual_sd, "design_sd": design_sd, "seeds": seeds}
    return {**pooled, "note": note if high > NOISE_RATIO * low else None}, tests


def not_settled(differences: Sequence[Mapping], baseline: Sequence[Mapping], steps: int) -> str | None:
    """Why the verdict may change with longer training, or None, from the curves of the difference and the baseline.

    Either the mean difference had another sign at half length than at the end (0 is no sign), or the baseline's mean
    loss fell by more than 0.05 over the last quarter; each at the evaluation nearest to that step.
    """
    if min(len(differences), len(baseline)) < MIN_EVALUATIONS:
        return "too few evaluations to tell"
    half = min(differences, key=lambda point: abs(point["step"] - steps / 2))
    quarter = min(baseline, key=lambda point: abs(point["step"] - steps * 3 / 4))
    before, after = (f"{point['mean']:+.4f} at step {point['step']}" for point in (half, differences[-1]))
    if half["mean"] * differences[-1]["mean"] < 0:
        return f"the mean difference was {before} and {after}"
    fall, where = quarter["mean"] - baseline[-1]["mean"], f"from step {quarter['step']} to {baseline[-1]['step']}"
    return f"the baseline's loss still fell by {fall:.3f} {where}" if fall > FALL else None


def _curve(curves: Sequence[Mapping[int, float]], tokens: Mapping[int, int], factor: float | None) -> list[dict]:
    """Mean over runs and a band of mean -+ factor x sd, at the steps that all of them have."""
    points = []
    for step in sorted(set.intersection(*map(set, curves))):
        mean, sd = mean_and_sd([curve[step] for curve in curves])
        low, high = (None, None) if None in (factor, sd) else (mean - factor * sd, mean + factor * sd)
        points.append({"step": step, "tokens": tokens[step], "mean": mean, "low": low, "high": high, "n": len(curves)})
    return points


def _alone(runs: Sequence[Run]) -> dict[str, Any]:
    """A design's own losses; nothing but n = 0 where none of its runs finished."""
    mean, sd = mean_and_sd([run.loss for run in runs]) if runs else (None, None)
    bits = [run.bits_per_byte for run in runs]
    return {
        "loss": {"n": len(runs), "mean": mean, "sd": sd},
        "bits_per_byte": None if None in bits or not bits else mean_and_sd(bits)[0],
        "curve": _curve([run.curve for run in runs], runs[0].tokens, 1.0) if runs else [],
        "against_baseline": None,
    }


def _paired(pairs: Mapping[int, tuple[Run, Run]], comparisons: int) -> dict[str, Any]:
    """Student's analysis of {seed: (design's run, baseline's run)}: error sd / sqrt(n), n - 1 degrees of freedom."""
    differences, n = [run.loss - reference.loss for run, reference in pairs.values()], len(pairs)
    curves = [{s: a.curve[s] - b.curve[s] for s in a.curve if s in b.curve} for a, b in pairs.values()]
    mean, sd = mean_and_sd(differences)
    result = {"seeds": list(pairs), "differences": differences, "mean": mean, "sd": sd}
    factor, test, detectable = None, {"interval": None, "p": None}, None
    if n >= MIN_SEEDS:
        factor, test = t_quantile(n - 1) / math.sqrt(n), t_test(mean, sd / math.sqrt(n), n - 1)
        detectable = detectable_multiple(n, comparisons) * sd
    curve = _curve(curves, next(iter(pairs.values()))[0].tokens, factor)
    return {**result, **test, "smallest_detectable": detectable, "curve": curve}


def analyse(runs: Mapping[str, Mapping[int, Path]], baseline: str) -> dict[str, Any]:
    """Compare every design with the baseline: runs[design][seed] is the metrics.jsonl of a finished run.

    The verdict is about the final loss, at 5% of the Holm-adjusted p, and stands only where it is settled. Bands of
    curves are mean -+ sd over seeds, those of differences 95% t-intervals. Plain JSON, None for what does not exist:
    interval and p below 3 seeds, sd of one run. UserError where final losses are over different numbers of tokens.
    """
    read = {name: {seed: read_curve(paths[seed]) for seed in sorted(paths)} for name, paths in runs.items()}
    sizes = {run.val_tokens: runs[name][seed] for name, by_seed in read.items() for seed, run in by_seed.items()}
    if len(sizes) > 1:
        told = " but ".join(f"{path} over {tokens} tokens" for tokens, path in sizes.items())
        raise UserError(f"last evaluations do not compare: {told}; delete the folder of the damaged run to repeat it")
    comparisons = len(read) - 1
    designs = {name: _alone(list(by_seed.values())) for name, by_seed in read.items()}
    for name in read.keys() - {baseline}:
        if pairs := {seed: (run, read[baseline][seed]) for seed, run in read[name].items() if seed in read[baseline]}:
            designs[name]["against_baseline"] = _paired(pairs, comparisons)
    against = {name: design["against_baseline"] for name, design in designs.items() if design["against_baseline"]}
    adjusted = holm({name: a["p"] for name, a in against.items() if a["p"] is not None}, comparisons)

    losses = {name: {seed: run.loss for seed, run in by_seed.items()} for name, by_seed in read.items()}
    pooled, tests = pooled_analysis(losses, baseline) or (None, {})
    pooled_p = holm({name: test["p"] for name, test in tests.items() if name != baseline}, comparisons)
    for name, a in against.items():
        a["p_holm"] = adjusted.get(name)
        a["not_settled"] = not_settled(a["curve"], designs[baseline]["curve"], max(r.step for r in read[name].values()))
        a["detected"], a["verdict"] = None, "too few seeds for a verdict"
        if name in adjusted:
            direction = "worse" if a["mean"] > 0 else "better"
            a["detected"] = direction if adjusted[name] <= LEVEL else "no difference detected"
            a["verdict"] = "not settled at this length" if a["not_settled"] else a["detected"]
        a["pooled"] = {**tests[name], "p_holm": pooled_p[name]} if name in tests else None
    return {"designs": designs, "comparisons": comparisons, "pooled": pooled}
