"""What a person sees of convert.py, and what the other commands do with a run that it brought in."""


import pytest
import safetensors.torch
import torch
from test_huggingface import THEIRS, llama_tokenizer, random_weights, save_run

import convert
import heads
import prepare
import sample
import train
from model import ModelConfig
from runtime.checkpoint import load_model, read_meta, write_meta

pytestmark = pytest.mark.usefixtures("handlers_come_back")
SMALL = ["--max_steps", "2", "--batch_size", "2", "--threads", "1", "--eval_tokens", "100", "--warmup_steps", "0"]


@pytest.fixture
def imported(tmp_path, command):
    """A run brought in from a random Llama with a tokenizer as Llama 2's."""
    torch.manual_seed(1)
    model = random_weights(THEIRS["llama"]())
    model.resize_token_embeddings(330)
    model.config.eos_token_id = 2
    model.save_pretrained(tmp_path / "hf")
    llama_tokenizer().save(str(tmp_path / "hf" / "tokenizer.json"))
    assert command(convert, "from-hf", tmp_path / "hf", tmp_path / "run")[0] == 0
    return tmp_path / "run"


def test_every_subcommand_has_its_help(command):
    status, out, _ = command(convert, "--help")
    assert status == 0 and all(f"convert.py {word}" in out for word in convert.COMMANDS)
    assert command(convert)[1] == out
    for word, told in (("to-hf", "new folder to write"), ("from-hf", "folder with config.json")):
        status, out, _ = command(convert, word, "--help")
        assert status == 0 and f"usage: convert.py {word}" in out and told in out


def test_a_run_goes_out_and_comes_back(tmp_path, command):
    save_run(tmp_path / "run", ModelConfig(vocab_size=29, n_layer=1, n_head=2, n_embd=16, block_size=16))
    status, out, _ = command(convert, "to-hf", tmp_path / "run", tmp_path / "new" / "hf")
    assert (status, out) == (0, f"wrote {tmp_path / 'new' / 'hf'} in the layout of nemotron\n")
    assert {path.name for path in (tmp_path / "new").glob("**/*")} == {
        "hf", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    status, out, _ = command(convert, "from-hf", tmp_path / "new" / "hf", tmp_path / "back")
    assert status == 0 and "from the layout of nemotron" in out and f"sample.py {tmp_path / 'back'}" in out
    words = ["--prompt", "abc", "--temperature", 0, "--max_new_tokens", 40]
    assert command(sample, tmp_path / "back", *words)[1] == command(sample, tmp_path / "run", *words)[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["to-h"], '"to-h" is not one of to-hf, from-hf'),
        (["to-hf"], "RUN is missing"),
        (["to-hf", "{}/run"], "FOLDER is missing"),
        (["to-hf", "{}/none", "{}/new"], "no run in"),
        (["to-hf", "{}/run", "{}/run"], "is there already"),
        (["to-hf", "{}/run", "{}/new", "--checkpoint", "first"], "best, last"),
        (["to-hf", "{}/odd", "{}/new"], "w_o = false"),
        (["from-hf", "{}", "{}/new"], "config.json is not there"),
        (["from-hf", "{}/none/at/all", "{}/new"], "neither a folder nor the name"),
        (["from-hf", "", "{}/new"], "source is empty; give a name"),
        (["from-hf", "{}", ""], "run is empty; give a name"),
        (["to-hf", "{}/run", ""], "folder is empty; give a name"),
        (["regroup", "{}/run", "", "--n_kv_head", "1"], "new is empty; give a name"),
        (["from-hf", "{}", "{}/run"], "holds a run already"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2_and_nothing_is_written(tmp_path, command, words, told):
    sizes = {"vocab_size": 29, "n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 16}
    save_run(tmp_path / "run", ModelConfig(**sizes))
    save_run(tmp_path / "odd", ModelConfig(**sizes, w_o=False))
    status, out, err = command(convert, *(word.format(tmp_path) for word in words))
    assert (status, out) == (2, "") and told in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_run_of_the_current_folder_bears_its_name(imported, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path / "hf")
    assert command(convert, "from-hf", ".", "../again")[0] == 0
    assert load_model(tmp_path / "again")[2]["dataset"]["name"] == "hf"


def test_an_export_that_fails_leaves_nothing_behind(tmp_path, command, monkeypatch):
    save_run(tmp_path / "run", ModelConfig(vocab_size=29, n_layer=1, n_head=2, n_embd=16, block_size=16))

    def full(*args, **kw):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save", full)
    status, _, err = command(convert, "to-hf", tmp_path / "run", tmp_path / "new")
    assert status == 1 and "the disk is full" in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_that_was_brought_in_can_be_sampled_and_looked_into(imported, command):
    status, out, err = command(sample, imported, "--prompt", "he llo", "--seed", 1, "--max_new_tokens", 30)
    assert status == 0 and out.startswith("he llo") and "step 0" in err
    status, out, _ = command(heads, imported, "--text", "the hello is here, and hell too. " * 3)
    assert status == 0 and (imported / "heads.html").is_file()
    status, _, err = command(heads, imported)
    assert status == 2 and "give --text" in err


def test_a_run_that_was_brought_in_is_fine_tuned_on_a_text_in_its_tokens(imported, command, dataset, tmp_path):
    status, _, err = command(train, "--init_from", imported, "--dataset", dataset, "--out_dir", tmp_path / "no", *SMALL)
    assert status == 2 and f"--like {imported}" in err
    text = tmp_path / "text.txt"
    text.write_text("the hello is here, and hell too.\n" * 60)
    assert command(prepare, tmp_path / "set", "--files", text, "--like", imported)[0] == 0
    words = ["--dataset", tmp_path / "set"]
    status, out, _ = command(train, "--resume", imported, *words, "--eval_only")
    before = float(out.split("val loss ")[1].split()[0])
    status, out, _ = command(train, "--init_from", imported, *words, "--out_dir", tmp_path / "tuned", *SMALL)
    assert status == 0
    status, out, _ = command(train, "--resume", tmp_path / "tuned", "--eval_only")
    assert float(out.split("val loss ")[1].split()[0]) < before
    assert command(convert, "to-hf", tmp_path / "tuned", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "tokenizer.json").read_text() == (tmp_path / "hf" / "tokenizer.json").read_text()


def test_a_run_that_was_brought_in_asks_for_a_data_set_and_prepares_none(imported, command, monkeypatch, tmp_path):
    monkeypatch.setattr(train, "open_or_prepare", pytest.fail)
    meta = read_meta(imported / "last")
    meta["dataset"]["name"] = "shakespeare"  # the folder that it came from may be called as a data set is
    write_meta(imported / "last", meta)
    for words in (["--init_from", imported, "--out_dir", tmp_path / "new"], ["--resume", imported, "--eval_only"]):
        status, _, err = command(train, *words)
        assert (status, err.count("\n")) == (2, 1) and "give --dataset NAME" in err and f"--like {imported}" in err


def test_a_run_that_was_brought_in_has_nothing_to_resume(imported, command):
    status, _, err = command(train, "--resume", imported)
    assert (status, err.count("\n")) == (2, 1) and f"with --init_from {imported}" in err


def test_a_run_is_made_of_its_settings_alone(imported, command, tmp_path):
    """settings.toml of what was brought in trains a model of that architecture from the start."""
    text = tmp_path / "text.txt"
    text.write_text("the hello is here, and hell too.\n" * 60)
    assert command(prepare, tmp_path / "set", "--files", text, "--like", imported)[0] == 0
    words = [imported / "settings.toml", "--dataset", tmp_path / "set", "--out_dir", tmp_path / "new"]
    assert command(train, *words, *SMALL)[0] == 0
