"""Model weights on disk: llm.c's .bin files, and one loader for every format we read.

A model .bin is a header of 256 little-endian int32 and the 16 parameter tensors, dense and in
order, nothing between them:

    [0] 20240326   magic
    [1] version    3: float32;  5: bfloat16.  Both have the vocabulary padded.
    [2] max_seq_len   [3] vocab_size V   [4] num_layers   [5] num_heads   [6] channels
    [7] padded_vocab_size: the rows that wte has in this file

The programs of llm.c read and write the same files (github.com/karpathy/llm.c). We write version 3.

    python -m numbagpt.checkpoint export MODEL FOLDER

writes a model as a folder that Hugging Face's Transformers opens.
"""

if __name__ == "__main__":  # before the imports, so that Ctrl-C is answered while they last
    import sys

    from numbagpt import program

    sys.exit(program.run_module("numbagpt.checkpoint"))

import math
import os
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from numbagpt import flags, huggingface, program
from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.files import (
    STORED_AS,
    atomic_write,
    check_room,
    check_writable_file,
    exists,
    explained,
    file_size,
    read_bytes,
    read_floats,
)
from numbagpt.magics import MODEL_MAGIC, kind_of_file
from numbagpt.tensors import parameter_shapes
from numbagpt.words import counted

STORED_IN_VERSION = {3: "float32", 5: "bfloat16"}
HEADER_BYTES = 256 * 4
CHECKPOINT_NAME = re.compile(r"model_(\d+)\.bin")


def write_model(
    path: str | os.PathLike,
    config: GPT2Config,
    parameters: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
) -> None:
    """Write a version-3 .bin, atomically and one tensor at a time.

    parameters   the 16 tensors by name, with the shapes of `parameter_shapes(config)`: a mapping,
                 or (name, array) pairs in the file's order, made as they are asked for, so that no
                 second copy of the model is ever in memory

    Raises UserError if the file cannot be written, ValueError if a tensor is missing or misshapen.
    """
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:8] = (
        MODEL_MAGIC,
        3,
        config.max_seq_len,
        config.vocab_size,
        config.num_layers,
        config.num_heads,
        config.channels,
        config.padded_vocab_size,
    )
    with atomic_write(path) as file:
        file.write(header.data)
        for array in _in_order(parameter_shapes(config), parameters):
            file.write(np.ascontiguousarray(array, "<f4").data)


def read_model(path: str | os.PathLike) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """Read a .bin of version 3 or 5: its config and the 16 tensors as float32.

    The vocabulary is padded to our own size whatever the file's padding, and the padded rows of wte
    are zero whatever the file has there.

    Raises UserError if the file is missing, is not a model, or is damaged.
    """
    config, stored, stored_shapes = _read_header(path)
    parameters = {}
    offset = HEADER_BYTES
    for name, shape in stored_shapes.items():
        parameters[name] = read_floats(path, stored, shape, offset)
        offset += math.prod(shape) * np.dtype(STORED_AS[stored]).itemsize
    parameters["wte"] = huggingface.pad_vocab(parameters["wte"], config)
    return config, parameters


def holds_model(path: str | os.PathLike) -> bool:
    """Whether `path` is a model .bin, a folder of them or a Hugging Face folder, whole or not.

    Raises UserError if that may not be read.
    """
    if os.path.isdir(path):
        return exists(Path(path, huggingface.CONFIG)) or bool(_steps(Path(path)))
    magic = MODEL_MAGIC.to_bytes(4, "little")
    return os.path.isfile(path) and read_bytes(path, len(magic)) == magic


def locate_model(path: str | os.PathLike) -> Path:
    """What `path` stands for: a .bin, or a Hugging Face folder.

    A folder with a config.json is Hugging Face's; any other stands for its model_<step>.bin of the
    highest step. Everything else stands for itself.

    Raises UserError if a folder has none, or for a damaged one, naming the highest that is whole.
    """
    path = Path(path)
    if not os.path.isdir(path) or exists(path / huggingface.CONFIG):
        return path
    last, *earlier = find_checkpoints(path)
    try:
        _read_header(last)
    except UserError as error:
        for checkpoint in earlier:
            try:
                _read_header(checkpoint)
            except UserError:
                continue
            raise UserError(f"{error}; or name an earlier one: {checkpoint}") from error
        raise
    return last


def choose_model(path: str | os.PathLike) -> Path:
    """locate_model for a program: says on stderr which of its files a folder stands for."""
    located = locate_model(path)
    if located != Path(path):
        program.note(f"weights from {located}")
    return located


def load_model(path: str | os.PathLike) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """Load the model that `path` stands for (see locate_model): its config and the 16 tensors.

    Raises UserError if there is no model there or it cannot be used.
    """
    path = locate_model(path)
    if path.is_dir():
        return huggingface.read(path)
    if path.suffix in (".safetensors", ".json") and exists(path):
        raise UserError(
            f"{path} is one file of a Hugging Face model; expected its folder, where "
            f"{huggingface.CONFIG} has the shape of the model; name the folder: {path.parent}"
        )
    return read_model(path)


def check_checkpoints(
    folder: str | os.PathLike, config: GPT2Config, last_step: int, overwrite: bool = False
) -> None:
    """Prove that a run can write its checkpoints up to `last_step` to the folder, which exists.

    overwrite   replace an earlier run's of the same steps, instead of refusing a folder with any

    Called before any work, so that a run does not fail at its first checkpoint an hour later.
    Raises UserError where the folder is Hugging Face's, where it has checkpoints that are to stay
    or one of a later step, which would go on being what the folder stands for, where what has the
    name of one cannot be replaced by a file, such as a folder or a link that leads nowhere, and
    where the disk has no room for one.
    """
    config_path = Path(folder, huggingface.CONFIG)
    if exists(config_path):
        raise UserError(
            f"{config_path} makes its folder a Hugging Face model, which would be taken in place "
            "of the run's checkpoints; choose another folder with --output_dir"
        )
    steps = _steps(Path(folder))
    for path, step in steps.items():
        if step <= last_step and (path.is_symlink() or not path.is_file()):
            check_writable_file(path)
    last = max(steps, key=steps.get, default=None)
    if last and steps[last] > last_step:
        raise UserError(
            f"{last} is there already, of a later step than the run's last, {last_step}: it would "
            "be taken in place of the run's checkpoints; choose another folder with --output_dir, "
            "or remove it"
        )
    if last and not overwrite:
        raise UserError(
            f"{last} is there already; expected no checkpoints of an earlier run; choose another "
            "folder with --output_dir, or replace them with --overwrite"
        )
    check_room(folder, "a checkpoint", _model_bytes(parameter_shapes(config), "float32"))


def find_checkpoints(folder: str | os.PathLike) -> list[Path]:
    """Every model_<step>.bin in `folder`, that of the highest step first.

    Not that which was written last: copying a folder gives its files any order in time. That
    decides only between two names of one step, such as model_7.bin and model_00000007.bin.
    Raises UserError if there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no folder {folder}; expected the output folder of a training run")
    steps = _steps(folder)
    if not steps:
        raise UserError(
            f"no model in folder {folder}; expected model_<step>.bin as training writes it, "
            "or config.json with model.safetensors"
        )
    return sorted(steps, key=lambda path: (steps[path], path.stat().st_mtime_ns), reverse=True)


def _steps(folder: Path) -> dict[Path, int]:
    """What has the name of a checkpoint in a folder, and the step in its name."""
    with explained(f"cannot read folder {folder}"):
        names = {path: CHECKPOINT_NAME.fullmatch(path.name) for path in folder.iterdir()}
    return {path: int(name[1]) for path, name in names.items() if name}


def export(source: str | os.PathLike, folder: str | os.PathLike) -> int:
    """Write the model at `source` as a Hugging Face folder; returns its number of parameters.

    Raises UserError if the model cannot be loaded or has weights that are not finite, and if the
    folder cannot be written or holds a model.
    A folder of training checkpoints is refused: a config.json would hide them from `load_model`.
    """
    folder = Path(folder)
    if os.path.isdir(folder) and _steps(folder):
        raise UserError(f"{folder} holds training checkpoints; export to another folder")
    huggingface.check_vacant(folder)  # before the model is read, which takes a while
    config, parameters = load_model(source)
    for name, array in parameters.items():
        if not np.isfinite(array).all():
            raise UserError(
                f"{source} is damaged: some numbers of {name} are not finite; export another model"
            )
    huggingface.write(folder, config, parameters)
    padding = (config.padded_vocab_size - config.vocab_size) * config.channels
    return sum(array.size for array in parameters.values()) - padding


def _in_order(
    shapes: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, np.ndarray] | Iterable[tuple[str, np.ndarray]],
) -> Iterator[np.ndarray]:
    """The arrays in the order of `shapes`, each checked; a wrong one is the caller's mistake."""
    if isinstance(parameters, Mapping):
        pairs = ((name, parameters[name]) for name in shapes)
    else:
        pairs = parameters
    for (name, array), expected in zip(pairs, shapes, strict=True):
        if name != expected or array.shape != shapes[expected]:
            raise ValueError(f"got {name} {array.shape}, expected {expected} {shapes[expected]}")
        yield array


def _read_header(
    path: str | os.PathLike,
) -> tuple[GPT2Config, str, dict[str, tuple[int, ...]]]:
    """The config, the stored number type and the shapes in the file, after checking all of it."""
    size = file_size(path)
    if size < HEADER_BYTES:
        raise UserError(
            f"{path} has {counted(size, 'byte')}; expected a model .bin, whose header alone has "
            f"{HEADER_BYTES:,}; the file is empty, truncated or something else"
        )
    start = read_bytes(path, HEADER_BYTES)
    magic, version, max_seq_len, V, L, NH, C, stored_Vp = struct.unpack("<8i", start[:32])
    if magic != MODEL_MAGIC:
        kind = kind_of_file(start)
        what = f"is {kind}" if kind else f"starts with {magic}"
        raise UserError(f"{path} {what}; expected a model .bin, magic {MODEL_MAGIC}")
    if version not in STORED_IN_VERSION:
        raise UserError(
            f"{path} is a model .bin of version {version}; expected 3 (float32) or 5 (bfloat16); "
            "write it again with a current llm.c"
        )
    try:
        config = GPT2Config(max_seq_len, V, L, NH, C)
    except UserError as error:
        raise UserError(f"{path} has a damaged header: {error}") from error
    if stored_Vp < V:
        raise UserError(
            f"{path} has a damaged header: vocabulary {V} padded to {stored_Vp}; "
            "expected the padded size to be at least the vocabulary"
        )
    stored = STORED_IN_VERSION[version]
    shapes = parameter_shapes(config) | {"wte": (stored_Vp, C)}
    expected = _model_bytes(shapes, stored)
    if size != expected:
        what = "is truncated" if size < expected else "has bytes after its end"
        raise UserError(
            f"{path} {what}: {size:,} bytes; expected {expected:,} for L={L} NH={NH} C={C} "
            f"T={max_seq_len} Vp={stored_Vp} in {stored}; copy or write it again"
        )
    return config, stored, shapes


def _model_bytes(shapes: Mapping[str, tuple[int, ...]], stored: str) -> int:
    """The size of a model .bin."""
    numbers = sum(math.prod(shape) for shape in shapes.values())
    return HEADER_BYTES + numbers * np.dtype(STORED_AS[stored]).itemsize


def main(arguments: list[str] | None = None) -> int:
    """Export as the command line says; returns the exit status."""
    description = "export: write a model as a folder that Hugging Face's Transformers opens"
    parser = flags.Parser(description, prog="python -m numbagpt.checkpoint")
    parser.add_argument("command", choices=("export",))
    parser.add_argument(
        "model", type=flags.path, help="a .bin, or the output folder of a training run"
    )
    parser.add_argument(
        "folder", type=flags.path, help="where config.json and model.safetensors go"
    )
    options = parser.parse_args(arguments)
    count = export(choose_model(options.model), options.folder)
    print(f"wrote {options.folder}: {count:,} parameters")
    return 0
