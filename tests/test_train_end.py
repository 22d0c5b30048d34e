"""How a run of train.py ends before its time, and what is kept of it then."""

import math
import os
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest
from programs import FULL_VOCAB, SMALL_VOCAB, checkpoints, command, make_model_file, make_shard, run

import train
from numbagpt import checkpoint, program, sampling
from numbagpt.checkpoint import read_model
from numbagpt.errors import DataError, UserError
from numbagpt.loader import Prefetcher
from numbagpt.shards import write_shard
from numbagpt.training import Trainer


def test_weights_that_are_not_finite_stop_the_run(flags, tmp_path):
    model = make_model_file(tmp_path / "nan.bin", SMALL_VOCAB, scale=math.nan)
    val = make_shard(tmp_path / "val.bin", 100, SMALL_VOCAB.vocab_size)
    for changes, what in [
        ({}, "loss of step 1"),
        ({"input_val_bin": val}, "validation loss of step 0"),
    ]:
        with pytest.raises(UserError) as error:
            train.main(flags(model=model, **changes))
        assert str(error.value) == (
            f"the {what} is nan before anything was learned: the weights in {model} are damaged; "
            "start from others"
        )
    assert not (tmp_path / "run").exists()


def test_a_run_that_blows_up_stops_and_names_the_last_checkpoint(flags, tmp_path):
    # The first step is taken with a tiny learning rate, the second makes the weights overflow.
    with pytest.raises(UserError) as error:
        train.main(
            flags(
                num_iterations=100,
                learning_rate=1e38,
                warmup_iters=10**38,
                checkpoint_every=1,
            )
        )
    last = checkpoints(tmp_path / "run")[-1]
    assert re.match(rf"the .* of step \d+ is (nan|inf); .*{last}", str(error.value))


def test_a_sample_of_weights_that_blew_up_stops_the_run(flags, tmp_path):
    model = make_model_file(tmp_path / "full.bin", FULL_VOCAB)
    with pytest.raises(UserError) as error:
        train.main(flags(model=model, num_iterations=1, learning_rate=1e38, warmup_iters=0))
    assert str(error.value) == (
        "logits of step 1 are not finite; the last checkpoint is "
        f"{tmp_path}/run/model_00000001.bin; lower --learning_rate or lengthen --warmup_iters"
    )


def bad_shard(folder):
    """Tokens of which the third batch of 16 has one that is beyond the vocabulary of 60."""
    tokens = np.arange(200) % 60
    tokens[40] = 60
    write_shard(folder / "bad.bin", tokens)
    return folder / "bad.bin"


def test_a_bad_token_further_on_ends_the_run_when_it_is_reached(flags, tmp_path):
    data = bad_shard(tmp_path)
    ended = run("train.py", *flags(input_bin=data), cwd=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: {tmp_path}/bad.bin has token id 60 at position 40; expected ids below the model's "
        "vocabulary of 60; use the tokenizer the model was made for\n"
    )
    assert re.findall(r"^step (\d)/4", ended.stdout, re.MULTILINE) == ["1", "2"]
    last = tmp_path / "run" / "model_00000002.bin"
    assert ended.stdout.endswith(f"wrote {last}\ninterrupted after step 2\n")
    # The prefetcher meets it as well in a run of two steps, which does not need it.
    whole = flags(input_bin=data, num_iterations=2, output_dir=tmp_path / "whole")
    assert train.main(whole) == 0


def test_bad_validation_data_at_the_end_does_not_cost_the_weights(flags, tmp_path, capsys):
    data = bad_shard(tmp_path)
    with pytest.raises(DataError, match=r"bad\.bin has token id 60 at position 40;"):
        train.main(flags(input_val_bin=data, val_loss_every=0))
    assert capsys.readouterr().out.endswith("interrupted after step 4\n")
    assert checkpoints(tmp_path / "run") == ["model_00000004.bin"]


def test_a_run_whose_output_nobody_reads_keeps_its_weights(flags, tmp_path):
    arguments = command("train.py", *flags(num_iterations=3000))
    environment = {"NUMBA_DISABLE_CUDA": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | environment
    ) as running:
        while not running.stdout.readline().startswith(b"step    3/3000"):
            assert running.poll() is None
        running.stdout.close()
        said = running.stderr.read().decode()
        assert running.wait() == 1
    (last,) = checkpoints(tmp_path / "run")
    steps = int(last.removeprefix("model_").removesuffix(".bin"))
    assert 3 <= steps < 3000
    path = tmp_path / "run" / last
    assert said == f"stopped after step {steps}: Broken pipe; the last checkpoint is {path}\n"
    read_model(path)


def test_a_run_whose_terminal_is_closed_keeps_its_weights(flags, tmp_path):
    ours, terminal = os.openpty()
    arguments = command("train.py", *flags(num_iterations=10**6))
    environment = {"NUMBA_DISABLE_CUDA": "1", "OPENBLAS_NUM_THREADS": "1"}
    with subprocess.Popen(
        arguments, stdin=terminal, stdout=terminal, stderr=terminal, env=os.environ | environment
    ) as running:
        os.close(terminal)
        seen = b""
        while b"step       3/" not in seen:
            seen += os.read(ours, 1024)
        os.close(ours)  # from here on writing fails
        running.send_signal(signal.SIGHUP)
        running.wait(timeout=60)
    (last,) = checkpoints(tmp_path / "run")
    assert int(last.removeprefix("model_").removesuffix(".bin")) >= 3
    read_model(tmp_path / "run" / last)


def test_a_sample_that_fails_at_the_end_does_not_cost_the_weights(flags, tmp_path, monkeypatch):
    def stream_text(*arguments, **options):
        yield "so far"
        raise UserError("the vocabulary is damaged")

    monkeypatch.setattr(sampling, "stream_text", stream_text)
    with pytest.raises(UserError, match="the vocabulary is damaged"):
        train.main(flags())
    assert checkpoints(tmp_path / "run") == ["model_00000004.bin"]


def test_a_checkpoint_that_cannot_be_written_names_the_last(flags, tmp_path, monkeypatch, at_call):
    def refuse(path, *_):
        raise UserError(f"cannot write {path}: No space left on device")

    at_call(train.Run, "save", 2, lambda: monkeypatch.setattr(checkpoint, "write_model", refuse))
    with pytest.raises(UserError) as error:
        train.main(flags(checkpoint_every=1))
    first, second = (tmp_path / "run" / f"model_0000000{step}.bin" for step in (1, 2))
    assert str(error.value) == (
        f"cannot write {second}: No space left on device; the last checkpoint is {first}"
    )


def test_an_output_folder_that_was_removed_is_made_again(flags, tmp_path, monkeypatch):
    step = train.Run.step

    def remove_folder_and_step(run, number):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        step(run, number)

    monkeypatch.setattr(train.Run, "step", remove_folder_and_step)
    assert train.main(flags()) == 0
    assert checkpoints(tmp_path / "run") == ["model_00000004.bin"]


def test_bad_validation_data_at_the_start_leaves_nothing(flags, tmp_path):
    with pytest.raises(DataError, match="token id 60 at position 40"):
        train.main(flags(input_val_bin=bad_shard(tmp_path)))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_stop_signal_finishes_the_step_and_writes_a_checkpoint(flags, tmp_path, sent, status):
    with subprocess.Popen(
        command("train.py", *flags(num_iterations=10**6)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        for line in process.stdout:
            if "step       3/" in line:
                process.send_signal(sent)
                break
        out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err == f"{train.STOPPING}\n"
    wrote, interrupted = out.splitlines()[-2:]
    steps = int(re.fullmatch(r"interrupted after step (\d+)", interrupted)[1])
    assert steps >= 3
    assert checkpoints(tmp_path / "run") == [f"model_{steps:08d}.bin"]
    assert wrote == f"wrote {tmp_path / 'run' / f'model_{steps:08d}.bin'}"
    _, parameters = read_model(tmp_path / "run" / f"model_{steps:08d}.bin")
    assert all(np.isfinite(array).all() for array in parameters.values())


def ctrl_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def at_call(monkeypatch):
    """Call something before the n-th call of a function."""

    def patch(owner, name, n, first):
        calls, function = [], getattr(owner, name)

        def patched(*arguments, **options):
            calls.append(None)
            if len(calls) == n:
                first()
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, patched)

    return patch


def test_ctrl_c_in_the_simulator_is_told_how_long_it_takes(flags, at_call, capfd):
    at_call(train.Run, "next_batch", 1, ctrl_c)
    assert train.main(flags(device="sim", batch_size=1, num_iterations=1)) == 130
    assert (
        capfd.readouterr().err == f"{train.STOPPING}; until then the simulator may take minutes\n"
    )


def test_ctrl_c_within_a_step_leaves_the_step_out(flags, tmp_path, at_call, capfd):
    # Three batches a step; Ctrl-C comes before the eighth, the second of the third step.
    train.main(flags(total_batch_size=48, checkpoint_every=2, output_dir=tmp_path / "whole"))
    capfd.readouterr()
    at_call(Prefetcher, "next_batch", 8, ctrl_c)
    assert train.main(flags(total_batch_size=48)) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\n"
    written = tmp_path / "run" / "model_00000002.bin"
    assert out.endswith(f"wrote {written}\ninterrupted after step 2\n")
    assert len(re.findall(r"^step \d/4", out, re.MULTILINE)) == 2
    assert checkpoints(tmp_path / "run") == ["model_00000002.bin"]
    assert written.read_bytes() == (tmp_path / "whole" / "model_00000002.bin").read_bytes()


def test_ctrl_c_before_the_steps_of_an_earlier_run(flags, tmp_path, at_call, capfd):
    """They are not replaced, and the highest of them is what the folder stands for."""
    folder = tmp_path / "run"
    assert train.main(flags(num_iterations=5, checkpoint_every=3)) == 0
    assert capfd.readouterr().out.count("earlier run") == 0
    at_call(Prefetcher, "next_batch", 5, ctrl_c)
    again = [*flags(num_iterations=5, checkpoint_every=3, seed=7), "--overwrite"]
    assert train.main(again) == 130
    out = capfd.readouterr().out
    hidden = f" (folder {folder} still stands for model_00000005.bin, of an earlier run)"
    assert re.findall("^wrote .*$", out, re.MULTILINE) == [
        f"wrote {folder / 'model_00000003.bin'}{hidden}",
        f"wrote {folder / 'model_00000004.bin'}{hidden}",
    ]
    assert checkpoint.locate_model(folder) == folder / "model_00000005.bin"
    assert train.main(again) == 0
    *_, wrote = re.findall("^wrote .*$", capfd.readouterr().out, re.MULTILINE)
    assert wrote == f"wrote {folder / 'model_00000005.bin'}"


@pytest.mark.parametrize("overfit", [[], ["--overfit_single_batch"]])
def test_ctrl_c_within_the_first_step_writes_no_checkpoint(
    flags, tmp_path, at_call, capfd, overfit
):
    at_call(train.Run, "next_batch", 2, ctrl_c)
    assert train.main([*flags(total_batch_size=16 * 10**30), *overfit]) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\n"
    assert out.endswith("interrupted before the first step was done: there is no checkpoint\n")
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_writes_no_checkpoint(flags, tmp_path, at_call, capfd):
    at_call(Prefetcher, "next_batch", 8, lambda: [ctrl_c(), ctrl_c()])
    assert program.run(lambda: train.main(flags(total_batch_size=48))) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\ninterrupted\n"
    assert "wrote" not in out
    assert not (tmp_path / "run").exists()


def test_a_second_signal_of_the_other_kind_ends_the_run_at_once(flags, tmp_path, at_call, capfd):
    at_call(Prefetcher, "next_batch", 8, lambda: [ctrl_c(), os.kill(os.getpid(), signal.SIGTERM)])
    assert program.run(lambda: train.main(flags(total_batch_size=48))) == 143
    assert capfd.readouterr().err == f"{train.STOPPING}\nterminated\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("validation", "step"), [(1, 0), (2, 2), (3, 4)])
def test_ctrl_c_ends_a_validation(flags, tmp_path, at_call, capfd, validation, step):
    val = make_shard(tmp_path / "val.bin", 2000, SMALL_VOCAB.vocab_size)
    at_call(Trainer, "evaluate", validation, ctrl_c)
    settings = flags(input_val_bin=val, val_loss_every=2, num_iterations=4)
    assert train.main(settings) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\n"
    assert out.count("validation loss") == validation - 1
    if step:
        assert out.endswith(f"interrupted after step {step}\n")
        assert checkpoints(tmp_path / "run") == [f"model_0000000{step}.bin"]


def test_ctrl_c_ends_a_sample(flags, tmp_path, monkeypatch, capfd):
    def pieces(*_, **__):
        yield "a piece"
        ctrl_c()
        yield "another"
        pytest.fail("the sample went on")

    monkeypatch.setattr(sampling, "stream_text", pieces)
    assert train.main(flags(sample_every=3)) == 130
    assert capfd.readouterr().out.endswith("interrupted after step 3\n")
    assert checkpoints(tmp_path / "run") == ["model_00000003.bin"]


def test_ctrl_c_while_a_checkpoint_is_written_writes_it_once(flags, tmp_path, at_call, capfd):
    at_call(checkpoint, "write_model", 1, ctrl_c)
    assert train.main(flags(checkpoint_every=2)) == 130
    out = capfd.readouterr().out
    assert out.count("wrote") == 1
    assert out.endswith("interrupted after step 2\n")
    assert checkpoints(tmp_path / "run") == ["model_00000002.bin"]
