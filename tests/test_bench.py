"""The command that measures speed: its designs, what it refuses, its tables and its last line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bench
from runtime.errors import UserError

ROOT = Path(__file__).parent.parent


def rate(value):
    return {"median": value, "low": value / 2, "high": value * 2}


def made_up(configs, batch, context, train_batch, rounds, progress, device, threads):
    """A measurement of large figures, in which the second design decodes three times as fast as the first."""
    progress(0.5, "training, a")

    def design(number):
        cells = [{"batch": b, "context": c} for b in batch for c in context]
        speed = 1e5 * (1 + 2 * number)
        return {
            "training": {"tokens_per_s": rate(1.2e6), "gflops": 12345.6, "share_of_matmul": 0.5},
            "prefill": [c | {"tokens_per_s": rate(1.2e6), "gflops": 12345.6, "share_of_matmul": 0.25} for c in cells],
            "decode": [c | {"tokens_per_s": rate(speed), "ms_per_step": rate(123.4), "cache_mb": 12345.6,
                            "gb_per_s": 123.4, "share_of_read": 1.5, "gain_expected": c["context"] > 4}
                       for c in cells],
            "decode_attention": [c | {"caches": 80, "ms": rate(123.4), "gb_per_s": 123.4, "share_of_ideal": 1.25,
                                      "sdpa_ms": rate(123.4)} for c in cells],
            "peak_memory_mb": {"start": 300.0, "training": 12345.0, "decoding": None},
        }  # fmt: skip

    return {
        "threads": 2, "device": "cpu", "rounds": rounds, "batch": list(batch), "context": list(context),
        "limits": {"matmul_gflops": 240.0, "read_gb_per_s": 22.0, "matmul": "a product", "read": "a sum"},
        "train_batch": train_batch, "designs": {name: design(i) for i, name in enumerate(configs)},
        "decode_gain": "where it is small no gain is to be expected",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def asked(monkeypatch, tmp_path):
    """What `measure` was asked; the answers are made up. The folder is empty."""
    calls = []

    def measure(*arguments):
        calls.append(arguments)
        return made_up(*arguments)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.chdir(tmp_path)
    return calls


def run(capsys, *words):
    """Tables and the JSON of the last line."""
    bench.main(list(words))
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last)


def test_without_anything_the_default_design_is_measured(capsys, asked):
    _, result = run(capsys)
    ((configs, batch, context, *_),) = asked
    assert list(configs) == ["default"] and configs["default"].vocab_size == bench.VOCAB_SIZE
    assert batch and context and result["speed"]["designs"].keys() == result["designs"].keys() == {"default"}


def test_every_file_is_a_design_and_flags_and_base_hold_for_all(capsys, asked):
    Path("base.toml").write_text("n_layer = 2\nvocab_size = 50\nmax_steps = 7\nlearning_rate = 1e-3")
    Path("a.toml").write_text("n_kv_head = 1")
    Path("b.toml").write_text("n_layer = 1")
    words = ["a.toml", "b.toml", "--base", "base.toml", "--n_embd", "64", "--batch", "2", "--context", "4", "32"]
    _, result = run(capsys, *words, "--threads", "1")
    configs, batch, context, _, _, _, device, threads = asked[0]
    assert [(name, c.n_layer, c.n_kv_head, c.n_embd, c.vocab_size) for name, c in configs.items()] == [
        ("a", 2, 1, 64, 50),
        ("b", 1, 8, 64, 50),
    ]
    assert (batch, context, device, threads) == ((2,), (4, 32), "cpu", 1)
    assert result["designs"]["a"]["file"] == "a.toml" and result["designs"]["a"]["settings"]["n_embd"] == 64
    assert result["command"] == "python bench.py " + " ".join([*words, "--threads", "1"])


def test_describing_runs_nothing_and_counts_what_no_machine_could_hold(capsys, asked):
    lines, result = run(capsys, "--describe", "--n_embd", "65536", "--n_layer", "2", "--n_kv_head", "1")
    assert not asked and result["speed"] is None
    # By hand, a block: w_q and w_o n^2 each, w_k and w_v n^2 / 8 each, an MLP of 8 n^2, two norms of n.
    n = 65536
    expected = 2 * (10 * n * n + n * n // 4 + 2 * n) + n
    assert result["designs"]["default"]["parameters_without_embeddings"] == expected
    assert any(f"{expected:,}" in line for line in lines)


def test_tables_fit_100_columns_and_tell_ratios_stars_and_what_is_unknown(capsys):
    for name in ("single-head", "multi-query"):
        Path(f"{name}.toml").write_text("")
    lines, _ = run(capsys, "single-head.toml", "multi-query.toml", "--batch", "16", "--context", "4", "131072")
    assert max(map(len, lines)) <= 100
    decode = lines[next(i for i, line in enumerate(lines) if line.startswith("Decoding")) :]
    stars = [line for line in decode if "multi-query" in line][:2]
    assert "3.00*" in stars[0] and "3.00 " in stars[1]
    assert any("unknown" in line for line in lines) and any("150%" in line for line in lines)
    assert any(line.startswith("* where it is small") for line in lines)


def test_a_number_has_three_digits_or_all_before_the_point():
    texts = [bench.number(value) for value in (1758.4, 99.96, 99.94, 12.0, 0.078349)]
    assert texts == ["1,758", "100", "99.9", "12.0", "0.0783"]


@pytest.mark.parametrize(
    "words, told",
    [
        (["--batch", "0"], "batch must be one or more different whole numbers from 1"),
        (["--context", "8", "8"], "context must be one or more different whole numbers from 1"),
        (["--rounds", "0"], "rounds must be at least 1, not 0"),
        (["--threads", "0"], "threads must be at least 1, not 0"),
        (["--max_steps", "5"], 'unknown setting "max_steps"'),
        (["mqa"], "mqa: no such file"),
        (["--device", "gpu9"], 'device "gpu9" is not known'),
    ],
)
def test_a_mistake_is_told_before_anything_is_measured(asked, words, told):
    with pytest.raises(UserError) as error:
        bench.main(words)
    assert str(error.value).startswith(told) and not asked


def test_the_command_measures_and_ends_with_json_whatever_the_locale():
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    env |= {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = ["config/mqa.toml", "--n_embd", "16", "--n_layer", "1", "--batch", "2", "--context", "4", "--rounds", "1"]
    done = subprocess.run([sys.executable, "bench.py", *words], cwd=ROOT, env=env, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["speed"]["limits"]["read_gb_per_s"] > 0
    assert result["speed"]["designs"]["mqa"]["decode"][0]["cache_mb"] == pytest.approx(2 * 4 * 2 * 2 * 4 / 1e6)
