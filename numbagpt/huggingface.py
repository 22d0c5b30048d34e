"""GPT-2 in Hugging Face's layout: a folder with config.json and model.safetensors.

A safetensors file is 8 bytes of header length, a JSON header naming each tensor's type, shape and
byte range, and the tensors. Three things differ from our layout:

- each layer's tensors stand alone; ours are stacked along L
- the four matrices of a layer are stored (in, out), a "Conv1D"; ours are (out, in)
- the vocabulary has V rows; ours has Vp, the rest zero

The output head is wte again (tied): a file may hold it under either name, or twice if the numbers
are the same.
"""

import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.files import (
    atomic_write,
    file_size,
    output_folder,
    read_bytes,
    read_floats,
)
from numbagpt.tensors import parameter_shapes
from numbagpt.tokenizer import END_OF_TEXT
from numbagpt.words import counted

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PREFIX = "transformer."
LARGEST_SIZE = 2**31 - 1  # of a config: what a .bin's header holds

# our name: theirs; in the layers, after "h.<layer>."
OUTER_NAMES = {"wte": "wte.weight", "wpe": "wpe.weight", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias"}
LAYER_NAMES = {
    "ln1w": "ln_1.weight",
    "ln1b": "ln_1.bias",
    "qkvw": "attn.c_attn.weight",
    "qkvb": "attn.c_attn.bias",
    "attprojw": "attn.c_proj.weight",
    "attprojb": "attn.c_proj.bias",
    "ln2w": "ln_2.weight",
    "ln2b": "ln_2.bias",
    "fcw": "mlp.c_fc.weight",
    "fcb": "mlp.c_fc.bias",
    "fcprojw": "mlp.c_proj.weight",
    "fcprojb": "mlp.c_proj.bias",
}
TRANSPOSED = {"qkvw", "attprojw", "fcw", "fcprojw"}
HEAD = "lm_head.weight"
# The causal mask, which older versions saved as if it were a weight.
MASK = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")

SIZES = {
    "max_seq_len": "n_positions",
    "vocab_size": "vocab_size",
    "num_layers": "n_layer",
    "num_heads": "n_head",
    "channels": "n_embd",
}
# Fields that change the maths, and the values that mean GPT-2's. A missing field is the first one.
MATHS = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "layer_norm_epsilon": (1e-5,),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Stored(NamedTuple):
    """Where a tensor lies: its file, number type (safetensors' name), shape and first byte."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read(folder: str | os.PathLike) -> tuple[GPT2Config, dict[str, np.ndarray]]:
    """Read a folder: its config and the 16 tensors as float32, in our layout.

    Reads float32, float16 and bfloat16, one file or shards, names with or without "transformer.".

    Raises UserError if a file is missing or damaged, if the config asks for maths that GPT-2 does
    not do, or if a tensor is missing, unexpected or misshapen; the first one is named.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    stored = _find_tensors(folder)
    prefix = PREFIX if any(name.startswith(PREFIX) for name in stored) else ""
    wte = prefix + OUTER_NAMES["wte"]
    # Of a tied pair a file may hold either name, or both.
    if head := stored.pop(HEAD, None):
        stored.setdefault(wte, head)
    stored = {
        name: tensor
        for name, tensor in stored.items()
        if not MASK.fullmatch(name.removeprefix(prefix))
    }
    _check_tensors(folder, config, prefix, stored)

    parameters = {name: np.empty(s, np.float32) for name, s in parameter_shapes(config).items()}
    parameters["wte"] = pad_vocab(_read_tensor(stored[wte]), config)
    for name, ours, layer, _ in _layout(config):
        if ours != "wte":
            array = _read_tensor(stored[prefix + name])
            parameters[ours][layer] = array.T if ours in TRANSPOSED else array
    if head and not np.array_equal(_read_tensor(head), parameters["wte"][: config.vocab_size]):
        raise UserError(f"{folder}: {HEAD} differs from wte.weight; expected the head to be tied")
    return config, parameters


def write(
    folder: str | os.PathLike, config: GPT2Config, parameters: Mapping[str, np.ndarray]
) -> None:
    """Write the 16 tensors (our names, `parameter_shapes(config)`) as a folder, made if missing.

    Each file is written atomically, and config.json last: a folder with one is complete. After an
    error or an interruption neither is left. The tensors are float32, transposed one at a time; the
    vocabulary's padding is left out.

    Raises UserError if the folder holds a model, is another program's, or cannot be written.
    """
    config_path, weights_path = Path(folder, CONFIG), Path(folder, WEIGHTS)
    with output_folder(folder):
        check_vacant(folder)
        try:
            _write_weights(weights_path, config, parameters)
            with atomic_write(config_path) as file:
                file.write((json.dumps(_config_fields(config), indent=2) + "\n").encode())
        except BaseException:
            config_path.unlink(missing_ok=True)
            weights_path.unlink(missing_ok=True)
            raise


def check_vacant(folder: str | os.PathLike) -> None:
    """Raise UserError if there is a part of a model in the folder, whosever it is.

    New weights beside an old config.json would look like a model, and be none. A link of such a
    name is a part too, wherever it leads.
    """
    for name in (CONFIG, WEIGHTS, INDEX):
        if os.path.lexists(Path(folder, name)):
            raise UserError(
                f"{Path(folder, name)} is there already; expected a folder without a model; name "
                "another, or remove the model that is there"
            )


def _write_weights(path: Path, config: GPT2Config, parameters: Mapping[str, np.ndarray]) -> None:
    # Transformers refuses a file that does not say which framework's layout it follows.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, _, _, shape in _layout(config):
        start, end = end, end + 4 * math.prod(shape)
        header[PREFIX + name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of 8

    with atomic_write(path) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, ours, layer, shape in _layout(config):
            array = parameters[ours][: shape[0]] if ours == "wte" else parameters[ours][layer]
            array = array.T if ours in TRANSPOSED else array
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}, expected {shape}")
            file.write(np.ascontiguousarray(array, "<f4").data)


def pad_vocab(wte: np.ndarray, config: GPT2Config) -> np.ndarray:
    """wte (at least V, C) with exactly Vp rows, those from V on zero; `wte` itself if it fits."""
    V, Vp = config.vocab_size, config.padded_vocab_size
    if len(wte) != Vp:
        padded = np.empty((Vp, config.channels), np.float32)
        padded[:V] = wte[:V]
        wte = padded
    wte[V:] = 0
    return wte


def _layout(config: GPT2Config) -> Iterator[tuple[str, str, Any, tuple[int, ...]]]:
    """(their name without prefix, our name, index into ours, their shape), in a fixed order."""
    shapes = parameter_shapes(config) | {"wte": (config.vocab_size, config.channels)}
    for ours, name in OUTER_NAMES.items():
        yield name, ours, ..., shapes[ours]
    for layer in range(config.num_layers):
        for ours, name in LAYER_NAMES.items():
            shape = shapes[ours][1:]
            yield f"h.{layer}.{name}", ours, layer, shape[::-1] if ours in TRANSPOSED else shape


def _config_fields(config: GPT2Config) -> dict[str, Any]:
    end_of_text = END_OF_TEXT if END_OF_TEXT < config.vocab_size else None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "n_ctx": config.max_seq_len,
        **{field: values[0] for field, values in MATHS.items()},
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_text),
        # We train without dropout; Transformers' default for a missing field is 0.1.
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
        "torch_dtype": "float32",
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(fields, dict):
        raise UserError(f"{path} is JSON of type {type(fields).__name__}; expected an object")
    return fields


def _read_config(path: Path) -> GPT2Config:
    fields = _read_json(path)
    if fields.get("model_type") != "gpt2":
        raise UserError(f'{path} has model_type {fields.get("model_type")!r}; expected "gpt2"')
    fields.setdefault("n_positions", fields.get("n_ctx"))
    for field in SIZES.values():
        if type(fields.get(field)) is not int or fields[field] > LARGEST_SIZE:
            raise UserError(
                f"{path} has {field} = {fields.get(field)!r}; expected an integer of at "
                f"most {LARGEST_SIZE:,}; download it again"
            )
    C = fields["n_embd"]
    # The hidden width is 4C, which null stands for.
    for field, values in (MATHS | {"n_inner": (None, 4 * C)}).items():
        if fields.get(field, values[0]) not in values:
            raise UserError(
                f"{path} has {field} = {fields[field]!r}; expected "
                f"{' or '.join(map(repr, values))}: only GPT-2's own maths is implemented"
            )
    try:
        return GPT2Config(**{ours: fields[theirs] for ours, theirs in SIZES.items()})
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _find_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor in the folder's weights, by name, from the headers alone."""
    if (folder / WEIGHTS).exists():
        files = [WEIGHTS]
    elif (folder / INDEX).exists():
        shards = _read_json(folder / INDEX).get("weight_map")
        # Not printable is what no path may have in it: NUL, half a character.
        if not isinstance(shards, dict) or not all(
            isinstance(name, str) and name.isprintable() for name in shards.values()
        ):
            raise UserError(f"{folder / INDEX} has no weight_map; expected tensor names to files")
        files = sorted(set(shards.values()))
    else:
        raise UserError(
            f"no {WEIGHTS} in {folder}; expected one beside config.json (a pytorch_model.bin can "
            "be turned into one by save_pretrained in Transformers)"
        )
    return {name: tensor for file in files for name, tensor in _read_header(folder / file)}


def _read_header(path: Path) -> Iterator[tuple[str, Stored]]:
    """The tensors of one safetensors file.

    The safetensors library checks the header: lengths, overlaps, sizes. Its NumPy side does not
    know bfloat16 though, so the places are taken from the header, and the bytes read by ourselves.
    """
    file_size(path)
    try:
        with safe_open(path, framework="numpy"):
            (length,) = struct.unpack("<Q", read_bytes(path, 8))
            header = json.loads(read_bytes(path, 8 + length)[8:])
    except (SafetensorError, OSError) as error:
        pointer = read_bytes(path, 40).startswith(b"version https://git-lfs")
        raise UserError(
            f"{path} is a Git LFS pointer, not the weights; run: git lfs pull"
            if pointer
            else f"{path} is not a whole safetensors file ({error}); download it again"
        ) from error
    for name, entry in header.items():
        if name != "__metadata__":
            start = 8 + length + entry["data_offsets"][0]
            yield name, Stored(path, entry["dtype"], tuple(entry["shape"]), start)


def _check_tensors(
    folder: Path, config: GPT2Config, prefix: str, stored: dict[str, Stored]
) -> None:
    expected = {}
    # Up to the first that is missing: a damaged config.json can ask for a billion layers.
    for name, _, _, shape in _layout(config):
        name = prefix + name
        if name not in stored:
            raise UserError(
                f"{folder} has no tensor {name}; expected the layout of GPT-2, with "
                f"{counted(config.num_layers, 'layer')} from config.json; download both files again"
            )
        expected[name] = shape
    if unexpected := [name for name in stored if name not in expected]:
        raise UserError(f"{folder} has a tensor {unexpected[0]}, which is no part of GPT-2")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise UserError(
                f"{stored[name].path} has {name} of shape {stored[name].shape}; "
                f"expected {shape} from config.json"
            )


def _read_tensor(tensor: Stored) -> np.ndarray:
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{tensor.path} stores numbers as {tensor.dtype}; expected {', '.join(FLOATS)}"
        )
    return read_floats(tensor.path, FLOATS[tensor.dtype], tensor.shape, tensor.offset)
