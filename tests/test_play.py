"""Episodes: what stands in a transcript, against chats that are tokenised anew; when it ends; and how answers are
sampled, against single forward passes without padding or a cache.

`play` and `generate` are the same in all scripts (test_single_file.py).
"""

import copy
from types import SimpleNamespace

import pytest
import torch
from helpers import build_model
from tokenizers.processors import TemplateProcessing

import ippo_llm
from utils import models, tasks
from utils.cli import TaskError
from utils.run.log import joint_samples
from utils.run.metrics import team_metrics

END = "<|end|>"


def make_team(tokenizer, num_agents=2, **flags):
    """(agents, args)."""
    sizes = {"num_turns": 3, "max_new_tokens": 5, "num_agents": num_agents}
    args = ippo_llm.Args(**(sizes | flags))
    initials = models.load(args, build_model(tokenizer), tokenizer)
    return [ippo_llm.Agent(i, initial, 10, args) for i, initial in enumerate(initials)], args


def script_answers(monkeypatch, tokenizer, answers):
    """Let agents answer with these texts, a list for each agent in each turn; returns what they read, lists of ids."""
    answers = [*answers]
    read = []

    def generate(agent, contexts, args, generator):
        if not contexts:
            return []
        read.append([[*context] for context in contexts])
        texts = answers.pop(0)
        assert len(texts) == len(contexts)
        return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]

    monkeypatch.setattr(ippo_llm, "generate", generate)
    return read


def play(agents, args, task, items):
    return ippo_llm.play(agents, tasks.load_task(task, args, None), items, args, None)


def ids_of(rollout, b):
    return rollout.ids[b][rollout.attention_mask[b] == 1].tolist()


def pieces(rollout, b):
    """The ids that were sampled, by turn."""
    turns = rollout.turns[b].tolist()
    return {
        turn: [token for token, own in zip(rollout.ids[b].tolist(), turns) if own == turn] for turn in {*turns} - {0}
    }


# --- On a task --------------------------------------------------------------------------------------------------------


class Relay:
    """Episodes of one turn, of two and of three; each agent reads what the other answered."""

    def formatters(self, item, agent):
        return [{"role": "user", "content": f"{item['k']}{'ab'[agent]}"}]

    def reward_func(self, first, second, turn, items):
        return [float(10 * item["k"] + turn) for item in items], [float(-turn) for _ in items]

    def external_transition(self, agent_completions, item, turn):
        return None if turn == item["k"] else [f"{turn}{text}" for text in reversed(agent_completions)]

    def reward_processor(self, reward):
        return reward / 2


ITEMS = [{"k": 0}, {"k": 1}, {"k": 2}]
RELAYED = [["1", "2", "3"], ["4", "5", "6"], ["2", "7"], ["8", "3"], ["9"], ["1"]]  # of agent 0, of 1, of 0 ...
CHAT = ["2a", "3", "06", "7", "13", "9"]  # of agent 0 in the last episode: it reads, answers, reads ...


def with_template(tokenizer, template):
    """A tokenizer whose chat template is its own, none or another's, and how that ends a message."""
    tokenizer = copy.deepcopy(tokenizer)
    end = "<|system|>" if template == "another end" else END
    tokenizer.chat_template = None if template == "none" else tokenizer.chat_template.replace(END, end)
    return tokenizer, end


def rendered(tokenizer, chat):
    """The ids of a chat, a list of what user and assistant say in turn, up to the next answer."""
    if not tokenizer.chat_template:
        text = chat[0] + "\n\n" + "".join(f"{answer}\n\n{said}\n\n" for answer, said in zip(chat[1::2], chat[2::2]))
        return tokenizer(text, add_special_tokens=False).input_ids
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(chat)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("template", ["own", "another end", "none"])
def test_an_agent_reads_its_whole_chat_as_the_template_has_it(tokenizer, monkeypatch, template, is_cut):
    tokenizer, end = with_template(tokenizer, template)
    agents, args = make_team(tokenizer)
    end = "" if is_cut or template == "none" else end
    read = script_answers(monkeypatch, tokenizer, [[text + end for text in texts] for texts in RELAYED])
    rollout, _ = play(agents, args, Relay(), ITEMS)
    read_by_first = [contexts[-1] for contexts in read[::2]]
    assert read_by_first == [rendered(tokenizer, CHAT[:k]) for k in (1, 3, 5)]
    assert ids_of(rollout, 2) == read_by_first[-1] + tokenizer(f"9{end}", add_special_tokens=False).input_ids


@pytest.fixture
def relay(tokenizer, monkeypatch):
    """The two rollouts of the relay."""
    agents, args = make_team(tokenizer)
    script_answers(monkeypatch, tokenizer, [[text + END for text in texts] for texts in RELAYED])
    return play(agents, args, Relay(), ITEMS)


def test_what_was_sampled_has_its_turn_and_all_else_0(relay, tokenizer):
    answers = {turn: tokenizer(text + END, add_special_tokens=False).input_ids for turn, text in ((1, "3"), (2, "7"))}
    answers[3] = tokenizer("9" + END, add_special_tokens=False).input_ids
    assert pieces(relay[0], 2) == answers
    assert [int(turn) for turn in relay[0].turns.amax(1)] == [1, 2, 3]


def test_an_agent_of_a_team_has_its_own_answers(relay):
    assert relay[0].answers == [["1"], ["2", "2"], ["3", "7", "9"]]
    assert relay[1].answers == [["4"], ["5", "8"], ["6", "3", "1"]]


def test_a_turns_reward_is_processed_and_on_its_last_token(relay):
    for rollout, expected in zip(relay, ([[0], [10, 11], [20, 21, 22]], [[0], [0, -1], [0, -1, -2]])):
        for b, rewards in enumerate(expected):
            turns = rollout.turns[b].tolist()
            for turn, reward in enumerate(rewards, 1):
                last = len(turns) - 1 - turns[::-1].index(turn)
                assert rollout.rewards[b, last] == reward / 2
        assert (rollout.rewards != 0).sum() == sum(reward != 0 for rewards in expected for reward in rewards)


def test_metrics_are_means_over_episodes_and_lengths_over_answers(relay):
    """Agent 0 earns 0, 10.5 and 31.5, agent 1 earns 0, -0.5 and -1.5, in one, two and three turns."""
    metrics = team_metrics(relay, several_turns=True)
    team = torch.tensor([0.0, 5.0, 15.0])
    right = {"reward_mean": float(team.mean()), "reward_std": float(team.std(correction=0)), "turns": 2.0}
    right |= {"agent_0/reward_mean": 14.0, "agent_1/reward_mean": -2 / 3}
    right |= {"turn_1/reward_mean": 2.5, "turn_2/reward_mean": 3.75, "turn_3/reward_mean": 5.0}
    right |= {"agent_0/response_length": 2.0, "agent_1/response_length": 2.0}  # a digit and the end token
    assert metrics == pytest.approx(right)


def test_rows_are_padded_on_the_right(relay):
    for rollout in relay:
        lengths = rollout.attention_mask.sum(1)
        for b, length in enumerate(lengths.tolist()):
            assert rollout.attention_mask[b, :length].all()
            assert not rollout.turns[b, length:].any() and not rollout.rewards[b, length:].any()


@pytest.mark.parametrize(
    "room, num_turns", [(17, 2), (23, 2), (24, 3)]
)  # it reads 12 tokens before turn 2, 19 before 3
def test_an_episode_ends_where_there_is_no_room_for_an_answer(tokenizer, monkeypatch, room, num_turns):
    agents, args = make_team(tokenizer, max_model_len=room)
    script_answers(monkeypatch, tokenizer, RELAYED if num_turns == 3 else RELAYED[:4])
    for rollout in play(agents, args, Relay(), ITEMS):
        assert rollout.turns.amax(1).tolist() == [1, 2, num_turns]
        assert rollout.turns[2][rollout.attention_mask[2].sum() - 1] == (3 if num_turns == 3 else 0)  # it is read


def test_an_episode_ends_for_all_where_one_agent_has_no_room(tokenizer, monkeypatch):
    agents, args = make_team(tokenizer, max_model_len=40)
    task = SimpleNamespace(
        formatters=[lambda item: "7", lambda item: "7" * 30],
        reward_func=lambda first, second: [1.0] * len(first),
        external_transition=lambda turn: ["1", "2"],
    )
    script_answers(monkeypatch, tokenizer, [["3"], ["3"]])
    for rollout in play(agents, args, task, [{}]):
        assert rollout.turns.max() == 1


def test_a_first_token_of_the_tokenizers_own_is_read_once(tokenizer, monkeypatch):
    with_first, _ = with_template(tokenizer, "none")
    first = with_first.convert_tokens_to_ids("<|system|>")
    with_first.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|system|> $A", special_tokens=[("<|system|>", first)]
    )
    agents, args = make_team(with_first)
    read = script_answers(monkeypatch, tokenizer, RELAYED)
    play(agents, args, Relay(), ITEMS)
    assert read[4][0] == [first, *rendered(with_first, CHAT[:5])]


# --- In an environment of several players -----------------------------------------------------------------------------


class Alternating:
    """The players move one after the other, three times; each move pays both."""

    def __init__(self, task, items, args):
        self.num_items = len(items)
        self.turn = 0

    def observe(self):
        chats = {b: f"move {self.turn}" for b in range(self.num_items)}
        return [chats, {}] if self.turn % 2 == 0 else [{}, chats]

    def reset(self):
        return self.observe()

    def step(self, actions):
        assert [len(own) for own in actions] == ([2, 0] if self.turn % 2 == 0 else [0, 2])
        self.turn += 1
        rewards = [dict.fromkeys(range(self.num_items), float(10**self.turn)) for _ in range(2)]
        return (self.observe() if self.turn < 3 else [{}, {}]), rewards, set()


def test_players_may_move_one_after_the_other(tokenizer, monkeypatch):
    agents, args = make_team(tokenizer)
    answers = [["1", "2"], ["3", "4"], ["5", "6"]]
    script_answers(monkeypatch, tokenizer, answers)
    first, second = play(agents, args, SimpleNamespace(TeamEnv=Alternating), [{}, {}])
    assert first.answers == [["1", "5"], ["2", "6"]] and second.answers == [["3"], ["4"]]
    assert [sorted(pieces(rollout, 0)) for rollout in (first, second)] == [[1, 3], [2]]
    of_turns = [
        [float(rollout.rewards[0][rollout.turns[0] == turn].sum()) for turn in (1, 2, 3)] for rollout in (first, second)
    ]
    assert of_turns == [[110.0, 0.0, 1000.0], [0.0, 1100.0, 0.0]]  # what is paid before a first move is left out
    metrics = team_metrics([first, second], several_turns=True)  # there it counts
    assert metrics["reward_mean"] == tasks.mean_reward([first, second]) == 1110.0
    assert [metrics[f"turn_{turn}/reward_mean"] for turn in (1, 2, 3)] == [10.0, 100.0, 1000.0]
    assert [own["reward"] for own in joint_samples([{}, {}], agents, [first, second], True)] == [1110.0, 1110.0]


class Forfeit(Alternating):
    """The first move cuts its episode, in which both still read; the second pays for both episodes all the same."""

    def step(self, actions):
        self.turn += 1
        if self.turn == 1:
            return [{0: "It is over.", 1: "Wait."}, {0: "It is over.", 1: "move 1"}], [{}, {}], {0}
        return [{}, {}], [{0: 7.0, 1: 1.0}, {0: 7.0, 1: 1.0}], set()


def test_no_reward_stands_on_a_token_that_was_read(tokenizer, monkeypatch):
    agents, args = make_team(tokenizer)
    script_answers(monkeypatch, tokenizer, [["1", "2"], ["3"], ["4"]])
    rollouts = play(agents, args, SimpleNamespace(TeamEnv=Forfeit), [{}, {}])
    for rollout in rollouts:
        assert rollout.rewards[rollout.turns == 0].abs().sum() == 0 and rollout.truncated.tolist() == [True, False]
        assert rollout.rewards.sum(1).tolist() == [0.0, 1.0]


# --- In a game --------------------------------------------------------------------------------------------------------


class Game:
    """Six games, by seed, which go on as `observations` say after each turn. A digit is a token."""

    observations = {1: "again", 2: "7" * 24, 3: "7" * 40, 4: "cut short", 5: "7" * 23}

    def reset(self, seed):
        self.seed = seed
        self.turn = 0
        if seed == 6:
            raise RuntimeError("no start")
        return f"game {seed}", {}

    def step(self, answer):
        self.turn += 1
        if self.seed == 7 and self.turn == 2:
            raise KeyError("no step")
        return self.observations.get(self.seed, "over"), float(self.turn), self.seed == 0, self.seed == 4, {}


def test_a_game_is_prompt_answer_observation_answer(tokenizer, monkeypatch):
    agents, args = make_team(tokenizer, 1, max_model_len=40)
    first = [f"11{END}", "22222", f"3{END}", f"44{END}", f"5{END}", f"6{END}"]
    script_answers(monkeypatch, tokenizer, [first, ["22222", f"6666{END}"], ["22222"]])
    (rollout,) = play(agents, args, Game, [{"seed": k} for k in range(6)])

    def asked(text, before=""):
        return f"{before}<|user|>{text}{END}<|assistant|>"

    expected = [
        asked("game 0") + first[0],
        asked("game 1") + "22222" + asked("again", END) + "22222" + asked("again", END) + "22222",
        asked("game 2") + first[2] + asked("7" * 24),  # room for 4 more tokens, not for 5
        asked("game 3") + first[3] + asked("7" * 40),
        asked("game 4") + first[4] + asked("cut short"),
        asked("game 5") + first[5] + asked("7" * 23) + f"6666{END}",
    ]
    found = [tokenizer.decode(ids_of(rollout, b)) for b in range(6)]
    assert found[:3] + found[4:5] == expected[:3] + expected[4:5] and found[5].startswith(expected[5])
    assert expected[3].startswith(found[3]) and len(ids_of(rollout, 3)) == 40  # what does not fit is not read
    assert rollout.rewards.sum(1).tolist() == [1, 6, 1, 1, 1, 3]
    assert rollout.turns.amax(1).tolist() == [1, 3, 1, 1, 1, 2]


def test_nothing_is_left_of_a_game_that_fails(tokenizer, monkeypatch):
    agents, args = make_team(tokenizer, 1)
    script_answers(monkeypatch, tokenizer, [["1", "2"], ["3", "4"], ["5"]])
    (rollout,) = play(agents, args, Game, [{"seed": 6}, {"seed": 7}, {"seed": 1}])
    assert rollout.answers == [[], [], ["2", "4", "5"]]
    assert not rollout.attention_mask[:2].any() and not rollout.rewards[:2].any() and rollout.turns[2].max() == 3


def test_games_that_all_fail_end_the_run_in_a_line(tokenizer):
    agents, args = make_team(tokenizer, 1)
    with pytest.raises(TaskError, match="^the environment failed in all 1 episodes, at first with RuntimeError: no s"):
        play(agents, args, Game, [{"seed": 6}])


# --- Answers ----------------------------------------------------------------------------------------------------------

LENGTH = 12
CONTEXTS = [[5, 6, 7], [9] * 11, [20, 30, 40, 50, 60], [100]]


def kept(logits, args):
    """The tokens that may be sampled, from the definitions of --top-k, --top-p and --min-p, one after the other."""
    keep = torch.ones(len(logits), dtype=torch.bool)
    if args.top_k:
        keep &= logits >= logits.sort(descending=True).values[args.top_k - 1]
    if args.top_p < 1:
        order = logits.masked_fill(~keep, -torch.inf).argsort(descending=True)
        shares = logits.masked_fill(~keep, -torch.inf)[order].softmax(-1)
        nucleus = order[: int((shares.cumsum(-1) < args.top_p).sum()) + 1]
        keep &= torch.zeros_like(keep).scatter(0, nucleus, True)
    if args.min_p:
        shares = logits.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= shares >= args.min_p * shares.max()
    return keep


def penalised(logits, context, args):
    """What stands in the transcript is less likely with --repetition-penalty."""
    seen = torch.tensor(sorted({*context}))
    logits = logits.clone()
    logits[seen] = torch.where(
        logits[seen] < 0, logits[seen] * args.repetition_penalty, logits[seen] / args.repetition_penalty
    )
    return logits


@torch.no_grad()
def sample(model, contexts, ends, args, generator):
    """Answers by a forward pass for each token, of one context each, without padding or a cache."""
    answers = [[] for _ in contexts]
    rows = [*range(len(contexts))]
    for t in range(LENGTH):
        probabilities = []
        for row in rows:
            context = contexts[row] + answers[row]
            logits = penalised(model(torch.tensor([context])).logits[0, -1] / args.temperature, context, args)
            if t < args.min_output_tokens:
                logits[ends] = -torch.inf
            probabilities.append(logits.masked_fill(~kept(logits, args), -torch.inf).softmax(-1))
        probabilities = torch.stack(probabilities)
        if args.do_sample:
            tokens = torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
        else:
            tokens = probabilities.argmax(-1)
        for row, token in zip(rows, tokens.tolist()):
            answers[row].append(token)
        rows = [row for row in rows if answers[row][-1] not in ends]
        if not rows:
            break
    return answers


@pytest.fixture
def sampler(tokenizer):
    """A function of flags: an agent whose answers often end, the model of its actor, its ends, and the args."""

    def make(**flags):
        (agent,), args = make_team(tokenizer, 1, max_new_tokens=LENGTH, **flags)
        model = agent.actor.model
        if agent.actor.adapter is not None:
            model.set_adapter(agent.actor.adapter)
        noise = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in agent.actor.parameters():
                parameter += 0.3 * torch.randn(parameter.shape, generator=noise)
            base = model if agent.actor.adapter is None else model.get_base_model()
            base.lm_head.weight *= 2
        logits = model(torch.tensor([CONTEXTS[1]])).logits[0, -1]
        agent.end_ids = logits.topk(3).indices[1:]  # two, of which one comes soon in most answers
        return agent, model, agent.end_ids.tolist(), args

    return make


WAYS = {
    "greedy": {"do_sample": False},
    "greedy, not again": {"do_sample": False, "repetition_penalty": 1.5},
    "greedy, not short": {"do_sample": False, "min_output_tokens": 6},
    "plain": {},
    "cooler": {"temperature": 0.6},
    "top k": {"top_k": 4},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.2},
    "all at once": {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2, "min_output_tokens": 3},
    "adapters": {"lora_rank": 4},
}


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_those_of_passes_without_padding_or_a_cache(sampler, way):
    agent, model, ends, args = sampler(**WAYS[way])
    expected = sample(model, CONTEXTS, ends, args, torch.Generator().manual_seed(3))
    with models.sampling([agent], args):
        answers = ippo_llm.generate(agent, CONTEXTS, args, torch.Generator().manual_seed(3))
    assert answers == expected
    if way == "plain":
        assert len({len(answer) for answer in answers}) > 1


def test_likeliest_answers_are_those_of_transformers(sampler):
    agent, model, ends, args = sampler(do_sample=False)
    answers = ippo_llm.generate(agent, CONTEXTS, args, None)
    for context, answer in zip(CONTEXTS, answers):
        ids = torch.tensor([context])
        options = {"do_sample": False, "max_new_tokens": LENGTH, "eos_token_id": ends, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert answer == expected[0, len(context) :].tolist()


def test_chunks_change_no_likeliest_answer(sampler):
    agent, _, _, args = sampler(do_sample=False)
    whole = ippo_llm.generate(agent, CONTEXTS, args, None)
    args.hf_generate_chunk_size = 3
    assert ippo_llm.generate(agent, CONTEXTS, args, None) == whole


def test_sampling_follows_the_probabilities(sampler):
    agent, model, _, args = sampler(top_k=3)
    args.max_new_tokens = 1
    answers = ippo_llm.generate(agent, [CONTEXTS[0]] * 20_000, args, torch.Generator().manual_seed(0))
    likeliest = model(torch.tensor([CONTEXTS[0]])).logits[0, -1].detach().topk(3)
    shares = [answers.count([token]) / len(answers) for token in likeliest.indices.tolist()]
    torch.testing.assert_close(torch.tensor(shares), likeliest.values.softmax(-1), atol=0.015, rtol=0)
