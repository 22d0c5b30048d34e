"""The shape of a GPT-2: five numbers, and the presets people ask for by name."""

from dataclasses import dataclass

from numbagpt.errors import UserError
from numbagpt.words import counted

VOCAB_SIZE = 50257  # of GPT-2's tokenizer
# cuBLAS and 128-bit access want round row lengths; the vocabulary is padded to a multiple of this.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True)
class GPT2Config:
    """The hyperparameters of one GPT-2 (Radford et al., 2019).

    max_seq_len   longest context, rows of wpe
    vocab_size    V, tokens that exist (50257 for GPT-2's BPE)
    num_layers    L
    num_heads     NH, attention heads; channels must be divisible by it
    channels      C, width of the residual stream; must be divisible by 4 (128-bit float32 access)

    Raises UserError if the numbers do not make a model.
    """

    max_seq_len: int = 1024
    vocab_size: int = VOCAB_SIZE
    num_layers: int = 12
    num_heads: int = 12
    channels: int = 768

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise UserError(f"model has {name} = {value}; expected at least 1")
        if self.channels % self.num_heads:
            raise UserError(
                f"model has {counted(self.channels, 'channel')} and "
                f"{counted(self.num_heads, 'head')}; "
                "expected the channels to be divisible by the heads"
            )
        if self.channels % 4:
            raise UserError(
                f"model has {counted(self.channels, 'channel')}; expected a multiple of 4"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Vp: V rounded up to a multiple of 128; rows from V on are zero and stay so."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

    @property
    def head_size(self) -> int:
        """HS = C / NH."""
        return self.channels // self.num_heads


def _depth(num_layers: int, num_heads: int, channels: int) -> GPT2Config:
    return GPT2Config(num_layers=num_layers, num_heads=num_heads, channels=channels)


DEFAULT_MODEL = "nano"
# d12 … d48 are llm.c's names; the gpt2 ones are Hugging Face's for the same shapes.
PRESETS = {
    "nano": GPT2Config(max_seq_len=64, num_layers=3, num_heads=4, channels=128),
    "d12": _depth(12, 12, 768),
    "d24": _depth(24, 16, 1024),
    "d36": _depth(36, 20, 1280),
    "d48": _depth(48, 25, 1600),
    "gpt2": _depth(12, 12, 768),
    "gpt2-medium": _depth(24, 16, 1024),
    "gpt2-large": _depth(36, 20, 1280),
    "gpt2-xl": _depth(48, 25, 1600),
}
