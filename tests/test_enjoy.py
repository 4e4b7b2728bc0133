"""utils.enjoy: what trained and untouched models write is really theirs, rewards are the task's, the page is safe."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import peft
import pytest
import torch
from helpers import TINY, make_args, with_curves
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, set_seed

import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import enjoy
from utils.cli import TaskError, UserError, parse
from utils.envs.guess import Env
from utils.models.prompts import render
from utils.tasks import number, tldr

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def make_run(folder, script, **flags):
    """The agents and the Run of one update."""
    small = {"train_size": 8, "rollout_buffer_size": 8, "num_train_epochs": 1, "output_dir": str(folder)}
    if script is ppo_llm:
        small |= {"evaluation_interval": 0, "batch_size": 8, "lr_actor": 0.05}
        return script.main(script.Args(**(small | flags)))
    small |= {"eval_interval": 0, "eval_size": 4, "mini_batch_size": 8}
    return script.main(make_args(script=script, **(small | flags)))


def train(folder, script, **flags):
    """The folder of a run of one update."""
    make_run(folder, script, **flags)
    return str(folder)


@pytest.fixture(scope="module")
def unlearned(tmp_path_factory):
    """A run of IPPO whose agents are as they were."""
    rates = {"actor_learning_rate": 0.0, "critic_learning_rate": 0.0}
    with with_curves():
        return train(tmp_path_factory.mktemp("ippo") / "run", ippo_llm, **rates)


@pytest.fixture(scope="module")
def guess(tmp_path_factory):
    return train(tmp_path_factory.mktemp("guess") / "run", ppo_llm, max_turns=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    flags = {"task": "tldr", "num_agents": 2, "max_output_tokens": 16}
    return train(tmp_path_factory.mktemp("pair") / "run", ppo_llm, **flags)


def test_a_run_that_max_steps_ended_is_finished(tmp_path):
    run = train(tmp_path / "run", ippo_llm, task="number", max_new_tokens=4, train_size=24, max_steps=9)
    assert len(enjoy.show(run, items=2)) == 2


@pytest.mark.parametrize("long_prompts, shown", [("drop", 4), ("truncate", 5)])
def test_long_prompts_are_shown_as_the_run_took_them(tmp_path, long_prompts, shown):
    """Of the five held-out items of seed 1 one has a prompt of more than 85 tokens."""
    flags = {"max_prompt_length": 85, "train_size": 16, "max_new_tokens": 4, "eval_size": 5, "task": "tldr"}
    run = train(tmp_path / "run", ippo_llm, long_prompts=long_prompts, **flags)
    assert len(enjoy.show(run, items=5)) == shown


@pytest.fixture
def copied(unlearned, tmp_path):
    return shutil.copytree(unlearned, tmp_path / "copied")


def alter(folder, name="model.safetensors"):
    """Give a model's folder other weights."""
    weights = load_file(folder / name)
    generator = torch.Generator().manual_seed(0)
    weights = {key: x + 0.1 * torch.randn(x.shape, generator=generator) for key, x in weights.items()}
    save_file(weights, folder / name, metadata={"format": "pt"})
    return str(folder)


def texts(samples, team):
    return [sample[team]["completions"] for sample in samples]


def set_flags(folder, **flags):
    config = json.loads((folder / "config.json").read_text())
    set_config(folder, args=config["args"] | flags)


def set_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def prompts_of(agent, tokenizer, items=None):
    items = items or [*tldr.eval_dataset(4, 1)]
    return [render(tldr.formatters(item, agent), tokenizer) for item in items]


def likeliest(model, tokenizer, prompt, tokens):
    """Greedy decoding of one prompt, without a cache."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
    start = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < start + tokens and (ids.shape[1] == start or ids[0, -1] != tokenizer.eos_token_id):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


# --- What is written --------------------------------------------------------------------------------------------------


def test_untouched_texts_are_the_models_and_agents_that_learned_nothing_write_the_same(unlearned, model, tokenizer):
    samples = enjoy.show(unlearned)
    assert [sample["item"] for sample in samples] == [*tldr.eval_dataset(4, 1)]
    set_seed(1)
    for agent in range(2):
        batch = tokenizer(prompts_of(agent, tokenizer), padding=True, padding_side="left", return_tensors="pt")
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 24}
        out = model.generate(input_ids=batch.input_ids, attention_mask=batch.attention_mask, **how)
        written = tokenizer.batch_decode(out[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        assert [completions[agent] for completions in texts(samples, "untouched")] == [[text] for text in written]
    assert texts(samples, "trained") == texts(samples, "untouched") != texts(enjoy.show(unlearned, seed=2), "trained")


def test_the_likeliest_texts_are_those_of_a_plain_loop(unlearned, model, tokenizer, monkeypatch):
    (sample,) = run_command(unlearned, "--items", 1, "--no-do-sample")
    expected = [[likeliest(model, tokenizer, prompts_of(agent, tokenizer)[0], 24)] for agent in range(2)]
    assert sample["untouched"]["completions"] == expected
    cold = enjoy.show(unlearned, items=1, temperature=1e-4)
    assert texts(cold, "untouched") == [expected]
    monkeypatch.setattr(enjoy, "ROWS", 2)
    more = enjoy.show(unlearned, items=5, do_sample=False)  # as many as are held out
    assert len(more) == 4 and more[0] == sample


def test_trained_texts_are_of_each_agents_own_weights(copied, tokenizer):
    alter(copied / "agent_1")
    samples = enjoy.show(copied, items=2, do_sample=False)
    altered = AutoModelForCausalLM.from_pretrained(copied / "agent_1", dtype=torch.float32).eval()
    for sample, prompt in zip(samples, prompts_of(1, tokenizer)):
        untouched, trained = sample["untouched"]["completions"], sample["trained"]["completions"]
        assert trained[0] == untouched[0] and trained[1] != untouched[1]
        assert trained[1] == [likeliest(altered, tokenizer, prompt, 24)]


def test_adapters_are_on_for_the_trained_and_off_for_the_untouched(pair, model, tokenizer):
    samples = enjoy.show(pair, items=2, do_sample=False)
    prompts = [prompts_of(agent, tokenizer)[:2] for agent in range(2)]
    plain = [[[likeliest(model, tokenizer, of_agent[k], 16)] for of_agent in prompts] for k in range(2)]
    assert texts(samples, "untouched") == plain
    adapted = [peft.PeftModel.from_pretrained(model, f"{pair}/agent_0/actor", adapter_name="0")]
    adapted[0].load_adapter(f"{pair}/agent_1/actor", adapter_name="1")
    for agent in range(2):
        adapted[0].set_adapter(str(agent))
        for k in range(2):
            expected = [likeliest(adapted[0].eval(), tokenizer, prompts[agent][k], 16)]
            assert samples[k]["trained"]["completions"][agent] == expected
    assert texts(samples, "trained") != plain


def test_each_agent_has_its_own_untouched_model(tmp_path, tokenizer):
    other = alter(shutil.copytree(TINY, tmp_path / "other"))
    run = train(tmp_path / "run", ippo_llm, model=(TINY, other), actor_learning_rate=0.0, max_new_tokens=8)
    (sample,) = enjoy.show(run, items=1, do_sample=False)
    for agent, name in enumerate((TINY, other)):
        loaded = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        expected = [likeliest(loaded, tokenizer, prompts_of(agent, tokenizer)[0], 8)]
        assert sample["untouched"]["completions"][agent] == expected == sample["trained"]["completions"][agent]


def test_several_turns_are_played_and_scored(tmp_path):
    flags = {"task": "number", "num_turns": 2, "max_new_tokens": 4, "actor_learning_rate": 1e-2}
    run = train(tmp_path / "run", ippo_llm, **flags)
    lengths = []
    for sample in enjoy.show(run):
        for team in enjoy.TEAMS:
            played = sample[team]["completions"]
            lengths.append(len(played[0]))
            earned = [number.reward_func(*([text] for text in turn), items=[sample["item"]]) for turn in zip(*played)]
            assert sample[team]["rewards"] == [[reward for (reward,) in earned]] * 2
            assert sample[team]["reward"] == pytest.approx(sum(map(sum, earned)))
            assert [len(prompts) for prompts in sample[team]["prompts"]] == [lengths[-1]] * 2
            assert {*sample[team]["prompts"][0][1:]} <= {"met", "higher", "lower"}
    assert 2 in lengths


ADAPTERS = {"max_turns": 3, "lr_actor": 1e-3}
ON_NUMBER = ADAPTERS | {"task": "number", "num_agents": 2, "max_output_tokens": 4}
IN_FULL = {"task": "number", "num_turns": 3, "max_new_tokens": 4}
MATCHES = {  # script, what is played, flags, turns of the longest episode
    "task on adapters": (ppo_llm, number, ON_NUMBER, 3),
    "task, little room": (ppo_llm, number, ON_NUMBER | {"max_model_len": 38}, 2),
    "task, threshold": (ppo_llm, number, ON_NUMBER | {"early_termination_threshold": 0.5}, 2),
    "environment": (ppo_llm, Env, ADAPTERS, 3),
    "task in full": (ippo_llm, number, IN_FULL, 3),
    "with a central critic": (maac_llm, number, IN_FULL, 3),
    "after trees": (magrpo_llm, number, IN_FULL | {"num_generations": 2}, 3),
}


@pytest.mark.parametrize("case", MATCHES)
def test_greedy_play_is_that_of_the_script(tmp_path, case):
    script, subject, flags, longest = MATCHES[case]
    agents, run = make_run(tmp_path / "run", script, **flags)
    samples = enjoy.show(run.folder, items=8, do_sample=False)
    items = [sample["item"] for sample in samples]
    if script is ppo_llm:
        rollouts = script.play(agents, subject, items, run.args, generator=None, greedy=True)
    else:
        rollouts = script.play(agents[:2], subject, items, replace(run.args, do_sample=False), generator=None)
    for agent, rollout in enumerate(rollouts):
        assert [sample["trained"]["completions"][agent] for sample in samples] == rollout.responses
        for sample, rewards in zip(samples, rollout.raw_rewards.tolist(), strict=True):
            earned = sample["trained"]["rewards"][agent]
            assert earned + [0.0] * (len(rewards) - len(earned)) == pytest.approx(rewards)
        assert max(map(len, rollout.responses)) == longest


def test_an_environment_is_played_with_the_held_out_seeds(guess):
    samples = enjoy.show(guess, items=6)
    assert [sample["item"]["seed"] for sample in samples] == [*range(1_500_000, 1_500_006)]
    for sample in samples:
        for team in enjoy.TEAMS:
            game = Env()
            observation, _ = game.reset(sample["item"]["seed"])
            ((prompts,), (answers,), (rewards,)) = (sample[team][x] for x in ("prompts", "completions", "rewards"))
            for prompt, answer, reward in zip(prompts, answers, rewards, strict=True):
                assert prompt == observation
                observation, expected, *_ = game.step(answer)
                assert reward == expected
            assert sample[team]["reward"] == pytest.approx(sum(rewards)) and 1 <= len(rewards) <= 3
    assert texts(samples, "trained") != texts(samples, "untouched")


FAILING = """
class Env:
    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return "Say one.", {}

    def step(self, answer):
        self.turn += 1
        if self.seed % 2 and self.turn == 2:
            raise RuntimeError("it broke")
        return "again", 1.0, False, False, {}
"""


def test_an_episode_that_fails_has_no_reward_and_one_without_room_ends(guess, tmp_path):
    run = shutil.copytree(guess, tmp_path / "run")
    (tmp_path / "failing.py").write_text(FAILING)
    set_flags(run, env=str(tmp_path / "failing.py"))
    with pytest.raises(UserError, match=r"takes the code in failing\.py: add --env FILE\.py"):
        enjoy.show(run, items=2)
    env = str(tmp_path / "failing.py")
    whole, failed = enjoy.show(run, items=2, env=env)
    assert whole["trained"]["reward"] == 3.0 and failed["trained"]["reward"] is None
    assert "it broke" in enjoy.as_text([failed]) and "it broke" in enjoy.page(run, [failed])
    assert enjoy.mean_rewards([whole, failed])[0] == {"untouched": 3.0, "trained": 3.0}
    set_flags(run, max_model_len=24)
    (short,) = enjoy.show(run, items=1, env=env)
    assert short["trained"]["reward"] < 3.0


def test_an_episode_that_its_environment_cuts_short_ends(guess, tmp_path):
    run = shutil.copytree(guess, tmp_path / "run")
    (tmp_path / "cut.py").write_text(FAILING.replace("1.0, False, False", "1.0, False, True"))
    set_flags(run, env=str(tmp_path / "cut.py"))
    (sample,) = enjoy.show(run, items=1, env=str(tmp_path / "cut.py"))
    assert sample["trained"]["rewards"] == [[1.0]] and len(sample["trained"]["completions"][0]) == 1


def test_a_prompt_of_ones_own_is_put_as_the_task_puts_it_or_as_it_is(unlearned, guess):
    (sample,) = enjoy.show(unlearned, prompt="My dog ran away.")
    for team in enjoy.TEAMS:
        assert sample[team]["reward"] is None and sample[team]["note"]
        assert sample[team]["prompts"][1] == [tldr.formatters({"prompt": "My dog ran away."}, 1)[0]["content"]]
    (sample,) = enjoy.show(guess, prompt="Guess it.")
    assert sample["trained"]["prompts"] == [["Guess it."]] and len(sample["trained"]["completions"][0]) == 1
    assert "own" in enjoy.as_text([sample]) and "mean reward" not in enjoy.as_text([sample])
    assert "no reward" in enjoy.page(guess, [sample])


# --- What is shown ----------------------------------------------------------------------------------------------------


def run_command(*argv):
    return enjoy.main(parse(enjoy.Args, [*map(str, argv)]))


def test_the_same_command_prints_the_same(unlearned, capsys):
    printed = []
    for _ in range(2):
        samples = run_command(unlearned, "--items", 3)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and len(samples) == 3
    means = [sum(sample[team]["reward"] for sample in samples) / 3 for team in enjoy.TEAMS]
    assert f"mean reward over 3 items: untouched {means[0]:.3f}, trained {means[1]:.3f}" in printed[0]
    assert "item 3 of 3" in printed[0] and "agent 1, untouched:" in printed[0]


class Reader(HTMLParser):
    """Elements, attributes and text of a page; elements must nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.texts = [], [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.mark.parametrize("drawn", [False, True], ids=["there", "drawn"])
def test_the_page_is_whole_and_needs_nothing_else(copied, drawn):
    if drawn:
        (copied / "curves.png").unlink()
    run_command(copied, "--items", 2, "--html", copied / "page.html")
    page = (copied / "page.html").read_text(encoding="utf-8")
    read = Reader(page)
    assert page.startswith("<!doctype html>") and ("html", "lang", "en") in read.attributes
    assert ("meta", "charset", "utf-8") in read.attributes and ("meta", "name", "viewport") in read.attributes
    assert read.tags.count("title") == read.tags.count("h1") == 1 and "script" not in read.tags
    sources = [value for _, name, value in read.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,iVBOR")
    assert not re.search(r"https?://|url\(|@import", page)
    assert all(value for tag, name, value in read.attributes if name == "alt")
    shown = "".join(read.texts)
    config = json.loads((copied / "config.json").read_text())
    assert config["git_commit"] in shown and config["versions"]["torch"] in shown and "reward_norm_eps" in shown
    assert not [*copied.glob("*.writing")]


@pytest.mark.parametrize("name", enjoy.HELD_OUT)
def test_the_page_begins_with_what_the_run_measured_on_all_held_out_items(copied, name):
    assert enjoy.held_out_rewards(copied) == {}
    columns = f"global_step,reward_mean,{name},{name}_untrained"
    (copied / "metrics.csv").write_text(f"{columns}\n4,0.5,0.25,0.125\n8,0.5,,\n12,0.5,0.75,\n")
    assert enjoy.held_out_rewards(copied) == {"untouched": 0.125, "trained": 0.75}
    page = enjoy.page(copied, enjoy.show(copied, items=1))
    text = "".join(Reader(page).texts)
    assert re.findall(r"over all held-out items, (\w+)\s*([\d.]+)", text) == [
        ("untouched", "0.125"),
        ("trained", "0.750"),
    ]


HOSTILE = '<script>alert("1")</script> & \'"><img src=x onerror=alert(2)> \x1b[31m \u202e'


def test_nothing_of_models_data_or_flags_is_markup(copied):
    set_flags(copied, model=[HOSTILE], task=HOSTILE)
    team = {"reward": 0.5, "rewards": [[0.5]], "prompts": [[HOSTILE]], "completions": [[HOSTILE]], "note": None}
    two = {"reward": 1.0, "rewards": [[0.5] * 2], "prompts": [[HOSTILE] * 2], "completions": [["", HOSTILE]]}
    samples = [{"item": {HOSTILE: HOSTILE}, "untouched": team, "trained": two | {"note": None}}]
    samples += [{"item": HOSTILE, "untouched": team | {"reward": None, "note": HOSTILE}, "trained": team}]
    page = enjoy.page(copied, samples)
    read = Reader(page)
    assert "script" not in read.tags and read.tags.count("img") == 1
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "\x1b" not in page and '<script>alert("1")</script>' in "".join(read.texts)
    assert "\x1b" not in enjoy.as_text(samples) and "script" in enjoy.as_text(samples)
    assert "mean reward over 1 item:" in enjoy.as_text(samples)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_the_page(unlearned, tmp_path, width):
    samples = run_command(unlearned, "--items", 2, "--html", tmp_path / "page.html")
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    browser += [f"--window-size={width},1600", f"--screenshot={tmp_path / 'page.png'}", "--dump-dom"]
    browser += [f"file://{tmp_path / 'page.html'}"]
    done = subprocess.run(browser, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for team in enjoy.TEAMS:
        assert f"reward {samples[0][team]['reward']:.3f}" in done.stdout
    if not (tmp_path / "page.png").exists():  # some versions do one of the two
        subprocess.run([x for x in browser if x != "--dump-dom"], check=True, capture_output=True, timeout=60)
    image = imread(tmp_path / "page.png")[..., :3]
    assert image.shape[1] == width and image.std() > 0.02 and image[-400:].std() > 0.01


# --- What goes wrong --------------------------------------------------------------------------------------------------


def test_what_is_no_finished_run_is_an_error_of_one_line(copied, tmp_path):
    def refuses(*words, of=copied, **flags):
        with pytest.raises(UserError) as error:
            run_command(of, *flags.get("flags", ()))
        assert error.value.exit_code == 2 and all(word in str(error.value) for word in words), str(error.value)

    refuses("no such folder", of=tmp_path / "nowhere")
    refuses("no such folder", of="x" * 5000)
    refuses("no config.json", of=tmp_path)
    refuses("--items", "greater than 0", flags=("--items", 0))
    refuses("--prompt", flags=("--prompt", " "))
    refuses("--html", flags=("--html", tmp_path))
    refuses("--html", flags=("--html", tmp_path / "none/page.html"))
    config, metrics = ((copied / name).read_text() for name in ("config.json", "metrics.csv"))

    set_config(copied, num_updates=2)
    refuses("1 of 2 updates are done", "--resume")
    set_config(copied, num_updates=1)
    set_flags(copied, task="gone.py")
    refuses("gone.py")
    set_flags(copied, task="tldr", model=["no/model"])
    refuses("no/model")
    set_flags(copied, model=["utils/tiny_lm"], temperature="hot")
    refuses("temperature is 'hot'")
    for text in ("{", "[]", '{"args": []}', "{}"):
        (copied / "config.json").write_text(text)
        refuses("config.json")
    (copied / "config.json").write_text(config)
    (copied / "metrics.csv").write_text("global_step,epoch\n8,much\n")
    refuses("metrics.csv")
    (copied / "metrics.csv").unlink()
    refuses("no update is done", "--resume")
    (copied / "metrics.csv").write_text(metrics)

    weights = copied / "agent_1/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refuses("agent_1")
    shutil.rmtree(copied / "agent_1")
    refuses("no agent_1", "--resume")


def test_adapters_that_are_damaged_or_of_another_base_are_an_error(pair, tmp_path):
    run = shutil.copytree(pair, tmp_path / "run")
    base = run / "agent_0/base.json"
    base.write_text(base.read_text().replace('"sha256": "', '"sha256": "0'))
    with pytest.raises(UserError, match="the weights differ"):
        run_command(run)
    run = shutil.copytree(pair, tmp_path / "again")
    (run / "agent_1/actor/adapter_model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(UserError, match="agent_1"):
        run_command(run)


def test_a_task_that_fails_is_an_error(copied, tmp_path):
    parts = "from utils.tasks.tldr import eval_dataset, formatters, train_dataset\n"
    (tmp_path / "mine.py").write_text(parts + "def reward_func(*texts):\n    raise ValueError('no')\n")
    set_flags(copied, task=str(tmp_path / "mine.py"))
    with pytest.raises(TaskError, match="reward_func"):
        run_command(copied, "--task", tmp_path / "mine.py")


IMPORTED = "open({!r}, 'w').close()\n"


@pytest.mark.parametrize("name", ["task", "script"])
def test_code_that_a_strangers_folder_names_is_not_run(name, copied, tmp_path):
    (tmp_path / "theirs.py").write_text(IMPORTED.format(str(tmp_path / "was_here")))
    if name == "task":
        set_flags(copied, task=str(tmp_path / "theirs.py"))
    else:
        set_flags(copied, task=None)
        set_config(copied, script=str(tmp_path / "theirs.py"))
    with pytest.raises(UserError, match="takes the code in theirs.py: add --task FILE.py, if you trust it"):
        run_command(copied)
    assert not (tmp_path / "was_here").exists()


def test_code_of_models_is_not_taken_by_the_word_of_a_folder(copied):
    set_flags(copied, trust_remote_code=True)
    with pytest.raises(UserError, match="add --trust-remote-code, if you trust it"):
        run_command(copied)
    assert len(run_command(copied, "--items", 1, "--trust-remote-code")) == 1
