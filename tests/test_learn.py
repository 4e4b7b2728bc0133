"""One update of each script against loops in float64 over single tokens, without padding: losses and gradients.

The steps are real, so that ratios leave 1 and values leave those of before the update; what each step's gradient should
be is computed with the weights that there were before it.
"""

import copy
import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from helpers import build_model
from torch import nn

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import distributed, models
from utils.models.weights import optimizers_of

EPISODES = [  # pieces of transcripts: how many tokens, and the turn in which they are sampled, 0 of those that are read
    [(5, 0), (3, 1), (9, 0), (4, 2), (12, 0), (1, 3)],
    [(4, 0), (6, 1)],
    [(6, 0), (2, 1), (7, 0), (7, 2)],
    [(3, 0), (1, 2), (8, 0), (5, 3)],  # it does not act in turn 1
    [(4, 0), (4, 1), (5, 0), (2, 3)],  # nor here in turn 2
    [(4, 0), (2, 1), (3, 2)],  # it reads nothing between two turns
    [],  # it does not act at all
    [(4, 0)],  # it reads, and the episode is cut short
    [(7, 0), (3, 1), (6, 0)],  # cut short after turn 1
    [(5, 0), (2, 1), (3, 0), (4, 2), (3, 0)],  # and after turn 2
]
TRUNCATED = {0, 1, 7, 8, 9}  # the first two for another agent's lack of room, so that this one reads no more
SIZES = {"rollout_buffer_size": len(EPISODES), "train_size": len(EPISODES), "num_turns": 3}
TEAM = {"update_epochs": 2, "mini_batch_size": 4, "micro_batch_size": 3, "temperature": 0.8, "gamma": 0.9}
TEAM |= {"entropy_coef": 0.3, "actor_learning_rate": 3e-3, "critic_learning_rate": 1e-2, "max_grad_norm": 1e9}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make_transcripts(script, tokenizer, episodes, seed=0):
    """Transcripts of random tokens, with a random reward on the last token of each turn."""
    generator = seeded(seed)
    transcripts = []
    for pieces in episodes:
        transcript = script.Transcript()
        for length, turn in pieces:
            ids = torch.randint(5, 768, (length,), generator=generator).tolist()
            transcript.extend(ids, turn)
            if turn:
                transcript.rewards[-1] = torch.randn((), generator=generator).item()
                transcript.earned[turn] = transcript.rewards[-1]
                transcript.answers.append(tokenizer.decode(ids, skip_special_tokens=True))
        transcripts.append(transcript)
    return transcripts


def make_args(script, **flags):
    names = script.Args.__dataclass_fields__
    return script.Args(**{name: value for name, value in (SIZES | TEAM | flags).items() if name in names})


def randomise(learners):
    """New value heads and adapters give 0; these do not, and actors differ from their references."""
    generator = seeded(1)
    with torch.no_grad():
        for learner in learners:
            for optimizer in optimizers_of(learner):
                for parameter in parameters(optimizer):
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)


def parameters(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


# --- What is exact ----------------------------------------------------------------------------------------------------


@dataclass
class Token:
    """A token that an agent sampled, and what models say about it, in float64."""

    turn: int
    reward: float
    logprob: torch.Tensor
    reference: torch.Tensor
    entropy: torch.Tensor
    value: torch.Tensor  # of the critic, without a baseline


class Exact:
    """Learners as they are now, in float64."""

    def __init__(self, learners):
        self.learners = copy.deepcopy(learners)
        for learner in self.learners:
            for name in ("actor", "reference", "critic"):
                policy = getattr(learner, name, None)
                if policy is not None:
                    policy.model.double()
            if hasattr(learner, "value_head"):
                learner.value_head.double()

    def gradients(self, loss):
        """Those by what each optimiser changes, lists of lists."""
        for learner in self.learners:
            for optimizer in optimizers_of(learner):
                optimizer.zero_grad()
                for parameter in parameters(optimizer):
                    parameter.requires_grad_(True)  # peft's set_adapter takes it from all but the last adapter
        loss.backward()
        return [gradients_of(optimizer) for learner in self.learners for optimizer in optimizers_of(learner)]


def gradients_of(optimizer):
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters(optimizer)]


def hidden_states_of(policy, ids):
    """Hidden states [L, D] of one text, and the model that they are of."""
    model = policy.model
    if policy.adapter is not None:
        model = policy.model.get_base_model()
        if policy.adapter:
            policy.model.base_model.enable_adapter_layers()
            policy.model.set_adapter(policy.adapter)
        else:
            policy.model.base_model.disable_adapter_layers()
    body = getattr(model, "model", model)  # a critic's model is a body
    return body(torch.tensor([ids])).last_hidden_state[0], model


def value_of(learner, hidden_states):
    return nn.Sequential.forward(learner.value_head, hidden_states).squeeze(-1)


def read(learner, transcript, args):
    """The tokens that an agent sampled, and the critic's value after all that it read and wrote."""
    if not any(transcript.turns):
        return [], None
    hidden_states, model = hidden_states_of(learner.actor, transcript.ids)
    log_pi = (model.lm_head(hidden_states) / args.temperature).log_softmax(-1)
    with torch.no_grad():
        reference_states, model = hidden_states_of(learner.reference, transcript.ids)
        log_ref = (model.lm_head(reference_states) / args.temperature).log_softmax(-1)
    values = torch.zeros(len(transcript.ids))
    if hasattr(learner, "value_head"):
        if learner.critic is not None:
            hidden_states, _ = hidden_states_of(learner.critic, transcript.ids)
        values = value_of(learner, hidden_states)
    tokens = []
    for t, (token, turn, reward) in enumerate(zip(transcript.ids, transcript.turns, transcript.rewards)):
        if turn:
            before = log_pi[t - 1]
            entropy = -(before.exp() * before).sum()
            tokens.append(Token(turn, reward, before[token], log_ref[t - 1, token], entropy, values[t - 1]))
    return tokens, values[-1]


def mean(numbers):
    return sum(numbers) / len(numbers)


def deviation(numbers):
    return mean([(x - mean(numbers)) ** 2 for x in numbers]) ** 0.5


def standardised(numbers, args, earlier=0.0):
    """Less their mean, divided by their deviation, which falls slowly where an `earlier` one was larger."""
    eps = getattr(args, "advantage_norm_eps", 1e-8)
    return [(x - mean(numbers)) / (max(deviation(numbers), 0.98 * earlier) + eps) for x in numbers]


def reward_scale(learner, totals, args):
    """What rewards are divided by, from what episodes earn; but in ppo_llm it falls slowly."""
    earlier = 0.0 if isinstance(args, ppo_llm.Args) else learner.state["s"]
    return max(deviation(totals), 0.98 * earlier) + args.reward_norm_eps


def chunks(things, size):
    return [things[k : k + size] for k in range(0, len(things), size)]


def actions_of(tokens, by_turn):
    """The actions of an episode: lists of tokens' numbers."""
    actions = []
    for k, token in enumerate(tokens):
        if by_turn and actions and tokens[actions[-1][0]].turn == token.turn:
            actions[-1].append(k)
        else:
            actions.append([k])
    return actions


def estimate(rewards, values, end_value, gamma, gae_lambda):
    """Advantages along a chain of actions, each the sum over TD errors that defines it."""
    values = [*values, end_value]
    deltas = [rewards[t] + gamma * values[t + 1] - values[t] for t in range(len(rewards))]
    ahead = range(len(rewards))
    return [sum((gamma * gae_lambda) ** (k - t) * deltas[k] for k in ahead if k >= t) for t in ahead]


class Targets:
    """What an agent of ippo_llm, iac_llm or ppo_llm learns from, episode by episode."""

    def __init__(self, script, exact, transcripts, args):
        self.script, self.args = script, args
        self.is_clipped = []  # values in a loss
        self.by_turn = script is iac_llm or getattr(args, "action_granularity", "token") == "turn"
        self.kind = getattr(args, "turn_value_reduction", "first_value")
        with torch.no_grad():
            read_episodes = [read(exact.learners[0], transcript, args) for transcript in transcripts]
        episodes = [tokens for tokens, _ in read_episodes]
        scale = 1.0
        if args.reward_normalization:
            totals = [sum(token.reward for token in tokens) for tokens in episodes if tokens]
            scale = reward_scale(exact.learners[0], totals, args)
        to_go = {}  # of each turn, what each episode that has it earns from it on
        for tokens in episodes:
            for turn in {token.turn for token in tokens}:
                to_go.setdefault(turn, []).append(sum(token.reward for token in tokens if token.turn >= turn) / scale)
        self.baseline = {turn: mean(numbers) for turn, numbers in to_go.items()}
        if not getattr(args, "turn_baseline", True):
            self.baseline = dict.fromkeys(to_go, mean(sum(to_go.values(), [])))
        self.old = episodes
        self.actions = [actions_of(tokens, self.by_turn) for tokens in episodes]
        self.old_values = [self.values(tokens, actions) for tokens, actions in zip(episodes, self.actions)]
        self.advantages, self.returns = [], []
        for b, ((tokens, end), actions, values) in enumerate(zip(read_episodes, self.actions, self.old_values)):
            rewards = []
            for action in actions:
                reward = sum(tokens[k].reward / scale for k in action)
                if script is not ppo_llm:
                    reward -= args.kl_coef * sum(float(tokens[k].logprob - tokens[k].reference) for k in action)
                rewards.append(reward)
            end_value = 0.0
            if script is ppo_llm and tokens and b in TRUNCATED:
                end_value = float(end) + self.baseline_after(tokens[-1].turn, episodes, scale)
            gae_lambda = getattr(args, "gae_lambda", 0.0)
            advantages = estimate(rewards, [float(value) for value in values], end_value, args.gamma, gae_lambda)
            self.advantages.append(advantages)
            self.returns.append([a + float(value) for a, value in zip(advantages, values)])
        if args.advantage_normalization:
            earlier = exact.learners[0].state["std"] if script is ppo_llm else 0.0
            flat = iter(standardised(sum(self.advantages, []), args, earlier))
            self.advantages = [[next(flat) for _ in own] for own in self.advantages]

    def baseline_after(self, turn, episodes, scale):
        """The mean that is earned after a turn in the episodes that have it and a later one, else its own baseline."""
        if not getattr(self.args, "turn_baseline", True):
            return self.baseline[turn]
        own = [tokens for tokens in episodes if turn in {token.turn for token in tokens} and tokens[-1].turn > turn]
        later = [sum(token.reward for token in tokens if token.turn > turn) / scale for tokens in own]
        return mean(later) if later else self.baseline[turn]

    def values(self, tokens, actions):
        """V of the actions."""
        values = []
        for action in actions:
            own = [tokens[k].value + self.baseline[tokens[k].turn] for k in action]
            values.append({"first_value": own[0], "final_value": own[-1], "mean": mean(own)}[self.kind])
        return values

    def loss(self, exact, transcripts, rows):
        """The loss of a mini-batch, and its parts."""
        args, is_ppo = self.args, self.script is ppo_llm
        eps = args.clip_coef if is_ppo else args.value_clip_range
        policy, error, entropy, k3, clipped = [], [], [], [], []
        num_ratios = 0
        for b in rows:
            tokens, _ = read(exact.learners[0], transcripts[b], args)
            actions = self.actions[b]
            own = zip(actions, self.values(tokens, actions), self.advantages[b], self.old_values[b], self.returns[b])
            for action, value, advantage, old_value, target in own:
                near = old_value + (value - old_value).clamp(-eps, eps)
                self.is_clipped.append((near - target) ** 2 > (value - target) ** 2)
                error.append(torch.maximum((value - target) ** 2, (near - target) ** 2))
                if not is_ppo:
                    policy += [-tokens[k].logprob * advantage for k in action]
                    continue
                ratios = [(tokens[k].logprob - self.old[b][k].logprob).exp() for k in action]
                ratios = [math.prod(ratios)] if args.turn_level_clip else ratios
                num_ratios += len(ratios)
                for ratio in ratios:
                    near = ratio.clamp(1 - eps, 1 + eps)
                    policy.append(-torch.minimum(ratio * advantage, near * advantage))
                    clipped.append(float(near != ratio))
            entropy += [token.entropy for token in tokens]
            differences = [token.reference - token.logprob for token in tokens]
            k3 += [d.exp() - d - 1 for d in differences]
        count = num_ratios if is_ppo else len(error) if self.by_turn else len(entropy)
        parts = {"policy_loss": sum(policy) / count, "value_loss": mean(error), "entropy": mean(entropy)}
        loss = parts["policy_loss"] - args.entropy_coef * parts["entropy"]
        if is_ppo:
            parts |= {"value_loss": mean(error) / 2, "kl_loss": mean(k3), "clip_fraction": mean(clipped)}
            loss = loss + args.kl_loss_coef * parts["kl_loss"]
        return loss + args.value_loss_coef * parts["value_loss"], parts


# --- The two compared -------------------------------------------------------------------------------------------------


def watch_steps(monkeypatch, learners):
    """Note before each optimiser's step its gradient, and the learners as they are then."""
    steps = []
    average_and_clip_gradients = distributed.average_and_clip_gradients

    def clip_and_note(optimizer, max_norm):
        steps.append(SimpleNamespace(optimizer=optimizer, gradients=gradients_of(optimizer), exact=Exact(learners)))
        return average_and_clip_gradients(optimizer, max_norm)

    monkeypatch.setattr(distributed, "average_and_clip_gradients", clip_and_note)
    return steps


def minibatches(args):
    """The rows of each step."""
    generator = seeded(7)
    rows = []
    for _ in range(args.update_epochs):
        rows += torch.randperm(len(EPISODES), generator=generator).split(args.mini_batch_size)
    return [each.tolist() for each in rows]


def assert_same(ours, exact):
    """Gradients of one optimiser."""
    largest = max(x.abs().max().item() for x in exact)
    for x, y in zip(ours, exact, strict=True):
        torch.testing.assert_close(x.double(), y, atol=2e-5 * largest + 1e-7, rtol=1e-4)
    return largest


def assert_same_metrics(metrics, parts):
    """The mean over the steps of each part of the loss."""
    for name in parts[0]:
        expected = float(mean([torch.as_tensor(own[name]).detach() for own in parts]))
        assert float(metrics[name]) == pytest.approx(expected, rel=1e-4, abs=1e-5), name


def assert_rollout_metrics(metrics, tokens, step):
    """Metrics of the tokens that an agent sampled, and the norm of the last gradient of its actor."""
    right = {"kl": mean([float(x.logprob - x.reference) for x in tokens])}
    right |= {"reference_logprob": mean([float(x.reference) for x in tokens])}
    right |= {"grad_norm": sum(float(x.double().square().sum()) for x in step.gradients) ** 0.5}
    for name, value in right.items():
        assert float(metrics[name]) == pytest.approx(value, rel=1e-4, abs=1e-5), name


def explained_variance(returns, values):
    """The share of the variance of returns that a critic's values explain."""
    errors = [R - float(V) for R, V in zip(returns, values, strict=True)]
    return pytest.approx(1 - (deviation(errors) / deviation(returns)) ** 2, rel=1e-4, abs=1e-5)


@pytest.fixture
def initials(tokenizer):
    """A function of args: what agents start from."""
    return lambda args: models.load(args, build_model(tokenizer), tokenizer)


CASES = {
    "ippo with a head": (ippo_llm, {"gae_lambda": 0.8}),
    "ippo with a critic": (ippo_llm, {"use_separate_critic": True, "advantage_normalization": False}),
    "ippo of plain rewards": (ippo_llm, {"reward_normalization": False, "kl_coef": 0.5}),
    "ippo with adapters": (ippo_llm, {"lora_rank": 4, "use_separate_critic": True}),
    "iac with a head": (iac_llm, {}),
    "iac with a critic": (iac_llm, {"use_separate_critic": True, "advantage_normalization": False}),
    "ppo of tokens": (ppo_llm, {"kl_loss_coef": 0.4}),
    "ppo of turns": (ppo_llm, {"action_granularity": "turn", "kl_loss_coef": 0.4, "advantage_normalization": False}),
    "ppo of clipped turns": (ppo_llm, {"action_granularity": "turn", "turn_level_clip": True}),
    "ppo of turns' mean values": (ppo_llm, {"action_granularity": "turn", "turn_value_reduction": "mean"}),
    "ppo of turns' last values, one baseline": (
        ppo_llm,
        {"action_granularity": "turn", "turn_value_reduction": "final_value", "turn_baseline": False},
    ),
    "ppo with a head": (ppo_llm, {"use_separate_critic": False, "reward_normalization": True}),
    "ppo without adapters": (ppo_llm, {"lora_rank": 0, "use_separate_reference_adapter": False}),
}


# As if earlier rollouts had been more different: what rewards or advantages are divided by falls slowly
AFTER_OTHERS = ("ippo with a head", "iac with a head", "ppo of clipped turns")


def cases(names, short):
    """Those of the short form, and the rest."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.rest]) for name in names]


SHORT = ("ippo with a head", "ippo with a critic", "iac with a head", "ppo of tokens", "ppo of clipped turns")


@pytest.mark.parametrize("case", cases(CASES, SHORT))
def test_losses_and_gradients_are_those_of_a_loop(initials, monkeypatch, case):
    script, flags = CASES[case]
    args = make_args(script, num_agents=1, **flags)
    (initial,) = initials(args)
    agent = script.Agent(0, initial, 10, args)
    randomise([agent])
    if case in AFTER_OTHERS:
        agent.state = dict.fromkeys(agent.state, 9.0)
    transcripts = make_transcripts(script, agent.tokenizer, EPISODES)
    if case == "ppo of tokens":  # self-play: rows of a seat that acts in odd turns, and of one that acts in even turns
        for b, transcript in enumerate(transcripts):
            transcript.turns = [turn and 2 * turn - 1 + b % 2 for turn in transcript.turns]
    targets = Targets(script, Exact([agent]), transcripts, args)
    steps = watch_steps(monkeypatch, [agent])
    rollout = script.Rollout(**models.pad_right(transcripts, agent, TRUNCATED))
    metrics = script.learn(agent, rollout, args, seeded(7))

    all_parts, largest = [], []
    for rows, step in zip(minibatches(args), chunks(steps, 2), strict=True):
        loss, parts = targets.loss(step[0].exact, transcripts, rows)
        all_parts.append(parts)
        exact = step[0].exact.gradients(loss)
        largest.append([assert_same(own.gradients, expected) for own, expected in zip(step, exact, strict=True)])
    assert_same_metrics(metrics, all_parts)
    assert_rollout_metrics(metrics, sum(targets.old, []), steps[-2])
    returns, values = (sum(own, []) for own in (targets.returns, targets.old_values))
    assert float(metrics["explained_variance"]) == explained_variance(returns, values)
    if case in AFTER_OTHERS:
        assert [*agent.state.values()] == pytest.approx([0.98 * 9.0])
    assert min(mean(own) for own in zip(*largest)) > 1e-3
    assert 0.01 < float(mean([x.float() for x in targets.is_clipped])) < 0.95
    if script is ppo_llm:
        assert 0.01 < metrics["clip_fraction"] < 0.99


# --- A team's critic --------------------------------------------------------------------------------------------------

OTHER_EPISODES = [  # of a second agent: in each turn up to the last one somebody acts
    [(5, 0), (2, 1), (3, 0), (2, 2), (3, 0), (2, 3)],
    [(4, 0), (3, 1)],
    [(4, 0), (3, 2)],
    [(6, 0), (2, 1), (4, 0), (3, 2)],
    [(3, 0), (4, 2)],
    [(3, 0), (1, 1), (2, 0), (1, 2)],
    [(4, 0), (2, 1)],
    [],
    [(3, 0), (2, 1), (2, 0)],
    [(5, 0), (2, 1), (3, 0), (4, 2), (3, 0)],
]


def joint_values(critic, transcripts):
    """{turn: V} of an episode of a team, from its transcripts as text."""
    tokenizer = critic.critic.tokenizer
    ids, marks = [], {}
    places = [0 for _ in transcripts]
    for turn in range(1, 1 + max([0, *(turn for own in transcripts for turn in own.turns)])):
        before, after = "", ""
        for i, own in enumerate(transcripts):
            if turn in own.turns:
                start = own.turns.index(turn)
                end = start + own.turns.count(turn)
                text = tokenizer.decode(own.ids[places[i] : start], skip_special_tokens=True)
                answer = tokenizer.decode(own.ids[start:end], skip_special_tokens=True)
                before += f"Agent {i} reads:\n{text}\n\n"
                after += f"Agent {i} writes:\n{answer}\n\n"
                places[i] = end
        ids += tokenizer(before, add_special_tokens=False).input_ids
        marks[turn] = len(ids) - 1
        ids += [tokenizer.eos_token_id, *tokenizer(after, add_special_tokens=False).input_ids]
    if not marks:
        return {}
    values = value_of(critic, hidden_states_of(critic.critic, ids)[0])
    return {turn: values[place] for turn, place in marks.items()}


@pytest.mark.parametrize("flags", [{}, {"advantage_normalization": False}], ids=str)
def test_a_teams_losses_and_gradients_are_those_of_a_loop(initials, monkeypatch, flags):
    args = make_args(maac_llm, kl_coef=0.2, num_agents=2, **flags)
    agents = [maac_llm.Agent(i, initial, 10, args) for i, initial in enumerate(initials(args))]
    critic = maac_llm.Critic(initials(args)[0], 10, args)
    randomise([*agents, critic])
    critic.state["s"] = 0.0 if flags else 9.0
    teams = [
        make_transcripts(maac_llm, critic.critic.tokenizer, own, k) for k, own in enumerate((EPISODES, OTHER_EPISODES))
    ]
    teams[1][3].rewards[-1] += 0.7  # on its last token; it is earned in turn 3, in which agent 0 acts alone
    teams[1][3].earned[3] = 0.7
    episodes = [*zip(*teams)]
    exact = Exact([*agents, critic])

    with torch.no_grad():
        tokens = [[read(exact.learners[i], own, args)[0] for i, own in enumerate(episode)] for episode in episodes]
        critic_values = [joint_values(exact.learners[-1], episode) for episode in episodes]
    earned = []  # in each turn
    for episode, turns in zip(episodes, critic_values):
        earned.append({turn: sum(own.earned.get(turn, 0.0) for own in episode) / 2 for turn in turns})
    scale = reward_scale(exact.learners[-1], [sum(own.values()) for own in earned if own], args)
    baseline = {}
    for turn in (1, 2, 3):
        to_go = [sum(own[t] for t in own if t >= turn) / scale for own in earned if turn in own]
        baseline[turn] = mean(to_go)
    old_values = [{turn: float(V) + baseline[turn] for turn, V in own.items()} for own in critic_values]
    returns, advantages = [], []
    for episode, own, values in zip(tokens, earned, old_values):
        returns.append({})
        for turn in own:
            penalty = sum(float(x.logprob - x.reference) for one in episode for x in one if x.turn == turn)
            reward = own[turn] / scale - args.kl_coef * penalty
            returns[-1][turn] = reward + args.gamma * values.get(turn + 1, 0.0)
        advantages.append({turn: returns[-1][turn] - values[turn] for turn in own})
    if args.advantage_normalization:
        flat = iter(standardised([x for own in advantages for x in own.values()], args))
        advantages = [{turn: next(flat) for turn in own} for own in advantages]

    steps = watch_steps(monkeypatch, [*agents, critic])
    rollouts = [maac_llm.Rollout(**models.pad_right(own, agent)) for own, agent in zip(teams, agents)]
    metrics, critic_metrics = maac_llm.learn(agents, critic, rollouts, args, seeded(7))
    rows_of_steps = minibatches(args)
    per_learner = [steps[i::3] for i in range(3)]
    for i in range(2):
        parts = []
        for rows, step in zip(rows_of_steps, per_learner[i], strict=True):
            num_turns = sum(len(earned[b]) for b in rows)
            policy, entropy = 0.0, []
            for b in rows:
                own_tokens, _ = read(step.exact.learners[i], episodes[b][i], args)
                policy = policy - sum(x.logprob * advantages[b][x.turn] for x in own_tokens) / num_turns
                entropy += [x.entropy for x in own_tokens]
            parts.append({"policy_loss": policy, "entropy": mean(entropy)})
            loss = policy - args.entropy_coef * mean(entropy)
            assert assert_same(step.gradients, step.exact.gradients(loss)[i]) > 1e-3
        assert_same_metrics(metrics[i], parts)
        assert_rollout_metrics(metrics[i], sum([own[i] for own in tokens], []), per_learner[i][-1])
    assert critic.state["s"] == pytest.approx(scale - args.reward_norm_eps)
    flat = [[own[turn] for own in episodes for turn in own] for episodes in (returns, old_values)]
    assert float(critic_metrics["explained_variance"]) == explained_variance(*flat)
    parts = []
    for rows, step in zip(rows_of_steps, per_learner[2], strict=True):
        errors = []
        for b in rows:
            values = joint_values(step.exact.learners[-1], episodes[b])
            errors += [(values[turn] + baseline[turn] - returns[b][turn]) ** 2 for turn in values]
        parts.append({"value_loss": mean(errors)})
        assert assert_same(step.gradients, step.exact.gradients(mean(errors))[-1]) > 1e-3
    assert_same_metrics(critic_metrics, parts)


# --- Groups -----------------------------------------------------------------------------------------------------------

K = 5
GROUPS = ["mean", "mean, normalised", "rloo", "max", "raw"]


@pytest.mark.parametrize("kind", cases(GROUPS, GROUPS[:2]))
def test_losses_and_gradients_of_groups_are_those_of_a_loop(initials, monkeypatch, kind):
    mode, _, normalised = kind.partition(", ")
    flags = {"advantage_mode": mode, "advantage_normalization": bool(normalised)}
    flags |= {"num_generations": K, "kl_coef": 0.2}
    args = make_args(magrpo_llm, num_agents=1, **flags)
    (initial,) = initials(args)
    agent = magrpo_llm.Agent(0, initial, 10, args)
    randomise([agent])
    transcripts = make_transcripts(magrpo_llm, agent.tokenizer, EPISODES)
    exact = Exact([agent])
    with torch.no_grad():
        episodes = [read(exact.learners[0], transcript, args)[0] for transcript in transcripts]
    returns = []  # of each episode, by turn
    for tokens in episodes:
        rewards = {turn: 0.0 for turn in (1, 2, 3)}
        for token in tokens:
            rewards[token.turn] += token.reward - args.kl_coef * float(token.logprob - token.reference)
        played = {token.turn for token in tokens}
        returns.append(
            {turn: sum(rewards[t] * args.gamma ** (t - turn) for t in rewards if t >= turn) for turn in played}
        )
    advantages = []
    for b, own in enumerate(returns):
        advantages.append({})
        for turn, R in own.items():
            group = [other for other in range(b - b % K, b - b % K + K) if turn in returns[other]]
            everyone = [returns[other][turn] for other in group]
            others = [returns[other][turn] for other in group if other != b] or [R]
            compared = {"mean": mean(everyone), "rloo": mean(others), "max": max(everyone), "raw": 0.0}[mode]
            advantages[-1][turn] = (R - compared) / (deviation(everyone) + 1e-4 if normalised else 1.0)

    steps = watch_steps(monkeypatch, [agent])
    metrics = magrpo_llm.learn(agent, magrpo_llm.Rollout(**models.pad_right(transcripts, agent)), args, seeded(7))
    parts = []
    for rows, step in zip(minibatches(args), steps, strict=True):
        policy, entropy = 0.0, []
        for b in rows:
            tokens, _ = read(step.exact.learners[0], transcripts[b], args)
            policy = policy - sum(x.logprob * advantages[b][x.turn] for x in tokens)
            entropy += [x.entropy for x in tokens]
        policy = policy / sum(len(returns[b]) for b in rows)
        parts.append({"policy_loss": policy, "entropy": mean(entropy)})
        loss = policy - args.entropy_coef * mean(entropy)
        assert assert_same(step.gradients, step.exact.gradients(loss)[0]) > 1e-3
    assert_same_metrics(metrics, parts)
    assert_rollout_metrics(metrics, sum(episodes, []), steps[-1])


# --- Nothing to learn -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm], ids=lambda each: each.__name__)
def test_a_rollout_in_which_all_earn_the_same_moves_no_actor(initials, tokenizer, script):
    flags = {"num_generations": 7, "advantage_normalization": True} if script is magrpo_llm else {}
    args = make_args(script, num_agents=2, entropy_coef=0.0, gamma=1.0, kl_coef=0.0, kl_loss_coef=0.0, **flags)
    agents = [script.Agent(i, initial, 10, args) for i, initial in enumerate(initials(args))]
    transcripts = make_transcripts(script, tokenizer, [[(5 + k, 0), (2, 1), (3, 0), (3, 2)] for k in range(14)])
    for transcript in transcripts:
        transcript.rewards = [
            0.3 * (k in (len(transcript.ids) - 1, transcript.turns.index(1) + 1)) for k in range(len(transcript.ids))
        ]
        transcript.earned = {1: 0.3, 2: 0.3}
    before = [parameter.clone() for agent in agents for parameter in agent.actor.parameters()]
    rollouts = [script.Rollout(**models.pad_right(transcripts, agent)) for agent in agents]
    if script is maac_llm:
        maac_llm.learn(agents, maac_llm.Critic(initials(args)[0], 10, args), rollouts, args, seeded())
    else:
        for agent, rollout in zip(agents, rollouts):
            script.learn(agent, rollout, args, seeded())
    after = [parameter for agent in agents for parameter in agent.actor.parameters()]
    assert max((x - y).abs().max().item() for x, y in zip(before, after)) == 0


def test_rewards_that_are_all_the_same_are_not_divided_by_their_deviation(initials, tokenizer):
    args = make_args(ppo_llm, num_agents=1, gamma=0.5, reward_normalization=True)
    agent = ppo_llm.Agent(0, initials(args)[0], 10, args)
    transcripts = make_transcripts(ppo_llm, tokenizer, [[(5 + k, 0), (3, 1)] for k in range(14)])
    for transcript in transcripts:
        transcript.rewards = [0.0] * (len(transcript.ids) - 1) + [1.0]
    rollout = ppo_llm.Rollout(**models.pad_right(transcripts, agent))
    assert float(ppo_llm.learn(agent, rollout, args, seeded())["value_loss"]) < 1


@pytest.mark.parametrize("last_turn, same", [(1, "token"), (2, "turn")])
def test_actions_are_tokens_by_auto_where_all_episodes_have_one_turn(initials, tokenizer, last_turn, same):
    losses = {}
    for granularity in ("token", "turn", "auto"):
        args = make_args(ppo_llm, num_agents=1, action_granularity=granularity)
        torch.manual_seed(0)
        agent = ppo_llm.Agent(0, initials(args)[0], 10, args)
        transcripts = make_transcripts(ppo_llm, tokenizer, [[(5, 0), (3, 1)], [(4, 0), (2, last_turn)]])
        rollout = ppo_llm.Rollout(**models.pad_right(transcripts, agent))
        losses[granularity] = float(ppo_llm.learn(agent, rollout, args, seeded())["policy_loss"])
    assert losses["token"] != losses["turn"] and losses["auto"] == losses[same]


def test_a_ratio_too_large_to_be_computed_is_clipped_and_gives_no_gradient_that_is_no_number(initials, monkeypatch):
    """exp(120), of an answer of two tokens or more: the clip holds where A > 0, and else the gradient is finite."""
    args = make_args(ppo_llm, num_agents=1, action_granularity="turn", turn_level_clip=True)
    (initial,) = initials(args)
    agent = ppo_llm.Agent(0, initial, 10, args)
    policy_forward = ppo_llm.policy_forward

    def rise(*values):
        logprobs, *others = policy_forward(*values)
        return logprobs + 60.0 * (logprobs != 0) * torch.is_grad_enabled(), *others

    monkeypatch.setattr(ppo_llm, "policy_forward", rise)
    transcripts = make_transcripts(ppo_llm, agent.tokenizer, EPISODES)
    metrics = ppo_llm.learn(agent, ppo_llm.Rollout(**models.pad_right(transcripts, agent)), args, seeded(7))
    assert metrics["clip_fraction"] > 0.9 and metrics["grad_norm"].isfinite()
    assert all(parameter.isfinite().all() for parameter in agent.actor.parameters())
