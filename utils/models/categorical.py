"""The distributions of tokens, whose logarithms are not all in memory at once."""

import torch
from torch.utils.checkpoint import checkpoint

CHUNK = 2**25  # logits that are taken to float32 at a time


class Categorical:
    """n distributions over V tokens, softmax(logits / temperature), computed in float32 from logits [n, V] of any type.

    log_prob and entropy, and their gradients, are those of torch.distributions.Categorical. Of more than CHUNK logits
    they are computed in chunks of rows, and again in the backward pass, so that only the logits are kept until then:
    2 bytes for each in bfloat16, where torch's class keeps 20.
    """

    def __init__(self, logits, temperature=1.0):
        self.logits = logits
        self.temperature = temperature

    def log_prob(self, ids):
        """log pi of ids [n]: [n]."""
        return self.in_chunks(lambda pi, ids: pi.log_prob(ids), ids)

    def entropy(self):
        """[n], in nats."""
        return self.in_chunks(lambda pi: pi.entropy())

    def in_chunks(self, read, *others):
        def compute(logits, *others):
            logits = logits.float() / self.temperature
            return read(torch.distributions.Categorical(logits=logits, validate_args=False), *others)

        rows = max(1, CHUNK // self.logits.shape[1])
        if len(self.logits) <= rows:
            return compute(self.logits, *others)
        chunks = zip(*(x.split(rows) for x in (self.logits, *others)))
        return torch.cat([checkpoint(compute, *each, use_reentrant=False, preserve_rng_state=False) for each in chunks])
