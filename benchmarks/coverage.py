"""How often the statistics of a comparison are right, on simulated sweeps that pass through metrics files.

    python -m benchmarks.coverage --sweeps 10000

Losses are seed effect + design effect + noise. Prints, for normal, exponential and heavy-tailed noise, how often the
95% interval holds the true difference (paired; pooled), how many sweeps without any effect hold a false verdict, and
how often a difference of the size called smallest detectable is found. About half a minute for every 1,000 sweeps.
"""

import argparse
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lab.stats import analyse, detectable_multiple

# Noise of variance 1. The difference of two exponentials is symmetric, with heavier tails than the normal's.
NOISE: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "t, 3 df": lambda rng, shape: rng.standard_t(3, size=shape) / math.sqrt(3),
}
SEED_SD, NOISE_SD = 0.02, 0.008  # nats
PAIRED_SD = NOISE_SD * math.sqrt(2)  # of the difference of two designs at one seed
DESIGNS = ["baseline", "planted", "third", "fourth", "fifth"]


def write_run(path: Path, loss: float) -> None:
    """A finished run's metrics.jsonl with its last evaluation alone: the settled rule is no part of this."""
    row = f'{{"step": 400, "tokens": 400000, "val_loss": {loss!r}, "val_bits_per_byte": 2.5, "val_tokens": 1000}}\n'
    path.write_bytes(row.encode())


def simulate(noise: str, seeds: int, designs: int, sweeps: int, folder: Path) -> dict[str, float | list[float]]:
    """Shares of simulated sweeps, each analysed twice: with no effect, and with one in the second design.

    coverage: of each comparison's interval; pooled_coverage: of all pooled intervals; false_verdict: sweeps without
    an effect that call any design better or worse; detected: effects of detectable_multiple found worse.
    """
    rng = np.random.default_rng([seeds, designs, list(NOISE).index(noise)])
    effect = detectable_multiple(seeds, designs - 1) * PAIRED_SD
    names = DESIGNS[:designs]
    null = {name: {seed: folder / f"{name}-{seed}.jsonl" for seed in range(seeds)} for name in names}
    with_effect = {**null, "planted": {seed: folder / f"with-effect-{seed}.jsonl" for seed in range(seeds)}}
    truth = {name: effect * (name == "planted") for name in names[1:]}
    covered, pooled_covered, false_verdicts, detected = dict.fromkeys(names[1:], 0), 0, 0, 0
    for _ in range(sweeps):
        losses = 1.7 + rng.normal(scale=SEED_SD, size=seeds) + NOISE_SD * NOISE[noise](rng, (designs, seeds))
        for name, row in zip(names, losses.tolist(), strict=True):
            for seed, loss in enumerate(row):
                write_run(null[name][seed], loss)
                if name == "planted":
                    write_run(with_effect[name][seed], loss + effect)
        result = analyse(null, "baseline")["designs"]
        false_verdicts += any(result[name]["against_baseline"]["detected"] in ("better", "worse") for name in truth)
        result = analyse(with_effect, "baseline")["designs"]
        for name, true in truth.items():
            against = result[name]["against_baseline"]
            covered[name] += against["interval"][0] <= true <= against["interval"][1]
            pooled_covered += against["pooled"]["interval"][0] <= true <= against["pooled"]["interval"][1]
        detected += result["planted"]["against_baseline"]["detected"] == "worse"
    return {
        "coverage": [count / sweeps for count in covered.values()],
        "pooled_coverage": pooled_covered / sweeps / len(covered),
        "false_verdict": false_verdicts / sweeps,
        "detected": detected / sweeps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", type=int, default=10_000)
    sweeps = parser.parse_args().sweeps
    print("| noise | designs | seeds | coverage | pooled coverage | false verdict | detected |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for noise in NOISE:
            for designs in (2, 5):
                for seeds in (3, 5, 10):
                    s = simulate(noise, seeds, designs, sweeps, Path(folder))
                    shares = [np.mean(s["coverage"]), s["pooled_coverage"], s["false_verdict"], s["detected"]]
                    told = " | ".join(f"{share:.1%}" for share in shares)
                    print(f"| {noise} | {designs} | {seeds} | {told} |", flush=True)


if __name__ == "__main__":
    main()
