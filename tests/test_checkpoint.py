"""numbagpt.checkpoint: llm.c's .bin, byte for byte, and every way a file can be wrong."""

import errno
import json
import os
import re
import resource
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from numbagpt import files, huggingface, program
from numbagpt.checkpoint import (
    check_checkpoints,
    choose_model,
    export,
    find_checkpoints,
    load_model,
    locate_model,
    main,
    read_model,
    write_model,
)
from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.tensors import parameter_shapes

# V = 130 pads to Vp = 256; C = 36 with 3 heads is nothing round.
CONFIG = GPT2Config(max_seq_len=5, vocab_size=130, num_layers=2, num_heads=3, channels=36)
HEADER = (20240326, 3, 5, 130, 2, 3, 36, 256)
NUMBERS = 256 * 36 + 5 * 36 + 2 * (12 * 36 * 36 + 13 * 36) + 2 * 36


def make_parameters(config: GPT2Config = CONFIG) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    parameters = {
        name: rng.standard_normal(shape, np.float32)
        for name, shape in parameter_shapes(config).items()
    }
    parameters["wte"][config.vocab_size :] = 0
    return parameters


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], array, err_msg=name, strict=True)


def header_bytes(**changes: int) -> bytes:
    """The header laid out by hand, with the given words (w0 … w255) replaced."""
    words = [*HEADER, *[0] * 248]
    for word, value in changes.items():
        words[int(word[1:])] = value
    return struct.pack("<256i", *words)


@pytest.fixture
def model_bin(tmp_path):
    path = tmp_path / "model.bin"
    write_model(path, CONFIG, make_parameters())
    return path


def test_round_trip_is_bit_exact(model_bin):
    config, parameters = read_model(model_bin)
    assert config == CONFIG
    assert_same(parameters, make_parameters())
    for array in parameters.values():
        array[...] = 0  # ours to change


def test_bytes_of_the_file(model_bin):
    data = model_bin.read_bytes()
    assert len(data) == 1024 + 4 * NUMBERS
    assert data[:1024] == header_bytes()
    parameters = make_parameters()
    order = (
        "wte wpe ln1w ln1b qkvw qkvb attprojw attprojb ln2w ln2b fcw fcb fcprojw fcprojb lnfw lnfb"
    )
    assert data[1024:] == b"".join(parameters[name].tobytes() for name in order.split())


def test_special_values_survive(tmp_path):
    parameters = make_parameters()
    parameters["lnfb"][:4] = [-0.0, 1e-45, 3.4028235e38, np.nan]
    write_model(tmp_path / "m.bin", CONFIG, parameters)
    _, got = read_model(tmp_path / "m.bin")
    assert got["lnfb"].tobytes() == parameters["lnfb"].tobytes()


def test_tensors_are_written_one_at_a_time(tmp_path, model_bin):
    parameters = make_parameters()
    made = []

    def pairs():
        for name, array in parameters.items():
            made.append(name)
            yield name, array

    path = tmp_path / "streamed.bin"
    write_model(path, CONFIG, pairs())
    assert made == list(parameters)
    assert path.read_bytes() == model_bin.read_bytes()
    # A mapping's own order does not matter, nor do memory layout or a wider type.
    shuffled = {name: np.asfortranarray(parameters[name], float) for name in sorted(parameters)}
    write_model(path, CONFIG, shuffled)
    assert path.read_bytes() == model_bin.read_bytes()


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_a_crash_half_way_leaves_the_old_file(model_bin, interruption):
    old = model_bin.read_bytes()

    def crashes():
        for name, array in make_parameters().items():
            if name == "fcw":
                raise interruption
            yield name, array + 1

    with pytest.raises(interruption):
        write_model(model_bin, CONFIG, crashes())
    assert model_bin.read_bytes() == old
    assert list(model_bin.parent.iterdir()) == [model_bin]


@pytest.mark.parametrize("mistake", ["missing", "extra", "order", "shape"])
def test_wrong_parameters_are_not_written(tmp_path, mistake):
    pairs = list(make_parameters().items())
    if mistake == "missing":
        pairs.pop()
    elif mistake == "extra":
        pairs.append(("more", np.zeros(3, np.float32)))
    elif mistake == "order":
        pairs[2:4] = pairs[3:1:-1]
    else:
        pairs[4] = ("qkvw", pairs[4][1].transpose(0, 2, 1))
    with pytest.raises(ValueError, match=r"argument|expected"):
        write_model(tmp_path / "m.bin", CONFIG, iter(pairs))
    assert list(tmp_path.iterdir()) == []


def test_bfloat16_file(tmp_path):
    """Version 5: the upper 16 bits of every float32."""
    parameters = make_parameters()
    data = header_bytes(w1=5)
    for array in parameters.values():
        bits = array.view(np.uint32)
        bits &= 0xFFFF0000
        data += (bits >> 16).astype("<u2").tobytes()
    (tmp_path / "m.bin").write_bytes(data)
    config, got = read_model(tmp_path / "m.bin")
    assert config == CONFIG
    assert_same(got, parameters)


@pytest.mark.parametrize("stored_Vp", [130, 131, 192, 256, 384])
def test_any_vocabulary_padding_becomes_ours(tmp_path, stored_Vp):
    """Rows past V are garbage in the file and zero in the model."""
    parameters = make_parameters()
    wte = np.full((stored_Vp, 36), 9, np.float32)
    wte[:130] = parameters["wte"][:130]
    tensors = [wte, *list(parameters.values())[1:]]
    data = header_bytes(w7=stored_Vp) + b"".join(array.tobytes() for array in tensors)
    (tmp_path / "m.bin").write_bytes(data)
    config, got = read_model(tmp_path / "m.bin")
    assert config == CONFIG
    assert_same(got, parameters)


SWAPPED = struct.unpack("<i", struct.pack(">i", 20240326))[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w0": 1234}, "starts with 1234; expected a model .bin, magic 20240326"),
        ({"w0": SWAPPED}, "is a model written on a big-endian machine"),
        ({"w1": 1}, "is a model .bin of version 1; expected 3 (float32) or 5 (bfloat16)"),
        ({"w1": 2}, "of version 2; expected 3"),
        ({"w1": 6}, "of version 6; expected 3"),
        ({"w2": 0}, "has a damaged header: model has max_seq_len = 0"),
        ({"w3": -1}, "has a damaged header: model has vocab_size = -1"),
        ({"w4": 0}, "has a damaged header: model has num_layers = 0"),
        ({"w5": 5}, "has a damaged header: model has 36 channels and 5 heads"),
        ({"w6": 39}, "has a damaged header: model has 39 channels"),
        ({"w7": 129}, "has a damaged header: vocabulary 130 padded to 129"),
        ({"w4": 3}, "is truncated"),
        ({"w4": 1}, "has bytes after its end"),
        ({"w1": 5}, "has bytes after its end"),
        # Sizes far beyond any memory: refused by arithmetic, before anything is allocated.
        (dict.fromkeys(("w2", "w3", "w4", "w7"), 2**31 - 1) | {"w6": 3 * 2**29}, "is truncated"),
    ],
)  # fmt: skip
def test_wrong_headers(model_bin, changes, message):
    model_bin.write_bytes(header_bytes(**changes) + model_bin.read_bytes()[1024:])
    for read in (read_model, load_model):
        with pytest.raises(UserError) as error:
            read(model_bin)
        assert str(error.value).startswith(f"{model_bin} ")
        assert message in str(error.value)
        assert "\n" not in str(error.value)


def test_wrong_sizes(model_bin):
    data = model_bin.read_bytes()
    expected = f"expected {len(data):,} for L=2 NH=3 C=36 T=5 Vp=256 in float32"
    for content, message in [
        (b"", "has 0 bytes; expected a model .bin, whose header alone has 1,024"),
        (data[:1023], "has 1,023 bytes; expected a model .bin"),
        (data[:1024], f"is truncated: 1,024 bytes; {expected}"),
        (data[:-1], f"is truncated: {len(data) - 1:,} bytes; {expected}"),
        (data + b"\0", f"has bytes after its end: {len(data) + 1:,} bytes; {expected}"),
    ]:
        model_bin.write_bytes(content)
        with pytest.raises(UserError) as error:
            read_model(model_bin)
        assert str(error.value).startswith(f"{model_bin} {message}")


def test_what_is_not_a_model(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*missing\.bin: No such file or directory"):
        load_model(tmp_path / "missing.bin")
    with pytest.raises(UserError, match="no model in folder"):
        load_model(tmp_path)
    with pytest.raises(UserError, match="is not a regular file"):
        read_model(tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*gone\.safetensors: No such file"):
        load_model(tmp_path / "gone.safetensors")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_one_file_of_a_hugging_face_model_is_told_to_be_that(tmp_path, name):
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(UserError) as error:
        load_model(tmp_path / name)
    assert str(error.value) == (
        f"{tmp_path / name} is one file of a Hugging Face model; expected its folder, where "
        f"config.json has the shape of the model; name the folder: {tmp_path}"
    )


def test_checkpoints_that_can_be_written(tmp_path):
    """Over older ones, through a link, beside what has the name of none at all."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "model_00000001.bin").write_bytes(b"old")
    (tmp_path / "model_00000002.bin").symlink_to("disk/model.bin")
    (tmp_path / "model_last.bin").mkdir()
    before = sorted(tmp_path.rglob("*"))
    check_checkpoints(tmp_path, CONFIG, 3, overwrite=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "model_00000001.bin").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkdir, ": it exists and is not a regular file"),
        (os.mkfifo, ": it exists and is not a regular file"),
        (partial(os.symlink, "/"), ": it exists and is not a regular file"),
        (partial(os.symlink, "/gone/a.bin"), ", a link to /gone/a.bin: No such file or directory"),
    ],
)
def test_checkpoints_that_cannot_be_written(tmp_path, make, message):
    path = tmp_path / "model_00000003.bin"
    make(path)
    with pytest.raises(UserError, match=f"^cannot write {path}{message}"):
        check_checkpoints(tmp_path, CONFIG, 3)


@pytest.mark.parametrize("step", [1, 3])
def test_checkpoints_that_are_to_stay(tmp_path, step):
    path = tmp_path / f"model_{step:08d}.bin"
    for name in (path.name, "model_00000000.bin"):
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(UserError, match=f"^{path} is there already; .* with --overwrite$"):
        check_checkpoints(tmp_path, CONFIG, 3)
    check_checkpoints(tmp_path, CONFIG, 3, overwrite=True)
    assert path.read_bytes() == b"old"


@pytest.mark.parametrize("step", [4, 100_000_000])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_checkpoint_of_a_later_step_would_hide_the_runs(tmp_path, step, overwrite):
    path = tmp_path / f"model_{step:08d}.bin"
    for name in (path.name, "model_00000003.bin"):
        (tmp_path / name).write_bytes(b"old")
    with pytest.raises(UserError) as error:
        check_checkpoints(tmp_path, CONFIG, 3, overwrite)
    assert str(error.value) == (
        f"{path} is there already, of a later step than the run's last, 3: it would be taken in "
        "place of the run's checkpoints; choose another folder with --output_dir, or remove it"
    )
    assert path.read_bytes() == b"old"


def test_room_for_a_checkpoint(model_bin, monkeypatch):
    size, disk = model_bin.stat().st_size, shutil.disk_usage(model_bin.parent)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: disk._replace(free=size))
    check_checkpoints(model_bin.parent, CONFIG, 3)
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: disk._replace(free=size - 1))
    with pytest.raises(UserError, match=f"a checkpoint takes {size:,} bytes and {size - 1:,} are"):
        check_checkpoints(model_bin.parent, CONFIG, 3)


def test_a_folder_stands_for_its_highest_step(tmp_path):
    """Whenever it was written, and by the number: 99999999 < 100000000."""
    steps = [(3, 1003), (99_999_999, 1001), (100_000_000, 1000), (7, 1002)]
    for step, time in steps:
        path = tmp_path / f"model_{step:08d}.bin"
        path.write_bytes(b"")
        os.utime(path, (time, time))
    # no checkpoints
    for name in [
        ".model_999999999.bin.0123.tmp",
        "model_999999999.bin.old",
        "xmodel_999999999.bin",
    ]:
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_checkpoints(tmp_path)] == [
        "model_100000000.bin",
        "model_99999999.bin",
        "model_00000007.bin",
        "model_00000003.bin",
    ]
    parameters = make_parameters()
    write_model(tmp_path / "model_100000000.bin", CONFIG, parameters)
    assert locate_model(tmp_path) == tmp_path / "model_100000000.bin"
    config, got = load_model(tmp_path)
    assert config == CONFIG
    assert_same(got, parameters)


def test_of_two_names_of_one_step_the_newer_file_is_taken(tmp_path):
    names = ["model_7.bin", "model_00000007.bin", "model_007.bin"]
    for time, name in enumerate(names):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time, time))
    assert [path.name for path in find_checkpoints(tmp_path)] == names[::-1]


def test_a_damaged_highest_step(tmp_path):
    """The highest of the whole ones is named; it is not taken silently."""
    paths = [tmp_path / f"model_0000000{step}.bin" for step in range(1, 5)]
    for path in paths:
        write_model(path, CONFIG, make_parameters())
    paths[3].write_bytes(b"")
    paths[2].write_bytes(paths[2].read_bytes()[:-1])
    for load in (locate_model, load_model):
        with pytest.raises(UserError) as error:
            load(tmp_path)
        assert str(error.value).startswith(f"{paths[3]} has 0 bytes; ")
        assert str(error.value).endswith(f"; or name an earlier one: {paths[1]}")
    for path in paths[:3]:
        path.unlink()
    with pytest.raises(UserError, match=r"truncated or something else$"):
        load_model(tmp_path)


def test_what_is_no_folder_of_checkpoints_stands_for_itself(tmp_path, model_bin, capsys):
    huggingface.write(tmp_path / "hf", CONFIG, make_parameters())
    (tmp_path / "hf" / "model_00000001.bin").write_bytes(b"")
    for path in (model_bin, tmp_path / "hf", tmp_path / "missing"):
        assert locate_model(path) == choose_model(str(path)) == path
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["missing", "file"])
def test_no_folder_of_checkpoints(tmp_path, name):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match=r"no folder .*; expected the output folder"):
        find_checkpoints(tmp_path / name)


def test_load_model_takes_every_format(tmp_path, model_bin):
    huggingface.write(tmp_path / "hf", CONFIG, make_parameters())
    for path in (model_bin, str(model_bin), tmp_path / "hf", str(tmp_path / "hf")):
        config, got = load_model(path)
        assert config == CONFIG
        assert_same(got, make_parameters())


def test_export_from_the_command_line(tmp_path, model_bin):
    folder = tmp_path / "new" / "exported"
    command = [sys.executable, "-m", "numbagpt.checkpoint", "export", str(model_bin), str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"wrote {folder}: {NUMBERS - 126 * 36:,} parameters\n"
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == 130
    config, got = load_model(folder)
    assert config == CONFIG
    assert_same(got, make_parameters())


def test_export_says_which_checkpoint_it_takes(tmp_path, capsys):
    run, folder = tmp_path / "run", tmp_path / "exported"
    run.mkdir()
    parameters = make_parameters()
    write_model(run / "model_00000002.bin", CONFIG, parameters)
    write_model(
        run / "model_00000001.bin", CONFIG, {name: array + 1 for name, array in parameters.items()}
    )
    assert main(["export", str(run), str(folder)]) == 0
    assert capsys.readouterr().err == f"weights from {run / 'model_00000002.bin'}\n"
    assert_same(load_model(folder)[1], parameters)


def test_export_refusals(tmp_path, model_bin, capsys):
    missing, out = tmp_path / "missing.bin", tmp_path / "out"
    for source, folder, message in [
        (
            missing,
            out,
            f"error: cannot read {missing}: No such file or directory; check the path\n",
        ),
        (model_bin, model_bin, f"error: cannot write to folder {model_bin}: a file of that name"),
    ]:
        assert program.run(partial(main, ["export", str(source), str(folder)])) == 1
        printed = capsys.readouterr()
        assert printed.err.startswith(message)
        assert printed.err.count("\n") == 1
        assert printed.out == ""
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments", [[], ["import", "a", "b"], ["export", "a"], ["export", "", "b"], ["--export"]]
)
def test_export_flags(capsys, arguments):
    with pytest.raises(SystemExit) as status:
        main(arguments)
    assert status.value.code == 2
    assert re.fullmatch("error: [^\n]+\n", capsys.readouterr().err)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_export_refuses_weights_that_are_not_finite(tmp_path, value):
    parameters = make_parameters()
    parameters["lnfb"][3] = value
    path = tmp_path / "a.bin"
    write_model(path, CONFIG, parameters)
    with pytest.raises(UserError) as error:
        export(path, tmp_path / "out")
    assert str(error.value) == (
        f"{path} is damaged: some numbers of lnfb are not finite; export another model"
    )
    assert list(tmp_path.iterdir()) == [path]


def test_export_to_a_full_disk(tmp_path, model_bin):
    # The system refuses the bytes beyond a limit as it does those beyond a disk.
    folder = tmp_path / "new" / "exported"
    ended = subprocess.run(
        [sys.executable, "-m", "numbagpt.checkpoint", "export", str(model_bin), str(folder)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, 5_000)),
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert f"cannot write {folder}/model.safetensors: File too large" in ended.stderr
    assert not (tmp_path / "new").exists()


def test_export_interrupted(tmp_path, model_bin, monkeypatch, capsys):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface, "write", interrupt)
    assert program.run(partial(main, ["export", str(model_bin), str(tmp_path / "out")])) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_export_leaves_another_model_alone(tmp_path, capsys):
    """Before it reads its own: that one is missing."""
    config = tmp_path / "hf" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")
    assert program.run(partial(main, ["export", str(tmp_path / "a.bin"), str(config.parent)])) == 1
    assert capsys.readouterr() == (
        "",
        f"error: {config} is there already; expected a folder without a model; name another, or "
        "remove the model that is there\n",
    )
    assert config.read_text() == "{}"


def test_export_does_not_hide_training_checkpoints(tmp_path):
    checkpoint = tmp_path / "model_00000001.bin"
    write_model(checkpoint, CONFIG, make_parameters())
    with pytest.raises(UserError, match="holds training checkpoints; export to another folder"):
        export(checkpoint, tmp_path)
    assert list(tmp_path.iterdir()) == [checkpoint]


FOLDER_READERS = {
    "load": load_model,
    "train": lambda folder: check_checkpoints(folder, CONFIG, 3),
    "export": lambda folder: export("a.bin", folder),
}


@pytest.mark.parametrize("read", FOLDER_READERS.values(), ids=FOLDER_READERS)
def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch, read):
    def refuse(folder):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError) as error:
        read(tmp_path)
    assert str(error.value) == (
        f"cannot read folder {tmp_path}: {os.strerror(errno.EACCES)}; check the permissions"
    )


@pytest.mark.parametrize("name", ["load", "train"])
def test_a_folder_that_may_be_hugging_faces(tmp_path, name):
    """Whether it has a config.json cannot be told: that is no reason to take it for a run's."""
    config = tmp_path / "config.json"
    config.symlink_to(config)
    with pytest.raises(UserError) as error:
        FOLDER_READERS[name](tmp_path)
    assert str(error.value) == f"cannot read {config}: {os.strerror(errno.ELOOP)}"
