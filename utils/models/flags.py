"""Flags of models that all scripts have."""

from dataclasses import field
from typing import Annotated, Literal

import pydantic
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from utils.cli import Fraction, Settings, UserError, flag_name, flags, needs, not_with
from utils.models import engine, lora, stages, transcripts


@flags
class LoadingArgs:
    """How models are loaded, and computed."""

    model_config: Settings = field(default_factory=dict)  # settings that actors are loaded with, JSON values by name
    dtype: Literal["float32", "bfloat16"] = "float32"  # data type of the models' weights
    # bf16: autocast in the forward pass, not attention on a CPU; auto: for large models, where the device is fast at it
    mixed_precision: Literal["auto", "no", "bf16"] = "auto"
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # attention kernel
    trust_remote_code: bool = False  # run code that comes with a hub model
    # today, for chat templates that write the date: a fixed one, so that a run is the same on any day
    template_date: Annotated[str, pydantic.AfterValidator(transcripts.check_date)] = transcripts.TEMPLATE_DATE
    chat_template_kwargs: Settings = field(default_factory=dict)  # what chat templates take, as enable_thinking=false
    max_model_len: PositiveInt | None = None  # most tokens of a transcript: an episode stops before; none: the model's
    # sample with a cache of fixed size: on a GPU a token's step is captured once, and replayed (a CUDA graph)
    static_cache: bool = not_with("use_vllm", "shard", default=False)
    shard: bool = False  # let each of several processes hold a part of every model, in place of whole ones (FSDP)
    gradient_checkpointing: bool = False  # keep less of the forward pass, and compute it again for the backward pass
    # torch.compile's mode
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune"] | None = not_with("static_cache", "shard")
    # positions from a row's first token; off: from its padding (rotary only)
    calc_position_embeddings: bool = not_with("use_vllm", "static_cache", default=True)


@flags
class LoraArgs:
    """LoRA adapters, with --lora-rank above 0."""

    lora_alpha: PositiveFloat = 32.0  # the adapters' output is scaled by alpha / r
    lora_dropout: Fraction = 0.0  # dropout on what the adapters read, while learning
    lora_target_modules: tuple[str, ...] = ()  # linear layers that get an adapter, by name; none: all but the output's
    # a peft.LoraConfig in place of --lora-rank and the flags above: a JSON file of its fields, or JSON
    lora_config: Annotated[str | None, pydantic.BeforeValidator(lora.as_text)] = None
    # in float32, passes without gradients read W + BA, computed once; takes a copy of the layers with adapters
    merge_adapters: bool = True
    load_checkpoint: str | None = None  # run or peft folder to start from: its actors are now actors and references
    load_optimizer: bool = needs("load_checkpoint", default=False)  # go on with its optimisers too
    keep_reference: bool = needs("load_checkpoint", default=False)  # its references stay the references
    fresh_critic: bool = needs("load_checkpoint", default=False)  # critics and their value heads are new
    merge_lora_configs: bool = needs("load_checkpoint", default=False)  # take a configuration that differs, merged
    save_optimizer: bool = True  # keep the optimisers' state with the run's agents; a checkpoint always has it
    save_base: bool = False  # write the base's weights too, once, at the end


@flags
class OptimizerArgs:
    """AdamW."""

    weight_decay: NonNegativeFloat = 0.0
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9  # decay of the first moment
    # decay of the second moment; with 0.999 a rare large gradient makes a large step
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_epsilon: PositiveFloat = 1e-8  # term added to the denominator


@flags
class ModelArgs(LoadingArgs, LoraArgs, OptimizerArgs):
    """Models, adapters and optimisers."""

    def check_models(self):
        """Raise UserError for flags that do not go together."""
        engine.check_vllm_args(self)
        if not lora.is_wanted(self):
            default = type(self)()
            for name in ("lora_alpha", "lora_dropout", "lora_target_modules", "load_checkpoint", "save_base"):
                if getattr(self, name) != getattr(default, name):
                    raise UserError(f"{flag_name(name)} has no effect without --lora-rank")
            return
        stages.check_stage(self)


OF_CRITIC_MODELS = ("critic_model_name_or_path", "critic_value_head_hidden_dim")


@flags
class CriticModelArgs:
    """What critics that are models of their own start from, and their heads."""

    critic_model_name_or_path: tuple[str, ...] = ()  # of separate critics, one or one each; none: --model
    # settings that critics of that name are loaded with
    critic_model_config: Settings = needs("critic_model_name_or_path", default=dict)
    critic_value_head_hidden_dim: PositiveInt | None = None  # hidden units of a separate critic's head; none: linear


@flags
class CriticArgs(CriticModelArgs):
    """What critics start from, and their heads."""

    value_head_hidden_dim: PositiveInt | None = None  # hidden units of the value head on an actor; none: linear

    def check(self):
        """Raise UserError for a flag of critics that the agents don't have."""
        has_models = self.use_separate_critic
        absent = ("value_head_hidden_dim",) if has_models else OF_CRITIC_MODELS
        for name in absent:
            if getattr(self, name):
                where = "where critics are models of their own" if has_models else "without --use-separate-critic"
                raise UserError(f"{flag_name(name)} has no effect {where}")


@flags
class SamplingArgs:
    """Sampling, and vLLM."""

    top_p: Fraction = needs("do_sample", default=1.0)  # nucleus sampling
    top_k: NonNegativeInt = needs("do_sample", default=0)  # sample from so many likeliest tokens; 0: from all
    min_p: Fraction = needs("do_sample", default=0.0)  # sample from tokens at least this share as likely as the best
    repetition_penalty: PositiveFloat = 1.0  # above 1: what stands in the transcript is less likely to come again
    min_output_tokens: NonNegativeInt = 0  # an answer may not end before so many
    skip_special_tokens: bool = True  # answers as text go without special tokens; off: without the end token alone
    # contexts that are continued at once; none: all
    hf_generate_chunk_size: PositiveInt | None = not_with("use_vllm", default=None)
    use_vllm: bool = False  # sample with vLLM, an engine in each process; see docs/many_devices.md
    vllm_config: Settings = needs("use_vllm", default=dict)  # settings of vLLM's engine, JSON values by name

    def check(self):
        """Raise UserError for an answer that is to be longer than it may be."""
        if self.min_output_tokens > self.max_new_tokens:
            most = f"at most --max-new-tokens, {self.max_new_tokens}"
            raise UserError(f"--min-output-tokens takes {most}, got {self.min_output_tokens}")
