"""The flags of the programs: values that look like flags, and what is loaded for them."""

import subprocess
import sys

import pytest
from programs import ROOT

from numbagpt import flags


def test_a_value_that_looks_like_a_flag(capsys):
    parser = flags.Parser("")
    parser.section("what is tested")
    parser.text("--prompt", "what to go on from")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--prompt", "-x"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: argument --prompt: expected one argument; write --flag=-x for a value that begins "
        "with - (--help lists the flags)\n"
    )
    assert parser.parse_args(["--prompt=-x"]).prompt == "-x"


@pytest.mark.parametrize(
    ("stray", "advice"),
    [
        (["b.bin", "c.bin"], "; put a pattern, or a value with spaces, in quotes"),
        (["--nope", "3"], ""),
    ],
)
def test_a_pattern_that_the_shell_expanded_is_to_be_quoted(stray, advice, capsys):
    parser = flags.Parser("")
    parser.section("what is tested")
    parser.flag("--input_bin", flags.path, None, "shards")
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--input_bin", "a.bin", *stray])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        f"error: unrecognized arguments: {' '.join(stray)}{advice} (--help lists the flags)\n"
    )


def test_the_device_flags_are_there_before_anything_heavy_is_loaded():
    program = (
        "import sys\n"
        "from numbagpt import flags\n"
        "parser = flags.Parser('')\n"
        "flags.add_device_flags(parser)\n"
        "chosen = parser.parse_args('--precision bf16 --attention materialized'.split())\n"
        "print(chosen.device, chosen.precision, chosen.attention, chosen.graph, chosen.seed)\n"
        "print({'numpy', 'numba', 'tiktoken'} & sys.modules.keys() or 'light')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.stderr) == ("auto bf16 materialized 1 42\nlight\n", "")
