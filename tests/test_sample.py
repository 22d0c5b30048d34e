"""sample.py end to end: a model that knows one text by heart, and models that know nothing."""

import os
import subprocess

import numpy as np
import pytest
from programs import FULL_VOCAB, SMALL_VOCAB, command, make_model_file, run

import sample
import train
from numbagpt import sampling
from numbagpt.checkpoint import write_model
from numbagpt.errors import UserError
from numbagpt.sampling import stream_text
from numbagpt.shards import write_shard
from numbagpt.tensors import parameter_shapes
from numbagpt.tokenizer import END_OF_TEXT, decode, encode

TEXT = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, "
    "it was the age of foolishness"
)


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory):
    """An output folder with a model that was trained on TEXT and its end alone."""
    folder = tmp_path_factory.mktemp("by_heart")
    tokens = [*encode(TEXT), END_OF_TEXT]
    assert len(tokens) <= FULL_VOCAB.max_seq_len
    write_shard(folder / "text.bin", np.array(tokens))
    model = make_model_file(folder / "start.bin", FULL_VOCAB)
    settings = {
        "model": model,
        "input_bin": folder / "text.bin",
        "output_dir": folder / "run",
        "batch_size": 1,
        "sequence_length": len(tokens) - 1,
        "num_iterations": 60,
        "learning_rate": 0.03,
        "weight_decay": 0,
        "device": "cpu",
    }
    assert (
        train.main([str(x) for name, value in settings.items() for x in (f"--{name}", value)]) == 0
    )
    return folder / "run"


@pytest.fixture
def untrained(tmp_path):
    return make_model_file(tmp_path / "untrained.bin", FULL_VOCAB)


def sampled(capsys, checkpoint, *flags):
    capsys.readouterr()
    status = sample.main(["--device", "cpu", "--checkpoint", str(checkpoint), *map(str, flags)])
    assert status == 0
    return capsys.readouterr()


@pytest.mark.parametrize("words", [1, 5, 12])
def test_greedy_goes_on_with_what_was_learnt_and_stops_at_its_end(by_heart, capsys, words):
    prompt = decode(encode(TEXT)[:words])
    found = sampled(capsys, by_heart, "--temperature", 0, "--prompt", prompt)
    assert found.out == TEXT + "\n"
    assert found.err == f"weights from {by_heart / 'model_00000060.bin'}\n"


def test_max_new_tokens_cuts_the_text(by_heart, capsys):
    prompt = decode(encode(TEXT)[:4])
    found = sampled(capsys, by_heart, "--temperature", 0, "--prompt", prompt, "--max_new_tokens", 3)
    assert found.out == decode(encode(TEXT)[:7]) + "\n"


def test_the_seed_decides(untrained, capsys):
    texts = [
        sampled(capsys, untrained, "--max_new_tokens", 8, "--seed", seed).out for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_samples_differ_and_the_first_is_the_one_drawn_alone(untrained, capsys):
    flags = "--max_new_tokens", 8, "--prompt", "Once"
    alone = sampled(capsys, untrained, *flags).out
    three = sampled(capsys, untrained, *flags, "--num_samples", 3).out.split("\n---\n")
    assert three.pop() == ""
    assert three[0] == alone.rstrip("\n")
    assert len(set(three)) == 3
    assert all(text.startswith("Once") for text in three)


def test_greedy_is_what_top_k_1_and_a_tiny_top_p_draw(untrained, capsys):
    flags = "--max_new_tokens", 6, "--prompt", "The"
    greedy = sampled(capsys, untrained, *flags, "--temperature", 0)
    assert sampled(capsys, untrained, *flags, "--top_k", 1, "--seed", 5) == greedy
    assert sampled(capsys, untrained, *flags, "--top_p", 1e-6, "--seed", 6) == greedy


def test_a_prompt_beyond_the_context_is_cut_and_said_so(untrained, capsys):
    prompt = " word" * 40
    found = sampled(capsys, untrained, "--max_new_tokens", 1, "--prompt", prompt)
    assert found.out.startswith(prompt)
    assert found.err == "the prompt has 40 tokens; its last 32 fit the model's context\n"


def test_a_vocabulary_that_is_not_gpt2s_is_refused(tmp_path):
    model = make_model_file(tmp_path / "small.bin", SMALL_VOCAB)
    with pytest.raises(UserError, match="knows 60 tokens"):
        sample.main(["--device", "cpu", "--checkpoint", str(model)])


def test_damaged_weights_are_one_line_and_nothing_else(tmp_path):
    """Infinite ones, on the CPU: NumPy would warn of what it makes of them."""
    config = FULL_VOCAB
    parameters = {name: np.full(s, np.inf) for name, s in parameter_shapes(config).items()}
    write_model(tmp_path / "inf.bin", config, parameters)
    flags = ["--checkpoint", "inf.bin", "--prompt", "Once", "--device", "cpu"]
    found = run("sample.py", *flags, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (1, "")
    assert found.stderr == (
        "error: inf.bin: the model gives logits that are not finite: its weights are damaged; take "
        "others\n"
    )


@pytest.mark.parametrize("error", [UserError, KeyboardInterrupt])
def test_an_error_within_a_text_begins_a_line(untrained, monkeypatch, capsys, error):
    def pieces(*_, **__):
        yield " upon"
        yield " a"
        raise error

    monkeypatch.setattr(sampling, "stream_text", pieces)
    with pytest.raises(error):
        sample.main(["--device", "cpu", "--checkpoint", str(untrained), "--prompt", "Once"])
    assert capsys.readouterr().out == "Once upon a\n"


class Fake:
    """A model with a vocabulary larger than GPT-2's that puts everything on what lies beyond."""

    T = 8

    class config:
        vocab_size = 50304

    def next_token_logits(self, tokens):
        logits = np.zeros(50304)
        logits[50257:] = 1e9
        logits[262] = 1
        return logits


def test_tokens_beyond_gpt2s_are_never_drawn():
    pieces = stream_text(Fake(), [], 3, np.random.default_rng(0), temperature=0)
    assert list(pieces) == [" the"] * 3


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--temperature", ["-1", "nan", "inf", "hot"]),
        ("--top_k", ["0", "-3", "1.5"]),
        ("--top_p", ["0", "1.01", "nan"]),
        ("--max_new_tokens", ["0"]),
        ("--num_samples", ["0"]),
    ],
)
def test_a_flag_that_makes_no_sense_is_one_line(flag, values, capsys):
    for value in values:
        with pytest.raises(SystemExit) as exit_:
            sample.main([flag, value])
        assert exit_.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"error: argument {flag}: '{value}' is not ")
        assert len(err.splitlines()) == 1


def test_limits_of_the_flags_are_taken():
    flags = ["--temperature", "0", "--top_k", "1", "--top_p", "1", "--num_samples", "1"]
    options = sample.parse_arguments(flags)
    assert (options.temperature, options.top_k, options.top_p) == (0, 1, 1)


def test_text_is_streamed_and_a_reader_may_go_away(untrained):
    """The reader takes the first bytes while the text is far from done, and closes the pipe."""
    flags = ["--checkpoint", untrained, "--device", "cpu", "--prompt", "Streamed"]
    with subprocess.Popen(
        command("sample.py", *flags, "--max_new_tokens", 10**6),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout.read(8) == b"Streamed"
        assert len(process.stdout.read(8)) == 8
        assert process.poll() is None
        process.stdout.close()
        assert process.wait(timeout=60) == 1
        assert process.stderr.read() == b""


def test_the_command_line_prints_errors_as_one_line(tmp_path):
    found = run("sample.py", "--top_k", "many", cwd=tmp_path)
    assert found.returncode == 2
    assert found.stderr == (
        "error: argument --top_k: 'many' is not a whole number from 1 up (--help lists the flags)\n"
    )
    found = run("sample.py", cwd=tmp_path)
    assert found.returncode == 1
    assert found.stderr == (
        "error: --checkpoint out: there is no such file or folder; python train.py makes one\n"
    )


@pytest.mark.parametrize("name", ["gpt2", "gpt2/", "nano"])
def test_a_preset_is_no_checkpoint(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        sample.main(["--checkpoint", name])
    assert str(error.value) == (
        f"--checkpoint {name}: there is no such file or folder; as --model of train.py, "
        f"{name.strip('/')} is random weights; expected trained ones: name a model .bin, a run's "
        "output folder or a Hugging Face folder"
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, a disk that is full")
def test_notes_that_cannot_be_written_end_nothing(by_heart, tmp_path):
    """That the CPU is used, which checkpoint, and that the prompt is too long."""
    arguments = ("--checkpoint", by_heart, "--prompt", TEXT + TEXT, "--max_new_tokens", 1)
    said = run("sample.py", *arguments, cwd=tmp_path)
    assert said.returncode == 0
    assert len(said.stderr.splitlines()) == 3
    with open("/dev/full", "w") as full:
        ended = run("sample.py", *arguments, cwd=tmp_path, stderr=full)
    assert (ended.returncode, ended.stdout) == (0, said.stdout)
