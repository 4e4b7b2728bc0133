"""Tasks and games as TeamEnv plays them: what is read, what is earned, in which order players move."""

import math
import operator
import random
import time
from types import SimpleNamespace

import ippo_llm
import ppo_llm
from utils import tasks
from utils.envs import grid, guess
from utils.tasks import number, tldr


def make_env(flags, items, script=ippo_llm, task=None):
    args = script.Args(**flags)
    task = tasks.load_task(task, args, default=script)
    return getattr(task, "TeamEnv", script.TeamEnv)(task, items, args)


def test_number_says_higher_or_lower_and_pays_the_closer_the_better():
    item = number.train_dataset(1, 0)[0]
    env = make_env({"task": "number", "num_turns": 2}, [item])
    first = env.reset()
    assert [*first[0]] == [0] and first[0][0] == number.formatters(item)
    observations, rewards, truncated = env.step([{0: "1"}, {0: "1"}])
    assert rewards[0] == rewards[1] and rewards[0][0] == number.reward_func(["1"], ["1"], items=[item])[0]
    assert not truncated and all(message["role"] == "user" for message in observations[0][0])
    observations, _, _ = env.step([{0: "2"}, {0: "2"}])
    assert observations == [{}, {}]  # two turns are over


def test_a_reward_of_each_agent_stays_its_own():
    task = SimpleNamespace(
        train_dataset=lambda size, seed: [{"prompt": "p"}] * size, reward_func=lambda a, b: [[1.0], [-1.0]]
    )
    env = make_env({}, [{"prompt": "p"}], task=task)
    env.reset()
    _, rewards, _ = env.step([{0: "a"}, {0: "b"}])
    assert rewards == [{0: 1.0}, {0: -1.0}]


def test_a_reward_is_processed_and_a_task_gets_what_it_names():
    got = {}

    def reward_func(first, second, items, prompts, turns, turn, num_turns, batch_items=None):
        assert batch_items == items
        got.update(items=items, prompts=prompts, turns=turns, turn=turn, num_turns=num_turns)
        return [2.0]

    task = SimpleNamespace(
        train_dataset=lambda size, seed: [], reward_func=reward_func, reward_processor=lambda reward: 10 * reward
    )
    env = make_env({"num_turns": 3}, [{"prompt": "p"}], task=task)
    env.reset()
    _, rewards, _ = env.step([{0: "a"}, {0: "b"}])
    assert rewards == [{0: 20.0}, {0: 20.0}]
    assert got == {"items": [{"prompt": "p"}], "prompts": [["p"], ["p"]], "turns": [[["a"]], [["b"]]]} | {
        "turn": 0,
        "num_turns": 3,
    }


def test_a_reward_func_may_be_a_generator_and_a_formatter_need_not_tell_its_arguments():
    def reward_func(first, second):
        yield from (len(text) / 2 for text in first)

    task = SimpleNamespace(formatters=operator.itemgetter("prompt"), reward_func=reward_func, train_dataset=list)
    env = make_env({}, [{"prompt": "p"}, {"prompt": "q"}], task=task)
    assert env.reset() == [{0: "p", 1: "q"}] * 2
    _, rewards, _ = env.step([{0: "a", 1: "bb"}, {0: "", 1: ""}])
    assert rewards == [{0: 0.5, 1: 1.0}] * 2
    task.reward_func = lambda first, second: map(len, second)
    env = make_env({}, [{"prompt": "p"}], task=task)
    env.reset()
    assert env.step([{0: ""}, {0: "abc"}])[1] == [{0: 3.0}] * 2


def test_a_task_may_go_on_with_the_prompts_that_it_is_shown():
    first = [{"role": "user", "content": "Write."}]
    more = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "On."}]

    def external_transition(prompt_history_per_agent):
        chats = [own[-1] for own in prompt_history_per_agent]
        for chat in chats:
            chat += more
        return chats

    task = SimpleNamespace(formatters=lambda item: item["chat"], reward_func=lambda *texts: [0.0], train_dataset=list)
    task.external_transition = external_transition
    item = {"chat": first}
    env = make_env({"num_turns": 2}, [item], task=task)
    env.reset()
    observations, _, _ = env.step([{0: "a"}, {0: "a"}])
    assert observations == [{0: more[1:]}] * 2 and item["chat"] == [{"role": "user", "content": "Write."}]


def test_a_game_ends_is_truncated_and_reads_its_last_observation():
    class Game:
        def reset(self, seed):
            return f"game {seed}", {}

        def step(self, answer):
            return "after", 1.0, answer == "end", answer == "cut", {}

    args = ppo_llm.Args(num_turns=2)
    env = tasks.load_task(Game, args, default=ppo_llm)
    env = env.TeamEnv(env, [{"seed": k} for k in range(3)], args)
    assert [chat[0]["content"] for chat in env.reset()[0].values()] == ["game 0", "game 1", "game 2"]
    observations, rewards, truncated = env.step([{0: "end", 1: "cut", 2: "on"}])
    assert rewards == [{0: 1.0, 1: 1.0, 2: 1.0}] and truncated == {1} and observations[0].keys() == {1, 2}
    observations, rewards, _ = env.step([{2: "on"}])
    assert observations == [{}] and rewards == [{2: 1.0}] and not env.failed


def test_guessing_the_middle_earns_the_optimum_on_average():
    scores = []
    for secret_seed in range(400):
        env = ppo_llm.Env()
        env.reset(secret_seed)
        low, high, score, is_over = 1, 16, 0.0, False
        while not is_over:
            middle = (low + high) // 2
            observation, reward, is_over, _, _ = env.step(str(middle))
            score += reward
            low, high = (middle + 1, high) if observation == "higher" else (low, middle - 1)
        scores.append(score)
    assert math.isclose(guess.optimum(6), 29 / 48)
    assert abs(sum(scores) / len(scores) - 29 / 48) < 0.03


def test_the_scripts_game_is_the_one_of_its_name():
    rng = random.Random(1)
    for seed in range(50):
        here, there = ppo_llm.Env(), guess.Env()
        assert here.reset(seed) == there.reset(seed)
        is_over = False
        while not is_over:
            answer = str(rng.randint(0, 18)) if rng.random() < 0.9 else "what"
            step = here.step(answer)
            assert step[1:] == there.step(answer)[1:]
            is_over = step[2]


def test_the_default_task_is_tldr():
    items = tldr.train_dataset(4, 1)
    assert [*items] == [*ippo_llm.train_dataset(4, 1)]
    texts = (["one two three four five six seven eight."] * 4, [f"{item['prompt']} Then more." for item in items])
    assert ippo_llm.reward_func(*texts, items=items) == tldr.reward_func(*texts, items=items)
    assert grid.Env().reset(seed=0)[0]


def test_batches_are_passes_over_all_items():
    args = ippo_llm.Args(rollout_buffer_size=4, num_generations=2, num_train_epochs=3)
    batches = tasks.shuffled_batches([*range(5)], args)
    assert len(batches) == 7 and all(len(batch) == 2 for batch in batches)
    seen = [item for update in range(len(batches)) for item in batches[update]]
    assert sorted(seen[:5]) == sorted(seen[5:10]) == [*range(5)] and seen[:5] != seen[5:10]
    args = ippo_llm.Args(rollout_buffer_size=4, num_train_epochs=3, max_episodes=5)
    assert len(tasks.shuffled_batches([*range(40)], args)) == 2


def test_passes_are_drawn_as_they_are_needed_and_in_any_order():
    flags = {"rollout_buffer_size": 4, "num_train_epochs": 2_000_000_000, "max_episodes": 32}
    start = time.monotonic()
    batches = tasks.shuffled_batches([*range(6)], ippo_llm.Args(**flags))
    assert len(batches) == 8 and time.monotonic() - start < 1
    in_order = [batches[update] for update in range(8)]
    again = tasks.shuffled_batches([*range(6)], ippo_llm.Args(**flags))
    assert [again[update] for update in reversed(range(8))] == in_order[::-1]
    endless = tasks.shuffled_batches([*range(6)], ippo_llm.Args(**flags | {"max_episodes": None}))
    assert len(endless) == 3_000_000_000 and [endless[update] for update in range(8)] == in_order
