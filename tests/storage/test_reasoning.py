"""One stored text holds a reply's reasoning and its answer, and only the answer counts where a client sends it back."""

from __future__ import annotations

import pytest

from storage.keys import ROOT, path_key
from storage.reasoning import split_reply


@pytest.mark.parametrize(
    ("text", "reasoning", "answer", "is_open"),
    [
        ("", "", "", False),
        ("Yes.", "", "Yes.", False),
        (" Yes.\n", "", " Yes.\n", False),
        ("<think>\nhm\n</think>\n\nYes.\n", "hm", "Yes.\n", False),
        (" \n<think>hm</think>Yes.", "hm", "Yes.", False),
        ("<think>\n\n</think>\n\nYes.", "", "Yes.", False),
        ("<think>\nhm", "hm", "", True),
        ("<think>", "", "", True),
        ("<think>hm</think>", "hm", "", False),
        ("<think>a</think>b</think>c", "a", "b</think>c", False),
        ("Yes. <think>hm</think>", "", "Yes. <think>hm</think>", False),
        ("<thinking>", "", "<thinking>", False),
    ],
)
def test_the_parts_of_a_reply(text, reasoning, answer, is_open):
    assert split_reply(text) == (reasoning, answer, is_open)


def test_a_reply_is_found_by_its_answer_and_a_message_by_all_of_it():
    thought = "<think>\nhm\n</think>\n\nYes."
    assert path_key(ROOT, "assistant", thought) == path_key(ROOT, "assistant", "Yes.")
    assert path_key(ROOT, "assistant", thought) != path_key(ROOT, "assistant", "No.")
    assert path_key(ROOT, "user", thought) != path_key(ROOT, "user", "Yes.")
