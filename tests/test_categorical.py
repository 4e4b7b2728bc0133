"""models.Categorical: the numbers of its definition, whole and in chunks, and what is kept of them."""

import math

import pytest
import torch

from utils.models import Categorical, categorical

n, V, TEMPERATURE = 7, 11, 0.7


@pytest.fixture(params=[2**25, 3 * V, 1], ids=["whole", "three rows", "a row"])
def chunk(request, monkeypatch):
    monkeypatch.setattr(categorical, "CHUNK", request.param)


def loop(logits, ids):
    """log pi and entropy, by definition."""
    logprobs, entropies = [], []
    for row, k in zip(logits.tolist(), ids.tolist()):
        total = sum(math.exp(x / TEMPERATURE) for x in row)
        p = [math.exp(x / TEMPERATURE) / total for x in row]
        logprobs.append(math.log(p[k]))
        entropies.append(-sum(x * math.log(x) for x in p))
    return torch.tensor(logprobs), torch.tensor(entropies)


def test_values_and_gradients_are_those_of_the_definition(chunk):
    torch.manual_seed(0)
    logits = torch.randn(n, V, requires_grad=True)
    ids = torch.randint(V, (n,))
    pi = Categorical(logits, TEMPERATURE)
    logprobs, entropies = loop(logits, ids)
    torch.testing.assert_close(pi.log_prob(ids), logprobs)
    torch.testing.assert_close(pi.entropy(), entropies)
    weights = torch.randn(2, n)
    (weights[0] * pi.log_prob(ids) + weights[1] * pi.entropy()).sum().backward()
    p = (logits.detach() / TEMPERATURE).softmax(-1)
    of_logprob = torch.nn.functional.one_hot(ids, V) - p
    of_entropy = -p * (p.log() + entropies[:, None])
    right = (weights[0, :, None] * of_logprob + weights[1, :, None] * of_entropy) / TEMPERATURE
    torch.testing.assert_close(logits.grad, right)


def test_no_rows_are_no_error(chunk):
    pi = Categorical(torch.empty(0, V, requires_grad=True))
    assert pi.log_prob(torch.empty(0, dtype=torch.long)).shape == pi.entropy().shape == (0,)


def test_chunks_keep_the_logits_alone_until_the_backward_pass(monkeypatch):
    kept = {}
    for size in (2**25, 64):
        monkeypatch.setattr(categorical, "CHUNK", size)
        logits = torch.randn(64, 32, dtype=torch.bfloat16).requires_grad_()
        kept[size] = {}

        def keep(x):
            kept[size][x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            pi = Categorical(logits)
            (pi.log_prob(torch.zeros(64, dtype=torch.long)) + pi.entropy()).sum().backward()
    assert sum(kept[2**25].values()) > 6 * logits.nbytes
    assert sum(kept[64].values()) <= logits.nbytes + 64 * 8 + 4096  # ids too
