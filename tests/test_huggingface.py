"""numbagpt.huggingface: the layout against arrays laid out by hand, and against the libraries."""

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from numbagpt import huggingface
from numbagpt.config import GPT2Config
from numbagpt.errors import UserError
from numbagpt.files import locked
from numbagpt.huggingface import INDEX, read, write
from numbagpt.tensors import parameter_shapes

C = 12
CONFIG = GPT2Config(max_seq_len=5, vocab_size=7, num_layers=2, num_heads=3, channels=C)
FIELDS = {
    "model_type": "gpt2",
    "n_positions": 5,
    "vocab_size": 7,
    "n_layer": 2,
    "n_head": 3,
    "n_embd": C,
}


def theirs() -> dict[str, np.ndarray]:
    """A model as Hugging Face names and lays it out: every number differs from every other."""
    shapes = {"wte.weight": (7, C), "wpe.weight": (5, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
    for layer in range(2):
        for name, shape in [
            ("ln_1.weight", (C,)),
            ("ln_1.bias", (C,)),
            ("attn.c_attn.weight", (C, 3 * C)),
            ("attn.c_attn.bias", (3 * C,)),
            ("attn.c_proj.weight", (C, C)),
            ("attn.c_proj.bias", (C,)),
            ("ln_2.weight", (C,)),
            ("ln_2.bias", (C,)),
            ("mlp.c_fc.weight", (C, 4 * C)),
            ("mlp.c_fc.bias", (4 * C,)),
            ("mlp.c_proj.weight", (4 * C, C)),
            ("mlp.c_proj.bias", (C,)),
        ]:
            shapes[f"h.{layer}.{name}"] = shape
    tensors, start = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
        start += size
    return tensors


def ours(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same model in our layout, spelled out tensor by tensor."""
    first, second = (
        {k[4:]: v for k, v in tensors.items() if k.startswith(f"h.{i}.")} for i in (0, 1)
    )

    def stack(name):
        return np.stack([first[name], second[name]])

    def stack_transposed(name):
        return np.stack([first[name].T, second[name].T])

    return {
        "wte": np.concatenate([tensors["wte.weight"], np.zeros((121, C), np.float32)]),
        "wpe": tensors["wpe.weight"],
        "ln1w": stack("ln_1.weight"),
        "ln1b": stack("ln_1.bias"),
        "qkvw": stack_transposed("attn.c_attn.weight"),
        "qkvb": stack("attn.c_attn.bias"),
        "attprojw": stack_transposed("attn.c_proj.weight"),
        "attprojb": stack("attn.c_proj.bias"),
        "ln2w": stack("ln_2.weight"),
        "ln2b": stack("ln_2.bias"),
        "fcw": stack_transposed("mlp.c_fc.weight"),
        "fcb": stack("mlp.c_fc.bias"),
        "fcprojw": stack_transposed("mlp.c_proj.weight"),
        "fcprojb": stack("mlp.c_proj.bias"),
        "lnfw": tensors["ln_f.weight"],
        "lnfb": tensors["ln_f.bias"],
    }  # fmt: skip


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert list(got) == list(parameter_shapes(CONFIG))
    for name, array in expected.items():
        np.testing.assert_array_equal(got[name], array, err_msg=name, strict=True)


def save(folder: Path, tensors: dict[str, np.ndarray], **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def save_raw(path: Path, dtype: str, tensors: dict[str, np.ndarray]) -> None:
    """A safetensors file written by hand, its tensors' bytes taken as they are."""
    header, data = {}, b""
    for name, array in tensors.items():
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": span}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def message_of(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        read(folder)
    message = str(error.value)
    assert message.startswith(str(folder)) or f" {folder}" in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("extras", [False, True])
def test_read(tmp_path, prefix, extras):
    tensors = {prefix + name: array for name, array in theirs().items()}
    if extras:
        for layer in range(2):
            tensors[f"{prefix}h.{layer}.attn.bias"] = np.ones((1, 1, 5, 5), np.uint8)
            tensors[f"{prefix}h.{layer}.attn.masked_bias"] = np.array(-1e4, np.float32)
        tensors["lm_head.weight"] = theirs()["wte.weight"]
    config, got = read(save(tmp_path, tensors))
    assert config == CONFIG
    assert_same(got, ours(theirs()))


def test_a_tied_pair_stored_under_the_heads_name(tmp_path):
    tensors = {"transformer." + name: array for name, array in theirs().items()}
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    _, got = read(save(tmp_path, tensors))
    assert_same(got, ours(theirs()))


def test_half_precision(tmp_path):
    # Numbers up to 255 are exact in both formats.
    tensors = {name: array % 251 for name, array in theirs().items()}
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    for dtype, stored in [
        ("F16", {name: array.astype("<f2") for name, array in tensors.items()}),
        ("BF16", {n: (a.view(np.uint32) >> 16).astype("<u2") for n, a in tensors.items()}),
    ]:
        save_raw(tmp_path / "model.safetensors", dtype, stored)
        _, got = read(tmp_path)
        assert_same(got, ours(tensors))


def test_shards(tmp_path):
    tensors = theirs()
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for i, (name, array) in enumerate(tensors.items()):
        list(shards.values())[i % 2][name] = array
    for file, part in shards.items():
        save_file(part, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    _, got = read(tmp_path)
    assert_same(got, ours(tensors))

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: No such file" in message_of(tmp_path)


@pytest.mark.parametrize(
    "index", [{}, *({"weight_map": value} for value in (3, {"a": 3}, {"a": "\0"}, {"a": "\ud800"}))]
)
def test_shards_without_a_map(tmp_path, index):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "has no weight_map" in message_of(tmp_path)


def test_fields_that_do_not_change_the_maths(tmp_path):
    fields = {
        "activation_function": "gelu_pytorch_tanh",
        "layer_norm_epsilon": 1e-05,
        "n_inner": None,
        "reorder_and_upcast_attn": True,
        "resid_pdrop": 0.1,
        "n_ctx": 5,
    }
    assert read(save(tmp_path, theirs(), **fields))[0] == CONFIG
    assert read(save(tmp_path, theirs(), n_inner=4 * C))[0] == CONFIG
    old = {field: value for field, value in FIELDS.items() if field != "n_positions"} | {"n_ctx": 5}
    (tmp_path / "config.json").write_text(json.dumps(old))
    assert read(tmp_path)[0] == CONFIG


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model_type", "gpt_neo", """has model_type 'gpt_neo'; expected "gpt2\""""),
        ("model_type", None, "has model_type None"),
        ("activation_function", "gelu", "has activation_function = 'gelu'; expected 'gelu_new' or"),
        ("layer_norm_epsilon", 1e-6, "has layer_norm_epsilon = 1e-06; expected 1e-05"),
        ("tie_word_embeddings", False, "has tie_word_embeddings = False; expected True"),
        ("scale_attn_weights", False, "has scale_attn_weights = False; expected True"),
        ("scale_attn_by_inverse_layer_idx", True, "has scale_attn_by_inverse_layer_idx = True"),
        ("add_cross_attention", True, "has add_cross_attention = True"),
        ("n_inner", 3 * C, f"has n_inner = {3 * C}; expected None or {4 * C}"),
        ("n_layer", None, "has n_layer = None; expected an integer"),
        ("n_embd", "12", "has n_embd = '12'; expected an integer"),
        ("n_head", 3.0, "has n_head = 3.0; expected an integer"),
        ("vocab_size", True, "has vocab_size = True; expected an integer"),
        ("n_positions", None, "has n_positions = None; expected an integer"),
        ("n_embd", 2**31, "has n_embd = 2147483648; expected an integer of at most 2,147,483,647"),
        ("n_embd", 10**4299, "expected an integer of at most 2,147,483,647"),
        ("n_head", 5, "model has 12 channels and 5 heads"),
        ("n_layer", 0, "model has num_layers = 0"),
    ],
)
def test_configs_that_are_not_ours(tmp_path, field, value, message):
    found = message_of(save(tmp_path, theirs(), **{field: value}))
    assert found.startswith(str(tmp_path / "config.json"))
    assert message in found


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b'{"model_type": "gpt2"', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b"1" * 5000, "is not JSON"),
        (b"[1, 2]", "is JSON of type list; expected an object"),
    ],
)
def test_damaged_config(tmp_path, content, message):
    save(tmp_path, theirs())
    (tmp_path / "config.json").write_bytes(content)
    assert message in message_of(tmp_path)


def test_more_layers_than_there_are(tmp_path):
    """The first that is missing is named at once, not after a list of a billion is made."""
    save(tmp_path, theirs(), n_layer=1_000_000_000)
    message = "no tensor h.2.ln_1.weight; expected the layout of GPT-2, with 1,000,000,000 layers"
    assert message in message_of(tmp_path)


def test_missing_files(tmp_path):
    assert "config.json: No such file" in message_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    assert "no model.safetensors in" in message_of(tmp_path)
    (tmp_path / "model.safetensors").mkdir()
    assert "is not a regular file" in message_of(tmp_path)


def test_damaged_weights(tmp_path):
    path = save(tmp_path, theirs()) / "model.safetensors"
    data = path.read_bytes()
    huge = struct.pack("<Q", 2**62) + data[8:]
    for content in (b"", data[:7], data[:100], data[:-1], data + b"\0", huge, b"\0" * 500):
        path.write_bytes(content)
        assert "is not a whole safetensors file" in message_of(tmp_path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 548105171\n")
    assert (
        message_of(tmp_path) == f"{path} is a Git LFS pointer, not the weights; run: git lfs pull"
    )


def without(name: str) -> dict[str, np.ndarray]:
    tensors = theirs()
    del tensors[name]
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (without("wte.weight"), "has no tensor wte.weight"),
        (without("h.1.mlp.c_fc.bias"), "has no tensor h.1.mlp.c_fc.bias"),
        ({}, "has no tensor wte.weight"),
        (theirs() | {"score.weight": np.ones(3)}, "has a tensor score.weight, which is no part"),
        (theirs() | {"h.2.ln_1.bias": np.ones(C)}, "has a tensor h.2.ln_1.bias"),
        (theirs() | {"transformer.wte.weight": np.ones(3)}, "has no tensor transformer.wpe.weight"),
        (
            theirs() | {"h.0.attn.c_attn.weight": np.ones((3 * C, C), np.float32)},
            "has h.0.attn.c_attn.weight of shape (36, 12); expected (12, 36) from config.json",
        ),
        (
            theirs() | {"wte.weight": np.ones((8, C), np.float32)},
            "has wte.weight of shape (8, 12); expected (7, 12)",
        ),
        (theirs() | {"wpe.weight": np.ones((5, C))}, "stores numbers as F64; expected F32"),
        (
            theirs() | {"lm_head.weight": theirs()["wte.weight"] + 1},
            "lm_head.weight differs from wte.weight; expected the head to be tied",
        ),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit(tmp_path, tensors, message):
    assert message in message_of(save(tmp_path, tensors))


def test_write_is_the_inverse_of_read(tmp_path):
    folder = tmp_path / "a" / "b"
    expected = ours(theirs())
    write(folder, CONFIG, expected)
    config, got = read(folder)
    assert config == CONFIG
    assert_same(got, expected)
    assert sorted(entry.name for entry in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_the_library_reads_what_we_write(tmp_path):
    write(tmp_path, CONFIG, ours(theirs()))
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == {"transformer." + name for name in theirs()}
    for name, array in theirs().items():
        np.testing.assert_array_equal(tensors["transformer." + name], array, strict=True)
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    (length,) = struct.unpack("<Q", (tmp_path / "model.safetensors").read_bytes()[:8])
    assert length % 8 == 0
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields.items() >= FIELDS.items()
    assert fields["layer_norm_epsilon"] == 1e-5
    assert fields["activation_function"] == "gelu_new"
    assert fields["eos_token_id"] is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
def test_a_folder_with_a_part_of_a_model_is_left_alone(tmp_path, name):
    """Also with one that is not GPT-2, or not whole."""
    (tmp_path / name).write_text('{"model_type": "bert"}')
    with pytest.raises(UserError) as error:
        write(tmp_path, CONFIG, ours(theirs()))
    assert str(error.value) == (
        f"{tmp_path / name} is there already; expected a folder without a model; name another, or "
        "remove the model that is there"
    )
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"model_type": "bert"}'


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", INDEX])
@pytest.mark.parametrize("target", ["disk/file", "/gone/file"])
def test_a_folder_with_a_link_of_a_models_name_is_left_alone(tmp_path, name, target):
    """Though there is nothing where it leads, which may be a disk that is away."""
    (tmp_path / "disk").mkdir()
    (tmp_path / name).symlink_to(target)
    with pytest.raises(UserError, match=rf"^{tmp_path / name} is there already; expected a folder"):
        write(tmp_path, CONFIG, ours(theirs()))
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(["disk", name])
    assert os.readlink(tmp_path / name) == target


@pytest.mark.parametrize("existed", [True, False])
def test_a_write_interrupted_between_its_files_leaves_none(tmp_path, monkeypatch, existed):
    folder = tmp_path / "new"
    if existed:
        folder.mkdir()

    def interrupt(config):
        assert (folder / "model.safetensors").exists()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(huggingface, "_config_fields", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(folder, CONFIG, ours(theirs()))
    assert list(tmp_path.rglob("*")) == ([folder] if existed else [])
    write(folder, CONFIG, ours(theirs()))
    assert_same(read(folder)[1], ours(theirs()))


def test_an_interrupted_write_leaves_no_new_folder(tmp_path):
    broken = ours(theirs()) | {"fcw": np.zeros((2, C, 4 * C), np.float32)}
    with pytest.raises(ValueError, match=r"h\.0\.mlp.c_fc.weight has shape"):
        write(tmp_path / "new" / "deep", CONFIG, broken)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_takes_one_write_at_a_time(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="another program writes to folder"):
        write(tmp_path, CONFIG, ours(theirs()))
    assert list(tmp_path.iterdir()) == []


def test_write_to_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(UserError, match="cannot write to folder"):
        write(tmp_path / "file" / "below", CONFIG, ours(theirs()))


def test_transformers_agrees(tmp_path):
    """Its own folder is read, and ours gives it the same logits back."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**FIELDS)).eval()
    model.save_pretrained(tmp_path / "theirs")
    config, parameters = read(tmp_path / "theirs")
    assert config == CONFIG
    state = {name.removeprefix("transformer."): t.numpy() for name, t in model.state_dict().items()}
    assert_same(parameters, ours(state))

    write(tmp_path / "ours", config, parameters)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    tokens = torch.arange(5)[None] % 7
    assert torch.equal(again(tokens).logits, model(tokens).logits)
