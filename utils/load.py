"""A run's folder as agents, in one call from Python; safetensors and JSON are read, and no code is run for it.

from utils.load import load
agents, args = load("runs/mine", ppo_llm)
"""

from pathlib import Path

from utils import distributed, models
from utils.cli import UserError, flags_of
from utils.files import STATE, read_json
from utils.models.lora import SHORT_FORM, read_config
from utils.models.weights import load_agents
from utils.run.checkpoint import newest_whole

# Flags that are not those of the run: of code, devices and folders, and of what the run itself started from
NOT_TAKEN = """trust_remote_code shard use_vllm vllm_config resume fork pause_at overwrite load_checkpoint
load_optimizer eval_against keep_reference fresh_critic merge_lora_configs""".split()


def load(folder, script, model=None, tokenizer=None, num_updates=1, **flags):
    """The agents of a run as they are in its newest whole checkpoint, and their flags: (agents, args).

    `script` is the run's, imported: ppo_llm. A team's critic is the last of the agents. `model` and `tokenizer` are
    main's, for a run that had them. Learning rates would take `num_updates` more updates. `flags` stand in for the
    run's own; --trust-remote-code, --shard and --use-vllm are off unless they are among them. What the run itself
    started from (--load-checkpoint) is not needed, nor its task or environment. Raises UserError.
    """
    agents, args, checkpoint, _ = begin(folder, script, model, tokenizer, num_updates, **flags)
    load_agents(checkpoint, agents)
    for agent, state in zip(agents, read_json(checkpoint / STATE)["agents"]):
        if state is not None:
            agent.state = state
    return agents, args


def begin(folder, script, model=None, tokenizer=None, num_updates=1, **flags):
    """The agents of a run as they were before it, its flags, its newest whole checkpoint, what the agents start from.

    Adapters are of the shape that they have in the checkpoint.
    """
    saved = flags_of(folder, script.Args, "load")
    checkpoint, _ = newest_whole(Path(folder) / "checkpoints")
    if checkpoint is None:
        raise UserError(f"load: {folder} has no checkpoint")
    if saved["lora_config"] or saved["load_checkpoint"]:
        saved["lora_config"] = read_config(checkpoint / "agent_0" / "actor")
        saved = {name: value for name, value in saved.items() if name not in SHORT_FORM}
    saved = {name: value for name, value in saved.items() if name not in NOT_TAKEN}
    args = script.Args(**(saved | flags))
    distributed.start(args, trains=False)
    initials = models.load(args, model, tokenizer)
    for i, initial in enumerate(initials):
        initial.has_own_reference = (checkpoint / f"agent_{i}" / "reference").is_dir()
    agents = [script.Agent(i, initial, num_updates, args) for i, initial in enumerate(initials)]
    if hasattr(script, "Critic"):
        agents.append(script.Critic(initials[0], num_updates, args))
    return agents, args, checkpoint, initials
