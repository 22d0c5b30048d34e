"""What a file is, told from its beginning: llm.c's magics, an int32, and a few other kinds."""

import codecs

MODEL_MAGIC = 20240326
SHARD_MAGIC = 20240520

FILE_OF_MAGIC = {
    MODEL_MAGIC: "a model (for train.py's --model)",
    20240327: "a debug state",
    20240328: "a tokenizer",
    SHARD_MAGIC: "a shard of tokens (for train.py's --input_bin)",
    20240522: "a set of multiple-choice questions",
    20240527: "an optimizer state",
    20240801: "a shard of Llama 3 tokens",
    20240803: "a Llama 3 model or its debug state",
}
GZIP = b"\x1f\x8b\x08"
FILE_OF_SIGNATURE = {
    GZIP: "gzipped (gunzip unpacks it)",
    b"PK\x03\x04": "a zip archive, such as torch.save writes",
    b"\x93NUMPY": "a NumPy array (numpy.load reads it)",
    b"PAR1": "a Parquet table",
}
MAX_SAFETENSORS_HEADER = 10**8  # bytes, by the format's definition


def kind_of_file(start: bytes) -> str | None:
    """What begins with these bytes, 4 or more, to complete "it is …"; None if that is not known."""
    magic = int.from_bytes(start[:4], "little")
    if magic in FILE_OF_MAGIC:
        return FILE_OF_MAGIC[magic]
    if magic == int.from_bytes(MODEL_MAGIC.to_bytes(4, "big"), "little"):
        return "a model written on a big-endian machine"
    for signature, kind in FILE_OF_SIGNATURE.items():
        if start.startswith(signature):
            return kind
    # The length of a header, 8 bytes, and that header, a JSON object.
    length = int.from_bytes(start[:8], "little")
    if start[8:10] == b'{"' and length <= MAX_SAFETENSORS_HEADER:
        return "weights in safetensors (train.py's --model takes the folder they are in)"
    return "text" if _is_text(start) else None


def _is_text(start: bytes) -> bool:
    try:
        # Not final: the cut may have split the last character.
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
