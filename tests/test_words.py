"""How numbers of things are written."""

from numbagpt.words import counted


def test_a_number_of_one_takes_the_singular():
    assert [counted(n, "token") for n in (0, 1, 2, 1079)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "1,079 tokens",
    ]
    assert [counted(n, "batch", "batches") for n in (1, 65)] == ["1 batch", "65 batches"]
