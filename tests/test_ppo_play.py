"""Playing episodes in ppo_llm: what stands in a transcript, when an episode ends, and games that fail."""

import copy
from pathlib import Path

import pytest
import torch
from helpers import make_ppo_agents, make_ppo_args, read_metrics, seeded
from safetensors.torch import load_file
from tokenizers.processors import TemplateProcessing

import ppo_llm
from utils.cli import TaskError, UserError
from utils.tasks import number

NO_PHASE = {"generator": None, "phase": lambda name: None}


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of a tokenizer and flags: (agents, args)."""

    def build(own_tokenizer=None, **flags):
        args = ppo_llm.resolve_args(make_ppo_args(**flags))
        return make_ppo_agents(loaded_model, own_tokenizer or tokenizer, args), args

    return build


def script_responses(monkeypatch, answers):
    """Let agents answer with these ids, a list for each call of `sample`; returns the list of prompts they read."""
    prompts_read = []

    def sample(agent, prompts, args, generator):
        prompts_read.append(copy.deepcopy(prompts))
        response_ids = answers.pop(0)
        logprobs = [[-0.1 * token for token in ids] for ids in response_ids]
        return response_ids, logprobs, agent.tokenizer.batch_decode(response_ids, skip_special_tokens=True)

    monkeypatch.setattr(ppo_llm, "sample", sample)
    return prompts_read


# --- In an environment ------------------------------------------------------------------------------------------------


class Games:
    """Six games, by seed, which go on as `observations` say after each turn. A digit is a token."""

    observations = {1: "again", 2: "7" * 24, 3: "7" * 40, 4: "cut short", 5: "7" * 23}

    def reset(self, seed):
        self.seed = seed
        self.turn = 0
        return f"game {seed}", {}

    def step(self, response):
        self.turn += 1
        return self.observations.get(self.seed, "over"), float(self.turn), self.seed == 0, self.seed == 4, {}


class Match:
    """The six games played with fixed responses, of a tokenizer whose chat template is its own, none or another's."""

    def __init__(self, make, tokenizer, monkeypatch, template):
        self.template = template
        self.end = "<|system|>" if template == "another end" else "<|end|>"
        self.tokenizer = copy.deepcopy(tokenizer)
        if template == "none":
            self.tokenizer.chat_template = None
        else:
            self.tokenizer.chat_template = self.tokenizer.chat_template.replace("<|end|>", self.end)
        END = self.tokenizer.convert_tokens_to_ids(self.end)
        first = [[510, END], [50, 51, 52, 53, 54], [60, END], [70, 71, END], [80, END], [85, END]]
        second = [[55, 56, 57, 58, 59], [86, 87, 88, 89, END]]
        third = [[90, 91, 92, 93, 94]]
        agents, args = make(self.tokenizer, max_model_len=40)
        answers = [first, second, third]
        self.prompts_read = script_responses(monkeypatch, answers)
        items = [{"seed": k} for k in range(6)]
        self.rollout = ppo_llm.play_environment(agents[0], Games, items, args, **NO_PHASE)
        assert answers == []
        cut = self.observed("again", self.end)  # the end that was not sampled is no action
        self.pieces = [  # of each game: ids and the turn in which they were sampled, or -1
            [self.prompt("game 0"), (first[0], 0)],
            [self.prompt("game 1"), (first[1], 0), cut, (second[0], 1), cut, (third[0], 2)],
            [self.prompt("game 2"), (first[2], 0), self.observed("7" * 24)],  # room for 4 more tokens, not for 5
            [self.prompt("game 3"), (first[3], 0)],  # no room for the observation
            [self.prompt("game 4"), (first[4], 0), self.observed("cut short")],
            [self.prompt("game 5"), (first[5], 0), self.observed("7" * 23), (second[1], 1)],
        ]

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def observed(self, text, before=""):
        if self.template == "none":
            return self.ids(f"\n\n{text}\n\n"), -1
        return self.ids(f"{before}<|user|>{text}{self.end}<|assistant|>"), -1

    def prompt(self, text):
        return (self.ids(f"{text}\n\n"), -1) if self.template == "none" else self.observed(text)


@pytest.fixture(params=["own", "none", "another end"])
def match(request, make, tokenizer, monkeypatch):
    return Match(make, tokenizer, monkeypatch, request.param)


def test_a_transcript_is_prompt_response_observation_response(match):
    rollout = match.rollout
    for b, (prompt, *rest) in enumerate(match.pieces):
        assert rollout.prompt_ids[b, 0][rollout.prompt_mask[b, 0] == 1].tolist() == prompt[0]
        response_ids = rollout.response_ids[b, 0][rollout.response_mask[b, 0] == 1].tolist()
        assert response_ids == [token for ids, _ in rest for token in ids]


def test_only_what_was_sampled_has_a_turn(match):
    rollout = match.rollout
    for b, (_, *rest) in enumerate(match.pieces):
        turns = rollout.turn_of_token[b, 0][rollout.response_mask[b, 0] == 1].tolist()
        assert turns == [turn for ids, turn in rest for _ in ids]


def test_only_what_was_sampled_has_a_logprob(match):
    rollout = match.rollout
    expected = -0.1 * rollout.response_ids * rollout.mask
    torch.testing.assert_close(rollout.logprobs, expected)


def test_responses_are_texts_turn_by_turn(match):
    for texts, pieces in zip(match.rollout.responses, match.pieces, strict=True):
        assert texts == [match.tokenizer.decode(ids, skip_special_tokens=True) for ids, turn in pieces if turn >= 0]


def test_each_turn_reads_the_whole_transcript(match):
    flat = [[ids for ids, _ in pieces] for pieces in match.pieces]
    second = [sum(flat[1][:3], []), sum(flat[5][:3], [])]
    third = [sum(flat[1][:5], [])]
    assert match.prompts_read == [[ids[0] for ids in flat], second, third]


def test_a_transcript_is_no_longer_than_max_model_len(match):
    lengths = [sum(len(ids) for ids, _ in pieces) for pieces in match.pieces]
    assert (lengths[2], lengths[5]) == (36, 40)


def test_episodes_that_are_cut_short_are_truncated(match):
    assert match.rollout.truncated.tolist() == [0, 0, 1, 1, 1, 1]


def test_the_horizon_is_no_truncation(match):
    assert match.rollout.played[1].all() and match.rollout.truncated[1] == 0


def test_rewards_are_those_of_the_turns_played(match):
    expected = [[1, 0, 0], [1, 2, 3], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 2, 0]]
    assert match.rollout.rewards.tolist() == expected
    assert match.rollout.processed_rewards.tolist() == expected


def test_prompts_are_the_first_and_the_observations(match):
    assert match.rollout.prompts[1][1:] == ["again", "again"]
    assert match.ids(match.rollout.prompts[1][0]) == match.pieces[1][0][0]


FRAGILE = """
class Env:
    def reset(self, seed):
        self.seed, self.turn = seed % 8, 0
        if self.seed == 0:
            raise RuntimeError("no start")
        return f"game {self.seed}", {}

    def step(self, response):
        self.turn += 1
        if self.seed == 1 and self.turn == 2:
            raise KeyError("no step")
        return "lower " * (60 if self.seed > 5 else 1), float(len(response)), False, False, {}
"""


@pytest.fixture(scope="module")
def fragile(tmp_path_factory):
    """The folder of a run in an environment that fails in two of eight games; two of the others are cut short."""
    folder = tmp_path_factory.mktemp("fragile")
    (folder / "fragile.py").write_text(FRAGILE)
    ppo_llm.main(make_ppo_args(folder, env=str(folder / "fragile.py"), train_size=8, max_model_len=60))
    return folder / "run"


def test_games_that_fail_are_dropped(fragile):
    (row,) = read_metrics(fragile)
    assert (float(row["dropped"]), float(row["truncated"])) == (2, 2)
    assert float(row["turns"]) == pytest.approx((4 * 3 + 2 * 1) / 6)  # of games 2 to 5, and of 6 and 7, cut short


def test_the_other_games_are_learned_from(fragile):
    actor = load_file(fragile / "agent_0/actor/adapter_model.safetensors")
    assert all(weight.any() for name, weight in actor.items() if "lora_B" in name)


def test_a_game_that_is_dropped_is_named(make, tmp_path, capsys):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    agents, args = make(env=str(tmp_path / "fragile.py"), max_model_len=60)
    factory, _ = ppo_llm.load_env(args.env, 3)
    ppo_llm.play_environment(agents[0], factory, [{"seed": 8}, {"seed": 9}, {"seed": 10}], args, **NO_PHASE)
    output = capsys.readouterr().out
    assert "the episode of seed 8 is dropped: RuntimeError: no start (reset)" in output
    assert "the episode of seed 9 is dropped: KeyError: 'no step' (turn 2)" in output


def test_games_that_all_fail_end_the_run_in_a_line(make, monkeypatch):
    monkeypatch.setattr(Games, "close", lambda self: 1 / 0, raising=False)
    agents, args = make(max_model_len=40)
    with pytest.raises(TaskError, match="the environment failed in all 1 episodes, at first with ZeroDivisionError"):
        ppo_llm.play_environment(agents[0], Games, [{"seed": 3}], args, **NO_PHASE)


# --- On a task --------------------------------------------------------------------------------------------------------


class Relay:
    """A task of two agents and three episodes, of one turn, of two and of three; each reads the other's response."""

    def formatters(self, item, agent):
        return f"{item['k']}{'ab'[agent]}"

    def reward_func(self, first, second, turn, items):
        return [float(10 * item["k"] + turn) for item in items], [float(-turn) for _ in items]

    def external_transition(self, agent_completions, item, turn):
        return None if turn == item["k"] else [f"{turn}{text}" for text in reversed(agent_completions)]

    def reward_processor(self, reward):
        return reward / 2


@pytest.fixture
def relay(make, tokenizer, monkeypatch):
    """The two rollouts of the relay."""
    agents, args = make(task="number", num_agents=2)
    digits = {str(n): tokenizer(str(n), add_special_tokens=False).input_ids for n in range(10)}
    responses = [
        ["1", "2", "3"],
        ["4", "5", "6"],
        ["2", "7"],
        ["8", "3"],
        ["9"],
        ["1"],
    ]  # agent 0, agent 1, agent 0 ...
    script_responses(monkeypatch, [[digits[text] for text in texts] for texts in responses])
    return ppo_llm.play_task(agents, Relay(), [{"k": 0}, {"k": 1}, {"k": 2}], args, **NO_PHASE)


def test_an_agent_of_a_team_has_its_own_responses(relay):
    assert relay[0].responses == [["1"], ["2", "2"], ["3", "7", "9"]]
    assert relay[1].responses == [["4"], ["5", "8"], ["6", "3", "1"]]


def test_each_turn_of_a_task_has_a_prompt_of_its_own(relay):
    assert relay[0].prompts == [["0a"], ["1a", "05"], ["2a", "06", "13"]]
    assert relay[1].prompts == [["0b"], ["1b", "02"], ["2b", "03", "17"]]


def test_an_episode_of_a_task_that_ended_early_has_empty_rows(relay):
    for rollout in relay:
        assert rollout.has_tokens.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
        assert rollout.played.tolist() == rollout.has_tokens.tolist()


def test_a_token_of_a_task_has_its_turn(relay):
    for rollout in relay:
        for r in range(3):
            assert set(rollout.turn_of_token[2, r].tolist()) - {-1} == {r}


def test_agents_have_their_own_rewards(relay):
    assert relay[0].rewards.tolist() == [[0, 0, 0], [10, 11, 0], [20, 21, 22]]
    assert relay[1].rewards.tolist() == [[0, 0, 0], [0, -1, 0], [0, -1, -2]]


def test_what_is_learned_from_are_the_processed_rewards(relay):
    for rollout in relay:
        assert torch.equal(rollout.processed_rewards, rollout.rewards / 2)


def test_an_episode_ends_after_a_reward_above_the_threshold(make):
    agents, args = make(task="number", early_termination_threshold=-1.0)
    (rollout,) = ppo_llm.play(agents, number, list(number.train_dataset(4, 0)), args, seeded(), lambda name: None)
    assert rollout.played.sum() == 4


# --- Prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_without_a_token_is_refused(make):
    agents, args = make()
    with pytest.raises(UserError, match="a prompt has no tokens: ''"):
        ppo_llm.encode_prompt("", agents[0].tokenizer, args)


def test_a_prompt_that_leaves_no_room_is_refused(make):
    agents, args = make(max_model_len=10)
    with pytest.raises(UserError, match="--max-output-tokens 5 after a prompt of 6 exceeds --max-model-len 10"):
        ppo_llm.encode_prompt("777777", agents[0].tokenizer, args)


def test_a_prompt_may_fill_the_room(make):
    agents, args = make(max_model_len=10)
    assert len(ppo_llm.encode_prompt("77777", agents[0].tokenizer, args)) == 5


def test_a_first_token_of_the_tokenizers_own_is_read_once(make, tokenizer):
    with_first = copy.deepcopy(tokenizer)
    first = with_first.convert_tokens_to_ids("<|system|>")
    processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", first)])
    with_first.backend_tokenizer.post_processor = processor
    assert with_first("7").input_ids == [first, *tokenizer("7").input_ids]
    agents, args = make(with_first, task="number", num_agents=2)
    rollout, _ = ppo_llm.play_task(agents, Relay(), [{"k": 0}], args, **NO_PHASE)
    prompt_ids = rollout.prompt_ids[0, 0][rollout.prompt_mask[0, 0] == 1].tolist()
    assert prompt_ids == [first, *tokenizer("0a").input_ids]


def test_a_tokenizer_without_a_padding_token_gets_one(loaded_model, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    args = ppo_llm.resolve_args(make_ppo_args())
    _, own = ppo_llm.load_base(args, torch.device("cpu"), loaded_model, bare)
    assert own.pad_token == tokenizer.eos_token
    assert bare.pad_token is None


def test_a_run_takes_a_tokenizer_without_a_padding_token(tmp_path, model, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    _, run = ppo_llm.main(make_ppo_args(tmp_path, train_size=8, evaluation_interval=0), model=model, tokenizer=bare)
    assert run.step == 1
    assert Path(tmp_path / "run/agent_0/tokenizer_config.json").is_file()
