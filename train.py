"""Train a GPT-2 on one GPU, or a small one on a CPU.

    python train.py                       the nano model on the built-in corpus
    python train.py --model d12 --input_bin 'data/web_train_??????.bin' \\
                    --input_val_bin 'data/web_val_??????.bin'
    python train.py --model MODEL         go on from the weights of a .bin, of a run's output folder
                                          or of a Hugging Face folder

The flags carry the names of llm.c's trainer. python -m numbagpt.data makes the .bin shards.
"""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from numbagpt import flags, metrics, program
from numbagpt.config import DEFAULT_MODEL, PRESETS, VOCAB_SIZE
from numbagpt.errors import DataError, NotFinite, UserError
from numbagpt.schedule import learning_rate_at

# NumPy and what loads Numba are imported in main or where they are used: that takes a second, for
# which --help and a mistyped flag should not have to wait.
if TYPE_CHECKING:
    import numpy as np

    from numbagpt.loader import Prefetcher, TokenLoader
    from numbagpt.training import Trainer

SAMPLE_TOKENS, SAMPLE_TEMPERATURE = 64, 0.8
STOPPING = "stopping; a checkpoint of the last whole step follows (Ctrl-C again: at once, without)"
SIMULATED = "; until then the simulator may take minutes"


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The flags; None where the default depends on model and device (see numbagpt/settings.py)."""
    parser = flags.Parser(__doc__)
    count, from_zero = flags.number(int, 1), flags.number(int, 0)
    positive, not_negative = flags.number(float, 0, above=True), flags.number(float, 0)
    fraction, beta = flags.number(float, 0, 1), flags.number(float, 0, 0.999999)
    # what lies far beyond is 0 or infinity in float32
    eps, clip = flags.number(float, 1e-30, 1e30), flags.number(float, 1e-30, 1e30, or_zero=True)
    flag, path = parser.flag, flags.path

    parser.section("data and model")
    flag("--input_bin", path, None, "shards to train on, a glob pattern (default: built-in corpus)")
    flag("--input_val_bin", path, None, "shards to validate on (default: the corpus's, or none)")
    flag("--output_dir", path, flags.DEFAULT_OUTPUT_DIR, "where model_<step>.bin is written")
    parser.switch("--overwrite", "replace an earlier run's checkpoints of the same steps there")
    presets = f"{', '.join(PRESETS)} (random weights)"
    flag("--model", path, None, f"{presets}, a .bin or a folder (default: {DEFAULT_MODEL})")
    parser.section("batch")
    flag("--batch_size", count, None, "B (default: what makes 4096 tokens on a GPU, 512 elsewhere)")
    flag("--sequence_length", count, None, "T (default: 1024 on a GPU, 64 elsewhere, or less)")
    flag("--total_batch_size", count, None, "tokens a step, a multiple of B*T (default: B*T)")
    flag("--val_max_steps", count, 20, "batches of a validation, or all if there are fewer")
    parser.switch("--overfit_single_batch", "train on the first batch only")
    parser.section("optimization")
    flag("--num_iterations", count, None, "steps (default: 1000 on a GPU, 100 elsewhere)")
    flag("--learning_rate", positive, None, "the highest (default: 2e-3 for nano, else 3e-4)")
    flag("--warmup_iters", from_zero, None, "steps of warm-up (default: a fifth, at most 700)")
    flag("--learning_rate_decay_frac", fraction, 0.1, "last learning rate as part of the highest")
    flag("--weight_decay", not_negative, 0.1, "of matrices and embeddings")
    flag("--grad_clip", clip, 1.0, "largest norm of the gradients; 0 clips nothing")
    flag("--beta1", beta, 0.9, "AdamW's memory of the gradient")
    flag("--beta2", beta, 0.95, "AdamW's memory of its square")
    flag("--eps", eps, 1e-8, "AdamW's epsilon")
    parser.section("every N steps and at the end; 0: only at the end")
    flag("--val_loss_every", from_zero, 100, "print the validation loss")
    flag("--sample_every", from_zero, 0, "print a sample")
    flag("--checkpoint_every", from_zero, 0, "write a checkpoint")
    flags.add_device_flags(parser)
    flag(
        "--recompute",
        flags.number(int, 0, 2),
        0,
        "save memory: 1: compute GELU again in the backward pass; 2: and layernorm",
    )
    parser.switch("--nvtx", "name layers and phases for NVIDIA's profilers; use with --graph 0")
    return parser.parse_args(argv)


class Run:
    """A training run: its steps, and what is done between them."""

    def __init__(
        self,
        trainer: "Trainer",
        batches: "Prefetcher",
        val_loader: "TokenLoader | None",
        progress: metrics.Progress,
        options: argparse.Namespace,
    ) -> None:
        self.trainer, self.model, self.options = trainer, trainer.model, options
        self.batches, self.val_loader, self.progress = batches, val_loader, progress
        notice = STOPPING + SIMULATED * (self.model.device.name == "sim")
        self.interrupt = program.Interrupt(notice)
        self.only_batch = batches.next_batch() if options.overfit_single_batch else None

    def train(self) -> int:
        """All steps; returns the exit status.

        On a GPU a step is only queued, and while it runs the result of the one before is read.
        """
        import numpy as np

        in_flight = 1 if self.model.device.name == "cuda" else 0
        # NumPy need not warn of an overflow: report() stops a run that went astray, in one line.
        with self.interrupt, np.errstate(all="ignore"):
            try:
                return self.all_steps(in_flight)
            except OSError as error:  # standard output is gone
                self.save_silently()
                reason = f"{error.strerror or error}; {self.progress.what_was_saved()}"
                program.note(f"stopped after step {self.trainer.steps}: {reason}")
                raise

    def all_steps(self, in_flight: int) -> int:
        """The steps and what is between them; a run that is stopped ends with a checkpoint."""
        try:
            for step in range(self.options.num_iterations):
                self.between_steps(step)
                self.step(step)
                self.report(in_flight)
            self.between_steps(self.options.num_iterations)
        except program.Stopped as stopped:
            self.stop()
            return stopped.status
        except DataError:
            self.stop()
            raise
        return 0

    def stop(self) -> None:
        """Write a checkpoint of the last whole step, if there is one."""
        self.report()
        if steps := self.trainer.steps:
            self.write_checkpoint(steps)
            print(f"interrupted after step {steps}")
        else:
            print("interrupted before the first step was done: there is no checkpoint")

    def save_silently(self) -> None:
        """Write a checkpoint of the last whole step, if there is one, and print nothing."""
        for _ in self.trainer.read():  # waits for it
            pass
        if self.trainer.steps:
            self.save(self.trainer.steps)

    def step(self, step: int) -> None:
        """Queue one optimizer step."""
        batches = (self.next_batch() for _ in range(self.options.accumulation_steps))
        self.trainer.step(self.interrupt.watch(batches), self.learning_rate(step))

    def next_batch(self) -> "np.ndarray":
        """The next packed batch: that of the data, or again the one to overfit."""
        return self.batches.next_batch() if self.only_batch is None else self.only_batch

    def report(self, in_flight: int = 0) -> None:
        """Print a line for each step that was not yet, but for the last `in_flight`."""
        for result in self.trainer.read(in_flight):
            learning_rate = self.learning_rate(self.progress.steps)
            self.progress.report(result.loss, result.grad_norm, learning_rate)

    def learning_rate(self, step: int) -> float:
        o = self.options
        return learning_rate_at(
            step, o.learning_rate, o.warmup_iters, o.num_iterations, o.learning_rate_decay_frac
        )

    def between_steps(self, step: int) -> None:
        """Validate, write a checkpoint and sample if it is time, that is after `step` steps."""

        def is_time(every: int) -> bool:
            return step == self.options.num_iterations or (every > 0 and step % every == 0)

        self.interrupt.check()
        o = self.options
        validate = self.val_loader is not None and is_time(o.val_loss_every)
        sample = step > 0 and is_time(o.sample_every)
        write = step > 0 and is_time(o.checkpoint_every)
        if not (validate or sample or write):
            return
        self.report()
        if validate:
            self.validate(step)
        if write:
            self.write_checkpoint(step)
        if sample:
            self.sample(step)
        self.progress.restart_clock()

    def validate(self, step: int) -> None:
        """Print the mean loss over the first batches of the validation data, always the same."""
        loader = self.val_loader
        loader.reset()
        count = min(self.options.val_max_steps, loader.num_batches)
        batches = (self.trainer.pack(*loader.next_batch()) for _ in range(count))
        loss = self.trainer.evaluate(self.interrupt.watch(batches))
        self.progress.check_finite("validation loss", loss, step)
        print(f"validation loss after step {step}: {loss:.4f}")

    def sample(self, step: int) -> None:
        """Print what the model writes when it starts from nothing."""
        import numpy as np

        from numbagpt.sampling import stream_text

        rng = np.random.default_rng(self.options.seed)
        try:
            pieces = stream_text(self.model, [], SAMPLE_TOKENS, rng, temperature=SAMPLE_TEMPERATURE)
        except UserError as error:
            print(f"no sample: {error}")
        else:
            try:
                text = "".join(self.interrupt.watch(pieces))
            except NotFinite:
                self.progress.not_finite(f"logits of step {step} are not finite", step)
            print(f"--- sample after step {step}", text, "---", sep="\n")

    def write_checkpoint(self, step: int) -> None:
        """Write the weights as model_<step>.bin, unless that is what was written last.

        Says so, and which checkpoint the folder stands for if that is another: with --overwrite,
        one of an earlier run's later steps, until this run comes to it.
        """
        from numbagpt.checkpoint import find_checkpoints

        if path := self.save(step):
            last = find_checkpoints(path.parent)[0]
            note = f" (folder {path.parent} still stands for {last.name}, of an earlier run)"
            print(f"wrote {path}{note if last != path else ''}")

    def save(self, step: int) -> Path | None:
        """write_checkpoint without a word; the path, or None if there was nothing to write."""
        from numbagpt.checkpoint import write_model

        path = Path(self.options.output_dir) / f"model_{step:08d}.bin"
        if path == self.progress.last_checkpoint:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile
        try:
            write_model(path, self.model.config, self.model.each_parameter())
        except UserError as error:
            raise UserError(f"{error}; {self.progress.what_was_saved()}") from error
        self.progress.last_checkpoint = path
        return path


def main(argv: list[str] | None = None) -> int:
    """Train as the command line says; returns the exit status."""
    options = parse_arguments(argv)
    with program.loading():
        from numbagpt.checkpoint import check_checkpoints
        from numbagpt.files import output_folder, shell_path
        from numbagpt.gpt2 import GPT2
        from numbagpt.gpu import profile
        from numbagpt.loader import Prefetcher, TokenLoader
        from numbagpt.memory import num_parameters
        from numbagpt.settings import fill_in_defaults, find_model, summary
        from numbagpt.state import plan_model
        from numbagpt.training import Trainer
    with output_folder(options.output_dir):
        device, processor = flags.choose_device(options)
        config, source, make_parameters = find_model(
            options.model, options.seed, options.output_dir
        )
        fill_in_defaults(options, config, device.name == "cuda")
        check_checkpoints(
            options.output_dir, config, options.num_iterations, overwrite=options.overwrite
        )
        model_options = flags.model_options(options, device, config)
        model_options["recompute"] = options.recompute
        options.precision = model_options["precision"]
        if options.nvtx:
            profile.enable()
        o, B, T, V = options, options.batch_size, options.sequence_length, config.vocab_size
        loader = TokenLoader(o.input_bin, B, T, V)
        val_loader = TokenLoader(o.input_val_bin, B, T, V) if o.input_val_bin else None
        plan = plan_model(config, device, B, T, **model_options)
        print(summary(o, config, source, plan, processor, loader, val_loader))

        model = GPT2(config, device, B, T, **model_options)
        model.load_parameters(make_parameters())
        del make_parameters  # and with it the host's copy
        trainer = Trainer(
            model, o.accumulation_steps, o.beta1, o.beta2, o.eps, o.weight_decay, o.grad_clip
        )
        progress = metrics.Progress(
            o.num_iterations,
            o.total_batch_size,
            metrics.flops_per_token(num_parameters(config), config.num_layers, config.channels, T),
            metrics.peak_flops(processor, o.precision),
            source,
        )
        with Prefetcher(loader, trainer.pack) as batches:
            status = Run(trainer, batches, val_loader, progress, o).train()
    if status == 0 and V >= VOCAB_SIZE:  # else sample.py refuses
        path = shell_path(progress.last_checkpoint)
        print(f"sample from it: python sample.py --checkpoint {path}")
    return status


if __name__ == "__main__":
    sys.exit(program.run(main))
