"""Playing episodes in ppo_llm: what stands in a transcript, when an episode ends, and games that fail."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_ppo_agents, make_ppo_args, read_metrics, seeded
from tokenizers.processors import TemplateProcessing

import ppo_llm
from utils import envs
from utils.cli import TaskError, UserError
from utils.models.prompts import render
from utils.tasks import number


@pytest.fixture
def make(loaded_model, tokenizer):
    """A function of a tokenizer and flags: (agents, args)."""

    def build(own_tokenizer=None, **flags):
        args = ppo_llm.resolve_args(make_ppo_args(**flags))
        return make_ppo_agents(loaded_model, own_tokenizer or tokenizer, args), args

    return build


def script_responses(monkeypatch, answers):
    """Let agents answer with these ids, a list for each agent in each turn; returns the list of what they read."""
    read = []

    def sample_tokens(agent, transcripts, args, generator, greedy):
        read.append([transcript.ids for transcript in transcripts])
        for transcript, ids in zip(transcripts, answers.pop(0), strict=True):
            text = agent.tokenizer.decode(ids, skip_special_tokens=True)
            transcript.add_response(ids, [-0.1 * token for token in ids], text)

    monkeypatch.setattr(ppo_llm, "sample_tokens", sample_tokens)
    return read


def with_template(tokenizer, template):
    """A tokenizer whose chat template is its own, none or another's, and how that ends a message."""
    tokenizer = copy.deepcopy(tokenizer)
    end = "<|system|>" if template == "another end" else "<|end|>"
    own = tokenizer.chat_template.replace("<|end|>", end)
    tokenizer.chat_template = None if template == "none" else own
    return tokenizer, end


TEMPLATES = ["own", "none", "another end"]


def prompt_of(rollout, b):
    """The ids of the prompt in a row of a rollout."""
    P = rollout.ids.shape[1] - rollout.turn_of_token.shape[1]
    return rollout.ids[b, :P][rollout.attention_mask[b, :P] == 1].tolist()


def rest_of(rollout, b, name="response_ids"):
    """What stands after the prompt in a row of a rollout: its ids, their turns, or the like."""
    L = rollout.turn_of_token.shape[1]
    return getattr(rollout, name)[b][rollout.attention_mask[b, -L:] == 1].tolist()


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
        self.tokenizer, self.end = with_template(tokenizer, template)
        END = self.tokenizer.convert_tokens_to_ids(self.end)
        first = [[510, END], [50, 51, 52, 53, 54], [60, END], [70, 71, END], [80, END], [85, END]]
        second = [[55, 56, 57, 58, 59], [86, 87, 88, 89, END]]
        third = [[90, 91, 92, 93, 94]]
        agents, args = make(self.tokenizer, max_model_len=40)
        answers = [first, second, third]
        self.prompts_read = script_responses(monkeypatch, answers)
        items = [{"seed": k} for k in range(6)]
        (self.rollout,) = ppo_llm.play(agents, Games, items, args, None)
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


@pytest.fixture(params=TEMPLATES)
def match(request, make, tokenizer, monkeypatch):
    return Match(make, tokenizer, monkeypatch, request.param)


def test_a_transcript_is_prompt_response_observation_response(match):
    rollout = match.rollout
    for b, (prompt, *rest) in enumerate(match.pieces):
        assert prompt_of(rollout, b) == prompt[0]
        assert rest_of(rollout, b) == [token for ids, _ in rest for token in ids]


def test_only_what_was_sampled_has_a_turn(match):
    rollout = match.rollout
    for b, (_, *rest) in enumerate(match.pieces):
        assert rest_of(rollout, b, "turn_of_token") == [turn for ids, turn in rest for _ in ids]


def test_only_what_was_sampled_has_a_logprob(match):
    rollout = match.rollout
    expected = -0.1 * rollout.response_ids * rollout.response_mask
    torch.testing.assert_close(rollout.logprobs, expected)


def test_each_turn_reads_the_whole_transcript(match):
    flat = [[ids for ids, _ in pieces] for pieces in match.pieces]
    second = [sum(flat[1][:3], []), sum(flat[5][:3], [])]
    third = [sum(flat[1][:5], [])]
    assert match.prompts_read == [[ids[0] for ids in flat], second, third]


def test_episodes_that_are_cut_short_are_truncated(match):
    assert match.rollout.truncated.tolist() == [0, 0, 1, 1, 1, 1]


def test_rewards_are_those_of_the_turns_played(match):
    expected = [[1, 0, 0], [1, 2, 3], [1, 0, 0], [1, 0, 0], [1, 0, 0], [1, 2, 0]]
    assert match.rollout.rewards.tolist() == expected
    assert match.rollout.raw_rewards.tolist() == expected


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


def test_games_that_all_fail_end_the_run_in_a_line(make, monkeypatch):
    monkeypatch.setattr(Games, "close", lambda self: 1 / 0, raising=False)
    agents, args = make(max_model_len=40)
    with pytest.raises(TaskError, match="the environment failed in all 1 episodes, at first with ZeroDivisionError"):
        ppo_llm.play(agents, Games, [{"seed": 3}], args, seeded())


def test_a_game_that_is_dropped_has_no_turn(make, tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    agents, args = make(env=str(tmp_path / "fragile.py"))
    factory, _ = envs.load_env(args.env, 3)
    (rollout,) = ppo_llm.play(agents, factory, [{"seed": 8}, {"seed": 9}, {"seed": 10}], args, seeded())
    assert rollout.played.tolist() == [[False] * 3, [False] * 3, [True] * 3]
    assert not rollout.response_mask[:2].any() and not rollout.rewards[:2].any() and not rollout.truncated[:2].any()
    assert rollout.responses[:2] == [[], []]


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


RELAYED = [["1", "2", "3"], ["4", "5", "6"], ["2", "7"], ["8", "3"], ["9"], ["1"]]  # of agent 0, of 1, of 0 ...


@pytest.fixture
def play_relay(make, tokenizer, monkeypatch):
    """A function of responses and flags: the agents, the args and the two rollouts of the relay."""

    def play(responses=RELAYED, **flags):
        agents, args = make(task="number", num_agents=2, **flags)
        digits = {str(n): tokenizer(str(n), add_special_tokens=False).input_ids for n in range(10)}
        script_responses(monkeypatch, [[digits[text] for text in texts] for texts in responses])
        return agents, args, ppo_llm.play(agents, Relay(), [{"k": 0}, {"k": 1}, {"k": 2}], args, None)

    return play


@pytest.fixture
def relay(play_relay):
    """The two rollouts of the relay."""
    return play_relay()[2]


def test_an_agent_of_a_team_has_its_own_responses(relay):
    assert relay[0].responses == [["1"], ["2", "2"], ["3", "7", "9"]]
    assert relay[1].responses == [["4"], ["5", "8"], ["6", "3", "1"]]


def test_each_turn_of_a_task_has_a_prompt_of_its_own(relay):
    assert relay[0].prompts == [["0a"], ["1a", "05"], ["2a", "06", "13"]]
    assert relay[1].prompts == [["0b"], ["1b", "02"], ["2b", "03", "17"]]


def test_an_episode_of_a_task_that_ended_early_has_no_later_turns(relay):
    for rollout in relay:
        assert rollout.played.tolist() == [[True, False, False], [True, True, False], [True, True, True]]
        assert not rollout.truncated.any()


def test_an_episode_of_a_task_is_one_transcript(relay, tokenizer):
    def ids(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    first, second = ids("<|end|><|user|>06<|end|><|assistant|>"), ids("<|end|><|user|>13<|end|><|assistant|>")
    assert prompt_of(relay[0], 2) == ids("2a")
    assert rest_of(relay[0], 2) == [*ids("3"), *first, *ids("7"), *second, *ids("9")]
    holes = [-1] * len(first)
    assert rest_of(relay[0], 2, "turn_of_token") == [0, *holes, 1, *holes, 2]


def test_agents_have_their_own_rewards(relay):
    assert relay[0].raw_rewards.tolist() == [[0, 0, 0], [10, 11, 0], [20, 21, 22]]
    assert relay[1].raw_rewards.tolist() == [[0, 0, 0], [0, -1, 0], [0, -1, -2]]


def test_what_is_learned_from_are_the_processed_rewards(relay):
    for rollout in relay:
        assert torch.equal(rollout.rewards, rollout.raw_rewards / 2)


# --- A task without room ----------------------------------------------------------------------------------------------

SHORT = [RELAYED[0], RELAYED[1], RELAYED[2], RELAYED[3]]  # the third turn is not played


@pytest.mark.parametrize("room, observed", [(15, 0), (16, 6), (20, 6)])  # 10 tokens, then 6, then a response of 5
def test_a_transcript_of_a_task_without_room_is_truncated(play_relay, room, observed):
    _, _, rollouts = play_relay(SHORT, max_model_len=room)
    for rollout in rollouts:
        assert rollout.truncated.tolist() == [0, 0, 1]
        assert rollout.played.sum(1).tolist() == [1, 2, 2]
        assert rollout.attention_mask[2].sum() == 10 + observed


def test_a_transcript_of_a_task_with_room_goes_on(play_relay):
    _, _, rollouts = play_relay(max_model_len=21)
    for rollout in rollouts:
        assert not rollout.truncated.any() and rollout.played[2].all()


def test_an_episode_ends_for_all_where_one_agent_has_no_room(make, tokenizer, monkeypatch):
    agents, args = make(task="number", num_agents=2, max_model_len=40)
    task = SimpleNamespace(
        formatters=[lambda item: "7", lambda item: "7" * 30],
        reward_func=lambda first, second: [1.0] * len(first),
        external_transition=lambda turn: ["1", "2"],
    )
    digit = tokenizer("3", add_special_tokens=False).input_ids
    script_responses(monkeypatch, [[digit], [digit]])
    rollouts = ppo_llm.play(agents, task, [{}], args, None)
    for rollout in rollouts:
        assert rollout.truncated.tolist() == [1] and rollout.played.tolist() == [[True, False, False]]


# --- A chat that goes on ----------------------------------------------------------------------------------------------


def play_number(make, tokenizer, monkeypatch, template, answers):
    """A game of the task `number` with these answers: the tokenizer, the rollout, and what was read in each turn."""
    tokenizer, _ = with_template(tokenizer, template)
    agents, args = make(tokenizer, task="number", max_turns=3, max_model_len=None)
    read = script_responses(monkeypatch, [[tokenizer(text, add_special_tokens=False).input_ids] for text in answers])
    item = {"share": 0.999}  # the number is 10
    (rollout,) = ppo_llm.play(agents, number, [item], args, None)
    chat = number.formatters(item)
    chats = [chat]
    for answer in answers[:-1]:
        text = answer.removesuffix("<|end|>").removesuffix("<|system|>")
        chat = [*chat, {"role": "assistant", "content": text}, {"role": "user", "content": "higher"}]
        chats.append(chat)
    return tokenizer, rollout, chats, [prompts[0] for prompts in read]


@pytest.mark.parametrize(
    "template, end", [("own", "<|end|>"), ("own", ""), ("another end", "<|system|>"), ("none", "")]
)
def test_a_chat_that_goes_on_is_read_as_its_template_has_it(make, tokenizer, monkeypatch, template, end):
    answers = [f"7{end}", f"8{end}", f"9{end}"]
    tokenizer, rollout, chats, read = play_number(make, tokenizer, monkeypatch, template, answers)
    assert len(read) == 3 and rollout.prompts[0][1:] == ["higher", "higher"]
    for chat, ids in zip(chats, read, strict=True):
        assert tokenizer.decode(ids) == render(chat, tokenizer)
        assert ids == tokenizer(render(chat, tokenizer), add_special_tokens=False).input_ids


# --- Prompts ----------------------------------------------------------------------------------------------------------


def test_a_prompt_without_a_token_is_refused(make):
    agents, args = make()
    with pytest.raises(UserError, match="a prompt has no tokens: ''"):
        ppo_llm.encode([""], agents[0], args)


def test_a_prompt_that_leaves_no_room_is_refused(make):
    agents, args = make(max_model_len=10)
    fit = "a prompt has 6 tokens, and at most 5 fit: --max-output-tokens 5 of --max-model-len 10"
    with pytest.raises(UserError, match=fit):
        ppo_llm.encode(["777777"], agents[0], args)


def test_a_prompt_may_fill_the_room(make):
    agents, args = make(max_model_len=10)
    assert [len(ids) for ids in ppo_llm.encode(["77777", "7"], agents[0], args)] == [5, 1]


def test_a_first_token_of_the_tokenizers_own_is_read_once(make, tokenizer):
    with_first = copy.deepcopy(tokenizer)
    first = with_first.convert_tokens_to_ids("<|system|>")
    processor = TemplateProcessing(single="<|system|> $A", special_tokens=[("<|system|>", first)])
    with_first.backend_tokenizer.post_processor = processor
    assert with_first("7").input_ids == [first, *tokenizer("7").input_ids]
    agents, args = make(with_first, task="number", num_agents=2)
    rollout, _ = ppo_llm.play(agents, Relay(), [{"k": 0}], args, seeded())
    assert prompt_of(rollout, 0) == [first, *tokenizer("0a").input_ids]


def test_a_run_takes_a_tokenizer_without_a_padding_token(tmp_path, model, tokenizer):
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    _, run = ppo_llm.main(make_ppo_args(tmp_path, train_size=8, evaluation_interval=0), model=model, tokenizer=bare)
    assert run.step == 1 and bare.pad_token is None
    assert Path(tmp_path / "run/agent_0/tokenizer_config.json").is_file()
