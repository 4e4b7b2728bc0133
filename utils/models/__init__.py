"""Language models as policies: loaded, called in one way, with adapters, sharded, sampled by vLLM."""

from utils.models.flags import CriticArgs, CriticModelArgs, ModelArgs, SamplingArgs
from utils.models.loading import ValueHead
from utils.models.policy import adamw, generate_with_vllm, in_chunks, load, lr_schedule, sampling
from utils.models.transcripts import (
    encode,
    join_transcripts,
    logits_processors,
    pad_left,
    pad_right,
    sum_by_turn,
    unflatten,
)

__all__ = [
    "CriticArgs",
    "CriticModelArgs",
    "ModelArgs",
    "SamplingArgs",
    "ValueHead",
    "adamw",
    "encode",
    "generate_with_vllm",
    "in_chunks",
    "join_transcripts",
    "load",
    "logits_processors",
    "lr_schedule",
    "pad_left",
    "pad_right",
    "sampling",
    "sum_by_turn",
    "unflatten",
]
