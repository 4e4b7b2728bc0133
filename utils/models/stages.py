"""What a run of adapters starts from: another run's folder, or a plain peft folder (--load-checkpoint)."""

import copy
import os
import warnings
from pathlib import Path

from utils.cli import UserError, one_line, run_of
from utils.models.adapters import WEIGHTS, check_base, copy_adapter, load_adapter, unmerge
from utils.models.loading import locate, num_learners
from utils.models.lora import (
    CONFIG,
    check_lora_args,
    describe_differences,
    in_words,
    lora_config,
    merge_configs,
    read_config,
    resolve_modules,
)
from utils.models.tensors import BASE, HEAD, fingerprint, load_head, load_optimizer
from utils.models.weights import load_weights, optimizers_of

PICKLE = "adapter_model.bin"


def check_stage(args):
    """Raise UserError for flags of the adapters, or of what they start from, that can't be followed."""
    check_lora_args(args)
    if args.load_checkpoint is not None and not own_checkpoint(args):
        check_checkpoint(args)


def own_checkpoint(args):
    """The newest whole checkpoint of the run that goes on (--resume), or is forked, or the one that is named, or None.

    It has all that the run once started from. Raises UserError where there are checkpoints, and none is whole.
    """
    from utils.run.checkpoint import newest_whole  # which knows of runs, and they of models

    for run in filter(None, (args.resume, args.fork)):
        path = newest_whole(Path(run) / "checkpoints", tell=lambda _: None)[0] if run_of(run) == run else Path(run)
        if path is not None:
            return path


def check_checkpoint(args):
    """The folder of each agent in --load-checkpoint; a plain peft folder is that of all.

    Raises UserError unless there are num_agents, with all files that are to be loaded.
    """
    folder = Path(args.load_checkpoint)
    paths = find_agents(folder, num_learners(args))
    for path in paths:
        if args.keep_reference and is_plain(path):
            raise UserError(f"--keep-reference takes a run's folder, and {path} is a peft folder, without references")
        if not is_plain(path) and not (path / BASE).is_file():
            raise UserError(f"{path} is incomplete: there is no {path / BASE}")
        for role in saved_roles(path, args):
            check_files(path, adapter_folder(path, role))
    return paths


def find_agents(folder, num_agents):
    """The folder of each of num_agents agents in a run's folder, or in a plain peft folder. Raises UserError."""
    if is_plain(folder):
        return [folder] * num_agents
    paths = []
    while os.path.isdir(folder / f"agent_{len(paths)}"):
        paths.append(folder / f"agent_{len(paths)}")
    if not paths:
        reason = "it has no agent_0" if os.path.isdir(folder) else "there is no such folder"
        takes = f"a folder with agent_0 and so on in it, or a peft folder, with {CONFIG}"
        raise UserError(f"--load-checkpoint takes {takes}, got {folder}: {reason}")
    if len(paths) != num_agents:
        there = "1 agent" if len(paths) == 1 else f"{len(paths)} agents"
        raise UserError(f"--load-checkpoint {folder} has {there}, and the team has {num_agents}")
    return paths


def check_files(path, folder):
    """Raise UserError unless an agent's folder has an adapter's files in `folder`."""
    for file in (folder / CONFIG, folder / WEIGHTS):
        if not file.is_file():
            pickle = f"; {PICKLE} is a pickle, which is not read" if (folder / PICKLE).is_file() else ""
            raise UserError(f"{path} is incomplete: there is no {file}{pickle}")
    read_config(folder)


def is_plain(path):
    """Whether a folder is an adapter in peft's format itself."""
    return os.path.isfile(path / CONFIG)  # False too for what can be no name


def adapter_folder(path, role):
    """Where an agent's folder has the adapter of a role."""
    return path if is_plain(path) else path / role


def saved_roles(path, args):
    """The adapters that are loaded from an agent's folder."""
    roles = ["actor"]
    if (path / "critic").is_dir() and not is_model(path / "critic") and not args.fresh_critic:
        roles.append("critic")
    if args.keep_reference and (path / "reference").is_dir():
        roles.append("reference")
    return roles


def is_model(path):
    """Whether a folder is a model of its own, without adapters."""
    return (path / "config.json").is_file()


def warn_of_other_base(path, base_name):
    """Warn where a plain peft folder names another base: it has no fingerprint of it, only shapes are checked."""
    there = read_config(path).base_model_name_or_path
    if there and os.path.realpath(locate(str(there))) != os.path.realpath(locate(str(base_name))):
        warnings.warn(f"{path} is of the base {one_line(there, 80)} by its name, not of {base_name}", stacklevel=2)


def compare_configs(model, config, args, agents):
    """`config` merged with the LoRA configurations of --load-checkpoint, and how these differ, by field, in words.

    `model` is the base of these `agents`, numbers, without adapters. Raises UserError where they differ, unless
    --merge-lora-configs.
    """
    folder = args.load_checkpoint
    merged = copy.deepcopy(config)
    differences = {}
    paths = check_checkpoint(args)
    for path in dict.fromkeys(paths[i] for i in agents):
        for role in saved_roles(path, args):
            saved_folder = adapter_folder(path, role)
            saved = resolve_modules(model, read_config(saved_folder), saved_folder / CONFIG)
            differences |= describe_differences(saved, config)
            if saved.use_dora and not config.use_dora:
                raise UserError(f"{saved_folder / CONFIG} has use_dora, and takes use_dora here too")
            merged = merge_configs(model, merged, saved)
    text = "; ".join(differences.values())
    if differences and not args.merge_lora_configs:
        raise UserError(f"--load-checkpoint {folder} takes its LoRA configuration, or --merge-lora-configs: {text}")
    if args.load_optimizer and differences.keys() - {"lora_dropout"}:
        raise UserError(f"--load-optimizer takes the LoRA configuration of {folder}, not a merged one: {text}")
    return merged if differences else config, text


def build_config(model, args, agents):
    """A peft.LoraConfig for these `agents` from the flags, merged with --load-checkpoint's; warns where they differ.

    Raises UserError for flags that the model can't follow, and where the two differ without --merge-lora-configs.
    """
    own = args.load_checkpoint and own_checkpoint(args)
    if own:
        config = read_config(own / f"agent_{agents[0]}" / "actor")
        config.base_model_name_or_path = None
        config.inference_mode = False
        return config
    config = lora_config(model, args)
    if args.load_checkpoint:
        folder = args.load_checkpoint
        config, differences = compare_configs(model, config, args, agents)
        if differences:
            merged = f"r {config.r}, target_modules {in_words(config.target_modules)}"
            if config.modules_to_save:
                merged += f", modules_to_save {in_words(config.modules_to_save)}"
            text = f"the LoRA configuration of {folder} differs: {differences}; now {merged}, all else as here"
            warnings.warn(text, stacklevel=2)
    return config


def load_stage(agents, args):
    """Start from --load-checkpoint: agent i's actor becomes actor and reference; its critic and head are loaded.

    A critic that the checkpoint lacks begins as its actor, a head that it lacks is new, and so is a team's critic. With
    --keep-reference a reference that the checkpoint lacks is the base, as it was there. The policies are the
    checkpoint's, also in adapters that are wider than its own (`build_config`). A run that goes on takes nothing from
    there. Raises UserError.
    """
    if own_checkpoint(args):
        return
    fingerprints = {}
    for path, agent in zip(check_checkpoint(args), agents):
        actor = agent.actor
        if is_plain(path):
            warn_of_other_base(path, actor.name)
        else:
            if id(actor.model) not in fingerprints:
                unmerge(actor.model)
                fingerprints[id(actor.model)] = fingerprint(actor.model)
            check_base(path, actor.model, actor.name, fingerprints[id(actor.model)])
        load_adapter(adapter_folder(path, "actor"), actor.model, actor.adapter, args.merge_lora_configs)
        if "reference" in saved_roles(path, args):
            load_adapter(path / "reference", actor.model, agent.reference.adapter, args.merge_lora_configs)
        elif not args.keep_reference:
            copy_adapter(actor.model, actor.adapter, agent.reference.adapter)
        if not args.fresh_critic:
            load_critic(path, agent, args)
        if args.load_optimizer:
            load_optimizers(path, agent, args)


def load_critic(path, agent, args):
    """Give an agent the critic and the value head in its folder. Raises UserError where these are of another kind."""
    critic = getattr(agent, "critic", None)
    has_critic = not is_plain(path) and (path / "critic").is_dir()
    if critic is not None and has_critic and is_model(path / "critic") != (critic.adapter is None):
        kinds = ["adapters", "a model of its own"]
        there, here = kinds[is_model(path / "critic")], kinds[critic.adapter is None]
        raise UserError(f"{path}/critic is {there}, and here a critic is {here}: add --fresh-critic")
    if critic is not None and has_critic and critic.adapter is None:
        load_weights(path / "critic", critic.model, "--load-checkpoint")
    elif critic is not None and has_critic:
        load_adapter(path / "critic", critic.model, critic.adapter, args.merge_lora_configs)
    elif critic is not None and critic.adapter:
        copy_adapter(critic.model, agent.actor.adapter, critic.adapter)
    reads_alike = has_critic if critic is not None and critic.adapter is None else critic is not None or not has_critic
    if hasattr(agent, "value_head") and (path / HEAD).is_file() and reads_alike:
        load_head(path / HEAD, agent.value_head)


def load_optimizers(path, agent, args):
    """Restore the optimisers' moments and steps from an agent's folder, if it has them; else warn.

    Learning rates and other settings stay the optimisers' own. With --fresh-critic only the actor's, the first, is
    restored. Raises UserError where a state does not fit.
    """
    for k, optimizer in enumerate(optimizers_of(agent)[: 1 if args.fresh_critic else None]):
        if not (path / f"optimizer_{k}.safetensors").is_file():
            warnings.warn(f"{path} has no state of optimizer {k}: it is new", stacklevel=2)
        else:
            load_optimizer(path, optimizer, f"optimizer_{k}")
