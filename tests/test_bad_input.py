"""Bad input through the real command line: one clear line, a status, nothing left behind."""

import os
import struct
import subprocess
import sys

import pytest
from programs import FULL_VOCAB, SMALL_VOCAB, make_model_file, make_shard, run

V = SMALL_VOCAB.vocab_size


@pytest.fixture
def files(tmp_path):
    """A working set: start.bin, a model with a context of 32, and tokens.bin, 100 of its tokens."""
    make_model_file(tmp_path / "start.bin", SMALL_VOCAB)
    make_shard(tmp_path / "tokens.bin", 100, V)
    return tmp_path


def tree(folder):
    return {path.relative_to(folder): os.stat(path).st_size for path in folder.rglob("*")}


def patched(source, target, offset, values, cut=None):
    """Copy a file with int32 values from byte `offset` on replaced, and its end cut off."""
    data = bytearray(source.read_bytes())
    data[offset : offset + 4 * len(values)] = struct.pack(f"<{len(values)}i", *values)
    target.write_bytes(data[:cut])


def wrong_magic(files):
    patched(files / "tokens.bin", files / "magic.bin", 0, [1234567])
    return ["--input_bin", "magic.bin"], ["magic.bin", "1234567", "20240520", "numbagpt.data"]


def wrong_version(files):
    patched(files / "tokens.bin", files / "version.bin", 4, [7])
    return ["--input_bin", "version.bin"], ["version.bin", "version 7", "version 1"]


def truncated_shard(files):
    patched(files / "tokens.bin", files / "short.bin", 0, [], cut=-20)
    return ["--input_bin", "short.bin"], ["short.bin", "90 tokens", "100"]


def ids_beyond_the_vocabulary(files):
    make_shard(files / "large.bin", 100, 5000)
    return ["--input_bin", "large.bin"], ["large.bin", "vocabulary of 60"]


def too_few_tokens(files):
    return ["--batch_size", "8", "--sequence_length", "32"], ["tokens.bin", "100 tokens", "257"]


def validation_data_too_short(files):
    make_shard(files / "val.bin", 10, V)
    return ["--input_val_bin", "val.bin"], ["val.bin", "10 tokens", "17"]


def no_file_matches(files):
    return ["--input_bin", "data/*_train_*.bin"], ["data/*_train_*.bin", "no file"]


def sequence_too_long(files):
    return ["--sequence_length", "33"], ["--sequence_length 33", "at most 32"]


def total_batch_not_divisible(files):
    return ["--total_batch_size", "40"], ["40", "2*8", "use 32 or 48"]


def unknown_preset(files):
    return ["--model", "d13"], ["--model d13", "nano", "d12", "d48"]


def truncated_checkpoint(files):
    patched(files / "start.bin", files / "cut.bin", 0, [], cut=5000)
    return ["--model", "cut.bin"], ["cut.bin", "truncated", "5,000 bytes"]


def foreign_checkpoint(files):
    return ["--model", "tokens.bin"], ["tokens.bin", "20240326", "--input_bin"]


def folder_without_a_model(files):
    (files / "empty").mkdir()
    return ["--model", "empty"], ["empty", "model_<step>.bin"]


def weights_that_are_not_finite(files):
    make_model_file(files / "nan.bin", SMALL_VOCAB, scale=float("nan"))
    return ["--model", "nan.bin"], ["loss of step 1 is nan", "the weights in nan.bin are damaged"]


def no_gpu(files):
    return ["--device", "cuda"], ["--device cuda", "NUMBA_DISABLE_CUDA"]


def precision_without_a_gpu(files):
    return ["--precision", "tf32"], ["--precision tf32", "GPU"]


def output_folder_is_a_file(files):
    return ["--output_dir", "tokens.bin"], ["tokens.bin", "file of that name"]


def output_folder_not_writable(files):
    return ["--output_dir", "tokens.bin/run"], ["tokens.bin/run", "Not a directory"]


def output_folder_has_a_checkpoint(files):
    (files / "run").mkdir()
    (files / "run" / "model_00000002.bin").write_bytes(b"")
    return ["--output_dir", "run"], ["run/model_00000002.bin is there", "--overwrite"]


def output_folder_has_a_later_checkpoint(files):
    (files / "run").mkdir()
    (files / "run" / "model_00000009.bin").write_bytes(b"")
    flags = ["--output_dir", "run", "--overwrite"]
    return flags, ["run/model_00000009.bin is there", "run's last, 2", "remove it"]


def checkpoint_name_is_a_folder(files):
    (files / "run" / "model_00000001.bin").mkdir(parents=True)
    return ["--output_dir", "run"], ["run/model_00000001.bin", "not a regular file", "move it"]


def failure_with_a_deep_output_folder(files):
    return ["--output_dir", "new/deep", "--model", "d13"], ["--model d13"]


CASES = [
    wrong_magic,
    wrong_version,
    truncated_shard,
    ids_beyond_the_vocabulary,
    too_few_tokens,
    validation_data_too_short,
    no_file_matches,
    sequence_too_long,
    total_batch_not_divisible,
    unknown_preset,
    truncated_checkpoint,
    foreign_checkpoint,
    folder_without_a_model,
    weights_that_are_not_finite,
    no_gpu,
    precision_without_a_gpu,
    output_folder_is_a_file,
    output_folder_not_writable,
    output_folder_has_a_checkpoint,
    output_folder_has_a_later_checkpoint,
    checkpoint_name_is_a_folder,
    failure_with_a_deep_output_folder,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_training(files, case):
    flags, named = case(files)
    before = tree(files)
    defaults = ["--model", "start.bin", "--input_bin", "tokens.bin", "--device", "cpu"]
    defaults += ["--batch_size", 2, "--sequence_length", 8, "--num_iterations", 2]
    found = run("train.py", *defaults, *flags, cwd=files)
    assert found.returncode == 1
    assert found.stderr.startswith("error: ")
    assert len(found.stderr.splitlines()) == 1
    for part in named:
        assert part in found.stderr
    assert tree(files) == before


def test_the_working_set_works(files):
    """What the cases change is all that is wrong with them."""
    flags = ["--model", "start.bin", "--input_bin", "tokens.bin", "--device", "cpu"]
    flags += ["--batch_size", 2, "--sequence_length", 8, "--num_iterations", 2]
    found = run("train.py", *flags, cwd=files)
    assert (found.returncode, found.stderr) == (0, "")
    assert (files / "out" / "model_00000002.bin").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full, a disk that is full")
@pytest.mark.parametrize("program", ["train.py", "sample.py"])
def test_output_that_cannot_be_written(tmp_path, program):
    make_model_file(tmp_path / "start.bin", FULL_VOCAB)
    make_shard(tmp_path / "tokens.bin", 100, FULL_VOCAB.vocab_size)
    before = tree(tmp_path)
    flags = {
        "train.py": ["--model", "start.bin", "--input_bin", "tokens.bin", "--batch_size", 2],
        "sample.py": ["--checkpoint", "start.bin"],
    }
    with open("/dev/full", "w") as full:
        found = run(program, "--device", "cpu", *flags[program], cwd=tmp_path, stdout=full)
    assert found.returncode == 1
    assert found.stderr == "error: cannot write the output: No space left on device\n"
    assert tree(tmp_path) == before


def test_a_closed_output_is_no_error(files):
    """As by `>&-` in a shell."""
    flags = ["--model", "start.bin", "--input_bin", "tokens.bin", "--device", "cpu"]
    flags += ["--batch_size", 2, "--sequence_length", 8, "--num_iterations", 2]
    found = run("train.py", *flags, cwd=files, stdout=None, preexec_fn=lambda: os.close(1))
    assert (found.returncode, found.stderr) == (0, "")
    assert (files / "out" / "model_00000002.bin").exists()


def test_no_progress_bar_on_a_closed_stderr(tmp_path):
    (tmp_path / "a.txt").write_text("one two\n" * 20)
    module = [sys.executable, "-m", "numbagpt.data", "a.txt", "--output_dir", "data"]
    close = {"cwd": tmp_path, "preexec_fn": lambda: os.close(2)}
    assert subprocess.run(module, stdout=subprocess.PIPE, timeout=60, **close).returncode == 0
    assert (tmp_path / "data" / "a_train_000000.bin").exists()


@pytest.mark.parametrize(("flag", "status"), [(["--model", "d13"], 1), (["--nope"], 2)])
def test_no_error_on_stdout_where_stderr_is_closed(tmp_path, flag, status):
    """As by `2>&-` in a shell."""
    found = run("train.py", *flag, cwd=tmp_path, stderr=None, preexec_fn=lambda: os.close(2))
    assert (found.returncode, found.stdout) == (status, "")


@pytest.mark.parametrize("program", ["numbagpt", "numbagpt.gpu.offline", "numbagpt.bench"])
def test_an_unknown_flag_is_named(tmp_path, program):
    module = [sys.executable, "-m", program, "--nope"]
    found = subprocess.run(module, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert found.returncode == 2
    assert found.stderr == "error: unrecognized arguments: --nope (--help lists the flags)\n"


def test_a_tilde_is_the_home_folder_in_every_path(files, monkeypatch):
    """Also where the shell leaves it alone; what it does not expand is a name like any other."""
    monkeypatch.setenv("HOME", str(files / "home"))
    (files / "~tilde.bin").write_bytes((files / "tokens.bin").read_bytes())
    flags = ["--model", "start.bin", "--device", "cpu", "--batch_size", 2, "--num_iterations", 1]
    flags += ["--sequence_length", 8]
    for folder in ("~/run", "~nouser/run", "./~/run"):
        found = run(
            "train.py", *flags, "--input_bin", "~tilde.bin", "--output_dir", folder, cwd=files
        )
        assert (found.returncode, found.stderr) == (0, "")
    assert {path.relative_to(files).as_posix() for path in files.rglob("model_*.bin")} == {
        f"{folder}/run/model_00000001.bin" for folder in ("home", "~nouser", "~")
    }
    flags = [*flags, "--input_bin", "./~tilde.bin", "--output_dir", "again", "--overwrite"]
    for model in ("~/run/model_00000001.bin", "~nouser/run", "./~/run"):
        found = run("train.py", *flags, "--model", model, cwd=files)
        assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize(
    ("name", "named"),
    [("cut.bin", "truncated"), ("tokens.bin", "--input_bin"), ("start.bin", "knows 60 tokens")],
)
def test_sampling(files, name, named):
    patched(files / "start.bin", files / "cut.bin", 0, [], cut=5000)
    before = tree(files)
    found = run("sample.py", "--checkpoint", name, "--device", "cpu", cwd=files)
    assert found.returncode == 1
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert found.stderr.startswith("error: ")
    assert named in found.stderr
    assert tree(files) == before
