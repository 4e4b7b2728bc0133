"""What several tests need: short runs, agents with values, and a rollout on its way from sampling to learning."""

import contextlib
import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

import ippo_llm
import ppo_llm
import utils.run
from utils.models.loading import locate
from utils.run.report import draw_curves
from utils.tasks import tldr

PLACE = r" [(]\w+[.]py:\d+[)]"  # of an error in a user's code, in a message
TINY = str(Path(locate("utils/tiny_lm")).resolve())


@contextlib.contextmanager
def with_curves():
    """Within it, runs of this process draw their curves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils.run, "draw_curves", draw_curves)
        yield


def make_args(tmp_path=None, script=ippo_llm, **flags):
    """Args of a run of ippo_llm or iac_llm that takes seconds."""
    small = {
        "rollout_buffer_size": 8,
        "mini_batch_size": 4,
        "train_size": 40,
        "num_train_epochs": 1,
        "eval_size": 4,
        "eval_interval": 3,
        "max_new_tokens": 24,
        "output_dir": str(tmp_path / "run") if tmp_path else None,
    }
    return script.Args(**(small | flags))


def make_ppo_args(tmp_path=None, **flags):
    """Args of a run of ppo_llm that takes seconds, not yet resolved."""
    small = {
        "rollout_buffer_size": 8,
        "train_size": 16,
        "num_train_epochs": 1,
        "eval_loop": 4,
        "max_turns": 3,
        "max_output_tokens": 5,
        "max_model_len": 200,
        "batch_size": 8,
        "lr_actor": 1e-2,
        "lora_rank": 8,
        "lora_alpha": 16.0,
        "update_epochs": 1,
        "output_dir": str(tmp_path / "run") if tmp_path else None,
    }
    return ppo_llm.Args(**(small | flags))


def make_agent(args, model, tokenizer, critic="head", seed=0, script=ippo_llm):
    """An agent of ippo_llm or iac_llm whose values are not 0; `critic` is head or separate."""
    model.mixed_precision = model.base_model.mixed_precision = args.mixed_precision
    args = replace(args, use_separate_critic=critic == "separate")
    return randomise_value_head(script.Agent(0, model, tokenizer, 10, args), seed)


def randomise_value_head(agent, seed=0):
    """A new value head gives 0 everywhere; this one does not."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in agent.value_head.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return agent


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def all_parameters(agent):
    """The parameters that an agent's optimisers change."""
    return [p for optimizer in agent.optimizers for group in optimizer.param_groups for p in group["params"]]


def gradients(agent):
    """Copies of the gradients of what an agent's optimisers change; 0 where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in all_parameters(agent)]


def state_of(agent):
    """Copies of all that learning may change in an agent of ippo_llm or iac_llm."""
    return [parameter.detach().clone() for parameter in all_parameters(agent)]


def learning_targets(agent, rollout, args, script=ippo_llm):
    """What `learn` does before the epochs: (values, advantages, returns, action_mask), [B, T, K] each."""
    reference_logprobs = script.compute_logprobs(agent.reference, rollout, args)
    values = script.compute_values(agent, rollout, args)
    rewards = script.token_rewards(rollout, reference_logprobs, args)
    rewards = script.sum_over_actions(rewards, rollout, args)
    values = script.first_of_actions(values, args)
    action_mask = script.first_of_actions(rollout.response_mask, args)
    if script is ippo_llm:
        advantages, returns = ippo_llm.gae(rewards, values, action_mask, args.gamma, args.gae_lambda)
    else:
        advantages, returns = script.td_error(rewards, values, action_mask, args.gamma)
    if args.advantage_normalization:
        advantages = script.standardise(advantages, action_mask)
    return values, advantages, returns, action_mask


def set_rewards(rollout, rewards):
    """Give a rollout of one turn the rewards [B]."""
    rollout.raw_rewards[:, 0] = rewards
    rollout.rewards[:, 0] = rewards
    return rollout


def whole_minibatch(rollout, targets, script=ippo_llm):
    """A rollout as one mini-batch, in its own order."""
    names = ("old_values", "advantages", "returns", "action_mask")
    weights = torch.ones_like(rollout.logprobs)
    minibatch = script.Batch(**vars(rollout), reference_logprobs=None, weights=weights, **dict(zip(names, targets)))
    minibatch.num_tokens = rollout.response_mask.sum()
    minibatch.num_actions = targets[-1].sum()
    return minibatch


def task_of(**attributes):
    """The default task of ippo_llm with some of its names replaced."""
    names = ("train_dataset", "eval_dataset", "formatters", "reward_func")
    return SimpleNamespace(**({name: getattr(tldr, name) for name in names} | attributes))


def build_model(tokenizer, **settings):
    """Another model, a fifth as wide as the embedded one."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        **settings,
    )
    return LlamaForCausalLM(config)


def make_model(folder, tokenizer):
    """The folder of `build_model`, with another chat template."""
    build_model(tokenizer).save_pretrained(folder)
    other = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    other.chat_template = "{% for message in messages %}Q: {{ message['content'] }} A: {% endfor %}"
    other.save_pretrained(folder)
    return str(folder)


def read_metrics(folder):
    """The rows of a run's metrics.csv, dicts of strings."""
    with open(Path(folder) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- ppo_llm: agents, and rollouts of made-up transcripts -------------------------------------------------------------

GAMES = [  # tokens of each game: prompt, response, observation, response ...
    [5, 3],
    [9, 4, 3, 2, 4, 6],
    [7, 2, 3, 5, 4],
    [4, 6],
    [6, 1, 2, 1, 2, 1],
    [11, 2, 5, 7],
    [3, 8],
    [8, 3, 2, 4],
]
TRUNCATED_GAMES = (2, 3, 7)
TASK_EPISODES = [  # tokens of prompt, response, next prompt, response ...; two episodes end early
    [5, 3, 9, 4, 12, 1],
    [4, 6],
    [6, 2, 7, 7],
    [3, 1, 8, 5, 5, 2],
]


def make_ppo_agents(base, tokenizer, args, scale=0.1):
    """Agents of ppo_llm, on a copy of the base, whose adapters and value heads are not 0. `args` are resolved."""
    torch.manual_seed(1)
    agents = ppo_llm.build_agents(args, torch.device("cpu"), 10, base, tokenizer)
    randomise_adapters(agents[0].model, scale)
    return [randomise_value_head(agent, i) for i, agent in enumerate(agents)]


def randomise_adapters(model, scale=0.1, seed=2):
    """New adapters change nothing; these do."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def change_adapters(model, scale=0.2, seed=4):
    """Let all that adapters have be as if it had learned, but for A: B, DoRA's magnitudes, modules_to_save."""
    generator = seeded(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in (".lora_B.", ".lora_magnitude_vector.", ".modules_to_save.")):
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def make_transcript(lengths, generator):
    """A transcript of random tokens: prompt, response, observation, response ..."""
    pieces = [torch.randint(5, 768, (length,), generator=generator).tolist() for length in lengths]
    transcript = ppo_llm.Transcript([""], pieces[0])
    for k, piece in enumerate(pieces[1:]):
        if k % 2 == 0:
            transcript.add_response(piece, [0.0] * len(piece), "")
        else:
            transcript.add_observation(piece)
    return transcript


def make_episodes(kind):
    """Made-up episodes of a game or of a task: B transcripts, with rewards for each turn."""
    generator = seeded(3)
    if kind == "game":
        episodes = [make_transcript(lengths, generator) for lengths in GAMES]
        for k in TRUNCATED_GAMES:
            episodes[k].truncated = True
    else:
        episodes = [make_transcript(lengths, generator) for lengths in TASK_EPISODES]
    for transcript in episodes:
        transcript.rewards = torch.randn(len(transcript.responses), generator=generator).tolist()
        transcript.raw_rewards = [reward + 10 for reward in transcript.rewards]  # which nothing is to learn from
    return episodes


def make_ppo_rollout(episodes, agent, args):
    """The rollout of made-up episodes, with the agent's log-probabilities."""
    rollout = ppo_llm.collate(episodes, agent, args)
    rollout.logprobs = ppo_llm.compute_logprobs(agent.actor, rollout, args) * rollout.response_mask  # as sampled
    rollout.sampler_logprobs = rollout.logprobs
    return rollout


def make_ppo_batch(agent, rollout, args):
    """What `learn` does before the epochs: a rollout as one mini-batch, in its own order."""
    reference_logprobs = ppo_llm.compute_logprobs(agent.reference, rollout, args) if args.beta > 0 else None
    values = ppo_llm.compute_values(agent, rollout, args)
    rewards = ppo_llm.bootstrap_rewards(rollout, values, args)
    rewards, old_values, action_mask = ppo_llm.to_actions(rewards, values, rollout, args)
    advantages, returns = ppo_llm.gae(rewards, old_values, action_mask, args.gamma, args.gae_lambda)
    if args.adv_whitening:
        advantages = ppo_llm.standardise(advantages, action_mask)
    targets = {"old_values": old_values, "advantages": advantages, "returns": returns, "action_mask": action_mask}
    batch = ppo_llm.Batch(**vars(rollout), reference_logprobs=reference_logprobs, **targets)
    batch.num_tokens = rollout.response_mask.sum()
    batch.num_actions = action_mask.sum()
    return batch


class Action(NamedTuple):
    """An action of an episode: a token, or a turn."""

    turn: int
    columns: list  # of its tokens among the transcript's response tokens
    reward: float
    value: torch.Tensor

    def index(self, episode, args):
        """Where a [B, L] of tokens or a [B, T] of turns has it."""
        return episode, self.turn if args.action_granularity == "turn" else self.columns[0]


def turns_of(transcript):
    """The columns of the tokens of each turn: {turn: list}."""
    columns = {}
    for column, turn in enumerate(transcript.turn_of_token):
        if turn >= 0:
            columns.setdefault(turn, []).append(column)
    return columns


def values_of(agent, transcript):
    """V before each of a transcript's L tokens, then V after the last, [L + 1] in float64, without any padding."""
    agent.model.set_adapter(agent.critic)
    ids = torch.tensor([transcript.ids])
    hidden_states = agent.model(ids, output_hidden_states=True).hidden_states[-1]
    return agent.value_head(hidden_states)[0, len(transcript.prompt_ids) - 1 :, 0].double()


def actions_of(transcript, values, args):
    """The actions of an episode, one after the other, from its turns' rewards and its values_of."""
    actions = []
    for turn, columns in turns_of(transcript).items():
        reward = transcript.rewards[turn]
        turn_values = [values[column] for column in columns]
        if args.action_granularity == "turn":
            reductions = {
                "first_value": turn_values[0],
                "mean": sum(turn_values) / len(turn_values),
                "final_value": turn_values[-1],
            }
            actions.append(Action(turn, columns, reward, reductions[args.turn_value_reduction]))
        else:
            for column, value in zip(columns, turn_values):
                actions.append(Action(turn, [column], reward if column == columns[-1] else 0.0, value))
    return actions


class Pass(NamedTuple):
    """A forward pass of the base in a run of ppo_llm."""

    function: str  # of the script, that made it
    adapter: str | None  # None: no adapter
    rows: int  # in the batch
    has_positions: bool  # whether it got position ids


def watch_passes(monkeypatch):
    """Let runs of ppo_llm record their forward passes: an object with `passes`, a list of Pass, and the `base`."""
    watched = SimpleNamespace(passes=[], functions=[], base=None)
    load_models = ppo_llm.models.load_models

    def record(module, values, named):
        if not watched.functions:  # while agents are built
            return
        projection = module.layers[0].self_attn.q_proj
        adapter = None if projection.disable_adapters else projection.active_adapters[0]
        rows = len(named["input_ids"])
        watched.passes.append(Pass(watched.functions[-1], adapter, rows, named.get("position_ids") is not None))

    def load_and_watch(*values):
        loaded = load_models(*values)
        watched.base = loaded[0]
        watched.base.base_model.register_forward_pre_hook(record, with_kwargs=True)
        return loaded

    def within(name):
        function = getattr(ppo_llm, name)

        def call(*values, **named):
            watched.functions.append(name)
            result = function(*values, **named)
            watched.functions.pop()
            return result

        monkeypatch.setattr(ppo_llm, name, call)

    monkeypatch.setattr(ppo_llm.models, "load_models", load_and_watch)
    for name in ("respond", "compute_logprobs", "compute_values", "ppo_loss", "value_loss"):
        within(name)
    return watched


# --- Teams of adapters on a base of some thousand parameters ----------------------------------------------------------

TINY_IDS = torch.arange(5, 25).reshape(2, 10)


def tiny_base(seed=0, **config):
    """A random Llama."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 48,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**(shape | config))).eval()


def make_team_args(base, **flags):
    """Resolved args of ppo_llm for two agents on a base that is called some/base."""
    small = {"task": "number", "num_agents": 2, "model": "some/base", "lora_rank": 4, "lora_alpha": 8.0}
    return ppo_llm.resolve_args(ppo_llm.Args(**(small | flags)), model=base)


def make_team(base, tokenizer, **flags):
    """Two agents of ppo_llm on a copy of the base, with new adapters, or those of the flag load_checkpoint."""
    args = make_team_args(base, **flags)
    torch.manual_seed(1)
    return ppo_llm.build_agents(args, torch.device("cpu"), 10, base, tokenizer)


@torch.no_grad()
def tiny_logits(model, adapter=None):
    """What the model says under an adapter, or under the one that is active."""
    if adapter:
        model.set_adapter(adapter)
    return model(TINY_IDS).logits


def same_tensors(first, second):
    return len(first) == len(second) and all(torch.equal(x, y) for x, y in zip(first, second))
