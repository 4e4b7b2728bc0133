"""Language models as policies: loaded, called in one way, with adapters, sharded, sampled by vLLM."""

from utils.models.flags import CriticArgs, ModelArgs, SamplingArgs
from utils.models.loading import ValueHead
from utils.models.policy import adamw, generate_with_vllm, in_chunks, load, sampling
from utils.models.transcripts import encode, logits_processors, pad_left, pad_right, split_turns, unflatten

__all__ = [
    "CriticArgs",
    "ModelArgs",
    "SamplingArgs",
    "ValueHead",
    "adamw",
    "encode",
    "generate_with_vllm",
    "in_chunks",
    "load",
    "logits_processors",
    "pad_left",
    "pad_right",
    "sampling",
    "split_turns",
    "unflatten",
]
