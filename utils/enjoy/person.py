"""A person in one seat of a run's game or task, in the terminal, and the run's agents in the others."""

from utils import distributed, tasks
from utils.cli import UserError, printable
from utils.enjoy import check_code, import_script, last_message, load_own_task
from utils.envs.exact import seats_of
from utils.load import begin
from utils.matches import AgentPlayer, play_matches
from utils.models.weights import load_agents
from utils.run.reader import read_config


class Person:
    """Who reads what the seat reads, and answers with a line. Raises EOFError where there is no further line."""

    def begin(self, num_matches):
        """Nothing is kept from match to match."""

    def read(self, b, chat):
        print(f"\n{printable(last_message(chat))}")
        return True

    def answer(self, episodes, env):
        try:
            return {b: input("> ") for b in episodes}
        except UnicodeDecodeError as error:
            raise UserError(f"an answer is to be in the terminal's encoding: {error.reason}") from error


def play_seat(run, seat, matches=4, seed=1, do_sample=True, temperature=None, script=None, **flags):
    """Let a person have a seat in matches on a run's held-out items, one after the other; a list of Match.

    It ends early where the input does. The others play with the run's newest weights. `script` and `flags` are as in
    `show`. Raises UserError.
    """
    config = read_config(run)
    module = import_script(run, config, script)
    check_code(run, config["args"], flags)
    agents, args, checkpoint, initials = begin(run, module, **flags)
    if args.num_agents == 1:
        raise UserError(f"--play takes a run of two seats or more, and {run} has one")
    if seat >= args.num_agents:
        raise UserError(f"--play takes a seat from 0 to {args.num_agents - 1}, got {seat}")
    load_agents(checkpoint, agents)
    args.do_sample = do_sample and args.do_sample
    args.temperature = temperature or args.temperature
    task = load_own_task(run, config, args, module)
    train, held_out = tasks.load_items(task, initials, args)
    rows = held_out or train
    items = [rows[k] for k in range(min(matches, len(rows)))]
    generator = distributed.generator(seed)
    players = [AgentPlayer(agent, args, module, generator) for agent in seats_of(agents, args.num_agents)]
    players[seat] = Person()
    played = []
    for k, item in enumerate(items, 1):
        print(f"\n--- match {k} of {len(items)}, you are seat {seat} ---")
        env = getattr(task, "TeamEnv", module.TeamEnv)(task, [item], args)
        try:
            played += play_matches(players, env, 1)
        except EOFError:
            print("\nno further input")
            break
        if 0 in getattr(env, "failed", ()):
            print("\nthe environment has dropped this match")
            played.pop()
            continue
        said = ", ".join(f"seat {own}: {printable(text.strip()) or 'nothing'}" for own, text in played[-1].moves)
        earned = ", ".join(f"seat {own} {reward:g}" for own, reward in enumerate(played[-1].earned))
        print(f"\nsaid: {said}\nearned: {earned}")
    if played:
        mean = sum(match.earned[seat] for match in played) / len(played)
        print(f"\nyou earned {mean:.3f} in a match, in the mean over {len(played)}")
    return played
