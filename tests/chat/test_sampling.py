"""What a model recommends, wherever it says so."""

from __future__ import annotations

import json

import pytest

from chat.sampling import USUAL, recommended
from engine.protocol import Sampling


@pytest.mark.parametrize(
    ("config", "name", "expected"),
    [
        (None, "some-model", USUAL),
        ({}, "SmolLM2-135M-Instruct.Q4_1", Sampling(temperature=0.2, top_p=0.9)),
        (
            {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True},
            "SmolLM2",
            Sampling(temperature=0.6, top_p=0.95, top_k=20),
        ),
        ({"top_p": 0.8}, "x", Sampling(temperature=1.0, top_p=0.8)),
        ({"temperature": 0.6, "do_sample": False}, "x", Sampling()),
        ({"temperature": "hot", "top_p": None, "seed": 3}, "x", USUAL),
        ({"temperature": float("nan")}, "x", USUAL),
        ([], "x", USUAL),
    ],
)
def test_recommendations(tmp_path, config, name, expected):
    if config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended(tmp_path, name) == expected


def test_a_damaged_file_is_no_reason_not_to_chat(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    assert recommended(tmp_path, "x") == USUAL
