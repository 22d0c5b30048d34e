"""train.py end to end: what it learns, prints and writes."""

import math
import os
import re
import shlex
import shutil
import signal
import subprocess

import numpy as np
import pytest
from programs import FULL_VOCAB, SMALL_VOCAB, command, make_model_file, make_shard, run

import train
from numbagpt import checkpoint, cli, metrics, sampling
from numbagpt.checkpoint import read_model
from numbagpt.config import PRESETS
from numbagpt.device import HostDevice
from numbagpt.errors import DataError, UserError
from numbagpt.loader import Prefetcher
from numbagpt.memory import MemoryPlan
from numbagpt.schedule import learning_rate_at
from numbagpt.shards import write_shard
from numbagpt.training import Trainer


class Reports:
    """The steps that the training loop reported, to the last bit."""

    def __init__(self) -> None:
        self.losses, self.norms, self.learning_rates = [], [], []


@pytest.fixture
def reports(monkeypatch):
    """What the progress report was given since the test started."""
    seen = Reports()
    report = metrics.Progress.report

    def record(self, loss, grad_norm, learning_rate):
        seen.losses.append(loss)
        seen.norms.append(grad_norm)
        seen.learning_rates.append(learning_rate)
        report(self, loss, grad_norm, learning_rate)

    monkeypatch.setattr(metrics.Progress, "report", record)
    return seen


@pytest.fixture
def flags(tmp_path):
    """Command line of a tiny run; flags given later override these."""
    model = make_model_file(tmp_path / "tiny.bin", SMALL_VOCAB)
    data = make_shard(tmp_path / "train.bin", 2000, SMALL_VOCAB.vocab_size)

    def arguments(**changes):
        settings = {
            "model": model,
            "input_bin": data,
            "output_dir": tmp_path / "run",
            "device": "cpu",
            "batch_size": 2,
            "sequence_length": 8,
            "num_iterations": 4,
        }
        settings |= changes
        return [str(part) for name, value in settings.items() for part in (f"--{name}", value)]

    return arguments


def checkpoints(folder):
    return sorted(path.name for path in folder.iterdir())


def test_overfitting_one_batch_drives_the_loss_to_zero(flags, reports):
    settings = flags(num_iterations=200, learning_rate=0.03, weight_decay=0)
    assert train.main([*settings, "--overfit_single_batch"]) == 0
    assert len(reports.losses) == 200
    assert reports.losses[0] == pytest.approx(math.log(SMALL_VOCAB.vocab_size), abs=0.1)
    assert reports.losses[-1] < 0.1


def test_without_the_flag_the_batches_differ(flags, reports):
    # The learning rate is too low to change anything: only other tokens give other losses.
    train.main(flags(learning_rate=1e-12))
    assert len(set(reports.losses)) == 4


def test_one_seed_gives_bit_identical_runs(flags, reports, tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", SMALL_VOCAB)
    for folder, seed in [("a", 7), ("b", 7), ("c", 8)]:
        train.main(flags(model="tiny", seed=seed, output_dir=tmp_path / folder))
    a, b, c = (reports.losses[i : i + 4] for i in (0, 4, 8))
    assert a == b
    assert a != c
    name = "model_00000004.bin"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.gpu
def test_the_gpu_repeats_itself_and_agrees_with_the_cpu(flags, reports, tmp_path):
    for i, device in enumerate(("cuda", "cuda", "cpu")):
        settings = {"device": device, "output_dir": tmp_path / str(i)}
        train.main(flags(**settings, precision="fp32", num_iterations=8, learning_rate=0.01))
    first, second, cpu = (reports.losses[i : i + 8] for i in (0, 8, 16))
    assert first == second
    np.testing.assert_allclose(first, cpu, rtol=1e-4)


def test_accumulated_batches_equal_one_large_batch(flags, reports, tmp_path):
    large = tmp_path / "large"
    small = tmp_path / "small"
    train.main(flags(batch_size=8, output_dir=large))
    train.main(flags(batch_size=2, total_batch_size=64, output_dir=small))
    np.testing.assert_allclose(reports.losses[4:], reports.losses[:4], rtol=1e-6)
    np.testing.assert_allclose(reports.norms[4:], reports.norms[:4], rtol=1e-5)
    # Another batch size without accumulation is another run: the comparison can fail.
    train.main(flags(batch_size=2))
    assert abs(reports.losses[8] - reports.losses[0]) > 1e-3


def test_the_learning_rate_follows_the_schedule_and_moves_the_weights(flags, reports, tmp_path):
    train.main(
        flags(num_iterations=5, learning_rate=0.01, warmup_iters=2, learning_rate_decay_frac=0.5)
    )
    assert reports.learning_rates == [learning_rate_at(s, 0.01, 2, 5, 0.5) for s in range(5)]
    _, before = read_model(tmp_path / "tiny.bin")
    _, after = read_model(tmp_path / "run" / "model_00000005.bin")
    for name, array in before.items():
        assert np.isfinite(after[name]).all()
        assert not np.array_equal(array, after[name]), f"{name} did not move"
        # AdamW moves a weight by about the learning rate a step.
        assert np.abs(array - after[name]).max() < 5 * 0.02


def test_validation_loss_of_a_uniform_model_is_log_v(flags, tmp_path, capsys):
    model = make_model_file(tmp_path / "zero.bin", SMALL_VOCAB, scale=0)
    val = make_shard(tmp_path / "val.bin", 100, SMALL_VOCAB.vocab_size)
    train.main(
        flags(
            model=model, input_val_bin=val, val_loss_every=2, val_max_steps=3, learning_rate=1e-12
        )
    )
    found = re.findall(r"validation loss after step (\d+): (\S+)", capsys.readouterr().out)
    assert found == [(step, f"{math.log(60):.4f}") for step in ("0", "2", "4")]


def test_validation_uses_the_same_batches_each_time_and_val_max_steps_of_them(
    flags, tmp_path, capsys
):
    val = make_shard(tmp_path / "val.bin", 16 * 3 + 1, SMALL_VOCAB.vocab_size)

    def losses(max_steps):
        train.main(
            flags(
                input_val_bin=val,
                val_loss_every=1,
                val_max_steps=max_steps,
                learning_rate=1e-12,
                num_iterations=2,
                output_dir=tmp_path / str(max_steps),
            )
        )
        return re.findall(r"validation loss after step \d: (\S+)", capsys.readouterr().out)

    one, three, more = losses(1), losses(3), losses(50)
    assert len(one) == len(three) == 3
    assert len(set(one)) == len(set(three)) == 1
    assert one[0] != three[0]
    assert three == more


def test_checkpoints_are_written_in_between_and_at_the_end(flags, tmp_path):
    train.main(flags(num_iterations=5, checkpoint_every=2))
    assert checkpoints(tmp_path / "run") == [f"model_0000000{step}.bin" for step in (2, 4, 5)]


@pytest.mark.parametrize("step", [1, 4])  # that of a Ctrl-C, and the last
def test_a_checkpoint_in_the_way_stops_the_run_before_its_first_step(
    flags, reports, tmp_path, step, capsys
):
    path = tmp_path / "run" / f"model_{step:08d}.bin"
    path.mkdir(parents=True)
    with pytest.raises(UserError, match=f"cannot write {path}: it exists and is not a regular"):
        train.main(flags())
    assert reports.losses == []
    assert capsys.readouterr().out == ""
    assert checkpoints(tmp_path / "run") == [path.name]


def test_a_full_disk_stops_the_run_before_its_first_step(flags, reports, tmp_path, monkeypatch):
    disk = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: disk)
    with pytest.raises(
        UserError, match=r"/run: a checkpoint takes [\d,]+ bytes and 1,000 are free"
    ):
        train.main(flags())
    assert reports.losses == []
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model", ["tiny.bin", "run"])
def test_checkpoints_of_an_earlier_run_are_kept(flags, tmp_path, reports, capsys, model):
    """Also those that the run would start from."""
    train.main(flags())
    written = tmp_path / "run" / "model_00000004.bin"
    before = written.read_bytes()
    again = flags(model=tmp_path / model, learning_rate=0.1)
    capsys.readouterr()
    assert cli.run_program(lambda: train.main(again)) == 1
    assert capsys.readouterr() == (
        "",
        f"error: {written} is there already; expected no checkpoints of an earlier run; choose "
        "another folder with --output_dir, or replace them with --overwrite\n",
    )
    assert len(reports.losses) == 4
    assert written.read_bytes() == before
    assert train.main([*again, "--overwrite"]) == 0
    assert len(reports.losses) == 8
    assert written.read_bytes() != before


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_a_hugging_face_folder_takes_no_checkpoints(flags, tmp_path, reports, overwrite):
    """They would be there, and load_model would go on taking the old weights."""
    folder = tmp_path / "hf"
    checkpoint.export(tmp_path / "tiny.bin", folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(UserError) as error:
        train.main([*flags(model=folder, output_dir=folder), *overwrite])
    assert str(error.value) == (
        f"{folder / 'config.json'} makes its folder a Hugging Face model, which would be taken in "
        "place of the run's checkpoints; choose another folder with --output_dir"
    )
    assert reports.losses == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert train.main(flags(model=folder)) == 0


def test_a_run_goes_on_from_an_output_folder(flags, reports, tmp_path):
    settings = flags(num_iterations=60, learning_rate=0.03)
    train.main([*settings, "--overfit_single_batch"])
    settings = flags(model=tmp_path / "run", output_dir=tmp_path / "on", num_iterations=1)
    train.main([*settings, "--overfit_single_batch"])
    assert reports.losses[60] < reports.losses[59] + 0.05 < reports.losses[0] / 2


def test_what_is_printed(flags, tmp_path, capsys):
    model = make_model_file(tmp_path / "full.bin", FULL_VOCAB)
    train.main(
        flags(model=model, num_iterations=4, total_batch_size=32, sample_every=3, warmup_iters=2)
    )
    out, err = capsys.readouterr()
    assert err == ""
    assert "B=2 x T=8 x 2 = 32 tokens a step" in out
    assert out.index("memory for B=2, T=8") < out.index("step 1/4")
    number = r"[\d,.]+"
    lines = re.findall(
        rf"^step (\d)/4 \| loss {number} \| norm {number} \| lr (\S+) \| {number} ms"
        rf" \| {number} tok/s \| MFU n/a(?: \| \d+s left)?$",
        out,
        re.MULTILINE,
    )
    assert [step for step, _ in lines] == ["1", "2", "3", "4"]
    assert lines[0][1] == "1.50e-04"
    assert re.findall(r"--- sample after step (\d)\n", out) == ["3", "4"]
    last = tmp_path / "run" / "model_00000004.bin"
    assert f"\nwrote {last}\n--- sample after step 4\n" in out
    assert out.endswith(f"\n---\nsample from it: python sample.py --checkpoint {last}\n")


def test_the_summary_says_where_the_weights_come_from(flags, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "tiny", SMALL_VOCAB)
    run = tmp_path / "run"
    for model, weights in [
        ("tiny", "random weights"),
        (tmp_path / "tiny.bin", f"weights from {tmp_path / 'tiny.bin'}"),
        (run, f"weights from {run / 'model_00000004.bin'}"),
    ]:
        train.main([*flags(model=model), "--overwrite"])
        (line,) = re.findall("^model  .*$", capsys.readouterr().out, re.MULTILINE)
        assert line == (f"model       {model}: L=1 NH=2 C=8 V=60, 0.0M parameters, {weights}")


def test_a_sample_in_between_does_not_change_the_run(flags, reports, tmp_path):
    model = make_model_file(tmp_path / "full.bin", FULL_VOCAB)
    train.main(flags(model=model, sample_every=0))
    settings = flags(model=model, sample_every=1, val_loss_every=1)
    train.main([*settings, "--overwrite"])
    assert reports.losses[:4] == reports.losses[4:]


def test_no_sample_without_gpt2s_vocabulary(flags, tmp_path, capsys):
    assert train.main(flags()) == 0
    out = capsys.readouterr().out
    # nor the advice to sample with a program that would refuse
    last = "no sample: the model knows 60 tokens; text needs GPT-2's vocabulary of 50257"
    assert out.splitlines()[-1] == last


def test_a_batch_too_large_for_the_memory_names_one_that_fits(flags, monkeypatch, capsys):
    fits = MemoryPlan(SMALL_VOCAB, 5, 8).total
    monkeypatch.setattr(HostDevice, "free_memory", lambda _: fits)
    with pytest.raises(UserError, match="the largest batch size that fits is 5"):
        train.main(flags(batch_size=50))
    assert "memory for B=50, T=8" in capsys.readouterr().out


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
        assert running.stderr.read() == b"", "there is nobody to tell"
        assert running.wait() == 1
    (last,) = checkpoints(tmp_path / "run")
    assert 3 <= int(last.removeprefix("model_").removesuffix(".bin")) < 3000
    read_model(tmp_path / "run" / last)


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


def test_the_command_it_prints_works_for_any_folder(flags, tmp_path, capsys):
    model = make_model_file(tmp_path / "full.bin", FULL_VOCAB)
    train.main(flags(model=model, output_dir=tmp_path / "it's a run"))
    *_, checkpoint = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert checkpoint == str(tmp_path / "it's a run" / "model_00000004.bin")


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


def test_ctrl_c_within_the_first_step_writes_no_checkpoint(flags, tmp_path, at_call, capfd):
    at_call(Prefetcher, "next_batch", 2, ctrl_c)
    assert train.main(flags(total_batch_size=16 * 10**6)) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\n"
    assert out.endswith("interrupted before the first step was done: there is no checkpoint\n")
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_writes_no_checkpoint(flags, tmp_path, at_call, capfd):
    at_call(Prefetcher, "next_batch", 8, lambda: [ctrl_c(), ctrl_c()])
    assert cli.run_program(lambda: train.main(flags(total_batch_size=48))) == 130
    out, err = capfd.readouterr()
    assert err == f"{train.STOPPING}\ninterrupted\n"
    assert "wrote" not in out
    assert not (tmp_path / "run").exists()


def test_a_second_signal_of_the_other_kind_ends_the_run_at_once(flags, tmp_path, at_call, capfd):
    at_call(Prefetcher, "next_batch", 8, lambda: [ctrl_c(), os.kill(os.getpid(), signal.SIGTERM)])
    assert cli.run_program(lambda: train.main(flags(total_batch_size=48))) == 143
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


def defaults(config, model, on_gpu, **given):
    names = "sequence_length batch_size total_batch_size num_iterations learning_rate warmup_iters"
    settings = dict.fromkeys([*names.split(), "input_val_bin"]) | given
    options = train.argparse.Namespace(model=model, input_bin="data.bin", **settings)
    train.fill_in_defaults(options, config, on_gpu)
    return options


def test_a_preset_does_not_hide_a_folder_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    with pytest.raises(UserError, match=r"write \./gpt2 for what is here"):
        train.find_model("gpt2", 1, ".")
    assert train.find_model("gpt2-medium", 1, ".")[0] == PRESETS["gpt2-medium"]
    assert train.find_model("gpt2", 1, str(tmp_path / "gpt2"))[0] == PRESETS["gpt2"]


@pytest.mark.parametrize("folder", ["-x", "~x"])
def test_the_advice_at_the_end_can_be_pasted(flags, tmp_path, monkeypatch, capsys, folder):
    monkeypatch.chdir(tmp_path)
    settings = flags(model=make_model_file(tmp_path / "full.bin", FULL_VOCAB), output_dir=None)
    i = settings.index("--output_dir")
    assert train.main([*settings[:i], *settings[i + 2 :], f"--output_dir={folder}"]) == 0
    advice = f"--checkpoint {shlex.quote(f'./{folder}/model_00000004.bin')}\n"
    assert capsys.readouterr().out.endswith(advice)


def test_a_run_may_be_called_like_its_preset(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_shard(tmp_path / "train.bin", 100, PRESETS["nano"].vocab_size)
    settings = "--device cpu --input_bin train.bin --batch_size 1 --sequence_length 8"
    for steps in ("1", "2"):  # the second finds the folder of the first
        arguments = [*settings.split(), "--num_iterations", steps, "--output_dir", "nano"]
        arguments.append("--overwrite")
        assert train.main(arguments) == 0
    assert checkpoints(tmp_path / "nano") == ["model_00000001.bin", "model_00000002.bin"]


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
        train.count_batches(total, 8, 64)


def test_total_batch_size_gives_the_accumulation_steps():
    assert train.count_batches(512 * 3, 8, 64) == 3
    options = defaults(PRESETS["d12"], "d12", True, total_batch_size=2**19)
    assert options.accumulation_steps == 128


BAD_FLAGS = {
    "--batch_size": ["0", "-1", "x", "1.5", "nan"],
    "--learning_rate": ["0", "-1e-3", "nan", "inf", "fast"],
    "--learning_rate_decay_frac": ["1.1", "-0.1"],
    "--weight_decay": ["-1", "nan"],
    "--beta2": ["1", "-0.5"],
    "--eps": ["0", "1e-300", "1e39", "inf"],  # 0 and infinity as a float32
    "--grad_clip": ["1e-46", "1e39", "-1", "nan"],
    "--seed": ["-1", "1.5"],
    "--warmup_iters": ["1" + 400 * "0"],  # beyond the floats
    "--input_bin": [""],  # as of an unset shell variable
    "--output_dir": [""],
    "--device": ["gpu"],
    "--precision": ["fp16"],
    "--batch": ["4"],  # an abbreviation
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD_FLAGS.items() for value in values]
)
def test_a_flag_that_makes_no_sense_is_one_line(flag, value, capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main([flag, value])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: .*{re.escape(flag)}.*\n", err)


def test_settings_at_their_limits_are_taken():
    for text, value in [("0", 0), ("1e-30", 1e-30), ("1e30", 1e30)]:
        assert train.parse_arguments(["--grad_clip", text]).grad_clip == value
        assert np.float32(value) == pytest.approx(value, rel=1e-6)
    for text, value in [("1e-30", 1e-30), ("1e30", 1e30)]:
        assert train.parse_arguments(["--eps", text]).eps == value


def test_a_limit_that_leaves_zero_out_says_so(capsys):
    with pytest.raises(SystemExit):
        train.main(["--grad_clip", "1e-46"])
    assert capsys.readouterr().err == (
        "error: argument --grad_clip: '1e-46' is not a number from 1e-30 to 1e+30, or 0 (--help "
        "lists the flags)\n"
    )


def test_help_states_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (--\w+)", text, re.MULTILINE)
    names = "input_bin input_val_bin output_dir model batch_size sequence_length total_batch_size"
    names += " num_iterations learning_rate warmup_iters learning_rate_decay_frac weight_decay"
    names += " grad_clip val_loss_every val_max_steps sample_every overfit_single_batch device"
    names += " precision attention graph recompute nvtx seed beta1 beta2 eps checkpoint_every"
    names += " overwrite"
    assert sorted(listed) == sorted(f"--{name}" for name in names.split())
    assert text.count("(default:") >= len(listed) - 3  # all but the switches


@pytest.mark.slow
def test_with_no_flags_the_programs_do_something_worth_seeing(tmp_path):
    trained = run("train.py", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    first, *_, last = re.findall(r"validation loss after step \d+: (\S+)", trained.stdout)
    assert 10.5 < float(first) < 11.2
    assert float(last) < 6.8
    assert "--- sample" in trained.stdout
    assert len(trained.stderr.splitlines()) == 1  # that there is no GPU
    config, _ = read_model(tmp_path / "out" / trained.stdout.split()[-1].split("/")[-1])
    assert config == PRESETS["nano"]
    sampled = run("sample.py", "--max_new_tokens", 20, cwd=tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    assert len(sampled.stdout.split()) > 3
