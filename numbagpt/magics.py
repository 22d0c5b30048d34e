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
ZIP = b"PK\x03\x04"


def kind_of_file(start: bytes) -> str | None:
    """What begins with these bytes, 4 or more, to complete "it is …"; None if that is not known."""
    magic = int.from_bytes(start[:4], "little")
    if magic in FILE_OF_MAGIC:
        return FILE_OF_MAGIC[magic]
    if magic == int.from_bytes(MODEL_MAGIC.to_bytes(4, "big"), "little"):
        return "a model written on a big-endian machine"
    if start.startswith(GZIP):
        return "gzipped (gunzip unpacks it)"
    if start.startswith(ZIP):
        return "a zip archive, such as torch.save writes"
    return "text" if _is_text(start) else None


def _is_text(start: bytes) -> bool:
    try:
        # Not final: the cut may have split the last character.
        return "\0" not in codecs.getincrementaldecoder("utf-8")().decode(start)
    except UnicodeDecodeError:
        return False
