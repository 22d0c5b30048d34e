"""The ways in which a model can be computed, by the names that flags give them."""

# What is stored and multiplied: see gpu.blas.set_precision and the README.
PRECISIONS = ("fp32", "tf32", "bf16")
# The T×T scores never leave the chip, or all of them lie in memory.
ATTENTIONS = ("flash", "materialized")
