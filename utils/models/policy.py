"""Policies: a model of transformers, or LoRA adapters on one that agents share, called in one way.

`load` gives an Initial for each agent: its model, frozen, and its tokenizer. What learns is made from it:

    initial.policy                  the frozen model itself, shared by the agents that start from it;
                                    with --load-checkpoint frozen adapters, of the agent's actor there
    initial.trainable_copy(name)    a copy of all weights, or with --lora-rank new adapters on the shared model
    initial.trainable_critic(name)  the same without an output layer, or --critic-model-name-or-path
    initial.frozen_copy(name)       a copy that does not learn, of the adapters of the agent's actor as they are
"""

import contextlib
import copy
import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModel

from utils import distributed
from utils.cli import UserError, flag_name
from utils.distributed import say
from utils.models import adapters, causal_lm, engine, loading, lora, sharding, stages
from utils.models.transcripts import UNLIMITED, end_tokens, mend_end_tokens, say_what_differs

LARGE = 100_000_000  # parameters of a model that a small model's learning rate ruins
LARGEST_RATES = {"actor": 5e-5, "critic": 1e-4}  # of such a model, all of whose weights learn, without a warning
LARGEST_RATE_OF_ADAPTERS = 5e-4  # of an actor's, on such a model
LEAST_RATE_IN_BFLOAT16 = 1e-4  # with which weights of that type keep most of a step


@dataclass
class Cache:
    """A model's cache of R rows; select(keep) keeps those where keep [R] is True."""

    content: Any

    def select(self, keep):
        if not keep.all():
            self.content.reorder_cache(keep.nonzero().squeeze(1))
        return self


class Policy:
    """A model of transformers, `model`, or the adapters of a name on it, where it is a peft.PeftModel."""

    def __init__(self, model, tokenizer, name, adapter=None, is_body=False):
        self.model = model
        self.tokenizer = tokenizer
        self.name = name  # of the initial model, or of the critic's
        self.adapter = adapter  # None: a model without adapters; "": a PeftModel's base
        self.is_body = is_body  # of an adapter: hidden states alone are computed
        self.is_copy = False  # of a frozen model: it is the agent's own
        self.to_be_sharded = False  # when it is first called: copies are made of it before
        self.positions = True  # counted from a row's first token
        self.room = UNLIMITED  # tokens that a transcript may have
        self.fingerprint = None  # of the initial model, or of the base of adapters, once it was asked for

    @property
    def device(self):
        return self.base.device

    @property
    def config(self):
        return self.base.config

    @property
    def base(self):
        """The transformers model that is called."""
        model = self.model if self.adapter is None else self.model.get_base_model()
        return model.base_model if self.is_body else model

    def parameters(self):
        """A list of what learns."""
        if self.adapter is None:
            return [parameter for parameter in self.base.parameters() if parameter.requires_grad]
        return adapters.parameters(self.model, self.adapter)

    def copy_from(self, other):
        """Take over the weights of another policy of the same kind."""
        with torch.no_grad():
            if self.adapter is None:
                for old, new in zip(self.model.parameters(), other.model.parameters(), strict=True):
                    old.copy_(new)
            else:
                adapters.copy_adapter(self.model, other.adapter, self.adapter)

    @contextlib.contextmanager
    def active(self):
        """Within it the model is this policy: its adapters are on, and merged or in training mode as gradients ask."""
        if self.to_be_sharded:
            self.shard()
        if self.adapter is None:
            adapters.set_training(self.model, torch.is_grad_enabled())
            yield
        else:
            with adapters.active(self.model, self.adapter):
                yield

    def shard(self):
        """Let each process keep its part of the weights."""
        if not getattr(self.model, "is_sharded", False):
            (sharding.shard_model if self.adapter is None else adapters.shard_base)(self.model)
            self.model.is_sharded = True
        self.to_be_sharded = False

    def next_token(self, ids, attention_mask, cache=None):
        """The output after rows of ids [R, S], padded on the left: logits [R, vocabulary], and a cache for the next."""
        new_ids = ids if cache is None else ids[:, -1:]
        content = None if cache is None else cache.content
        options = {"keep": 1, "use_cache": True, "positions": self.positions}
        with self.active():
            out = causal_lm.forward(self.base, new_ids, attention_mask, content, **options)
        return causal_lm.Output(out.logits[:, -1].float(), cache=Cache(out.cache))

    def read(self, ids, before):
        """The output before the n places where `before` [b, S] is True, in rows of ids [b, S], padded on the right.

        Logits [n, vocabulary], None of a critic, and hidden states [n, D] of the last layer: at place (row, t) what the
        model computes after ids[row, :t], which predicts token t. A token that only the agent's other models know is
        read as the last one that this model knows.
        """
        most = getattr(self.config.get_text_config(), "vocab_size", UNLIMITED) - 1

        with self.active():
            compute = functools.partial(causal_lm.read, self.base, ids[:, :-1].clamp(max=most), before[:, 1:])
            return sharding.call_inside(self.model.get_base_model(), compute) if self.is_body else compute()


class Initial:
    """What an agent starts from."""

    def __init__(self, source, i, args):
        self.source = source
        self.i = i
        self.args = args
        self.tokenizer = source.tokenizer
        self.config = source.config
        self.has_own_reference = bool(args.load_checkpoint)  # adapters, which are the checkpoint's actor
        room = engine.max_length(source.config, args)
        self.longest_prompt = room - args.max_new_tokens if room else UNLIMITED

    @property
    def end_ids(self):
        """The tokens that end an answer."""
        policy = self.source.policy
        return torch.tensor(end_tokens(policy.base, self.tokenizer), dtype=torch.long, device=policy.device)

    @property
    def policy(self):
        if self.has_own_reference and self.source.policy.adapter is not None:
            return self.frozen_copy(f"agent_{self.i}_reference")
        return self.source.policy

    def trainable_copy(self, name):
        return self.source.copy(name)

    def frozen_copy(self, name):
        return self.source.copy(name, learns=False, like=f"agent_{self.i}_actor")

    def trainable_critic(self, name):
        args = self.args
        if not args.critic_model_name_or_path:
            return self.source.copy(name, is_body=True)
        flag = flag_name("critic_model_name_or_path")
        names = args.critic_model_name_or_path
        name = names[self.i] if len(names) > 1 else names[0]
        options = (args.dtype, args.attn_implementation, args.trust_remote_code, args.critic_model_config)
        model = loading.load_model(name, flag, *options, AutoModel).to(distributed.device())
        causal_lm.prepare(model, name, args.mixed_precision)
        make_trainable(model, args)
        tokenizer = loading.load_critic_tokenizer(self.tokenizer, name, args)
        return Policy(model, tokenizer, name)


class Source:
    """A model that agents start from, loaded when it is first needed."""

    def __init__(self, name, config, tokenizer, args, model=None):
        self.name = name
        self.config = config
        self.tokenizer = tokenizer
        self.args = args
        self.given = model
        self.agents = []  # numbers of those that start from it
        self.loaded = None

    @property
    def policy(self):
        if self.loaded is None:
            model = loading.load_frozen(self.name, self.args, distributed.device(), self.given)
            mend_end_tokens(model, self.tokenizer, self.name)
            if self.args.mixed_precision == "auto" and causal_lm.is_in_bfloat16(model):
                exact = f"{flag_name('mixed_precision')} no is slower, and exact"
                say(f"{self.name}: forward passes are in bfloat16; {exact}")
            adapter = None
            if lora.is_wanted(self.args):
                model = adapters.wrap(model, stages.build_config(model, self.args, self.agents), self.args)
                adapter = ""
            compile_model(model if adapter is None else model.get_base_model(), self.args)
            self.loaded = self.policy_of(model, adapter)
            self.loaded.to_be_sharded = self.args.shard
            if not end_tokens(self.loaded.base, self.tokenizer):
                length = f"each answer has --max-new-tokens, {self.args.max_new_tokens}"
                say(f"{self.name} has no end token: {length}; eos_token of its tokenizer would be one")
        return self.loaded

    def policy_of(self, model, adapter=None, is_body=False):
        policy = Policy(model, self.tokenizer, self.name, adapter, is_body)
        policy.positions = self.args.calc_position_embeddings
        policy.room = engine.max_length(self.config, self.args) or UNLIMITED
        return policy

    def copy(self, name, learns=True, like=None, is_body=False):
        """A policy that learns, or a frozen one; adapters begin as those of the name `like`, if these are there."""
        initial = self.policy
        if initial.adapter is not None:
            if name not in initial.model.peft_config:
                adapters.add(initial.model, name, learns)
            if like in initial.model.peft_config:
                adapters.copy_adapter(initial.model, like, name)
            policy = self.policy_of(initial.model, name, is_body)
            policy.to_be_sharded = self.args.shard
            return policy
        model = copy.deepcopy(initial.model.base_model if is_body else initial.model)
        make_trainable(model, self.args)
        model.requires_grad_(learns)
        policy = self.policy_of(model)
        policy.is_copy = not learns
        return policy


def make_trainable(model, args):
    """Let a whole model learn as the flags say."""
    model.requires_grad_(True)
    if args.gradient_checkpointing:
        causal_lm.checkpoint_gradients(model)
    compile_model(model, args)
    if args.shard:
        sharding.shard_model(model)


def compile_model(model, args):
    """Have torch compile all but the output layer, with --torch-compiler. A copy of the model is not compiled."""
    if args.torch_compiler:
        model.base_model.compile(mode=args.torch_compiler, dynamic=True)


def load(args, model=None, tokenizer=None):
    """An Initial for each agent that learns, as the flags name them, or of copies of `model` and `tokenizer`.

    Only configurations and tokenizers are loaded yet. Raises UserError for what is not to be had, and for flags that
    the models can't follow.
    """
    args.check_models()
    names = loading.per_agent(flag_name("model"), loading.name_of(args, model), loading.num_learners(args))
    configs = loading.check_models(names, "model", "model_config", args, model, quantized=lora.is_wanted(args))
    tokenizers = loading.load_tokenizers(names, args, tokenizer)
    sources = {}
    initials = []
    for i, name in enumerate(names):
        if name not in sources:
            sources[name] = Source(name, configs[i], tokenizers[i], args, model)
        sources[name].agents.append(i)
        initials.append(Initial(sources[name], i, args))
    if getattr(args, "save_base", False) and len(sources) > 1:
        raise UserError("--save-base takes agents of one --model")
    for initial in initials:
        loading.check_initial(initial, args)
    if args.num_turns > 1:
        for name, tokenizer in dict(zip(names, tokenizers)).items():
            say_what_differs(tokenizer, name)
    loading.check_critics(initials, args)
    return initials


@contextlib.contextmanager
def sampling(agents, args):
    """Within it the agents sample: sharded weights are whole, weights are cast once, and vLLM has those of now."""
    models = list({id(agent.actor.base): agent.actor.base for agent in agents}.values())
    for agent in agents:
        if agent.actor.to_be_sharded:
            agent.actor.shard()
    with sharding.whole_models(models), contextlib.ExitStack() as stack:
        if args.use_vllm:
            for agent in dict.fromkeys(agents):  # one may be in several seats
                engine.hand_over(agent, agents, args)
        else:
            for model in models:
                if not (args.shard or args.torch_compiler):  # which hold on to the weights that they have
                    stack.enter_context(causal_lm.frozen_weights_cast(model))
            for model in models[:1]:
                stack.enter_context(causal_lm.autocast(model))
        yield


def in_chunks_or_by_vllm(generate):
    """Let a script's `generate` continue at most --hf-generate-chunk-size contexts at once, and one at least.

    With --use-vllm vLLM, which `sampling` has given the agent's weights, continues all of them in its place.
    """

    @functools.wraps(generate)
    def generate_all(agent, contexts, args, generator):
        if args.use_vllm and contexts:
            return engine.generate(agent, contexts, args, generator)
        size = args.hf_generate_chunk_size or max(1, len(contexts))
        answers = []
        for start in range(0, len(contexts), size):
            answers += generate(agent, contexts[start : start + size], args, generator)
        return answers

    return generate_all


def adamw(learners, lr, args):
    """AdamW for what policies and modules learn, with the flags' weight decay, betas and epsilon; None is skipped."""
    parameters = [parameter for each in learners if each is not None for parameter in each.parameters()]
    settings = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if len({isinstance(parameter, DTensor) for parameter in parameters}) > 1:
        settings["foreach"] = False  # on a GPU torch would compute parts and whole tensors together, and can't
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=args.weight_decay, **settings)


def warn_of_learning_rate(agents, args):
    """Say where a large model has the learning rate of a small one, and where weights of bfloat16 lose their steps.

    Of actors, and of critics that are models of their own.
    """
    for kind, largest in LARGEST_RATES.items():
        flag = f"{kind}_learning_rate"
        rate = getattr(args, flag, 0.0)
        policies = [policy for agent in agents if (policy := getattr(agent, kind, None)) is not None]
        whole = [policy for policy in policies if policy.adapter is None]
        learn = f"learn at {flag_name(flag)} {rate:g}"
        size = max([policy.base.num_parameters() for policy in whole], default=0)
        if size >= LARGE and rate > largest:
            takes = f"all {size / 1e6:.0f} million weights of {kind}s {learn}"
            say(f"{takes}, which may ruin them within a few updates: try 1e-5 or less")
        elif 0 < rate < LEAST_RATE_IN_BFLOAT16 and any(policy.base.dtype == torch.bfloat16 for policy in whole):
            say(f"{kind}s {learn} in bfloat16, which rounds most of so small steps away: --dtype float32 keeps them")
        size = max([policy.base.num_parameters() for policy in policies if policy.adapter], default=0)
        if kind == "actor" and size >= LARGE and rate > LARGEST_RATE_OF_ADAPTERS:
            say(f"adapters on {size / 1e6:.0f} million weights {learn}, and may ruin them: try 5e-4 or less")


def lr_schedule(optimizer, num_updates, args):
    """The learning rate by updates: --anneal-lr lowers it over the second half of the run to 0, where it stays.

    Where a script has --cosine-lr-schedule, along a cosine in its place, after --warmup-proportion of the updates, in
    which it rises in equal steps; the first of them is above 0.
    """
    if not hasattr(args, "cosine_lr_schedule"):
        factor = lambda update: min(1.0, max(0.0, 2.0 * (1.0 - update / num_updates)))  # noqa: E731
        return LambdaLR(optimizer, factor if args.anneal_lr else lambda update: 1.0)
    num_warmup = round(args.warmup_proportion * num_updates)

    def warm_factor(update):
        if update < num_warmup:
            return (update + 1) / (num_warmup + 1)
        progress = min(1.0, (update - num_warmup) / max(1, num_updates - num_warmup))
        return 0.5 * (1.0 + math.cos(math.pi * progress)) if args.cosine_lr_schedule else 1.0

    return LambdaLR(optimizer, warm_factor)
