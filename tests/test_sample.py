"""What a person sees of sample.py: text on standard output, notes beside it, one sentence for a mistake."""

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import sample
from data.tokenizer import ByteTokenizer, CharTokenizer
from model import GPT, ModelConfig
from runtime.checkpoint import save_checkpoint
from runtime.errors import run
from runtime.settings import as_dict

ROOT = Path(__file__).parent.parent
LETTERS = CharTokenizer("\n abcdefgh")


def save_run(folder, tokenizer=LETTERS, name="last", damage=False, padding=0):
    """A run of a small model whose text varies; padding: slots in its vocabulary that stand for nothing."""
    slots = tokenizer.vocab_size + padding
    config = ModelConfig(vocab_size=slots, block_size=16, n_layer=1, n_head=2, n_embd=16)
    weights = {key: 8 * value.detach() for key, value in GPT(config).named_parameters()}
    if damage:
        weights["embed.weight"].fill_(3e38)  # sums of it are beyond float32
    meta = {"step": 7, "best_loss": None, "model": as_dict(config), "train": {}, "tokenizer": tokenizer.to_meta()}
    meta["dataset"] = {"name": "letters", "fingerprint": ""}
    save_checkpoint(folder / name, meta, weights, None)
    return str(folder)


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("letters"))


@pytest.fixture
def command(capsys, monkeypatch):
    """Runs sample.py, short, with these words; exit status, standard output and standard error."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["sample.py", "--max_new_tokens", "60", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            run(sample.main)
        return stop.value.code or 0, *capsys.readouterr()

    return call


def texts(output):
    return re.split(r"--- sample \d+ ---\n", output)[1:]


def test_prompt_and_text_are_all_that_goes_to_standard_output(letters, command):
    status, out, err = command(letters, "--prompt", "abc", "--max_new_tokens", 50)
    assert status == 0
    assert out.startswith("abc") and len(out) == 3 + 50 + 1 and set(out) <= set(LETTERS.characters)
    assert "step 7" in err and "50 tokens in" in err


def test_the_seed_repeats_a_text_and_a_call_without_it_tells_its_own(letters, command):
    _, first, notes = command(letters)
    assert command(letters)[1] != first
    assert command(letters, "--seed", re.search(r"seed (\d+)", notes)[1])[1] == first


def test_greedy_needs_no_seed_and_is_what_one_choice_leaves(letters, command):
    greedy = command(letters, "--temperature", 0)[1]
    for words in (["--temperature", 0], ["--top_k", 1], ["--top_p", 1e-9]):
        assert command(letters, *words)[1] == greedy


def test_slots_without_a_token_are_never_written(tmp_path, command):
    assert len(command(save_run(tmp_path, padding=50), "--prompt", "a")[1]) == 1 + 60 + 1


def test_every_token_is_shown_when_it_is_made(letters, command, monkeypatch):
    class Terminal(io.StringIO):
        def flush(self):
            shown.append(len(self.getvalue()))

    shown = []
    monkeypatch.setattr(sys, "stdout", Terminal())
    command(letters, "--prompt", "a", "--max_new_tokens", 5)
    assert shown[:7] == [1, 2, 3, 4, 5, 6, 7]


def test_a_sample_is_the_same_however_many_are_asked_for(letters, command):
    words = (letters, "--seed", 3, "--max_new_tokens", 60, "--num_samples")
    all_64 = texts(command(*words, 64)[1])
    assert len(all_64) == len(set(all_64)) == 64
    assert command(*words, 1)[1] == all_64[0]
    for n in (4, 6):
        assert texts(command(*words, n)[1]) == all_64[:n]


def test_the_best_checkpoint_is_the_default_and_the_last_can_be_named(tmp_path, command):
    save_run(tmp_path, CharTokenizer("x"), "best")
    save_run(tmp_path, CharTokenizer("y"), "last")
    assert "x" in command(tmp_path)[1]
    assert "y" in command(tmp_path, "--checkpoint", "last")[1]


def test_a_prompt_longer_than_the_context_is_kept_and_the_note_says_what_is_seen(letters, command):
    status, out, err = command(letters, "--prompt", "abcdefgh" * 6, "--max_new_tokens", 5)
    assert (status, out[:48], len(out)) == (0, "abcdefgh" * 6, 48 + 5 + 1)
    assert "48 tokens; the model sees the last 16" in err


def test_a_prompt_comes_from_a_file_or_from_standard_input_unchanged(letters, command, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"ab\ncd\n")
    out = command(letters, "--prompt_file", file, "--seed", 1)[1]
    assert out.startswith("ab\ncd\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\ncd\n")))
    assert command(letters, "--prompt_file", "-", "--seed", 1)[1] == out


def test_a_terminal_is_not_obeyed_by_what_a_model_says(tmp_path, command, monkeypatch):
    run = save_run(tmp_path, CharTokenizer("a\n\r\t\x07\x1b\x9b\u200f"))
    words = (run, "--prompt", "\x1b", "--seed", 1, "--temperature", 100)
    _, out, _ = command(*words)  # into a pipe: as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    shown = out.replace("\x07", "\\x07").replace("\x1b", "\\x1b").replace("\x9b", "\\x9b")
    assert command(*words)[1] == shown and set(out) == set("a\n\r\t\x07\x1b\x9b\u200f")


@pytest.mark.parametrize("tokenizer", [CharTokenizer("xyz"), CharTokenizer("xyz", end=True), ByteTokenizer()])
def test_there_is_always_something_to_begin_with(tmp_path, command, tokenizer):
    assert command(save_run(tmp_path, tokenizer), "--max_new_tokens", 3)[0] == 0


def test_the_stop_text_ends_each_sample_and_is_left_out(letters, command):
    whole = texts(command(letters, "--seed", 1, "--num_samples", 3)[1])
    stop = whole[0][20:22]
    cut = texts(command(letters, "--seed", 1, "--num_samples", 3, "--stop", stop)[1])
    assert cut == [text[:-1].partition(stop)[0] + "\n" for text in whole] and cut != whole


def test_without_a_run_the_newest_is_taken(tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command()[0] == 2
    for name, when in (("one", 200), ("two", 100)):
        save_run(tmp_path / "runs" / name)
        os.utime(tmp_path / "runs" / name / "last" / "meta.json", (when, when))
    assert "runs/one" in command()[2]
    os.utime(tmp_path / "runs" / "two" / "last" / "meta.json", (2**32, 2**32))  # saved while the clock was wrong
    assert "runs/one" in command()[2]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "aé!b!"], "the prompt has 'é', '!'"),
        (["--stop", "Q"], "the stop text has 'Q'"),
        (["--prompt", "a", "--prompt_file", "-"], "--prompt and --prompt_file"),
        (["--prompt_file", "not/there.txt"], "not/there.txt: no such file"),
        (["--prompt_file", "."], "a folder"),
        (["--num_samples", "0"], "num_samples must be at least 1, not 0"),
        (["--max_new_tokens", "0"], "max_new_tokens must be at least 1, not 0"),
        (["--top_k", "0"], "top_k must be at least 1, not 0"),
        (["--top_p", "0"], "top_p must be above 0 and at most 1, not 0"),
        (["--top_p", "1.5"], "top_p must be above 0 and at most 1, not 1.5"),
        (["--temperature", "-1"], "temperature must be 0 (greedy) or more, not -1"),
        (["--temperature", "inf"], "temperature"),
        (["--checkpoint", "newest"], "checkpoint"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(letters, command, words, told):
    status, out, err = command(letters, *words)
    assert (status, out) == (2, "")
    assert told in err and err.count("\n") == 1


@pytest.mark.parametrize(("content", "told"), [(b"", "is empty"), (b"ab\xff", "byte 2 is not UTF-8")])
def test_a_prompt_file_without_text_is_refused(letters, command, tmp_path, content, told):
    (tmp_path / "prompt.txt").write_bytes(content)
    status, _, err = command(letters, "--prompt_file", tmp_path / "prompt.txt")
    assert status == 2 and told in err and err.count("\n") == 1


def test_a_run_that_is_not_there_is_a_mistake_and_damaged_weights_are_not(tmp_path, command):
    assert command(tmp_path / "none")[0] == 2
    status, _, err = command(save_run(tmp_path / "bad", damage=True))
    assert status == 1 and "not a number" in err


def test_help_tells_what_makes_a_text_repeatable_and_what_happens_past_the_context(command):
    status, out, _ = command("--help")
    words = " ".join(re.sub("[│\n]", " ", out).split())
    assert status == 0
    for told in ("also at temperature 1", "With the same --seed they do not", "greedy", "of block_size / 2"):
        assert told in words


@pytest.mark.skipif(os.name != "posix", reason="needs signals and pipes as POSIX has them")
def test_text_comes_while_it_is_made_and_a_closed_pipe_or_ctrl_c_ends_it_quietly(letters):
    line = [sys.executable, ROOT / "sample.py", letters, "--prompt", "abc", "--max_new_tokens", "1000000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}

    def heed_ctrl_c():  # a shell that starts us in the background makes its children ignore it
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    closed, stopped = (subprocess.Popen(line, preexec_fn=heed_ctrl_c, **pipes) for _ in range(2))
    assert closed.stdout.read(20).startswith(b"abc")
    closed.stdout.close()
    assert stopped.stdout.read(20).startswith(b"abc")
    stopped.send_signal(signal.SIGINT)
    out, err = stopped.communicate(timeout=120)
    assert (stopped.returncode, out[-1:]) == (130, b"\n")
    closed.wait(timeout=120)
    for told in (err, closed.stderr.read()):
        assert b"Traceback" not in told and b"Error" not in told
