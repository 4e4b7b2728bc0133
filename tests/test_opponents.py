"""Earlier copies of the learner in the other seats: which they are, who learns from what, and going on to the bit."""

import copy
import json
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import assert_metrics_are_alike
from processes import finish, finish_two, largest_difference, start

import ippo_llm
import ppo_llm
from utils import envs
from utils.cli import UserError
from utils.files import checkpoints
from utils.load import load
from utils.matches import RandomPlayer, play_matches
from utils.models.weights import opponents_of
from utils.opponents import Opponents, RunOpponents
from utils.run.log import joint_samples
from utils.same import compare, timeless

pytest.importorskip("pyspiel")

FLAGS = {"env": "open_spiel:kuhn_poker", "num_agents": 2, "self_play": True, "num_turns": 3, "max_new_tokens": 2}
FLAGS |= {"rollout_buffer_size": 4, "mini_batch_size": 4, "eval_size": 4, "max_episodes": 24, "lora_rank": 4}
FLAGS |= {"opponents": 2, "opponent_interval": 2, "save_interval": 1}


@pytest.fixture(autouse=True)
def on_a_small_model(monkeypatch, small_model):
    """Lets runs be of a model that is quick to load and to save."""
    monkeypatch.setitem(FLAGS, "model", small_model)


def train(folder=None, **flags):
    if "resume" not in flags:
        flags["output_dir"] = str(folder)
    return ppo_llm.main(ppo_llm.Args(**(FLAGS | flags)))


def weights_of(policy):
    """A copy of the weights of an actor, or of an opponent, which does not learn."""
    parameters = policy.parameters() if policy.adapter is not None else policy.model.parameters()
    return [parameter.detach().clone() for parameter in parameters]


def same(one, other):
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.fixture
def watched(monkeypatch):
    """Notes of each update: (the weights of each seat, which of them are the learner's, the rollout it learns from)."""
    notes = []
    play, learn = ppo_llm.play, ppo_llm.learn

    def note_play(players, task, items, args, generator):
        rollouts = play(players, task, items, args, generator)
        if len({*map(id, players)}) == len(players):  # no evaluation
            learner = [player.actor.adapter in (None, "agent_0_actor") for player in players]
            notes.append({"weights": [weights_of(player.actor) for player in players], "rollouts": rollouts})
            notes[-1]["learner"] = learner
        return rollouts

    def note_learn(agent, rollout, args, generator):
        notes[-1]["before"] = weights_of(agent.actor)
        notes[-1]["learned_from"] = rollout
        return learn(agent, rollout, args, generator)

    monkeypatch.setattr(ppo_llm, "play", note_play)
    monkeypatch.setattr(ppo_llm, "learn", note_learn)
    return notes


def test_earlier_copies_have_the_other_seat_and_it_learns_from_its_own(tmp_path, watched):
    agents, run = train(tmp_path / "run")
    before = [note["before"] for note in watched]
    assert len(agents) == 1 and len(before) == 6 and not same(before[0], before[1])
    there = [[0], [0], [0, 2], [0, 2], [4, 2], [4, 2]]  # updates before which the copies were taken
    found = set()
    for update, (note, taken) in enumerate(zip(watched, there)):
        seat = update % 2
        assert note["learner"] == [seat == 0, seat == 1]
        assert note["learned_from"] is note["rollouts"][seat]
        assert same(note["weights"][seat], before[update])
        (own,) = [k for k in taken if same(note["weights"][1 - seat], before[k])]
        found.add(own)
        row = run.rows[update]
        assert row["agent_0/reward_against_opponents"] == pytest.approx(row[f"agent_{seat}/reward_mean"])
        assert row["agent_0/win_rate_against_opponents"] == row[f"agent_{seat}/win_rate"]
    assert len(found) > 1
    assert same(weights_of(agents[0].opponents[0]), before[4]) and same(weights_of(agents[0].opponents[1]), before[2])
    assert not (tmp_path / "run/agent_0/opponent_0").exists()  # they are in checkpoints alone
    loaded, _ = load(tmp_path / "run", ppo_llm)
    assert same(weights_of(loaded[0].actor), weights_of(agents[0].actor)) and not opponents_of(loaded[0])


def test_seats_of_three_are_drawn_from_the_copies_alike_in_all_processes():
    class Initial:
        def frozen_copy(self, name):
            return Policy()

    class Policy:
        def copy_from(self, other):
            self.taken = other.taken

    class Agent:
        actor = Policy()

    args = ppo_llm.Args(num_agents=3, self_play=True, opponents=3, opponent_interval=1)
    agent = Agent()
    pools = [Opponents(agent, Initial(), args), Opponents(copy.copy(agent), Initial(), args)]
    met = set()
    for update in range(60):
        Agent.actor.taken = update
        torch.rand(update)  # the draws are of no other generator
        one, other = (pool.seats(update) for pool in pools)
        assert one[update % 3] is agent and agent not in (one[(update + 1) % 3], one[(update + 2) % 3])
        ages = [update - player.actor.taken for player in one]
        assert ages == [update - player.actor.taken for player in other] and max(ages) <= min(2, update)
        met.add(tuple(ages))
    assert len(met) > 12


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"lora_rank": 0, "use_separate_reference_adapter": False}, marks=pytest.mark.slow)],
    ids=["lora", "whole"],
)
def test_a_run_goes_on_to_the_bit(tmp_path, flags):
    train(tmp_path / "whole", **flags)
    run = tmp_path / "paused"
    train(run, pause_at=5, **flags)
    train(resume=str(run), **flags)
    assert all(compare(run, tmp_path / "whole").values())
    newest = [checkpoints(folder / "checkpoints")[-1] for folder in (run, tmp_path / "whole")]
    for path in newest[1].glob("agent_0/opponent_*/*.safetensors"):
        assert path.read_bytes() == (newest[0] / path.relative_to(newest[1])).read_bytes()


@pytest.mark.slow
def test_a_run_that_fails_in_any_phase_goes_on_to_the_bit(tmp_path, monkeypatch):
    train(tmp_path / "whole", eval_interval=2)
    for name in ("play", "learn", "evaluate"):
        function = getattr(ppo_llm, name)
        calls = []

        def fail(*arguments, function=function, calls=calls, name=name):
            calls.append(name)
            if len(calls) == (3 if name != "evaluate" else 2):
                raise UserError("it fails")
            return function(*arguments)

        run = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(ppo_llm, name, fail)
            with pytest.raises(UserError, match="it fails"):
                train(run, eval_interval=2)
        train(resume=str(run), eval_interval=2)
        assert all(compare(run, tmp_path / "whole").values()), name


def as_words(**flags):
    words = []
    for name, value in (FLAGS | flags).items():
        name = "--" + name.replace("_", "-")
        words += [name] if value is True else [name, value]
    return words


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_bit(tmp_path, small_model):
    flags = as_words(model=small_model, max_episodes=80)
    finish("ppo_llm", *flags, "--output-dir", tmp_path / "whole")
    process = start("ppo_llm", *flags, "--output-dir", tmp_path / "run")
    process.wait_until(lambda: (tmp_path / "run/checkpoints/update_000005").exists())
    process.signal(signal.SIGKILL)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    finish("ppo_llm", "--resume", tmp_path / "run")
    assert timeless(tmp_path / "run") == timeless(tmp_path / "whole") and len(timeless(tmp_path / "run")) == 20
    assert all(compare(tmp_path / "run", tmp_path / "whole").values())


@pytest.mark.parametrize("more", [[], ["--shard"], ["--shard", "--lora-rank", 0]], ids=str)
def test_two_processes_meet_the_same_opponents_and_learn_as_one(tmp_path, small_model, more):
    flags = as_words(model=small_model, rollout_buffer_size=8, mini_batch_size=8, max_episodes=48, opponent_interval=1)
    flags += ["--top-k", 1, "--adam-epsilon", 1e-4, "--eval-interval", 3]
    flags += [x for x in more if x != "--shard"]
    finish("ppo_llm", *flags, "--output-dir", tmp_path / "one")
    finish_two("ppo_llm", *flags, *more, "--output-dir", tmp_path / "two")
    assert largest_difference(tmp_path / "one/agent_0", tmp_path / "two/agent_0") < 1e-4
    assert_metrics_are_alike(tmp_path / "one", tmp_path / "two")


# --- The agents of a run ----------------------------------------------------------------------------------------------


def against(run, **flags):
    """Flags of a run whose opponents are the agents of another one."""
    return {"opponents": 0, "opponent_interval": 10, "opponent_run": str(run)} | flags


def test_the_agents_of_a_run_of_another_model_have_the_other_seat_and_do_not_change(tmp_path, watched):
    other, _ = ippo_llm.main(
        ippo_llm.Args(
            **{name: FLAGS[name] for name in ("env", "num_agents", "num_turns", "max_new_tokens", "eval_size")},
            rollout_buffer_size=4, mini_batch_size=4, max_episodes=4, model="utils/tiny_lm",
            output_dir=str(tmp_path / "other"),
        )
    )  # fmt: skip
    expected = [weights_of(agent.actor) for agent in other]
    watched.clear()
    agents, run = train(tmp_path / "run", **against(tmp_path / "other"))
    assert len(watched) == 6 and not opponents_of(agents[0])
    for update, note in enumerate(watched):
        seat = update % 2
        assert note["learned_from"] is note["rollouts"][seat] and same(note["weights"][seat], note["before"])
        assert same(note["weights"][1 - seat], expected[1 - seat])
        row = run.rows[update]
        assert row["agent_0/reward_against_opponents"] == pytest.approx(row[f"agent_{seat}/reward_mean"])
    train(tmp_path / "paused", **against(tmp_path / "other", pause_at=3))
    train(resume=str(tmp_path / "paused"), **against(tmp_path / "other"))
    assert all(compare(tmp_path / "paused", tmp_path / "run").values())


def test_opponents_that_have_learned_since_are_said(tmp_path, capsys):
    train(tmp_path / "other", pause_at=1)
    train(tmp_path / "run", **against(tmp_path / "other", pause_at=1))
    train(resume=str(tmp_path / "run"), **against(tmp_path / "other", pause_at=2))
    line = f"--opponent-run {tmp_path / 'other'} has learned since, from update_000001 to update_000002: "
    assert line not in capsys.readouterr().out
    train(resume=str(tmp_path / "other"), pause_at=2)
    train(resume=str(tmp_path / "run"), **against(tmp_path / "other", pause_at=3))
    assert capsys.readouterr().out.count(line) == 1
    train(tmp_path / "third", pause_at=1)
    train(tmp_path / "forked", fork=str(tmp_path / "run"), **against(tmp_path / "third"))
    assert "has learned since" not in capsys.readouterr().out


def test_what_is_earned_without_a_move_counts_as_the_win_does():
    earned = [[{1: 1.0}, {1: -1.0}], [{1: -1.0}, {1: 1.0}]]  # of two seats, in two matches
    turns = [torch.tensor([[0], [1]]), torch.tensor([[1], [0]])]  # seat 0 moves in the second one alone
    rollouts = [SimpleNamespace(turns=own, earned=paid) for own, paid in zip(turns, earned)]
    opponents = SimpleNamespace(args=ppo_llm.Args(num_agents=2, self_play=True))
    metrics = Opponents.metrics(opponents, 0, rollouts)
    assert metrics.pop("reward_half_width_against_opponents") == pytest.approx(1.96)  # of 1 and -1: sqrt(2) / sqrt(2)
    assert metrics == {"reward_against_opponents": 0.0, "win_rate_against_opponents": 0.5}


def test_an_opponent_leaves_room_for_answers_as_long_as_the_learners(tmp_path):
    train(tmp_path / "other", pause_at=1)
    args = ppo_llm.Args(**FLAGS | against(tmp_path / "other", max_new_tokens=7))
    agent = SimpleNamespace(longest_prompt=1)
    for player in RunOpponents(agent, args).players:
        assert player.longest_prompt == player.actor.room - 7


def test_samples_are_read_as_each_seat_reads(tmp_path, monkeypatch):
    readers = []

    def note(items, agents, *rest, **numbers):
        readers.append(agents)
        return joint_samples(items, agents, *rest, **numbers)

    monkeypatch.setattr("utils.run.joint_samples", note)
    agents, _ = train(tmp_path / "run", max_episodes=8)
    assert [[agent is agents[0] for agent in seats] for seats in readers] == [[True, False], [False, True]]


def test_a_wrong_run_as_opponent_is_a_line(tmp_path):
    train(tmp_path / "run", pause_at=1)
    for flags, message in (
        ({"self_play": False}, "--opponent-run has no effect without --self-play"),
        ({"opponents": 2}, "--opponent-run has no effect with --opponents"),
        ({"opponent_run": str(tmp_path / "none")}, f"--opponent-run: .*{tmp_path / 'none'}.* no such folder"),
        ({"env": "open_spiel:tiny_hanabi"}, f"--opponent-run {tmp_path / 'run'} is a run of --env open_spiel:kuhn.*"),
        ({"env": "guess", "num_agents": 1}, "--self-play has no effect with --num-agents 1"),
    ):
        with pytest.raises(UserError, match=f"^{message}$") as error:
            train(tmp_path / "new", **against(tmp_path / "run", **flags))
        assert "\n" not in str(error.value) and not (tmp_path / "new").exists()


def test_a_run_of_another_script_is_a_line_and_one_of_the_script_that_runs_is_taken(tmp_path, monkeypatch):
    train(tmp_path / "run", pause_at=1)
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"script": "mine.py"}))
    message = f"^--opponent-run: {tmp_path / 'run'} is of another script, which is not run for it$"
    with pytest.raises(UserError, match=message):
        train(tmp_path / "new", **against(tmp_path / "run"))
    assert not (tmp_path / "new").exists()
    (tmp_path / "mine.py").write_text(Path(ppo_llm.__file__).read_text())
    monkeypatch.setattr(ppo_llm, "__file__", str(tmp_path / "mine.py"))
    monkeypatch.setitem(sys.modules, "mine", None)  # and taken away again
    _, run = train(tmp_path / "new", **against(tmp_path / "run", max_episodes=4))
    assert "agent_0/reward_against_opponents" in run.rows[0]


# --- A random player --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seat", [0, 1])
def test_a_random_seat_draws_legal_answers(seat):
    args = ppo_llm.Args(**FLAGS)
    game, _ = envs.load_env(args.env, args)
    game.random_seats = {1 - seat}
    items = [{"seed": k} for k in range(4000)]
    players = [RandomPlayer("1"), RandomPlayer("2")]
    played = play_matches(players, game.make_env(None, items, args), len(items))
    assert {own for match in played for own, _ in match.moves} == {seat}
    earned = torch.tensor([match.earned for match in played])
    value = [0.125, -0.125][seat]  # of a uniformly random player against itself
    assert torch.all(earned.sum(1) == 0)
    assert abs(float(earned[:, seat].mean()) - value) < 3.5 * float(earned[:, seat].std()) / 4000**0.5


def test_random_seats_of_three_move_within_num_turns():
    args = ppo_llm.Args(**FLAGS | {"env": "open_spiel:kuhn_poker(players=3)", "num_agents": 3, "num_turns": 3})
    game, _ = envs.load_env(args.env, args)
    game.random_seats = {0, 2}
    env = game.make_env(None, [{"seed": k} for k in range(50)], args)
    observations = env.reset()
    assert [len(own) for own in observations] == [0, 50, 0] and env.moves == [1] * 50
    observations, rewards, cut = env.step([{}, dict.fromkeys(range(50), "1"), {}])
    assert env.moves == [3] * 50 and rewards[0].keys() == {*range(50)}
    goes_on = {b for b, match in enumerate(env.matches) if match.seat is not None}
    assert cut == goes_on and 0 < len(cut) < 50
    assert all(own.keys() == cut for own in observations)
    args.num_turns = 1
    assert game.make_env(None, [{"seed": 1}], args).reset() == [{}, {}, {}]  # it is no seat's move any more


def test_it_learns_from_its_seat_against_a_random_player_and_goes_on_to_the_bit(tmp_path, watched):
    flags = against("random", eval_interval=1)
    agents, run = train(tmp_path / "run", **flags)
    assert len(watched) == 6 and not opponents_of(agents[0])
    for update, note in enumerate(watched):
        seat = update % 2
        assert note["learned_from"] is note["rollouts"][seat] and note["rollouts"][seat].mask.any()
        assert not note["rollouts"][1 - seat].mask.any()
        row = run.rows[update]
        assert row["agent_0/reward_against_opponents"] == pytest.approx(row[f"agent_{seat}/reward_mean"])
    assert not run.task.given.random_seats  # the last evaluation had the agent in all seats
    train(tmp_path / "paused", **flags, pause_at=3)
    train(resume=str(tmp_path / "paused"), **flags)
    assert all(compare(tmp_path / "paused", tmp_path / "run").values())


@pytest.mark.slow
def test_two_processes_meet_the_same_random_player(tmp_path, small_model):
    flags = as_words(model=small_model, rollout_buffer_size=8, mini_batch_size=8, **against("random"))
    flags += ["--top-k", 1, "--adam-epsilon", 1e-4, "--eval-interval", 3]
    for name in ("--opponents", "--opponent-interval"):
        k = flags.index(name)
        del flags[k : k + 2]
    finish("ppo_llm", *flags, "--output-dir", tmp_path / "one")
    finish_two("ppo_llm", *flags, "--output-dir", tmp_path / "two")
    assert_metrics_are_alike(tmp_path / "one", tmp_path / "two")


def test_a_random_player_without_legal_answers_is_a_line(tmp_path):
    message = "^--opponent-run random takes a game that says what is legal: open_spiel, pettingzoo$"
    with pytest.raises(UserError, match=message):
        train(tmp_path / "run", **against("random", env=None, task="number"))
    assert not (tmp_path / "run").exists()


def test_a_random_player_leaves_the_agent_a_move_in_each_seat(tmp_path):
    with pytest.raises(UserError, match="^--opponent-run random takes a move of each seat, --num-turns 2 or more, got"):
        train(tmp_path / "run", **against("random", num_turns=1))


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"self_play": False}, "--opponents has no effect without --self-play"),
        ({"opponents": 0}, "--opponent-interval has no effect without --opponents"),
        ({"env": "guess", "num_agents": 1}, "--self-play has no effect with --num-agents 1"),
    ],
)
def test_opponents_without_a_seat_are_a_line(tmp_path, flags, message):
    with pytest.raises(UserError, match=f"^{message}$"):
        train(tmp_path / "run", **flags)


def test_a_fork_with_another_number_or_age_of_opponents_is_a_line(tmp_path):
    train(tmp_path / "run", pause_at=1)
    with pytest.raises(UserError, match="--opponents 2 there, 3 here"):
        train(tmp_path / "fork", fork=str(tmp_path / "run"), opponents=3)
    with pytest.raises(UserError, match="--opponent-interval 2 there, 1 here"):
        train(tmp_path / "fork", fork=str(tmp_path / "run"), opponent_interval=1)
