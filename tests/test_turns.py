"""Several turns: chains worked out by hand, what each agent sees, how an episode ends."""

from types import SimpleNamespace

import datasets
import pytest
import torch
from conftest import estimate, make_args, randomise_value_head

import iac_llm
import ippo_llm
from iac_llm import td_error
from ippo_llm import Agent, Rollout, gae, losses, play
from utils.cli import TaskError, UserError
from utils.tasks.episodes import Episodes

GAMMA, LAMBDA = 0.9, 0.8
ESTIMATES = {"ippo": lambda *chain: gae(*chain, GAMMA, LAMBDA), "iac": lambda *chain: td_error(*chain, GAMMA)}


def rollout_of(episodes, rewards, values, mask):
    """A rollout that knows nothing but the rewards and values of its actions, [R, K] each."""
    blank = torch.zeros(len(mask), 1)
    tensors = {"episodes": torch.tensor(episodes), "action_mask": torch.tensor(mask)}
    tensors |= {"action_rewards": torch.tensor(rewards), "values": torch.tensor(values)}
    return Rollout(blank, blank, blank, blank, blank, [], [], **tensors)


# Rewards 1 and 2, then an episode of one turn with reward 1; gamma 0.9, lambda 0.8, so gamma lambda = 0.72.
# Turns: V = 0.5, 0.25 and 0.1. delta_2 = 2 - 0.25 = 1.75; delta_1 = 1 + 0.9 * 0.25 - 0.5 = 0.725; the other's is 0.9.
TURNS = ([[1.0], [2.0], [1.0]], [[0.5], [0.25], [0.1]], [[1.0], [1.0], [1.0]])
# Tokens: two in the first turn (V = 0.5, 0.4), one in the second (0.25); two in the other episode (0.1, 0.2).
# delta = 0 + 0.9 * 0.4 - 0.5 = -0.14; 1 + 0.9 * 0.25 - 0.4 = 0.825; 1.75; and 0.9 * 0.2 - 0.1 = 0.08; 1 - 0.2 = 0.8.
TOKENS = (
    [[0.0, 1.0, 0.0], [2.0, 0.0, 0.0], [0.0, 1.0, 0.0]],
    [[0.5, 0.4, 9.0], [0.25, 9.0, 9.0], [0.1, 0.2, 9.0]],
    [[1.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]],
)
BY_HAND = {
    ("turn", "ippo"): [[0.725 + 0.72 * 1.75], [1.75], [0.9]],
    ("turn", "iac"): [[0.725], [1.75], [0.9]],
    ("token", "ippo"): [[-0.14 + 0.72 * 2.085, 0.825 + 0.72 * 1.75, 0], [1.75, 0, 0], [0.08 + 0.72 * 0.8, 0.8, 0]],
    ("token", "iac"): [[-0.14, 0.825, 0.0], [1.75, 0.0, 0.0], [0.08, 0.8, 0.0]],
}


@pytest.mark.parametrize("granularity, algorithm", BY_HAND)
def test_a_chain_of_two_turns_beside_one_of_one_by_hand(granularity, algorithm):
    rewards, values, mask = TURNS if granularity == "turn" else TOKENS
    rollout = rollout_of([0, 0, 1], rewards, values, mask)
    chain = rollout.chains()
    advantages, returns = ESTIMATES[algorithm](*chain)
    expected = torch.tensor(BY_HAND[granularity, algorithm])
    torch.testing.assert_close(rollout.unchain(advantages, chain[2]), expected)
    targets = (expected + torch.tensor(values)) * torch.tensor(mask)  # of both algorithms: A + V
    torch.testing.assert_close(rollout.unchain(returns, chain[2]), targets)


def transition(agent_completions, num_agents, prompt_history_per_agent, response_history_per_agent, item):
    """Episode 1 ends after its first turn; else each agent is shown its own history."""
    if item["number"] == 1:
        return None
    return [
        f"{prompts[-1]} {responses[-1]} lower"
        for prompts, responses in zip(prompt_history_per_agent, response_history_per_agent)
    ]


def two_turns(**parts):
    numbered = lambda size, seed: datasets.Dataset.from_list([{"number": k} for k in range(size)])  # noqa: E731
    task = {"train_dataset": numbered, "formatters": lambda item, agent: f"Agent {agent}, guess {item['number']}."}
    task |= {"reward_func": lambda *texts, turn: [turn + 1.0] * len(texts[0]), "external_transition": transition}
    return SimpleNamespace(**(task | parts))


@pytest.fixture
def team(model, tokenizer):
    args = make_args()
    return [randomise_value_head(Agent(args, model, tokenizer, model.base_model), seed) for seed in range(2)]


PLAIN = {"reward_normalization": False, "advantage_normalization": False, "kl_coef": 0.0, "value_clip_range": None}


@pytest.mark.parametrize("algorithm", ESTIMATES)
@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_episodes_of_one_and_two_turns_learn_from_the_chain_in_one_batch(
    model, team, accelerator, clock, granularity, algorithm
):
    flags = {"num_turns": 2, "max_new_tokens": 6, "action_granularity": granularity, **PLAIN}
    args = make_args(gamma=GAMMA, gae_lambda=LAMBDA, **flags)
    items = [{"number": k} for k in range(3)]
    rollouts = play(team, two_turns(), items, args, torch.Generator().manual_seed(0), clock, accelerator)
    for agent, rollout in zip(team, rollouts):
        assert rollout.episodes.tolist() == [0, 0, 1, 2, 2]
        assert rollout.rewards.tolist() == [1.0, 2.0, 1.0, 1.0, 2.0]
        estimate(agent, model, rollout, rollout.processed_rewards, args, accelerator, ESTIMATES[algorithm])
        terms = []  # (advantage, target, rows and position of the action), by a loop over episodes and their actions
        for episode in range(3):
            actions = []  # (reward, value, row, position)
            for row in (rollout.episodes == episode).nonzero().flatten().tolist():
                length = int(rollout.mask[row].sum())
                prompt = rollout.prompt_ids[row][rollout.prompt_mask[row] == 1]
                ids = torch.cat([prompt, rollout.response_ids[row, :length]])[None]
                with torch.no_grad():
                    values = agent.value_head(agent.critic(ids).last_hidden_state)[0, len(prompt) - 1 : -1, 0].tolist()
                reward = rollout.rewards[row].item()
                if granularity == "turn":
                    actions.append((reward, values[0], row, 0))
                else:
                    actions += [(reward * (t == length - 1), values[t], row, t) for t in range(length)]
            for t, (_, value, row, position) in enumerate(actions):
                following = [action[1] for action in actions[1:]] + [0.0]
                deltas = [r + GAMMA * v_next - v for (r, v, _, _), v_next in zip(actions, following)]
                decay = GAMMA * LAMBDA if algorithm == "ippo" else 0.0
                advantage = sum(decay**k * delta for k, delta in enumerate(deltas[t:]))
                terms.append((row, position, advantage, advantage + value))
        assert len(terms) == int(rollout.action_mask.sum())
        for row, position, advantage, target in terms:
            assert rollout.advantages[row, position].item() == pytest.approx(advantage, abs=2e-5)
            assert rollout.returns[row, position].item() == pytest.approx(target, abs=2e-5)


def test_an_agent_sees_its_own_history_as_the_transition_gives_it(team, accelerator, clock):
    args = make_args(num_turns=3, max_new_tokens=4)
    items = [{"number": k} for k in range(2)]
    rollouts = play(team, two_turns(), items, args, torch.Generator().manual_seed(0), clock, accelerator)
    for i, rollout in enumerate(rollouts):
        first = f"Agent {i}, guess 0."
        second = f"{first} {rollout.texts[0]} lower"
        assert rollout.prompts == [first, second, f"{second} {rollout.texts[1]} lower", f"Agent {i}, guess 1."]
        decoded = [
            team[i].tokenizer.decode(ids[mask == 1]) for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask)
        ]
        assert decoded == rollout.prompts  # rows of all turns, padded to one width
        for text, ids, mask in zip(rollout.texts, rollout.response_ids, rollout.mask):
            assert team[i].tokenizer.decode(ids[mask == 1], skip_special_tokens=True) == text


def test_a_mini_batch_has_all_turns_of_its_episodes(model, team, accelerator, clock, monkeypatch):
    args = make_args(num_turns=2, max_new_tokens=4, mini_batch_size=2, **PLAIN)
    items = [{"number": k} for k in range(4)]
    rollout = play(team, two_turns(), items, args, torch.Generator().manual_seed(0), clock, accelerator)[0]
    estimate(team[0], model, rollout, rollout.processed_rewards, args, accelerator)
    seen = []

    def spy(agent, batch, *rest):
        seen.append(batch.episodes.tolist())
        return losses(agent, batch, *rest)

    monkeypatch.setattr(ippo_llm, "losses", spy)
    ippo_llm.update(team[0], rollout, 1, args, accelerator, torch.Generator().manual_seed(0))
    assert len(seen) == 2 and sorted(sum(seen, [])) == [0, 0, 1, 2, 2, 3, 3]
    assert all(len(set(episodes)) == 2 for episodes in seen)


@pytest.mark.parametrize("threshold, turns", [(None, [0, 0, 1, 2, 2]), (0.5, [0, 1, 2]), (1.0, [0, 0, 1, 2, 2])])
def test_an_episode_ends_after_a_turn_whose_mean_reward_is_above_the_threshold(
    team, accelerator, clock, threshold, turns
):
    args = make_args(num_turns=2, max_new_tokens=4, early_termination_threshold=threshold)
    items = [{"number": k} for k in range(3)]
    rollouts = play(team, two_turns(), items, args, torch.Generator().manual_seed(0), clock, accelerator)
    assert rollouts[0].episodes.tolist() == turns


def test_a_reward_function_may_ask_for_the_turns_and_a_transition_for_everything():
    asked = []

    def reward_func(first, second, turns, turn, num_turns, items):
        asked.append((turn, num_turns, turns, [item["number"] for item in items]))
        return [[0.0] * len(first), [1.0] * len(first)]

    def external_transition(prompt, **known):
        asked.append((prompt, known))
        return None if known["item"]["number"] == 1 else ["x", "y"]

    task = two_turns(reward_func=reward_func, external_transition=external_transition)
    items = [{"number": 0, "prompt": "p"}, {"number": 1, "prompt": "q"}]
    episodes = Episodes(task, items, make_args(num_turns=2))
    assert episodes.play([["a", "b"], ["c", "d"]], [["p", "q"]] * 2) == ([[0.0, 0.0], [1.0, 1.0]],) * 2
    assert asked[0] == (0, 2, [[["a"], ["b"]], [["c"], ["d"]]], [0, 1])
    known = {"agent_completions": ["a", "c"], "num_agents": 2, "item": items[0], "turn": 0}
    known |= {"prompt_history_per_agent": [["Agent 0, guess 0."], ["Agent 1, guess 0."]]}
    assert asked[1] == ("p", known | {"response_history_per_agent": [["a"], ["c"]]})
    assert episodes.running == [0]
    episodes.play([["e"], ["f"]], [["p"]] * 2)
    assert asked[-1] == (1, 2, [[["a", "e"]], [["c", "f"]]], [0]) and episodes.running == []


BAD_TRANSITIONS = {
    "raises": (
        lambda item: 1 / 0,
        r"^external_transition failed on item 0, {'number': .}: ZeroDivisionError: division",
    ),
    "too few": (
        lambda item: ["only one"],
        r"^external_transition returned \['only one'\]; it takes a list of 2 prompts",
    ),
    "a text": (lambda item: "again", r"^external_transition returned 'again'; it takes a list of 2 prompts, or None"),
    "no prompt": (lambda item: [3, 4], r"^external_transition of agent 0 gave no prompt for item 0, .*: "),
}


@pytest.mark.parametrize("case", BAD_TRANSITIONS)
def test_a_bad_transition_is_one_line(tmp_path, case):
    function, message = BAD_TRANSITIONS[case]
    args = make_args(tmp_path, num_turns=2, eval_interval=0, max_new_tokens=4, train_size=8)
    with pytest.raises(TaskError, match=message) as error:
        ippo_llm.main(args, two_turns(external_transition=function, reward_func=lambda a, b: [0.0] * len(a)))
    assert "\n" not in str(error.value) and (tmp_path / "run/agent_1/config.json").exists()


def test_several_turns_take_a_task_that_has_them(tmp_path):
    task = two_turns()
    del task.external_transition
    with pytest.raises(UserError, match="--num-turns 2 takes a task with an external_transition, and .* has none"):
        ippo_llm.main(make_args(tmp_path, num_turns=2), task)


@pytest.mark.parametrize("script", [ippo_llm, iac_llm], ids=["ippo", "iac"])
def test_a_run_of_several_turns_writes_them(tmp_path, script):
    import csv
    import json

    args = make_args(tmp_path, script, num_turns=2, max_new_tokens=4, train_size=8, eval_size=4)
    task = two_turns(eval_dataset=two_turns().train_dataset)
    script.main(args, task)
    (row,) = csv.DictReader(open(tmp_path / "run/metrics.csv"))
    # of 8 episodes all but one have a second turn: 1 + 2 a piece, and 1
    assert float(row["reward_mean"]) == pytest.approx((7 * 3 + 1) / 8)
    assert (float(row["turn_1/reward_mean"]), float(row["turn_2/reward_mean"])) == (1.0, 2.0)
    assert float(row["turns"]) == 15 / 8 and float(row["eval/reward_mean"]) == pytest.approx((3 * 3 + 1) / 4)
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        played = 1 if sample["item"]["number"] == 1 else 2
        assert [len(texts) for texts in sample["completions"]] == [played] * 2
        assert sample["rewards"] == [[1.0, 2.0][:played]] * 2 and sample["reward"] == sum([1, 2][:played])
        assert [len(prompts) for prompts in sample["prompts"]] == [played] * 2


def test_iac_is_ippo_without_lambda_and_ippo_with_one_is_the_return_less_the_value():
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.arange(6) < torch.tensor([6, 1, 4, 3])[:, None]).double()
    for ours, theirs in zip(td_error(rewards, values, mask, 0.9), gae(rewards, values, mask, 0.9, 0.0)):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    advantages, _ = gae(rewards, values, mask, 1.0, 1.0)
    to_come = (rewards * mask).flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(advantages, (to_come - values) * mask, atol=1e-6, rtol=0)


def test_td_errors_and_targets_equal_a_loop_in_float64():
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    lengths = [5, 1, 3]
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).double()
    advantages, returns = td_error(rewards, values, mask, 0.7)
    for row, length in enumerate(lengths):
        for t in range(5):
            following = values[row, t + 1].item() if t + 1 < length else 0.0
            target = (rewards[row, t].item() + 0.7 * following) * (t < length)
            assert returns[row, t].item() == pytest.approx(target, abs=1e-12)
            assert advantages[row, t].item() == pytest.approx(
                (target - values[row, t].item()) * (t < length), abs=1e-12
            )


def test_with_one_turn_as_the_action_iac_and_ippo_have_the_same_gradient(model, tokenizer, prompts, accelerator):
    gradients = []
    for script, algorithm in ((ippo_llm, "ippo"), (iac_llm, "iac")):
        args = make_args(script=script, action_granularity="turn", gamma=GAMMA)
        agent = randomise_value_head(script.Agent(args, model, tokenizer))
        rollout = script.sample(agent, prompts, args, torch.Generator().manual_seed(0))
        rewards = torch.randn(5, generator=torch.Generator().manual_seed(1))
        estimate(agent, model, rollout, rewards, args, accelerator, ESTIMATES[algorithm])
        batch = rollout.select(torch.arange(5))
        script.losses(agent, batch, batch.mask.sum(), batch.action_mask.sum(), args)["loss"].backward()
        gradients.append({name: p.grad for name, p in agent.named_parameters()})
    assert sum(grad.abs().sum() for grad in gradients[0].values()) > 0
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], atol=1e-6, rtol=0, msg=name)
