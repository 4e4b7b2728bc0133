"""Language models as policies: loaded, called in one way, with adapters, sharded, sampled by vLLM."""

from utils.models.categorical import Categorical
from utils.models.flags import CriticArgs, CriticModelArgs, ModelArgs, SamplingArgs
from utils.models.loading import ValueHead
from utils.models.policy import adamw, in_chunks_or_by_vllm, load, lr_schedule, sampling
from utils.models.transcripts import (
    decode,
    earned_by_turn,
    encode,
    episode_rewards,
    join_rollouts,
    join_transcripts,
    logits_processors,
    pad_left,
    pad_right,
    unflatten,
)

__all__ = [
    "Categorical",
    "CriticArgs",
    "CriticModelArgs",
    "ModelArgs",
    "SamplingArgs",
    "ValueHead",
    "adamw",
    "decode",
    "earned_by_turn",
    "encode",
    "episode_rewards",
    "in_chunks_or_by_vllm",
    "join_rollouts",
    "join_transcripts",
    "load",
    "logits_processors",
    "lr_schedule",
    "pad_left",
    "pad_right",
    "sampling",
    "unflatten",
]
