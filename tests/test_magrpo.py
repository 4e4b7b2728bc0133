"""magrpo_llm: trees of joint samples, their returns and advantages by recursion, what is learned, and the loss."""

import collections

import pytest
import torch
from helpers import make_args, seeded
from short_runs import train

import magrpo_llm
from utils.cli import UserError
from utils.run.metrics import count_new_tokens
from utils.tasks import number

CPU = torch.device("cpu")
MODES = pytest.mark.parametrize("mode", ["mean", "rloo", "max", "raw"])


def args_of(**flags):
    small = {"num_turns": 2, "max_new_tokens": 3, "num_generations": 3, "rollout_buffer_size": 18}
    return make_args(script=magrpo_llm, **(small | flags))


def build_team(model, tokenizer, args):
    torch.manual_seed(0)
    agents = magrpo_llm.build_agents(args, CPU, 10, model, tokenizer)
    with torch.no_grad():
        for agent in agents:
            for parameter in agent.actor.parameters():
                parameter += 0.02 * torch.randn(parameter.shape, generator=seeded(1))
    return agents


class Watched:
    """The game of numbers, which counts what it is asked; some games end after the first turn."""

    formatters = staticmethod(number.formatters)

    def __init__(self, ends):
        self.ends = ends
        self.scored = []  # of each call the turns of each episode
        self.num_transitions = 0

    def reward_func(self, *completions, items, turns):
        self.scored.append([tuple(tuple(history[k]) for history in turns) for k in range(len(items))])
        return [float(sum(map(len, texts))) for texts in zip(*completions)]

    def external_transition(self, agent_completions, prompt_history_per_agent, num_agents, item):
        self.num_transitions += 1
        if self.ends and self.num_transitions % 4 == 0:
            return None
        return number.external_transition(["1"] * num_agents, num_agents, prompt_history_per_agent, item)


def play(agents, args, num_items=2, ends=True):
    """(rollouts, task) of trees of a few items."""
    K, T = args.num_generations, args.num_turns
    task = Watched(ends)
    items = [item for item in number.train_dataset(num_items, 0) for _ in range(K**T)]
    return magrpo_llm.play(agents, task, items, args, seeded(), K), task


def test_a_tree_has_its_generations_in_each_turn_and_scores_each_joint_sample_once(model, tokenizer):
    args = args_of(num_turns=3, num_generations=2, rollout_buffer_size=8)
    rollouts, task = play(build_team(model, tokenizer, args), args)
    played = rollouts[0].played
    assert [len(call) for call in task.scored] == [4, 6, 10]  # every fourth transition ends a game: one of 4, one of 6
    for t, call in enumerate(task.scored):
        seen = []
        for k in range(0, 16, 2 ** (2 - t)):  # the first path of each joint sample
            if played[k, t]:
                seen.append(tuple(tuple(rollout.responses[k][: t + 1]) for rollout in rollouts))
        assert seen == call
    once = sum(rollout.response_mask[:: 2 ** (2 - t), t].sum() for rollout in rollouts for t in range(3))
    assert count_new_tokens(rollouts) == once < sum(rollout.response_mask.sum() for rollout in rollouts)


def test_a_turn_that_paths_share_counts_for_all_of_them_and_each_path_has_one_that_counts(model, tokenizer):
    args = args_of(num_turns=3, num_generations=2, rollout_buffer_size=8)
    rollouts, _ = play(build_team(model, tokenizer, args), args)
    played = rollouts[0].played
    counts = magrpo_llm.paths_of_samples(played, 2)
    assert not played.all() and counts[played].sum() == counts.sum() == played.sum()
    for t in range(3):
        paths = 2 ** (2 - t)
        assert torch.equal(counts[:, t].view(-1, paths).sum(1), played[:, t].float().view(-1, paths).sum(1))
    assert (counts > 0).any(1).all()


def tree(rewards, t, first, K, gamma):
    """The return of the joint sample of turn t at path `first`, by recursion."""
    B, T = rewards.shape
    paths = K ** (T - 1 - t)
    total = float(rewards[first, t])
    if t + 1 < T:
        children = [tree(rewards, t + 1, first + j * paths // K, K, gamma) for j in range(K)]
        total += gamma * sum(children) / K
    return total


def random_rewards(K, T, trees=2):
    """[B, T], equal where paths share a joint sample."""
    rewards = torch.zeros(trees * K**T, T)
    for t in range(T):
        paths = K ** (T - 1 - t)
        rewards[:, t] = torch.randn(trees * K ** (t + 1), generator=seeded(t)).repeat_interleave(paths)
    return rewards


@pytest.mark.parametrize("K, T", [(4, 1), (3, 2), (2, 4)])
def test_returns_are_those_of_a_recursion(K, T):
    rewards = random_rewards(K, T)
    returns = magrpo_llm.tree_returns(rewards, K, 0.9)
    for t in range(T):
        for k in range(len(rewards)):
            first = k - k % K ** (T - 1 - t)
            assert returns[k, t] == pytest.approx(tree(rewards, t, first, K, 0.9), abs=1e-5)


@MODES
@pytest.mark.parametrize("K, T", [(3, 2), (2, 3)])
def test_advantages_are_those_of_each_group(K, T, mode):
    returns = magrpo_llm.tree_returns(random_rewards(K, T), K, 1.0)
    advantages = magrpo_llm.group_advantages(returns, K, mode)
    for t in range(T):
        paths = K ** (T - 1 - t)
        for k in range(len(returns)):
            node = k - k % (K * paths)
            group = [float(returns[node + j * paths, t]) for j in range(K)]
            own = float(returns[k, t])
            baseline = {
                "mean": sum(group) / K,
                "rloo": (sum(group) - own) / (K - 1),
                "max": max(group),
                "raw": 0.0,
            }[mode]
            assert advantages[k, t] == pytest.approx(own - baseline, abs=1e-5)


def test_normalised_all_modes_are_the_same_numbers():
    returns = random_rewards(3, 2)
    normalised = [magrpo_llm.group_advantages(returns, 3, mode, True) for mode in ("mean", "rloo", "max", "raw")]
    for advantages in normalised[1:]:
        torch.testing.assert_close(advantages, normalised[0], atol=1e-5, rtol=1e-4)
    group = normalised[0][:9:3, 0]
    assert group.mean().abs() < 1e-6 and group.std(correction=0) == pytest.approx(1, abs=1e-5)


def test_a_group_that_earns_the_same_teaches_nothing():
    returns = torch.full((9, 2), 0.7)
    for normalised in (False, True):
        assert not magrpo_llm.group_advantages(returns, 3, "mean", normalised).any()
    rounded = returns + 1e-7 * torch.randn(9, 2, generator=seeded())  # the KL penalty of actors that have not learned
    assert not magrpo_llm.group_advantages(rounded, 3, "mean", True).any()


def batch_of(agent, rollout, args):
    """What `learn` makes of a rollout, and its only mini-batch."""
    reference = magrpo_llm.compute_logprobs(agent.reference, rollout, args)
    returns = magrpo_llm.tree_returns(
        magrpo_llm.turn_rewards(rollout, reference, args), args.num_generations, args.gamma
    )
    advantages = magrpo_llm.group_advantages(returns, args.num_generations, args.advantage_mode)
    paths = magrpo_llm.paths_of_samples(rollout.played, args.num_generations)
    batch = magrpo_llm.Batch(
        **vars(rollout),
        reference_logprobs=reference,
        advantages=advantages,
        paths=paths,
        weights=torch.ones_like(rollout.logprobs),
    )
    batch.response_mask = rollout.response_mask * (paths > 0)[..., None]
    return batch


def test_the_gradient_is_that_of_all_paths_each_token_learned_and_no_padding(model, tokenizer):
    args = args_of(mini_batch_size=18, kl_coef=0.3, gamma=0.9)
    agents = build_team(model, tokenizer, args)
    rollouts, _ = play(agents, args)
    agent, rollout = agents[0], rollouts[0]
    batch = batch_of(agent, rollout, args)
    (minibatch,) = magrpo_llm.minibatches(batch, args, seeded())
    for part in minibatch.split(5):
        magrpo_llm.magrpo_loss(agent, part, args)[0].backward()
    gradients = [parameter.grad.clone() for parameter in agent.actor.parameters()]

    agent.actor.zero_grad()
    loss = 0.0
    pairs = rollout.played.nonzero().tolist()  # paths and turns: those that share a sample have it each
    lengths = collections.Counter()
    for k, t in pairs:
        ids = rollout.ids[k, t][rollout.attention_mask[k, t] > 0]
        length = int(rollout.response_mask[k, t].sum())
        lengths[length] += 1
        log_pi = agent.actor(ids[None, :-1]).logits[0, -length:].double().log_softmax(-1)
        loss -= log_pi[torch.arange(length), ids[-length:]].sum() * float(batch.advantages[k, t]) / len(pairs)
    loss.backward()
    assert len(lengths) > 1  # some responses are padded
    for parameter, gradient in zip(agent.actor.parameters(), gradients):
        torch.testing.assert_close(parameter.grad, gradient, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("ends", [False, True], ids=["all turns", "early ends"])
def test_minibatches_weigh_turns_as_the_rollout_does(model, tokenizer, ends):
    gradients = {}
    for size in (18, 3):
        args = args_of(mini_batch_size=size, kl_coef=0.3)
        agents = build_team(model, tokenizer, args)
        rollouts, _ = play(agents, args, ends=ends)
        batch = batch_of(agents[0], rollouts[0], args)
        minibatches = [*magrpo_llm.minibatches(batch, args, seeded())]
        assert (len({float(each.paths.sum()) for each in minibatches}) > 1) == (size == 3)
        for minibatch in minibatches:
            (magrpo_llm.magrpo_loss(agents[0], minibatch, args)[0] / len(minibatches)).backward()
        gradients[size] = [parameter.grad for parameter in agents[0].actor.parameters()]
    for one, two in zip(*gradients.values()):
        torch.testing.assert_close(one, two, atol=2e-5, rtol=1e-3)


def test_a_sample_that_paths_share_is_computed_once(model, tokenizer, monkeypatch):
    args = args_of(mini_batch_size=18, kl_coef=0.0)
    agents = build_team(model, tokenizer, args)
    rollouts, task = play(agents, args, ends=False)
    rows = []
    forward_policy = magrpo_llm.forward_policy

    def watched(policy, rollout, args):
        rows.append(int(rollout.played.sum()))
        return forward_policy(policy, rollout, args)

    monkeypatch.setattr(magrpo_llm, "forward_policy", watched)
    magrpo_llm.learn(agents[0], rollouts[0], args, seeded())
    assert sum(rows) == sum(map(len, task.scored)) < rollouts[0].played.sum()


def test_trees_that_all_end_early_are_learned(model, tokenizer):
    args = args_of(mini_batch_size=2, num_generations=2, rollout_buffer_size=4)
    agents = build_team(model, tokenizer, args)
    items = [item for item in number.train_dataset(1, 0) for _ in range(4)]
    task = Watched(ends=True)
    task.external_transition = lambda agent_completions: None
    rollouts = magrpo_llm.play(agents, task, items, args, seeded(), 2)
    before = [parameter.clone() for parameter in agents[0].actor.parameters()]
    metrics = magrpo_llm.learn(agents[0], rollouts[0], args, seeded(1))
    assert metrics["skipped"] == 0 and all(torch.isfinite(x) for x in metrics.values())
    assert any(not torch.equal(one, two) for one, two in zip(before, agents[0].actor.parameters()))


def test_a_run_of_trees_learns_and_reports_its_paths(in_tmp_path):
    _, run = train("magrpo")
    assert len(run.rows) == 3 and run.rows[0]["agent_0/policy_loss"] is not None
    assert not [name for name in run.rows[0] if "value" in name]


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"num_generations": 1}, "--num-generations: .*greater than or equal to 2"),
        (
            {"advantage_mode": "rloo", "advantage_normalization": True},
            "--advantage-mode has no effect with --advantage-normalization",
        ),
        ({"num_generations": 2, "num_turns": 20000}, "multiple of .* 2 \\^ 20000 x 1, got 4"),
    ],
)
def test_bad_groups_are_one_line(flags, message, in_tmp_path):
    with pytest.raises((UserError, ValueError), match=message):
        train("magrpo", **flags)
