"""What the files of llm.c begin with: the magic, an int32 that says what a file is."""

MODEL_MAGIC = 20240326
SHARD_MAGIC = 20240520

# People name the wrong one: this completes "it is …".
FILE_OF_MAGIC = {
    MODEL_MAGIC: "a model (name it with --model)",
    20240327: "a debug state",
    20240328: "a tokenizer",
    SHARD_MAGIC: "a shard of tokens (name it with --input_bin)",
    20240522: "a set of multiple-choice questions",
    20240527: "an optimizer state",
    20240801: "a shard of Llama 3 tokens",
    20240803: "a Llama 3 model or its debug state",
}
