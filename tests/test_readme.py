"""What the README says of flags is what the programs have."""

import re

import pytest
from programs import ROOT

import sample
import train

FLAG = re.compile(r"--(\w+)")


def section(start: str, end: str) -> str:
    """The README from one heading or sentence to the next."""
    _, _, rest = (ROOT / "README.md").read_text(encoding="utf-8").partition(start)
    text, found, _ = rest.partition(end)
    assert found, f"{start!r} … {end!r} is not in the README"
    return text


SECTIONS = {
    train: ("\n### Flags of train.py\n", "\n`sample.py` has "),
    sample: ("\n`sample.py` has ", "\n### "),
}


@pytest.mark.parametrize("program", SECTIONS, ids=lambda program: program.__name__)
def test_the_flags_of_a_program_and_their_defaults(program):
    text = section(*SECTIONS[program])
    flags = vars(program.parse_arguments([]))
    assert set(FLAG.findall(text)) == flags.keys()
    stated = {}
    for first, second in re.findall(r"^\| ([^|]+) \| ([^|]*) \|", text, re.MULTILINE):
        names, defaults = FLAG.findall(first), second.strip("` ").split(", ")
        if len(names) == len(defaults):
            stated |= zip(names, defaults, strict=True)
    # the others depend on one another, and are told in words
    fixed = {name: value for name, value in flags.items() if value not in (None, "")}
    told = {name: type(fixed[name])(stated[name]) for name in fixed.keys() & stated.keys()}
    assert told == {name: fixed[name] for name in told}
    assert len(told) >= 5
