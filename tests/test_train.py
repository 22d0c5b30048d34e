"""train.py end to end: what it learns, prints and writes."""

import math
import re
import shlex
import shutil

import numpy as np
import pytest
from programs import FULL_VOCAB, SMALL_VOCAB, checkpoints, make_model_file, make_shard, run

import train
from numbagpt import checkpoint, metrics, program
from numbagpt.checkpoint import read_model
from numbagpt.config import PRESETS
from numbagpt.device import HostDevice
from numbagpt.errors import UserError
from numbagpt.memory import MemoryPlan
from numbagpt.schedule import learning_rate_at


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
    assert program.run(lambda: train.main(again)) == 1
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


def test_a_folder_takes_one_run_at_a_time(flags, tmp_path, monkeypatch, capsys):
    first, second = [], []

    def step(run, number):
        if not second:
            second.append(program.run(lambda: train.main([*flags(), "--overwrite"])))
        first.append(number)

    whole_step = train.Run.step
    monkeypatch.setattr(train.Run, "step", lambda *a: [step(*a), whole_step(*a)])
    assert train.main(flags()) == 0
    assert (first, second) == ([0, 1, 2, 3], [1])
    assert capsys.readouterr().err == (
        f"error: another program writes to folder {tmp_path / 'run'}; expected one at a time; "
        "wait for its end or name another folder\n"
    )
    assert checkpoints(tmp_path / "run") == ["model_00000004.bin"]
    assert train.main([*flags(), "--overwrite"]) == 0


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


@pytest.mark.parametrize(
    ("warmup_iters", "expected", "last"),
    [
        (1, "learning rate 0.002, warm-up 1 step, then down to 0.0002", "6.50e-04"),
        (4, "learning rate 0.002, warm-up 4 steps, in which the run ends, at 0.002", "2.00e-03"),
        (10, "learning rate 0.002, warm-up 10 steps, in which the run ends, at 0.0008", "8.00e-04"),
    ],
)
def test_the_summary_says_what_becomes_of_the_learning_rate(
    flags, capsys, warmup_iters, expected, last
):
    train.main(flags(num_iterations=4, learning_rate=2e-3, warmup_iters=warmup_iters))
    out = capsys.readouterr().out
    assert f"\nAdamW       {expected}; weight decay 0.1\n" in out
    assert re.search(rf"^step 4/4 .* lr {last} ", out, re.MULTILINE)


def test_the_summary_counts_what_is_read(flags, tmp_path, capsys):
    """Of the shards those that have whole batches of 16 tokens: 62 and 3 of them."""
    for name, count in [("a0", 1000), ("a1", 16), ("a2", 63), ("val", 100)]:
        make_shard(tmp_path / f"{name}.bin", count, SMALL_VOCAB.vocab_size)
    pattern, val = tmp_path / "a?.bin", tmp_path / "val.bin"
    settings = flags(
        input_bin=pattern,
        input_val_bin=val,
        total_batch_size=32,
        num_iterations=13,
        val_max_steps=4,
    )
    train.main(settings)
    out = capsys.readouterr().out
    assert f"\ndata        {pattern}: 1,079 tokens, 3 shards, 65 batches\n" in out
    assert f"\nvalidation  {val}: 100 tokens, 4 of 6 batches\n" in out
    assert "\nsteps       13, 0.40 epochs\n" in out
    train.main([*settings, "--overfit_single_batch", "--overwrite"])
    assert "\nsteps       13, all on the first batch\n" in capsys.readouterr().out


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


def test_the_command_it_prints_works_for_any_folder(flags, tmp_path, capsys):
    model = make_model_file(tmp_path / "full.bin", FULL_VOCAB)
    train.main(flags(model=model, output_dir=tmp_path / "it's a run"))
    *_, checkpoint = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert checkpoint == str(tmp_path / "it's a run" / "model_00000004.bin")


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
    for more in (
        "--num_iterations 1 --output_dir nano",
        "--num_iterations 2 --output_dir nano --overwrite --model nano",
        "--num_iterations 3 --output_dir other",  # where nano was not asked for by its name
    ):
        assert train.main([*settings.split(), *more.split()]) == 0
    assert checkpoints(tmp_path / "nano") == ["model_00000001.bin", "model_00000002.bin"]
    assert checkpoints(tmp_path / "other") == ["model_00000003.bin"]


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
