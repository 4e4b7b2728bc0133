"""--dataset: what files and hub datasets hold arrives as they have it; nulls are refused, chats are prompts."""

import bz2
import gzip
import json
import logging
import lzma
from datetime import datetime
from types import SimpleNamespace

import datasets
import numpy
import pytest
from short_runs import FLAGS, SCRIPTS, small_model

from utils.cli import UserError
from utils.models.transcripts import readable
from utils.tasks.items import load_splits, shuffled

pytestmark = pytest.mark.usefixtures("in_tmp_path")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


def write(name, text):
    """A file, compressed by its suffix."""
    name.parent.mkdir(parents=True, exist_ok=True)
    openers = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    with openers.get(name.suffix, open)(name, "wt") as file:
        file.write(text)
    return str(name)


def rows_of(name, split="train"):
    return [*load_splits(str(name))[split]]


def train(script="ippo", given=None, **flags):
    """What the agents of an update read first, by item, and the Run."""
    read = []

    def reward_func(*completions, prompts, items):
        read.extend(zip(items, *prompts))
        return [1.0] * len(items)

    rows = flags.pop("train_dataset", None)
    task = None if given is None else SimpleNamespace(**given, reward_func=reward_func)
    args = SCRIPTS[script].Args(**(FLAGS[script] | {"output_dir": "run", "overwrite": True, "train_size": 4} | flags))
    _, run = SCRIPTS[script].main(args, task, *small_model(), train_dataset=rows)
    return read, run


# --- Values -----------------------------------------------------------------------------------------------------------

TEXTS = ["007", "2024-01-31", "2024-01-31 10:00:00", "10:30", "true", "NA", "null", "1e3", "1.50", " x ", "é"]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_brackets_in_a_path_are_no_pattern(tmp_path, monkeypatch):
    for name in ("rows[1]", "rows1"):
        write(tmp_path / f"{name}.jsonl", lines([{"prompt": name}]))
        write(tmp_path / name / "train.jsonl", lines([{"prompt": name}]))
    assert rows_of(tmp_path / "rows[1].jsonl") == rows_of(tmp_path / "rows[1]/train.jsonl") == [{"prompt": "rows[1]"}]
    with pytest.raises(UserError, match="in a folder's path for a pattern"):
        rows_of(tmp_path / "rows[1]")
    monkeypatch.chdir(tmp_path / "rows[1]")
    assert rows_of("train.jsonl") == [{"prompt": "rows[1]"}]


def test_a_file_that_a_readme_names_is_read_as_it_is_now(tmp_path):
    write(tmp_path / "data/README.md", "---\nconfigs:\n- config_name: default\n  data_files: train.jsonl\n---\n")
    for text in ("old", "newer"):
        write(tmp_path / "data/train.jsonl", lines([{"prompt": text}]))
        assert rows_of(tmp_path / "data") == [{"prompt": text}]


def test_a_field_of_json_that_a_readme_names_is_read(tmp_path):
    names = "config_name: default\n  data_files: x.json\n  field: data"
    write(tmp_path / "data/README.md", f"---\nconfigs:\n- {names}\n---\n")
    rows = [{"prompt": "a", "n": 1.5}, {"prompt": "b", "n": 2.0}]
    write(tmp_path / "data/x.json", json.dumps({"version": "2", "data": rows}))
    assert rows_of(tmp_path / "data") == rows


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("text", TEXTS)
def test_text_in_files_stays_text(text, suffix, tmp_path):
    rows = [{"prompt": text, "answer": "a"}] * 3
    forms = {
        "rows.jsonl": lines(rows),
        "rows.ndjson": lines(rows),
        "rows.json": json.dumps(rows, indent=1),
        "rows.csv": "prompt,answer\n" + f"{text},a\n" * 3,
        "rows.tsv": "prompt\tanswer\n" + f"{text}\ta\n" * 3,
    }
    for name, content in forms.items():
        assert rows_of(write(tmp_path / (name + suffix), content)) == rows, name
    assert rows_of(write(tmp_path / f"rows.txt{suffix}", f"{text}\n\n{text}\n")) == [{"text": text, "prompt": text}] * 2


@pytest.mark.parametrize("name", ["train.csv", "train.jsonl", "train.jsonl.gz"])
def test_text_in_folders_stays_text(name, tmp_path):
    rows = [{"prompt": text} for text in TEXTS[:2]]
    for split in ("train", "test"):
        file = tmp_path / "data" / name.replace("train", split)
        write(file, "prompt\n" + "\n".join(TEXTS[:2]) + "\n" if ".csv" in name else lines(rows))
    assert rows_of(tmp_path / "data") == rows_of(tmp_path / "data", "test") == rows


def test_values_of_json_are_those_of_the_file(tmp_path):
    rows = [
        {"n": 1, "big": 2**70, "mixed": 1, "in": {"day": "2024-01-31", "list": ["2024-01-31"]}, "f": 0.5},
        {"n": 2, "big": 2**53 + 1, "mixed": 2.5, "in": {"day": "2024-02-31", "list": []}, "f": 1.0, "more": "x"},
    ]
    found = rows_of(write(tmp_path / "rows.jsonl", lines(rows)))
    assert found == [rows[0] | {"more": None}, rows[1]]
    assert [type(row["mixed"]) for row in found] == [int, float]


def test_a_row_of_csv_with_more_fields_than_the_header_is_refused(tmp_path):
    with pytest.raises(UserError, match="its rows have more fields than its header"):
        rows_of(write(tmp_path / "rows.csv", "prompt,answer\na,1,\n"))


def test_a_row_of_csv_with_fewer_fields_than_the_header_is_refused(tmp_path):
    with pytest.raises(UserError, match="line 4 has 1 of 2 fields$"):
        rows_of(write(tmp_path / "rows.csv", "prompt,answer\na,1\n\nb\nc,3\n"))
    rows = rows_of(write(tmp_path / "long.csv", f"prompt,answer\n{'a' * 200_000},1\n   \n"))
    assert [len(row["prompt"]) for row in rows] == [200_000]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_that_is_not_utf_8_is_one_line(tmp_path, suffix, capfd):
    text = '{"prompt": "a"}\n{"prompt": "f\xfcr"}\n'.encode("latin-1")
    name = tmp_path / f"rows{suffix}"
    name.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    with pytest.raises(
        UserError, match=f"--dataset {name} can't be loaded: ValueError: line 2 is not UTF-8: invalid st"
    ):
        rows_of(name)
    assert capfd.readouterr() == ("", "")


def test_a_broken_file_is_said_once(tmp_path, monkeypatch):
    """By the error, and not by datasets too."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("datasets")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    logger.error("seen")
    with pytest.raises(UserError, match="ArrowInvalid: JSON parse error"):
        load_splits(write(tmp_path / "rows.jsonl", '{"prompt": "a"}\n{"prompt" "b"}\n'))
    assert messages == ["seen"]


def test_the_working_folder_and_a_saved_dataset_are_data(tmp_path, monkeypatch):
    rows = [{"prompt": "a"}, {"prompt": "b"}]
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    assert [*rows_of(tmp_path / "saved")] == rows
    (tmp_path / "data").mkdir()
    write(tmp_path / "data/train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path / "data")
    assert [*rows_of(".")] == rows


def test_a_column_without_a_value_and_quotes_in_csv(tmp_path):
    name = write(tmp_path / "rows.csv", 'prompt,answer\n"a ""b"", c",\n"two\nlines",3\n')
    assert rows_of(name) == [{"prompt": 'a "b", c', "answer": ""}, {"prompt": "two\nlines", "answer": "3"}]


def test_dates_of_parquet_are_dates(tmp_path):
    rows = datasets.Dataset.from_list([{"prompt": "a", "day": datetime(2024, 1, 31)}])
    rows.to_parquet(str(tmp_path / "rows.parquet"))
    assert rows_of(tmp_path / "rows.parquet") == [{"prompt": "a", "day": datetime(2024, 1, 31)}]


def test_rows_are_shuffled_as_datasets_does():
    rows = [{"k": k} for k in range(50)]
    assert [*datasets.Dataset.from_list(rows).shuffle(seed=3)] == shuffled(rows, 3)
    assert [*shuffled(datasets.Dataset.from_list(rows), 3)] == shuffled(rows, 3)


# --- Names ------------------------------------------------------------------------------------------------------------

CARD = """---
configs:
- config_name: easy
  data_files: easy.csv
- config_name: hard
  data_files: hard.csv
---
"""


def test_a_configuration_is_named_after_a_colon(tmp_path):
    write(tmp_path / "two/README.md", CARD)
    for name in ("easy", "hard"):
        write(tmp_path / f"two/{name}.csv", f"prompt\n{name}\n")
    assert rows_of(f"{tmp_path}/two:hard") == [{"prompt": "hard"}]
    with pytest.raises(UserError, match=r"Config name is missing.*name one of them, --dataset .*/two:CONFIG$"):
        load_splits(f"{tmp_path}/two")
    with pytest.raises(UserError, match="^--dataset .*two:none can't be loaded: ValueError: BuilderConfig 'none' not"):
        load_splits(f"{tmp_path}/two:none")


def test_a_name_with_a_colon_that_is_there_is_taken_as_it_is(tmp_path):
    assert rows_of(write(tmp_path / "a:b.csv", "prompt\nx\n")) == [{"prompt": "x"}]


# --- Nulls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize("task", [None, {"formatters": lambda item: f"{item['prompt']}"}, {}])
def test_a_null_is_one_line(task, value, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": value}, {"prompt": "d"}]
    with pytest.raises(UserError, match="^train_dataset= has a row without prompt, which is null there: {'prompt': "):
        train(given=task, train_dataset=rows)
    write(tmp_path / "rows.jsonl", lines([{"prompt": "a", "n": 1}] * 8 + [{"prompt": None, "n": 8}]))
    null = "rows.jsonl has a row without prompt, which is null there: {'prompt': None, 'n': 8}$"
    with pytest.raises(UserError, match=f"^--dataset {null}"):
        train(given=task, dataset="rows.jsonl", train_size=None, eval_size=1)


def test_a_null_that_a_template_reads_is_one_line():
    template = [{"role": "user", "content": "{prompt}"}, {"role": "user", "content": "By {author}."}]
    rows = [{"prompt": "a", "author": None}] * 4
    with pytest.raises(UserError, match="^formatter of agent 0 failed on item, .*: ValueError: its author is null"):
        train(given={"conversation_template": template}, train_dataset=rows)
    read, _ = train(given={"conversation_template": template[:1]}, train_dataset=rows)
    assert read[0][1] == [{"role": "user", "content": "a"}]


def test_a_null_that_nothing_reads_is_no_matter():
    rows = [{"question": "q", "answer": "a", "prompt": None, "more": None}] * 4
    template = [{"role": "user", "content": "{question}"}]
    read, _ = train(given={"conversation_template": template}, train_dataset=rows)
    assert read[0][1] == [{"role": "user", "content": "q"}]


@pytest.mark.parametrize("given", ["functions", "rows"])
def test_an_environment_of_a_task_reads_what_it_likes(given):
    """Though a function that its file imports is called reward_fn, which scores items with answers."""
    read = []

    class TeamEnv:
        def __init__(self, task, items, args):
            self.items = items

        def reset(self):
            read.extend(item["text"] for item in self.items)
            return [{b: item["text"] for b, item in enumerate(self.items)}] * 2

        def step(self, actions):
            return [{}, {}], [dict.fromkeys(own, 1.0) for own in actions], set()

    def rows(size, seed):
        return [{"text": "a"}, {"text": "b"}] * 2

    own = {"TeamEnv": TeamEnv, "reward_fn": lambda completion, answer, question: 0.0}
    data = {"train_dataset": rows, "eval_dataset": rows} if given == "functions" else {}
    task = SimpleNamespace(**own, **data)
    args = SCRIPTS["ippo"].Args(**(FLAGS["ippo"] | {"output_dir": "run", "train_size": 4, "eval_interval": 0}))
    SCRIPTS["ippo"].main(args, task, *small_model(), train_dataset=None if data else rows(4, 1))
    assert sorted(read)[:: len(read) // 2] == ["a", "b"]


# --- Chats ------------------------------------------------------------------------------------------------------------

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Summarise dogs."}]
TEXT = "Be kind.\n\nSummarise dogs."
READS = {
    "no formatters": ({}, CHAT),
    "a formatter that gives it": ({"formatters": lambda item: item["prompt"]}, CHAT),
    "one that adds to it": (
        {"formatters": lambda item: [*item["prompt"], {"role": "user", "content": "Now."}]},
        [*CHAT, {"role": "user", "content": "Now."}],
    ),
    "a text with it": ({"formatters": lambda item: f"{item['prompt']}!"}, f"{TEXT}!"),
    "a sum": ({"formatters": lambda item: "> " + item["prompt"] + "!"}, f"> {TEXT}!"),
    "a template": (
        {"conversation_template": [{"role": "user", "content": "Q: {prompt}"}]},
        [{"role": "user", "content": f"Q: {TEXT}"}],
    ),
}


def test_a_task_that_returns_more_items_than_it_is_asked_for_is_cut():
    made = {"train_dataset": lambda size, seed: [{"prompt": f"post {k}"} for k in range(9)]}
    read, run = train(given=made, num_train_epochs=1, max_episodes=None)
    assert {item["prompt"] for item, *_ in read} == {f"post {k}" for k in range(4)}


@pytest.mark.parametrize("name, text", [("a.csv", "prompt\n"), ("b.csv", ""), ("c.jsonl", "\n\n"), ("d.jsonl", "")])
def test_a_file_without_rows_is_one_line(name, text, tmp_path):
    with pytest.raises(UserError, match=f"--dataset {name} can't be loaded: it has no rows$"):
        load_splits(write(tmp_path / name, text).replace(f"{tmp_path}/", ""))


@pytest.mark.parametrize("source", ["list", "dataset", "file", "parquet"])
@pytest.mark.parametrize("case", READS)
def test_a_chat_is_a_prompt_wherever_a_text_is(case, source, tmp_path):
    task, expected = READS[case]
    rows = [{"prompt": CHAT}] * 8
    given = {"train_dataset": rows} if source == "list" else {"dataset": "rows.jsonl", "train_size": None}
    if source == "dataset":
        given = {"train_dataset": datasets.Dataset.from_list(rows)}
    if source == "parquet":
        more = [*CHAT, {"role": "user", "content": "b", "name": "me"}]  # Arrow gives all messages a name, or None
        datasets.Dataset.from_list([{"prompt": CHAT}] * 8 + [{"prompt": more}]).to_parquet(str(tmp_path / "x.parquet"))
        given = {"dataset": "x.parquet", "train_size": None}
    write(tmp_path / "rows.jsonl", lines(rows))
    read, run = train(given=task, **given, eval_size=1)
    assert all(prompts[0] == prompts[1] for _, *prompts in read) and expected in [prompts[0] for _, *prompts in read]
    assert CHAT in [sample["item"]["prompt"] for sample in run.log_files.samples]


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "ppo"])  # whose own is a game
def test_chats_train_the_scripts_own_task(script):
    _, run = train(script, train_dataset=[{"prompt": CHAT}] * 4)
    assert TEXT.split("\n\n")[1] in run.log_files.samples[0]["prompts"][0]


def test_chats_train_a_single_writer_who_is_compared_with_them():
    for flags in ({}, {"task": "tldr"}):
        _, run = train(train_dataset=[{"prompt": CHAT * 20}] * 4, num_agents=1, max_new_tokens=40, **flags)
        assert 0 <= run.rows[0]["reward_mean"] <= 3


def test_chats_from_numpy_are_chats():
    read, _ = train(given={}, train_dataset=[{"prompt": numpy.array(CHAT)}] * 4)
    assert read[0][1] == CHAT


# --- Half characters, and keys that are no text -----------------------------------------------------------------------

HALF = "a\ud800b"
READ = "a\N{REPLACEMENT CHARACTER}b"
ODD = {"prompt": HALF, ("a", 1): HALF, 2: {(3, 4): [{None: HALF}]}}


def samples_of(folder):
    return [json.loads(line) for line in open(f"{folder}/samples.jsonl", encoding="utf-8")]


@pytest.mark.parametrize("script", ["ippo", "maac"])
def test_half_a_character_is_read_as_unknown_and_written_escaped(script):
    rows = [ODD] * 12
    game = {"external_transition": lambda item: [HALF, [{"role": "user", "content": HALF}]]}
    flags = {"num_turns": 2, "train_size": 12, "save_interval": 1}
    _, run = train(script, given=game, train_dataset=rows, **flags, pause_at=2)
    samples = samples_of("run")
    assert samples[0]["item"] == {"prompt": HALF, "('a', 1)": HALF, "2": {"(3, 4)": [{"null": HALF}]}}
    assert READ in samples[0]["prompts"][0][0] and READ in samples[0]["prompts"][1][-1]
    _, run = train(script, given=game, train_dataset=rows, **flags, resume="run", output_dir=None, overwrite=False)
    assert run.step == 3 and samples_of("run")[: len(samples)] == samples


def test_half_a_character_in_an_observation_and_in_a_completion(monkeypatch):
    class Game:
        def reset(self, seed):
            return HALF, {}

        def step(self, answer):
            assert answer == HALF
            return HALF, 1.0, False, True, {}

    _, tokenizer = small_model()
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda self, rows, **_: [HALF] * len(rows))
    flags = {"output_dir": "run", "train_size": 4, "num_turns": 2, "num_agents": 1}
    SCRIPTS["ppo"].main(SCRIPTS["ppo"].Args(**(FLAGS["ppo"] | flags)), Game, *small_model())
    assert samples_of("run")[0]["completions"][0][0] == HALF
    train("maac", given={}, train_dataset=[{"prompt": "a"}] * 4)
    assert samples_of("run")[0]["completions"] == [HALF] * 2


def test_halves_that_belong_together_are_one_character():
    assert readable("a\ud83d\ude00\udc00") == "a\N{GRINNING FACE}\N{REPLACEMENT CHARACTER}"


def test_names_of_metrics_are_one_line():
    names = {("a", HALF): 1.0, "b\nc": 2.0, 3: 3.0}
    given = {"metrics_callback": lambda rollouts: names}
    train(given=given, train_dataset=[{"prompt": "a"}] * 12, train_size=12, pause_at=1)
    flags = {"train_size": 12, "resume": "run", "output_dir": None, "overwrite": False}
    _, run = train(given=given, train_dataset=[{"prompt": "a"}] * 12, **flags)
    assert run.step == 3 and [run.rows[0][name] for name in ("b c", "3")] == [2.0, 3.0]


@pytest.mark.parametrize("name", ["output_dir", "task", "env", "dataset", "resume", "fork", "model"])
def test_a_path_of_nothing_is_one_line(name):
    with pytest.raises(UserError) as error:
        SCRIPTS["ippo"].Args(**{name: ("",) if name == "model" else ""})
    assert str(error.value) == f"--{name.replace('_', '-')}: Input should be a text that is not empty"


@pytest.mark.parametrize("value", ["a\0b", "a\ud800b", "caf\udce9"])
@pytest.mark.parametrize(
    "name", ["output_dir", "task", "env", "dataset", "resume", "fork", "model", "load_checkpoint", "wandb_run_name"]
)
def test_a_path_that_can_be_none_is_one_line(name, value):
    flag = "--" + name.replace("_", "-")
    takes = "Input should be a text that files can be named by"
    with pytest.raises(UserError) as error:
        SCRIPTS["ippo"].Args(**{name: value})
    assert str(error.value) == f"{flag}: {takes}, got {ascii(value)}"
