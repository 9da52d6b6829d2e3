"""Step, epoch and loss, read from the end of a log as Trainer and tqdm write it."""

from __future__ import annotations

import pytest

from orchestrator.planning.progress import Progress, read_progress

TRAINER = (
    "{'loss': '4.747', 'grad_norm': '9.928', 'learning_rate': '0.0001778', 'epoch': '0.1527'}\n"
    "{'loss': '2.143', 'grad_norm': '32.12', 'learning_rate': '1.905e-05', 'epoch': '0.916'}\n"
)
BAR = "  4%|4         | 12/300 [00:10<04:10,  1.15it/s]\r  5%|5         | 15/300 [00:13<04:05,  1.16it/s]"


@pytest.mark.parametrize(
    ("out", "err", "expected"),
    [
        ("", "", Progress()),
        (TRAINER, "", Progress(epoch=0.916, loss=2.143)),
        (TRAINER, BAR, Progress(step=15, steps=300, epoch=0.916, loss=2.143)),
        ("{'loss': 1.5, 'epoch': 2.0}", "", Progress(epoch=2.0, loss=1.5)),
        ('noise {"loss": 0.25, "step": 40} more', "", Progress(step=40, loss=0.25)),
        ("{'loss': nan, 'epoch': 1.0}", "", Progress()),
        ("{'loss': 'nan', 'epoch': 1.0}", "", Progress(epoch=1.0, loss=float("nan"))),
        # The bar of an evaluation stands behind the one of the training; those with names are of other things.
        ("", BAR + "\n 42%|####      | 3/7 [00:01<00:00,  5.1it/s]", Progress(step=15, steps=300)),
        ("", "Map: 100%|##########| 524/524 [00:00<00:00, 5.1 examples/s]\n" + BAR, Progress(step=15, steps=300)),
        ("", BAR + "\n100%|##########| 7/7 [00:01<00:00,  5.1it/s]\n", Progress(step=15, steps=300)),
        ("", "100%|##########| 300/300 [04:00<00:00,  1.2it/s]\n", Progress(step=300, steps=300)),
        ("{'loss': '0.5'}\ncut: {'loss': '0.4', 'epo", "", Progress(loss=0.5)),
        ("a dictionary of a loss: {'loss': function()}", "", Progress()),
    ],
)
def test_what_the_log_says_last(out: str, err: str, expected: Progress) -> None:
    """Each value is the last one of its kind; what is no number is not read."""
    assert repr(read_progress(out, err)) == repr(expected)


def test_words_for_people() -> None:
    """Only what is known is said."""
    assert read_progress(TRAINER, BAR).text() == "step 15 of 300, epoch 0.916, loss 2.143"
    assert Progress().text() == ""
