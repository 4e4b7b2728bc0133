"""A model made for a game answers with its legal moves, each as often as any other, and can be played and trained."""

import itertools

import pytest
import torch

import ppo_llm
from utils import make_game_lm, models
from utils.cli import UserError
from utils.envs import open_spiel
from utils.exploit import policy_of
from utils.models.loading import load_model, load_tokenizer

pyspiel = pytest.importorskip("pyspiel")


def make(tmp_path, **flags):
    args = {"env": "open_spiel:kuhn_poker", "out": str(tmp_path / "made"), "num_layers": 1}
    make_game_lm.main(make_game_lm.Args(**(args | flags)))
    return tmp_path / "made"


def probabilities(folder, tmp_path):
    """(each information state's probabilities of the legal answers, the mass on illegal ones)."""
    flags = {"num_agents": 2, "self_play": True, "lora_rank": 0, "num_turns": 3, "max_new_tokens": 2}
    args = ppo_llm.Args(env="open_spiel:kuhn_poker", model=str(folder), **flags)
    agents = [ppo_llm.Agent(i, initial, 1, args) for i, initial in enumerate(models.load(args))]
    policy, illegal = policy_of(pyspiel.load_game("kuhn_poker"), agents * 2, args)
    return torch.tensor(policy.action_probability_array), max(illegal)


@pytest.mark.slow
def test_it_plays_uniformly_and_hardly_ever_illegally(tmp_path):
    table, illegal = probabilities(make(tmp_path, steps=80, num_matches=32, learning_rate=5e-3), tmp_path)
    assert illegal < 0.1 and (table - 0.5).abs().max() < 0.2


@pytest.mark.parametrize("coef", [1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_reading_sets_the_cards_apart(coef, tmp_path):
    """Without it the hidden states before an answer hardly differ: nothing depends on the card yet."""
    folder = make(tmp_path, steps=40, num_matches=16, learning_rate=5e-3, reading_coef=coef)
    model = load_model(str(folder), "--model")
    tokenizer = load_tokenizer(str(folder), "--model")
    hidden = []
    for card in range(3):
        chat = [{"role": "user", "content": f"You are player 0.\n{card}\n1 Pass, 2 Bet\nSay a number."}]
        ids = models.encode(chat, [], make_game_lm.Namespace(tokenizer=tokenizer))
        with torch.no_grad():
            hidden.append(model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1])
    distance = min((a - b).norm() / a.norm() for a, b in itertools.combinations(hidden, 2))
    assert distance > 0.15 if coef else distance < 0.05, distance


def test_the_loss_of_reading_is_that_of_a_loop():
    """A code is the sum of the vectors of all three tokens in a row up to there, standardised over the batch."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 2000, (3, 9), generator=generator)
    hidden = torch.randn(3, 9, 16, generator=generator)
    is_last = torch.zeros(3, 9, dtype=torch.bool)
    places = [(0, 4), (1, 8), (2, 1), (2, 8)]
    codes = []
    vectors = torch.randn(2**14, 4, generator=torch.Generator().manual_seed(0)).double()
    for row, column in places:
        is_last[row, column] = True
        tokens = [0, 0, *ids[row, : column + 1].tolist()]
        code = torch.zeros(4).double()
        for a, b, c in zip(tokens, tokens[1:], tokens[2:]):
            code += vectors[(a * 613 * 613 + b * 613 + c) % 2**14]
        codes.append(code)
    codes = torch.stack(codes)
    codes = (codes - codes.mean(0)) / codes.std(0, correction=0)
    errors = [(hidden[place][:4].double() - code) ** 2 for place, code in zip(places, codes)]
    loss = make_game_lm.reading_loss(hidden, ids, is_last)
    torch.testing.assert_close(loss.double(), torch.stack(errors).mean(), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_it_learns_the_moves_of_a_game_of_pettingzoo(tmp_path):
    pytest.importorskip("pettingzoo")
    folder = make(tmp_path, env="pettingzoo:rps_v2(max_cycles=1)", steps=60, num_matches=32, learning_rate=5e-3)
    args = ppo_llm.Args(
        env="pettingzoo:rps_v2(max_cycles=1)", model=str(folder), num_agents=2, num_turns=2, max_new_tokens=2,
        rollout_buffer_size=64, mini_batch_size=64, max_episodes=64, eval_interval=0, output_dir=str(tmp_path / "run"),
    )  # fmt: skip
    _, run = ppo_llm.main(args)
    assert run.rows[0]["illegal_rate"] < 0.15


def test_a_model_of_ones_own_learns_it_too(tmp_path):
    before, illegal_before = probabilities("utils/tiny_lm", tmp_path)
    folder = make(tmp_path, model="utils/tiny_lm", num_layers=2, steps=12, num_matches=16, learning_rate=3e-3)
    after, illegal = probabilities(folder, tmp_path)
    assert illegal < illegal_before - 0.2


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"env": "kuhn_poker"}, "open_spiel:NAME"),
        ({"env": "open_spiel:no_such_game"}, "no game of that name"),
        ({"out": ""}, "a folder to write"),
        ({"out": "/"}, "a folder to write"),
        ({"out": "utils/cli.py"}, "a folder to write"),
        ({"out": "/dev/null/made"}, "^/dev/null/made can't be written"),
        ({"model": "/no/such/folder", "num_layers": 2}, "^--model .* there is no folder /no/such/folder$"),
        ({"model": "utils/cli.py", "num_layers": 2}, "^--model utils/cli.py is no GGUF file"),
        ({"model": "utils/tiny_lm", "num_layers": 2, "hidden_size": 32}, "--hidden-size has no effect with --model"),
        ({"hidden_size": 30}, "multiple of 8"),
    ],
)
def test_bad_input_is_one_line(tmp_path, flags, message):
    with pytest.raises(UserError, match=message) as error:
        make(tmp_path, **flags)
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


def test_nothing_longer_than_the_model_has_room_for_is_learned_from(tmp_path, monkeypatch):
    game = open_spiel.make_game("kuhn_poker", "")
    agent = make_game_lm.Namespace(tokenizer=load_tokenizer("utils/tiny_lm", "--model"), room=512)
    rows = [row for seed in range(20) for row in make_game_lm.play_match(game, seed, agent, 100)]
    longest = max(len(ids) for ids, _ in rows)
    assert {weight for _, weights in rows for weight in weights} == {0.2, 1.0}
    agent.room = longest - 1
    shorter = [row for seed in range(20) for row in make_game_lm.play_match(game, seed, agent, 100)]
    assert longest > max(len(ids) for ids, _ in shorter) > 0
