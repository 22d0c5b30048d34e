"""The model that --model names, and the defaults that depend on model and device."""

from argparse import Namespace
from pathlib import Path

import pytest
from programs import SMALL_VOCAB, make_model_file

from numbagpt import settings
from numbagpt.config import PRESETS
from numbagpt.errors import UserError


def defaults(config, model, on_gpu, **given):
    names = "sequence_length batch_size total_batch_size num_iterations learning_rate warmup_iters"
    flags = dict.fromkeys([*names.split(), "input_val_bin"]) | given
    options = Namespace(model=model, input_bin="data.bin", **flags)
    settings.fill_in_defaults(options, config, on_gpu)
    return options


def folder_with(name):
    def make(path):
        path.mkdir()
        (path / name).touch()

    return make


MODELS = {
    "a run": folder_with("model_00000001.bin"),
    "hugging face": folder_with("config.json"),
    "bin": lambda path: make_model_file(path, SMALL_VOCAB),
}
NO_MODELS = {
    "nothing": lambda path: None,
    "an empty folder": Path.mkdir,
    "a folder of others": folder_with("model_last.bin"),
    "an empty file": Path.touch,
    "text": lambda path: path.write_text("notes on d12"),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("name", "preset"), [("d12", "--model gpt2"), ("nano", "no --model")])
def test_a_preset_does_not_hide_a_model_of_its_name(tmp_path, monkeypatch, make, name, preset):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / name)
    with pytest.raises(UserError) as error:
        settings.find_model(name, 1, ".")
    assert str(error.value) == (
        f"--model {name} is a preset, random weights, and {name} here is a model too; write "
        f"--model ./{name} for that one and {preset} for the preset, or rename it"
    )
    asked = preset.partition("--model ")[2] or None
    assert settings.find_model(asked, 1, ".")[:2] == (PRESETS[name], None)
    # what is written there is the run's own
    assert settings.find_model(name, 1, str(tmp_path / name))[:2] == (PRESETS[name], None)


@pytest.mark.parametrize("make", NO_MODELS.values(), ids=NO_MODELS)
def test_what_is_no_model_does_not_hide_a_preset(tmp_path, monkeypatch, make):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "d12")
    assert settings.find_model("d12", 1, ".")[:2] == (PRESETS["d12"], None)


def test_defaults_fit_model_and_device():
    gpu = defaults(PRESETS["d12"], "d12", True)
    assert (gpu.batch_size, gpu.sequence_length, gpu.total_batch_size) == (4, 1024, 4096)
    nano = defaults(PRESETS["nano"], "nano", True)
    assert (nano.batch_size, nano.sequence_length) == (64, 64)
    cpu = defaults(PRESETS["nano"], "nano", False, num_iterations=40)
    assert (cpu.batch_size, cpu.sequence_length, cpu.warmup_iters) == (8, 64, 8)
    assert cpu.input_val_bin is None
    assert defaults(PRESETS["nano"], None, False).model == "nano"
    assert defaults(PRESETS["d12"], "d12", True, num_iterations=20_000).warmup_iters == 700


def test_given_flags_are_kept_and_the_others_follow():
    options = defaults(PRESETS["d12"], "d12", True, sequence_length=37, warmup_iters=0)
    assert (options.sequence_length, options.batch_size) == (37, 110)
    assert (options.total_batch_size, options.warmup_iters) == (4070, 0)


@pytest.mark.parametrize(
    ("total", "nearest"),
    [
        (1, "512"),
        (511, "512"),
        (513, "512 or 1024"),
        (1535, "1024 or 1536"),
    ],
)
def test_total_batch_size_proposes_the_nearest(total, nearest):
    with pytest.raises(UserError, match=rf"{total} is no multiple .* = 512; use {nearest}$"):
        settings.count_batches(total, 8, 64)


def test_total_batch_size_gives_the_accumulation_steps():
    assert settings.count_batches(512 * 3, 8, 64) == 3
    options = defaults(PRESETS["d12"], "d12", True, total_batch_size=2**19)
    assert options.accumulation_steps == 128
