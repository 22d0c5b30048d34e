"""Write text with a GPT-2.

python sample.py                                  the last checkpoint of python train.py
python sample.py --checkpoint gpt2/ --prompt "In a shocking finding," --top_k 50
"""

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from numbagpt import flags, program
from numbagpt.config import PRESETS
from numbagpt.errors import NotFinite, UserError

# The rest is imported where it is used: it loads Numba, which takes a second.
if TYPE_CHECKING:
    from pathlib import Path

    from numbagpt.gpt2 import GPT2


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = flags.Parser(__doc__)
    count = flags.number(int, 1)
    parser.section("what is written")
    parser.flag(
        "--checkpoint",
        flags.path,
        flags.DEFAULT_OUTPUT_DIR,
        "a model .bin, a run's output folder (its highest step) or a Hugging Face folder",
    )
    parser.text("--prompt", "what to go on from; <|endoftext|> in it is plain text (default: none)")
    parser.flag("--max_new_tokens", count, 256, "stop there, if the text does not end before")
    parser.flag("--num_samples", count, 1, "texts")
    parser.section("how tokens are chosen")
    parser.flag(
        "--temperature",
        flags.number(float, 0),
        0.8,
        "1: as the model predicts; less: safer; 0: always the most probable",
    )
    parser.flag("--top_k", count, None, "only the N most probable tokens (default: all)")
    parser.flag(
        "--top_p",
        flags.number(float, 0, 1, above=True),
        1.0,
        "only the most probable tokens that together reach X",
    )
    flags.add_device_flags(parser)
    return parser.parse_args(argv)


def load(options: argparse.Namespace) -> tuple["GPT2", "Path"]:
    """The model that --checkpoint names, on the device, and where its weights lie."""
    with program.loading():
        from numbagpt.checkpoint import choose_model, load_model
        from numbagpt.gpt2 import GPT2
    device, _ = flags.choose_device(options)
    path = choose_model(options.checkpoint)
    config, parameters = load_model(path)
    model_options = flags.model_options(options, device, config)
    model = GPT2(config, device, 1, config.max_seq_len, training=False, **model_options)
    model.load_parameters(parameters)
    return model, path


def named(pieces: Iterator[str], path: "Path") -> Iterator[str]:
    """The pieces of a text; what is wrong with the weights that write it names their file."""
    try:
        yield from pieces
    except NotFinite as error:
        raise NotFinite(f"{path}: {error}") from error


def main(argv: list[str] | None = None) -> int:
    """Sample as the command line says; returns the exit status."""
    options = parse_arguments(argv)
    with program.loading():
        import numpy as np

        from numbagpt import files, sampling, tokenizer
    if not files.exists(options.checkpoint):
        name = options.checkpoint.rstrip("/")
        fix = "python train.py makes one"
        if name in PRESETS:
            fix = f"as --model of train.py, {name} is random weights; expected trained ones: name "
            fix += "a model .bin, a run's output folder or a Hugging Face folder"
        raise UserError(
            f"--checkpoint {options.checkpoint}: there is no such file or folder; {fix}"
        )
    model, path = load(options)
    prompt = tokenizer.encode(options.prompt)
    if len(prompt) > model.T:
        program.note(
            f"the prompt has {len(prompt)} tokens; its last {model.T} fit the model's context"
        )
        prompt = prompt[-model.T :]
    for i in range(options.num_samples):
        rng = np.random.default_rng([options.seed, i])
        pieces = sampling.stream_text(
            model,
            prompt,
            options.max_new_tokens,
            rng,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
        )
        pieces = named(pieces, path)
        # the first piece before the prompt: what is wrong with a model shows there
        print(options.prompt + next(pieces, ""), end="", flush=True)
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
        finally:  # what is said of an error, or of Ctrl-C, begins a line
            print()
        if options.num_samples > 1:
            print("---")
    return 0


if __name__ == "__main__":
    sys.exit(program.run(main))
