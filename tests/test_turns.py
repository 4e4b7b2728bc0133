"""Episodes of several turns in a script: what each agent sees, what it learns from, what the run writes."""

import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from helpers import learning_targets, make_agent, make_args, read_metrics, seeded

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
from ippo_llm import play

SCRIPTS = pytest.mark.parametrize(
    "script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow), maac_llm, magrpo_llm]
)
PLAIN = {"reward_normalization": False, "advantage_normalization": False, "kl_coef": 0.0, "value_clip_range": None}
GAMMA = 0.9
LAMBDA = 0.8


def train_dataset(size, seed):
    return datasets.Dataset.from_list([{"number": k} for k in range(size)])


def formatters(item, agent):
    return f"Agent {agent}, guess {item['number']}."


def reward_func(*texts, turn):
    return [turn + 1.0] * len(texts[0])


def external_transition(prompt_history_per_agent, response_history_per_agent, item):
    """Episode 1 ends after its first turn; else each agent is shown its own history."""
    if item["number"] == 1:
        return None
    histories = zip(prompt_history_per_agent, response_history_per_agent)
    return [f"{prompts[-1]} {responses[-1]} lower" for prompts, responses in histories]


def task_of_turns(**functions):
    task = {"train_dataset": train_dataset, "formatters": formatters, "reward_func": reward_func}
    return SimpleNamespace(**(task | {"external_transition": external_transition} | functions))


@pytest.fixture
def agents(model, tokenizer):
    return [make_agent(make_args(), model, tokenizer, "separate", seed) for seed in range(2)]


def play_items(agents, num_items, args):
    """Rollouts of the agents, for items 0, 1, ..., of which 1 has one turn."""
    items = train_dataset(num_items, 0).to_list()
    return play(agents, task_of_turns(), items, args, seeded())


# --- Rollouts ---------------------------------------------------------------------------------------------------------


def test_a_turn_that_was_not_played_is_0_everywhere(agents):
    for rollout in play_items(agents, 3, make_args(num_turns=2, max_new_tokens=6)):
        assert rollout.played.tolist() == [[True, True], [True, False], [True, True]]
        assert rollout.raw_rewards.tolist() == [[1.0, 2.0], [1.0, 0.0], [1.0, 2.0]]
        assert [len(texts) for texts in rollout.responses] == [len(texts) for texts in rollout.prompts] == [2, 1, 2]
        for name in ("ids", "attention_mask", "response_mask", "logprobs", "values", "rewards"):
            assert not getattr(rollout, name)[1, 1].any()


def test_an_agent_sees_its_own_history_as_the_transition_gives_it(agents):
    for i, rollout in enumerate(play_items(agents, 2, make_args(num_turns=3, max_new_tokens=4))):
        first = f"Agent {i}, guess 0."
        second = f"{first} {rollout.responses[0][0]} lower"
        third = f"{second} {rollout.responses[0][1]} lower"
        assert rollout.prompts == [[first, second, third], [f"Agent {i}, guess 1."]]


def test_ids_and_mask_of_all_turns_are_those_of_the_texts(agents, tokenizer):
    for rollout in play_items(agents, 2, make_args(num_turns=3, max_new_tokens=4)):
        for b, t in rollout.played.nonzero().tolist():
            ids = rollout.ids[b, t][rollout.attention_mask[b, t] == 1]
            response_ids = rollout.response_ids[b, t][rollout.response_mask[b, t] == 1]
            assert torch.equal(ids[-len(response_ids) :], response_ids)
            assert tokenizer.decode(ids[: -len(response_ids)]) == rollout.prompts[b][t]
            assert tokenizer.decode(response_ids, skip_special_tokens=True) == rollout.responses[b][t]


@pytest.mark.parametrize("threshold, num_turns", [(None, [2, 2]), (0.5, [2, 1]), (0.75, [2, 2]), (0.0, [1, 1])])
def test_the_threshold_is_for_the_mean_of_the_agents_as_reward_func_gave_it(agents, threshold, num_turns):
    task = task_of_turns(
        reward_func=lambda first, second, items: [[item["number"] / 6 for item in items], [0.5] * len(items)],
        reward_processor=lambda reward: -reward,
        external_transition=lambda item: ["Again."] * 2,
    )
    items = [{"number": 0}, {"number": 6}]  # means of 0.25 and 0.75
    args = make_args(num_turns=2, max_new_tokens=4, early_termination_threshold=threshold)
    for rollout in play(agents, task, items, args, seeded()):
        assert rollout.played.sum(1).tolist() == num_turns


def test_the_task_is_asked_for_next_prompts_between_turns_alone(agents):
    asked = []

    def external_transition(item, turn):
        asked.append((item["number"], turn))
        return ["Again."] * 2

    task = task_of_turns(external_transition=external_transition)
    play(agents, task, train_dataset(2, 0).to_list(), make_args(num_turns=3, max_new_tokens=4), seeded())
    assert asked == [(0, 0), (1, 0), (0, 1), (1, 1)]


# --- Learning ---------------------------------------------------------------------------------------------------------


def actions_of(agent, rollout, episode, granularity):
    """(reward, value, turn, position) of each action of an episode, one sequence at a time, without padding."""
    actions = []
    for turn, prompt in enumerate(rollout.prompts[episode]):
        prompt_ids = agent.tokenizer(prompt, add_special_tokens=False).input_ids
        length = int(rollout.response_mask[episode, turn].sum())
        ids = torch.tensor([prompt_ids + rollout.response_ids[episode, turn, :length].tolist()])
        with torch.no_grad():
            hidden_states = agent.critic(ids).last_hidden_state
            values = agent.value_head(hidden_states)[0, len(prompt_ids) - 1 : -1].tolist()
        reward = turn + 1.0
        if granularity == "turn":
            actions.append((reward, values[0], turn, 0))
        else:
            for t in range(length):
                actions.append((reward if t == length - 1 else 0.0, values[t], turn, t))
    return actions


@pytest.mark.parametrize("script", [ippo_llm, pytest.param(iac_llm, marks=pytest.mark.slow)])
@pytest.mark.parametrize("granularity", ["token", "turn"])
def test_episodes_of_one_and_two_turns_learn_from_their_chains(agents, granularity, script):
    flags = {"num_turns": 2, "max_new_tokens": 6, "action_granularity": granularity, "gamma": GAMMA, **PLAIN}
    decay = 0.0
    if script is ippo_llm:
        flags["gae_lambda"] = LAMBDA
        decay = GAMMA * LAMBDA
    args = make_args(script=script, **flags)
    for agent, rollout in zip(agents, play_items(agents, 3, args)):
        _, advantages, returns, action_mask = learning_targets(agent, rollout, args, script)
        num_actions = 0
        for episode in range(3):
            actions = actions_of(agent, rollout, episode, granularity)
            num_actions += len(actions)
            advantage = 0.0
            next_value = 0.0
            for reward, value, turn, position in reversed(actions):
                advantage = reward + GAMMA * next_value - value + decay * advantage
                next_value = value
                assert action_mask[episode, turn, position] == 1
                assert advantages[episode, turn, position].item() == pytest.approx(advantage, abs=2e-5)
                assert returns[episode, turn, position].item() == pytest.approx(advantage + value, abs=2e-5)
        assert num_actions == action_mask.sum()


# --- Runs -------------------------------------------------------------------------------------------------------------


@SCRIPTS
def test_a_run_of_several_turns_writes_them(tmp_path, script):
    groups = {"num_generations": 2, "rollout_buffer_size": 32} if script is magrpo_llm else {}
    args = make_args(tmp_path, script, num_turns=2, max_new_tokens=4, train_size=8, eval_size=4, **groups)
    script.main(args, task_of_turns(eval_dataset=train_dataset))
    (row,) = read_metrics(tmp_path / "run")
    # of 8 episodes all but one have a second turn: 1 + 2 a piece, and 1
    assert float(row["reward_mean"]) == pytest.approx((7 * 3 + 1) / 8)
    assert (float(row["turn_1/reward_mean"]), float(row["turn_2/reward_mean"])) == (1.0, 2.0)
    assert float(row["turns"]) == 15 / 8
    assert float(row["eval/reward_mean"]) == pytest.approx((3 * 3 + 1) / 4)
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        num_turns = 1 if sample["item"]["number"] == 1 else 2
        assert [len(texts) for texts in sample["completions"]] == [num_turns] * 2
        assert [len(prompts) for prompts in sample["prompts"]] == [num_turns] * 2
        assert sample["rewards"] == [[1.0, 2.0][:num_turns]] * 2
        assert sample["reward"] == sum([1.0, 2.0][:num_turns])
