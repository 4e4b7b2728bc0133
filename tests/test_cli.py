"""Names of the sources' pages are flags or aliases; --help explains every flag of every script."""

import importlib
import os
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
import torch
from processes import ROOT

import iac_llm
import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils.cli import ALIASES, UserError, command_line, find_run, flags, parse, run_of

SCRIPTS = (ippo_llm, iac_llm, maac_llm, magrpo_llm, ppo_llm)
OF_COMLRL = """
    output_dir actor_learning_rate critic_learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
    rollout_buffer_size mini_batch_size value_clip_range value_loss_coef entropy_coef advantage_normalization
    max_new_tokens temperature top_p top_k do_sample num_train_epochs per_device_train_batch_size use_separate_critic
    critic_model_name_or_path critic_value_head_hidden_dim value_head_hidden_dim num_agents num_turns reward_norm_eps
""".split()
OF_AGILERL = """
    batch_size beta vf_coef clip_coef gamma gae_lambda lr_actor lr_critic max_grad_norm update_epochs temperature
    repetition_penalty top_p top_k min_p use_separate_reference_adapter calc_position_embeddings
    micro_batch_size_per_gpu max_output_tokens min_output_tokens max_model_len hf_generate_chunk_size lora_config
    use_vllm vllm_config seed turn_level_clip action_granularity turn_value_reduction adv_whitening
    gradient_checkpointing torch_compiler max_steps evaluation_interval max_turns load_checkpoint
""".split()


def names_of(Args):
    own = set(Args.__dataclass_fields__)
    return own | {alias for alias, name in ALIASES.items() if name in own}


@pytest.mark.parametrize(
    "script, names",
    [(ippo_llm, [*OF_COMLRL, "ppo_epochs"]), (iac_llm, [*OF_COMLRL, "ac_epochs"]), (ppo_llm, OF_AGILERL)],
)
def test_every_name_of_a_sources_page_is_a_flag(script, names):
    assert set(names) <= names_of(script.Args)


def test_an_alias_is_the_flag_on_the_command_line_and_from_python():
    args = parse(ppo_llm.Args, ["--lr-actor", "0.5", "--max-turns", "3", "--no-adv-whitening", "--beta", "0.25"])
    assert (args.actor_learning_rate, args.num_turns) == (0.5, 3)
    assert (args.advantage_normalization, args.kl_loss_coef) == (False, 0.25)
    assert ppo_llm.Args(lr_actor=0.5, max_turns=3).num_turns == 3


MINE = """
from utils.cli import flags


@flags
class Args:
    seed: int = 1  # a seed

    # ----------------
    one: int = 1  # a number

    # 2nd stage
    two: int = 2  # another one

    # Lambda
    three: tuple[int, ...] = ()  # several
"""


def test_any_comment_may_stand_between_the_flags_of_a_copy(tmp_path, monkeypatch):
    (tmp_path / "my_flags.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    args = parse(importlib.import_module("my_flags").Args, ["--two", "5", "--three", "1", "2"])
    assert (args.one, args.two, args.three) == (1, 5, (1, 2))


@pytest.mark.parametrize("annotation", [list[int], list[int] | None, Path | None, Enum("Kind", "a b")])
def test_a_flag_that_a_config_can_not_keep_is_refused_where_it_is_written(annotation):
    with pytest.raises(TypeError, match="^the flag own is to be a number, a str, a Literal, or a tuple"):
        flags(type("Args", (), {"__annotations__": {"own": annotation}, "own": None}))


def test_values_are_not_clipped_with_inf():
    assert parse(ippo_llm.Args, ["--value-clip-range", "inf"]).value_clip_range == float("inf")
    with pytest.raises(UserError, match="--kl-coef"):
        parse(ippo_llm.Args, ["--kl-coef", "inf"])


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_has_every_flag(script, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(script.Args, ["--help"], script.__doc__)
    assert not stop.value.code
    text = capsys.readouterr().out
    for name in script.Args.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in text


def test_a_terminal_that_knows_ascii_alone_ends_no_command(tmp_path):
    lines = ["from utils.cli import command_line, flags", "@flags", "class Args:", "    x: int = 1  # a number"]
    lines.append("command_line(lambda args: print('one \u2026'), Args, 'What it does.')")
    (tmp_path / "tool.py").write_text("\n".join(lines), encoding="utf-8")
    env = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, tmp_path / "tool.py"], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one \\u2026\n", "")


@pytest.mark.parametrize("size, code", [(10**15, 1), (None, None)])
def test_memory_that_runs_out_before_a_run_is_one_line_and_no_other_error_is(size, code, monkeypatch, capsys):
    def main(args):
        return torch.empty(size) if size else torch.ones(2) @ torch.ones(3)

    monkeypatch.setattr(sys, "argv", ["ippo_llm.py"])
    with pytest.raises(SystemExit if code else RuntimeError) as stop:
        command_line(main, ippo_llm.Args, "What it does.")
    message = capsys.readouterr().err
    assert getattr(stop.value, "code", None) == code and message.count("\n") == (code is not None)
    assert not code or message.startswith("ippo_llm.py: error: out of memory: --lora-rank, --dtype, --shard may take")


def test_the_latest_run_is_found_beside_a_link_that_leads_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for k in (1, 2):
        Path(f"runs/ippo_llm__{k}").mkdir(parents=True)
        Path(f"runs/ippo_llm__{k}/config.json").write_text("{}")
        os.utime(f"runs/ippo_llm__{k}/config.json", (k, k))
        os.utime(f"runs/ippo_llm__{k}", (k, k))
    Path("runs/ippo_llm__1/notes.txt").symlink_to("nowhere.txt")
    os.utime("runs/ippo_llm__1/notes.txt", (1, 1), follow_symlinks=False)
    os.utime("runs/ippo_llm__1", (1, 1))
    assert find_run("latest", "ippo_llm") == Path("runs/ippo_llm__2")


def test_a_run_in_a_folder_called_checkpoints_is_no_checkpoint(tmp_path):
    run = tmp_path / "checkpoints/first"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    assert run_of(str(run)) == str(run) == run_of(str(run / "checkpoints/update_000001"))
