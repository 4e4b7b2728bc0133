"""Agents to and from a folder: safetensors and JSON alone.

What utils ask of an agent, or of a team's critic, which has no actor:

    tokenizer     of transformers
    actor         a Policy (policy.py)
    optimizers    a list of torch's optimisers, such as AdamW, whose state is of tensors
    schedules     a list of torch's learning-rate schedules, stepped once an update

and, if it has them, `reference` and `critic`, Policies too or None, `opponents`, a list of Policies, `value_head`, a
module, and `state`, a dict of JSON values. In a folder an agent has

    agent_<i>/                   a Hugging Face folder of the actor, and critic/, one of the critic
    agent_<i>/actor/, critic/, reference/    in its place, where these are adapters, peft's own format
    agent_<i>/opponent_<k>/      in a checkpoint, earlier copies of the actor
    agent_<i>/value_head.safetensors, base.json, the tokenizer, optimizer_<k>.safetensors with optimizer_<k>.json
    critic/                      the team's critic
    base/                        with --save-base: the base of adapters

base.json tells the initial model from others: a run is not resumed with another one.
"""

import contextlib
import json
import shutil
from pathlib import Path

from safetensors import SafetensorError

from utils.cli import UserError, describe
from utils.distributed import is_main, say
from utils.files import disk_errors, put, read_json
from utils.models import adapters, causal_lm
from utils.models.loading import check_whole, loading, without_bars
from utils.models.sharding import share, whole_tensors
from utils.models.tensors import BASE, HEAD, fingerprint, load_head, load_optimizer, save_optimizer, save_tensors

WEIGHTS = "model.safetensors"


def save_agents(folder, agents, checkpoint=False, with_optimizer=False, with_base=False):
    """Write the agents' folders. A checkpoint has their optimisers too, and never the base of adapters.

    A folder is whole or not there: it is written aside, then renamed. Where models are sharded, all processes call it,
    to send their parts; the main one writes.
    """
    for i, agent in enumerate(agents):
        final = Path(folder) / folder_name(i, agent)
        aside = final.with_name(final.name + ".writing")
        if is_main():
            shutil.rmtree(aside, ignore_errors=True)
        has_adapters = False
        for role, policy in (policies_of(agent) | (opponents_of(agent) if checkpoint else {})).items():
            if policy.adapter is None:
                save_model(policy.model, aside / ("" if role == main_role(agent) else role))
            else:
                has_adapters = True
                if is_main():
                    causal_lm.restore_frozen_weights(policy.model.get_base_model())  # it may be sampling
                    adapters.save_adapter(aside / role, policy.model, policy.adapter, policy.name)
        base = initial_of(agent)
        base = {"base": base and base.name, "fingerprint": fingerprint_of(base)}
        if checkpoint or with_optimizer:
            for k, optimizer in enumerate(optimizers_of(agent)):
                save_optimizer(aside, optimizer, f"optimizer_{k}")
        if not is_main():
            continue
        with beside_weights(aside):
            getattr(agent, main_role(agent)).tokenizer.save_pretrained(aside)
        if hasattr(agent, "value_head"):
            save_tensors(agent.value_head.state_dict(), aside / HEAD)
        if checkpoint or has_adapters:
            (aside / BASE).write_text(json.dumps(base, indent=2))
        put(aside, final)
    if with_base and not checkpoint and agents[0].actor.adapter is not None:
        adapters.unmerge(agents[0].actor.model)
        adapters.save_base(Path(folder) / "base", agents[0].actor.model, agents[0].tokenizer)


def check_saved(agents):
    """Raise UserError for an agent with an optimiser of something that its folder does not have."""
    for i, agent in enumerate(agents):
        kept = [policy.model if policy.adapter is None else policy for policy in policies_of(agent).values()]
        kept += [agent.value_head] if hasattr(agent, "value_head") else []
        saved = {id(parameter) for module in kept for parameter in module.parameters()}
        groups = [group for optimizer in optimizers_of(agent) for group in optimizer.param_groups]
        num_lost = sum(id(parameter) not in saved for group in groups for parameter in group["params"])
        if num_lost:
            learns = f"{folder_name(i, agent)} learns {num_lost} tensors that no checkpoint would have"
            raise UserError(f"{learns}: make a module of your own part of value_head")


def optimizers_of(agent):
    """Its optimisers: of an actor, then of its critic, if it has one; or the only one."""
    return agent.optimizers if hasattr(agent, "optimizers") else [agent.optimizer]


def schedules_of(agent):
    """The schedules of their learning rates."""
    return agent.schedules if hasattr(agent, "schedules") else [agent.schedule]


def folder_name(i, agent):
    """The folder of agent i, or of a team's critic."""
    return f"agent_{i}" if hasattr(agent, "actor") else "critic"


def main_role(agent):
    """The role of the model whose folder is the agent's own."""
    return "actor" if hasattr(agent, "actor") else "critic"


def policies_of(agent):
    """What an agent has of its own, by role: {role: Policy}."""
    policies = {role: getattr(agent, role, None) for role in ("actor", "critic")}
    reference = getattr(agent, "reference", None)
    if reference is not None and (reference.adapter or reference.is_copy):
        policies["reference"] = reference
    return {role: policy for role, policy in policies.items() if policy is not None}


def opponents_of(agent):
    """Earlier copies of its actor that it plays with, by role: {role: Policy}."""
    return {f"opponent_{k}": policy for k, policy in enumerate(getattr(agent, "opponents", ()))}


def initial_of(agent):
    """The initial model of an agent: its reference, or the base of its adapters; None: it does not have it."""
    reference = getattr(agent, "reference", None)
    if reference is not None and reference.adapter is None and not reference.is_copy:
        return reference
    return next((policy for policy in policies_of(agent).values() if policy.adapter is not None), None)


def fingerprint_of(policy):
    """What tells the initial model, or the base of adapters, from others; None: there is none.

    It is found out once, before anybody samples: then a base may have adapters merged into it, or cast weights.
    """
    if policy is None:
        return None
    if policy.fingerprint is None:
        if policy.adapter is not None:
            adapters.unmerge(policy.model)
        policy.fingerprint = fingerprint(policy.model)
    return policy.fingerprint


def save_model(model, path):
    """Write a model as a Hugging Face folder."""
    causal_lm.restore_frozen_weights(model)  # it may be sampling
    weights = whole_tensors(model.state_dict(keep_vars=True))
    if not is_main():
        return
    is_saved = False
    with beside_weights(path):
        with without_bars():
            model.save_pretrained(path, state_dict=dict(weights))
        is_saved = True
    if not is_saved:
        path.mkdir(parents=True, exist_ok=True)
        save_tensors({name: x.clone() for name, x in weights.items()}, path / WEIGHTS)


@contextlib.contextmanager
def beside_weights(path):
    """Within it what transformers refuses to write is said, and left out: no weights are lost for it."""
    try:
        with disk_errors():
            yield
    except (OSError, SafetensorError):
        raise
    except Exception as error:
        say(f"{path} is written without what transformers does not save: {describe(error)}")


def load_agents(folder, agents):
    """Give the agents what save_agents wrote in a checkpoint. Raises UserError where it is of other models."""
    for i, agent in enumerate(agents):
        path = Path(folder) / folder_name(i, agent)
        base = initial_of(agent)
        if read_json(path / BASE).get("fingerprint") != fingerprint_of(base):
            raise UserError(f"the run of {folder} began with another model than agent {i} has here")
        for role, policy in (policies_of(agent) | opponents_of(agent)).items():
            if policy.adapter is None:
                load_weights(path / ("" if role == main_role(agent) else role), policy.model)
            else:
                adapters.load_adapter(path / role, policy.model, policy.adapter)
        if hasattr(agent, "value_head"):
            load_head(path / HEAD, agent.value_head)
        for k, optimizer in enumerate(optimizers_of(agent)):
            load_optimizer(path, optimizer, f"optimizer_{k}")


def load_weights(path, model, flag="--resume"):
    """Give a model the weights in a Hugging Face folder of its own kind. Raises UserError, which names the flag."""
    with loading(flag, path):
        saved = type(model).from_pretrained(path, dtype=model.dtype, use_safetensors=True)  # no pickles
        check_whole(saved, "it")
        weights = model.state_dict()
        model.load_state_dict({name: share(x, weights[name]) for name, x in saved.state_dict().items()})
