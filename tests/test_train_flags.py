"""The flags of train.py: which values are taken, and what --help says."""

import re

import numpy as np
import pytest

import train

BAD_FLAGS = {
    "--batch_size": ["0", "-1", "x", "1.5", "nan"],
    "--learning_rate": ["0", "-1e-3", "nan", "inf", "fast"],
    "--learning_rate_decay_frac": ["1.1", "-0.1"],
    "--weight_decay": ["-1", "nan"],
    "--beta2": ["1", "-0.5"],
    "--eps": ["0", "1e-300", "1e39", "inf"],  # 0 and infinity as a float32
    "--grad_clip": ["1e-46", "1e39", "-1", "nan"],
    "--seed": ["-1", "1.5"],
    "--warmup_iters": ["1" + 400 * "0"],  # beyond the floats
    "--input_bin": [""],  # as of an unset shell variable
    "--output_dir": [""],
    "--device": ["gpu"],
    "--precision": ["fp16"],
    "--batch": ["4"],  # an abbreviation
}


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in BAD_FLAGS.items() for value in values]
)
def test_a_flag_that_makes_no_sense_is_one_line(flag, value, capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main([flag, value])
    assert exit_.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: .*{re.escape(flag)}.*\n", err)


def test_settings_at_their_limits_are_taken():
    for text, value in [("0", 0), ("1e-30", 1e-30), ("1e30", 1e30)]:
        assert train.parse_arguments(["--grad_clip", text]).grad_clip == value
        assert np.float32(value) == pytest.approx(value, rel=1e-6)
    for text, value in [("1e-30", 1e-30), ("1e30", 1e30)]:
        assert train.parse_arguments(["--eps", text]).eps == value


def test_a_limit_that_leaves_zero_out_says_so(capsys):
    with pytest.raises(SystemExit):
        train.main(["--grad_clip", "1e-46"])
    assert capsys.readouterr().err == (
        "error: argument --grad_clip: '1e-46' is not a number from 1e-30 to 1e+30, or 0 (--help "
        "lists the flags)\n"
    )


def test_help_states_every_flag_and_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    listed = re.findall(r"^  (--\w+)", text, re.MULTILINE)
    names = "input_bin input_val_bin output_dir model batch_size sequence_length total_batch_size"
    names += " num_iterations learning_rate warmup_iters learning_rate_decay_frac weight_decay"
    names += " grad_clip val_loss_every val_max_steps sample_every overfit_single_batch device"
    names += " precision attention graph recompute nvtx seed beta1 beta2 eps checkpoint_every"
    names += " overwrite"
    assert sorted(listed) == sorted(f"--{name}" for name in names.split())
    assert text.count("(default:") >= len(listed) - 3  # all but the switches
