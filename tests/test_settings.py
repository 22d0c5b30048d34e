"""The model that --model names, and the defaults that depend on model and device."""

from argparse import Namespace

import pytest

from numbagpt import settings
from numbagpt.config import PRESETS
from numbagpt.errors import UserError


def defaults(config, model, on_gpu, **given):
    names = "sequence_length batch_size total_batch_size num_iterations learning_rate warmup_iters"
    flags = dict.fromkeys([*names.split(), "input_val_bin"]) | given
    options = Namespace(model=model, input_bin="data.bin", **flags)
    settings.fill_in_defaults(options, config, on_gpu)
    return options


def test_a_preset_does_not_hide_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(UserError, match=r"write \./gpt2 for what is here"):
        settings.find_model("gpt2", 1, ".")
    assert settings.find_model("gpt2-medium", 1, ".")[0] == PRESETS["gpt2-medium"]
    assert settings.find_model("gpt2", 1, str(tmp_path / "gpt2"))[0] == PRESETS["gpt2"]


def test_defaults_fit_model_and_device():
    gpu = defaults(PRESETS["d12"], "d12", True)
    assert (gpu.batch_size, gpu.sequence_length, gpu.total_batch_size) == (4, 1024, 4096)
    nano = defaults(PRESETS["nano"], "nano", True)
    assert (nano.batch_size, nano.sequence_length) == (64, 64)
    cpu = defaults(PRESETS["nano"], "nano", False, num_iterations=40)
    assert (cpu.batch_size, cpu.sequence_length, cpu.warmup_iters) == (8, 64, 8)
    assert cpu.input_val_bin is None
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
