"""benchmark.speed: what it counts."""

import torch
from helpers import build_model
from transformers import AutoTokenizer

from benchmark.speed import Positions
from utils.models import causal_lm


def test_padding_is_what_is_computed_and_not_needed(monkeypatch):
    monkeypatch.setattr(causal_lm, "read", causal_lm.read)  # put back afterwards
    monkeypatch.setattr(causal_lm, "forward", causal_lm.forward)
    model = build_model(AutoTokenizer.from_pretrained("utils/tiny_lm"))
    positions = Positions()
    positions.watch()

    places = torch.zeros(2, 6, dtype=torch.bool)
    places[0, 1:3] = places[1, 4] = True  # 3 and 5 tokens up to the last one; the sixth column is left out
    causal_lm.read(model, torch.ones(2, 6, dtype=torch.long), places)
    assert (positions.needed, positions.computed) == (8, 10)

    ids = torch.tensor([[0, 7, 8], [5, 6, 7], [5, 6, 7]])  # the last two are read once
    mask = torch.tensor([[0, 1, 1], [1, 1, 1], [1, 1, 1]])
    out = causal_lm.forward(model, ids, mask, keep=1, use_cache=True)
    assert (positions.needed, positions.computed) == (8 + 5, 10 + 6)
    causal_lm.forward(model, ids[:, :1], torch.nn.functional.pad(mask, (0, 1), value=1), out.cache, keep=1)
    assert (positions.needed, positions.computed) == (8 + 5 + 3, 10 + 6 + 3)
