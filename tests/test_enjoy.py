"""utils.enjoy: what trained and untouched models write is really theirs, rewards are the task's, the page is safe."""

import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

import ippo_llm
import maac_llm
import magrpo_llm
import ppo_llm
from utils import distributed, enjoy, tasks
from utils.cli import TaskError, UserError, parse
from utils.enjoy.__main__ import Args, main
from utils.enjoy.page import page
from utils.enjoy.text import as_text, mean_rewards
from utils.tasks import number, tldr

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ROOT = Path(__file__).resolve().parent.parent
TINY = str(ROOT / "utils/tiny_lm")
SMALL = {"train_size": 8, "rollout_buffer_size": 8, "mini_batch_size": 8, "num_train_epochs": 1, "eval_interval": 0}
SMALL |= {"eval_size": 4, "actor_learning_rate": 0.01}


def train(folder, script=ippo_llm, **flags):
    """The agents and the Run of one update."""
    return script.main(script.Args(**(SMALL | {"output_dir": str(folder)} | flags)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run of IPPO."""
    folder = tmp_path_factory.mktemp("ippo") / "run"
    train(folder, max_new_tokens=24)
    return folder


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copied")


@pytest.fixture(scope="module")
def guess(tmp_path_factory):
    """The folder of a run of PPO in its game."""
    folder = tmp_path_factory.mktemp("guess") / "run"
    train(folder, ppo_llm, num_turns=3, lora_rank=4)
    return folder


def texts(samples, team):
    return [sample[team]["completions"] for sample in samples]


def set_flags(folder, **flags):
    config = json.loads((folder / "config.json").read_text())
    set_config(folder, args=config["args"] | flags)


def set_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def run_command(*argv):
    return main(parse(Args, [*map(str, argv)]))


def likeliest(folder, item, agent, tokens):
    """Greedy decoding of a task's prompt by the model in a folder, without a cache."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chat = tldr.formatters(item, agent)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    start = ids.shape[1]
    with torch.no_grad():
        while ids.shape[1] < start + tokens and (ids.shape[1] == start or ids[0, -1] != tokenizer.eos_token_id):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return tokenizer.decode(ids[0, start:], skip_special_tokens=True)


# --- What is written --------------------------------------------------------------------------------------------------


def test_the_likeliest_texts_are_those_of_the_saved_and_of_the_untouched_model(run):
    samples = run_command(run, "--items", 2, "--no-do-sample")
    assert [sample["item"] for sample in samples] == [*tldr.eval_dataset(4, 1)][:2]
    for sample in samples:
        for agent in range(2):
            assert sample["untouched"]["completions"][agent] == [likeliest(TINY, sample["item"], agent, 24)]
            trained = [likeliest(run / f"agent_{agent}", sample["item"], agent, 24)]
            assert sample["trained"]["completions"][agent] == trained
    assert texts(samples, "trained") != texts(samples, "untouched")
    cold = enjoy.show(run, items=2, temperature=1e-4)
    assert texts(cold, "trained") == texts(samples, "trained")


def test_rows_are_shown_where_nothing_is_held_out(run, monkeypatch):
    monkeypatch.delattr(ippo_llm, "eval_dataset")
    samples = enjoy.show(run, items=2)
    assert [sample["item"] for sample in samples] == [*ippo_llm.train_dataset(8, 1)][:2]


def test_it_is_said_that_a_task_of_python_is_not_here(run, tmp_path, capsys):
    enjoy.show(run, items=1)
    assert "from Python" not in capsys.readouterr().out
    copied = Path(shutil.copytree(run, tmp_path / "copied"))
    set_flags(copied, task=None, env=None)
    set_config(copied, task="the task mine")
    enjoy.show(copied, items=1)
    line = "was made from Python with the task mine, which is not here: this shows the task in ippo_llm.py\n"
    assert line in capsys.readouterr().out


MATCHES = {  # script, flags
    "on adapters": (ppo_llm, {"task": "number", "num_agents": 2, "max_new_tokens": 4, "lora_rank": 4}),
    "little room": (
        ppo_llm,
        {"task": "number", "num_agents": 2, "max_new_tokens": 4, "max_model_len": 38, "actor_learning_rate": 0.1},
    ),
    "a game": (ppo_llm, {"lora_rank": 4, "actor_learning_rate": 0.1}),
    "a head": (ippo_llm, {"task": "number", "max_new_tokens": 4}),
    "a central critic": (maac_llm, {"task": "number", "max_new_tokens": 4}),
    "groups": (magrpo_llm, {"task": "number", "max_new_tokens": 4, "num_generations": 2}),
}


@pytest.mark.parametrize("case", MATCHES)
def test_play_and_rewards_are_those_of_the_script(tmp_path, case):
    script, flags = MATCHES[case]
    agents, run = train(tmp_path / "run", script, num_turns=3, **flags)
    samples = enjoy.show(run.folder)
    assert len(samples) == 4
    args = run.args
    task = tasks.load_task(None, args, default=script)
    items = [sample["item"] for sample in samples]
    rollouts = script.play(agents[: args.num_agents], task, items, args, distributed.generator(1))
    for agent, rollout in enumerate(rollouts):
        assert [sample["trained"]["completions"][agent] for sample in samples] == rollout.answers
        earned = [sum(sample["trained"]["rewards"][agent]) for sample in samples]
        assert earned == pytest.approx(rollout.rewards.sum(1).tolist(), abs=1e-5)
    assert texts(samples, "trained") != texts(samples, "untouched")


def test_several_turns_are_scored_and_show_what_was_told(tmp_path):
    train(tmp_path / "run", task="number", num_turns=2, max_new_tokens=4)
    lengths = []
    for sample in enjoy.show(tmp_path / "run"):
        for team in enjoy.TEAMS:
            played = sample[team]["completions"]
            lengths.append(len(played[0]))
            earned = [number.reward_func(*([text] for text in turn), items=[sample["item"]]) for turn in zip(*played)]
            assert sample[team]["rewards"] == [[reward for (reward,) in earned]] * 2
            assert sample[team]["reward"] == pytest.approx(sum(map(sum, earned)))
            assert {*sample[team]["prompts"][0][1:]} <= {"met", "higher", "lower"}
    assert 2 in lengths


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


def test_an_episode_that_fails_has_no_reward(guess, tmp_path):
    copied = shutil.copytree(guess, tmp_path / "copied")
    env = str(tmp_path / "failing.py")
    Path(env).write_text(FAILING)
    set_flags(copied, env=env)
    with pytest.raises(UserError, match=r"takes the code in failing\.py: add --env FILE\.py"):
        enjoy.show(copied, items=2)
    whole, failed = enjoy.show(copied, items=2, env=env)
    assert whole["trained"]["reward"] == 3.0 and failed["trained"]["reward"] is None
    assert "it broke" in as_text([failed]) and "it broke" in page(copied, enjoy.read_config(copied), [failed])
    assert mean_rewards([whole, failed])[0] == {"untouched": 3.0, "trained": 3.0}


def test_a_prompt_of_ones_own_is_put_as_the_task_puts_it_or_as_it_is(run, guess):
    (sample,) = enjoy.show(run, prompt="My dog ran away.")
    for team in enjoy.TEAMS:
        assert sample[team]["reward"] is None and sample[team]["note"]
        assert sample[team]["prompts"][1] == [tldr.formatters({"prompt": "My dog ran away."}, 1)[0]["content"]]
    (sample,) = enjoy.show(guess, prompt="Guess it.")
    assert sample["trained"]["prompts"] == [["Guess it."]] and len(sample["trained"]["completions"][0]) == 1
    assert "own" in as_text([sample]) and "mean reward" not in as_text([sample])


# --- What is shown ----------------------------------------------------------------------------------------------------


def test_the_same_command_prints_the_same(run, capsys):
    printed = []
    for _ in range(2):
        samples = run_command(run, "--items", 3)
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


def test_the_page_is_whole_and_needs_nothing_else(copied):
    run_command(copied, "--items", 2, "--html", copied / "page.html")
    text = (copied / "page.html").read_text(encoding="utf-8")
    read = Reader(text)
    assert text.startswith("<!doctype html>") and ("html", "lang", "en") in read.attributes
    assert read.tags.count("title") == read.tags.count("h1") == 1 and "script" not in read.tags
    sources = [value for _, name, value in read.attributes if name in ("src", "href", "srcset", "action", "data")]
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,iVBOR")
    assert not re.search(r"https?://|url\(|@import", text)
    config = json.loads((copied / "config.json").read_text())
    shown = "".join(read.texts)
    assert config["git_commit"] in shown and config["versions"]["torch"] in shown and "reward_norm_eps" in shown
    assert not [*copied.glob("*.writing")]


HOSTILE = '<script>alert("1")</script> & \'"><img src=x onerror=alert(2)> \x1b[31m \u202e'


def test_nothing_of_models_data_or_flags_is_markup(copied):
    set_flags(copied, model=[HOSTILE], task=HOSTILE)
    team = {"reward": 0.5, "rewards": [[0.5]], "prompts": [[HOSTILE]], "completions": [[HOSTILE]], "note": None}
    two = {"reward": 1.0, "rewards": [[0.5] * 2], "prompts": [[HOSTILE] * 2], "completions": [["", HOSTILE]]}
    samples = [{"item": {HOSTILE: HOSTILE}, "untouched": team, "trained": two | {"note": None}}]
    samples += [{"item": HOSTILE, "untouched": team | {"reward": None, "note": HOSTILE}, "trained": team}]
    text = page(copied, enjoy.read_config(copied), samples)
    read = Reader(text)
    assert "script" not in read.tags and read.tags.count("img") == 1
    assert not [name for _, name, _ in read.attributes if name.startswith("on")]
    assert "\x1b" not in text and '<script>alert("1")</script>' in "".join(read.texts)
    assert "\x1b" not in as_text(samples) and "script" in as_text(samples)
    assert "mean reward over 1 item:" in as_text(samples)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium")
@pytest.mark.parametrize("width", [1200, 400])
def test_a_browser_shows_the_page(run, tmp_path, width):
    samples = run_command(run, "--items", 2, "--html", tmp_path / "page.html")
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


def test_what_is_no_run_is_an_error_of_one_line(copied, tmp_path):
    def refuses(*words, of=copied, flags=()):
        with pytest.raises(UserError) as error:
            run_command(of, *flags)
        assert error.value.exit_code == 2 and all(word in str(error.value) for word in words), str(error.value)

    refuses("no such folder", of=tmp_path / "nowhere")
    refuses("no such folder", of="x" * 5000)
    refuses("no config.json", of=tmp_path)
    refuses("--items", "greater than 0", flags=("--items", 0))
    refuses("--prompt", flags=("--prompt", " "))
    refuses("--html", flags=("--html", tmp_path))
    refuses("--html", flags=("--html", tmp_path / "none/page.html"))
    config = (copied / "config.json").read_text()
    set_flags(copied, model=["no/model"])
    refuses("no/model")
    set_flags(copied, temperature="hot")
    refuses("--temperature")
    for text in ("{", "[]", '{"args": []}', "{}"):
        (copied / "config.json").write_text(text)
        refuses("config.json")
    (copied / "config.json").write_text(config)
    shutil.rmtree(copied / "checkpoints")
    refuses("has no checkpoint")


def test_a_task_that_fails_is_an_error(copied, tmp_path):
    parts = "from utils.tasks.tldr import eval_dataset, formatters, train_dataset\n"
    (tmp_path / "mine.py").write_text(parts + "def reward_func(*texts):\n    raise ValueError('no')\n")
    with pytest.raises(TaskError, match="reward_func"):
        run_command(copied, "--task", tmp_path / "mine.py")


@pytest.mark.parametrize("name", ["task", "script"])
def test_code_that_a_strangers_folder_names_is_not_run(name, copied, tmp_path):
    code = tmp_path / "theirs.py"
    code.write_text(f"open({str(tmp_path / 'was_here')!r}, 'w').close()\nfrom ippo_llm import *\n")
    if name == "task":
        set_flags(copied, task=str(code))
    else:
        set_config(copied, script=str(code))
    with pytest.raises(UserError, match=f"takes the code in theirs.py: add --{name} FILE.py, if you trust it"):
        run_command(copied)
    assert not (tmp_path / "was_here").exists()
    run_command(copied, f"--{name}", code, "--items", 1)
    assert (tmp_path / "was_here").exists()


def test_what_a_stranger_links_to_is_not_in_the_page(copied, tmp_path):
    (tmp_path / "private.png").write_bytes(b"\x89PNG\r\n\x1a\nprivate")
    (copied / "curves.png").unlink(missing_ok=True)
    (copied / "curves.png").symlink_to(tmp_path / "private.png")
    for name in ("curves.png", "metrics.csv", "config.json"):
        if name != "curves.png":
            shutil.move(copied / name, tmp_path / name)
            (copied / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} is a link that leads out of its folder"):
            run_command(copied, "--items", 1, "--html", tmp_path / "page.html")
        assert not (tmp_path / "page.html").exists()
        (copied / name).unlink()
        if name != "curves.png":
            shutil.move(tmp_path / name, copied / name)
    (copied / "curves.png").write_text("private")
    with pytest.raises(UserError, match="curves.png is no PNG file"):
        run_command(copied, "--items", 1, "--html", tmp_path / "page.html")


def test_what_a_stranger_names_as_data_is_shown_only_where_the_command_names_it(copied, tmp_path):
    data = tmp_path / "private.txt"
    data.write_text("private\n" * 20)
    for name in (f"{tmp_path}:default", str(data)):
        set_flags(copied, dataset=name)
        with pytest.raises(
            UserError, match="shows what is in .* on this machine: add --dataset .*, if it may be shown"
        ):
            run_command(copied)
    assert run_command(copied, "--items", 1, "--dataset", data)[0]["item"]["prompt"] == "private"


def test_a_script_that_cannot_be_imported_is_one_line(copied, tmp_path):
    (tmp_path / "mine.py").write_text("import no_such_module")
    with pytest.raises(UserError, match="^--script .*mine.py: it can't be loaded: .*no_such_module"):
        run_command(copied, "--script", tmp_path / "mine.py")


@pytest.mark.parametrize("reward", ["1e308", "-1e308", "inf"])
def test_metrics_that_no_run_has_are_one_line(copied, tmp_path, reward):
    header, *rows = (copied / "metrics.csv").read_text().splitlines()
    columns = header.split(",")
    cells = rows[0].split(",")
    cells[columns.index("reward_mean")] = reward
    (copied / "metrics.csv").write_text("\n".join([header, ",".join(cells), ""]))
    (copied / "curves.png").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"metrics.csv: reward_mean takes a number up to 1e\+30, got "):
        run_command(copied, "--items", 1, "--html", tmp_path / "page.html")


def test_a_config_that_no_run_has_is_one_line(copied):
    set_flags(copied, seed=1e999)
    with pytest.raises(UserError, match="config.json: seed takes a whole number from 0, got inf$"):
        run_command(copied)
    (copied / "config.json").write_text('{"args": ' + "[" * 200_000)
    with pytest.raises(UserError, match="config.json can't be read as JSON: maximum recursion"):
        run_command(copied)
    with pytest.raises(UserError, match="config.json can't be read: RecursionError"):
        parse(ippo_llm.Args, ["--resume", str(copied)], script="ippo_llm")


def test_code_of_models_is_not_taken_by_the_word_of_a_folder(copied):
    set_flags(copied, trust_remote_code=True)
    with pytest.raises(UserError, match="add --trust-remote-code, if you trust it"):
        run_command(copied)
    assert len(run_command(copied, "--items", 1, "--trust-remote-code")) == 1


# --- A person in a seat -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kuhn(tmp_path_factory):
    """The folder of a run of PPO, whose agent has both seats of Kuhn poker."""
    pytest.importorskip("pyspiel")
    folder = tmp_path_factory.mktemp("kuhn") / "run"
    flags = {"env": "open_spiel:kuhn_poker", "num_agents": 2, "self_play": True, "num_turns": 3, "max_new_tokens": 2}
    train(folder, ppo_llm, lora_rank=4, **flags)
    return folder


def feed(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


@pytest.mark.parametrize("seat", [0, 1])
def test_a_person_has_a_seat(kuhn, monkeypatch, capsys, seat):
    feed(monkeypatch, "2\n" * 20)
    played = run_command(kuhn, "--play", seat, "--items", 3)
    output = capsys.readouterr().out
    assert len(played) == 3 and output.count(f"you are seat {seat} ---") == 3
    for match in played:
        assert all(text == "2" for own, text in match.moves if own == seat) and {own for own, _ in match.moves} == {
            0,
            1,
        }
        num_illegal = sum(own != seat and text.strip() not in ("1", "2") for own, text in match.moves)
        assert sum(match.earned) == -num_illegal
    assert output.count(f"You are player {seat}.") == sum(own == seat for match in played for own, _ in match.moves)
    assert f"You are player {1 - seat}." not in output  # what the other holds is not shown
    mean = sum(match.earned[seat] for match in played) / 3
    assert output.rstrip().endswith(f"you earned {mean:.3f} in a match, in the mean over 3")
    feed(monkeypatch, "2\n" * 20)
    assert run_command(kuhn, "--play", seat, "--items", 3) == played


def test_a_match_ends_with_the_input(kuhn, monkeypatch, capsys):
    feed(monkeypatch, "")
    assert run_command(kuhn, "--play", 0) == []
    assert capsys.readouterr().out.rstrip().endswith("no further input")


def test_a_person_plays_a_part_of_a_task(run, tmp_path, monkeypatch):
    train(tmp_path / "run", num_agents=2, max_new_tokens=8)
    feed(monkeypatch, "a summary\n" * 2)
    played = run_command(tmp_path / "run", "--play", 1, "--items", 2)
    assert [match.moves[1] for match in played] == [(1, "a summary")] * 2


def test_what_a_person_can_not_play_is_a_line(kuhn, guess):
    with pytest.raises(UserError, match="^--play takes a seat from 0 to 1, got 2$"):
        run_command(kuhn, "--play", 2)
    for folder, flags, message in [
        (guess, [], "--play takes a run of two seats or more"),
        (kuhn, ["--prompt", "Hello"], "it takes no --prompt and no --html"),
        (kuhn, ["--html", "page.html"], "it takes no --prompt and no --html"),
    ]:
        with pytest.raises(UserError, match=message):
            run_command(folder, "--play", 0, *flags)
