"""Texts that every machine has, and a small vocabulary, data folder and BERT for any test; none writes there."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before `datasets` and `transformers` are imported anywhere
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hashlib
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from tqdm import tqdm
from typer.testing import CliRunner, Result

from bert_pretrain.cli import app
from bert_pretrain.config import Config, ModelConfig
from bert_pretrain.config_file import load_config
from bert_pretrain.io.manifest import Output, read_record
from bert_pretrain.make_data.run import make_data
from bert_pretrain.model.bert import BertForPreTraining
from bert_pretrain.model.huggingface import save_model_folder, to_huggingface
from bert_pretrain.pipeline import run_pipeline, working_folder
from bert_pretrain.text.tokenizer import Tokenizer
from bert_pretrain.vocab.run import make_vocab

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored, also by children, in the background of a shell
tqdm.set_lock(threading.RLock())  # its own is shared by forks, one of which may be killed while it holds it
# The same cases in every run; look for new ones with --hypothesis-profile=default.
hypothesis.settings.register_profile("suite", derandomize=True, deadline=None, max_examples=60, database=None)
hypothesis.settings.register_profile("long", deadline=5000, max_examples=20_000, database=None)
hypothesis.settings.load_profile("suite")

REPOSITORY = Path(__file__).resolve().parents[1]
CHINESE_WORDS = re.findall(
    r"\S+",
    "我们 今天 学校 学习 中国 历史 老师 学生 问题 时间 工作 城市 北京 上海 天气 很好 喜欢 音乐 电影 书本 朋友 家人 "
    "晚饭 早上 下午 公园 散步 研究 语言 模型 数据 训练 结果 重要 方法 世界 经济 发展 科学 技术 文化 社会 生活 "
    "河流 高山 春天 花开 冬天 下雪 火车 飞机 旅行 地方 美丽 古老 建筑 故事 孩子 母亲 父亲 电话 电脑 网络 新闻",
)

MODEL = ModelConfig(
    hidden_size=16,
    num_hidden_layers=5,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=40,
    # Wide enough that layers, places and words all make a difference.
    initializer_range=0.3,
)


def save_model(model: BertForPreTraining, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a model folder that `transformers` can load."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_model_folder(to_huggingface(weights, model.config.architecture), model, folder, tokenizer)


def one_sentence_a_line(documents: list[list[str]]) -> str:
    return "\n\n".join("\n".join(document) for document in documents) + "\n"


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder, hidden ones included."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def call(*words: object, code: int = 0) -> Result:
    """Run a command of the program in this process, and check its exit code."""
    result = CliRunner().invoke(app, list(map(str, words)))
    assert result.exit_code == code, result.output
    return result


def run_stages(config: Config, output: Path, *, overwrite: bool = False, **options: Any) -> Path:
    """Run all stages as `run` does."""
    with working_folder(config, output, overwrite=overwrite):
        return run_pipeline(config, output, workers=1, overwrite=overwrite, **options)


def wait_until(is_so: Callable[[], object], process: "BaseProcess | subprocess.Popen[Any] | None" = None) -> None:
    """Wait until something is so; a process must not end before."""
    deadline = time.monotonic() + 180
    while not is_so():
        code = process.poll() if isinstance(process, subprocess.Popen) else process and process.exitcode
        assert code is None
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture(scope="session")
def english_documents() -> list[list[str]]:
    """Real English: the pydoc topics of the standard library as lists of sentences of plain prose."""
    from pydoc_data.topics import topics

    documents = []
    for name in sorted(topics):
        paragraphs = [" ".join(paragraph.split()) for paragraph in topics[name].split("\n\n")]
        sentences = [sentence for text in paragraphs for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", text)]
        documents.append([sentence for sentence in sentences if len(sentence) > 20])
    return [document for document in documents if len(document) > 1]


@pytest.fixture(scope="session")
def chinese_documents() -> list[list[str]]:
    """Chinese composed of ordinary words: documents as lists of sentences."""
    draw = random.Random(7)
    return [
        ["".join(draw.choices(CHINESE_WORDS, k=draw.randint(3, 12))) + draw.choice("。。。！？") for _ in range(size)]
        for size in (draw.randint(2, 30) for _ in range(120))
    ]


@pytest.fixture(scope="session")
def english_text(tmp_path_factory: pytest.TempPathFactory, english_documents: list[list[str]]) -> Path:
    """A file of English, one sentence a line, blank lines between documents."""
    path = tmp_path_factory.mktemp("english") / "english.txt"
    path.write_text(one_sentence_a_line(english_documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def chinese_text(tmp_path_factory: pytest.TempPathFactory, chinese_documents: list[list[str]]) -> Path:
    """A file of Chinese, one sentence a line, blank lines between documents."""
    path = tmp_path_factory.mktemp("chinese") / "chinese.txt"
    path.write_text(one_sentence_a_line(chinese_documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def vocab_folder(tmp_path_factory: pytest.TempPathFactory, english_text: Path) -> Path:
    """A lowercase English vocabulary of 3,000 tokens."""
    config = load_config(settings=["vocab.size=3000"])
    return make_vocab(config, [str(english_text)], tmp_path_factory.mktemp("vocab") / "vocab", workers=1)


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory, english_text: Path, vocab_folder: Path) -> Path:
    """A data folder of a few thousand English examples up to 64 tokens long, in several shards."""
    settings = ["data.max_seq_length=64", "data.dupe_factor=2", "data.examples_per_shard=1024"]
    config = load_config(settings=[*settings, "data.validation_fraction=0.1"])
    return make_data(config, [str(english_text)], vocab_folder, tmp_path_factory.mktemp("data") / "data", workers=1)


@pytest.fixture(scope="session")
def make_bert(tmp_path_factory: pytest.TempPathFactory, vocab_folder: Path) -> Callable[..., Path]:
    """Write a folder of a small BERT with random weights: `make_bert(num_hidden_layers=2)`."""

    def make(tokenizer: Tokenizer | None = None, seed: int = 5, **sizes: object) -> Path:
        tokenizer = tokenizer or Tokenizer.load(vocab_folder)
        model = BertForPreTraining(MODEL.model_copy(update=sizes), tokenizer.vocab_size)
        model.initialize(seed)
        folder = tmp_path_factory.mktemp("bert")
        save_model(model, folder, tokenizer)
        return folder

    return make


@pytest.fixture(scope="session")
def bert_folder(make_bert: Callable[..., Path]) -> Path:
    return make_bert()


@pytest.fixture(scope="session")
def sentences(english_documents: list[list[str]]) -> list[str]:
    """Real sentences, some of them longer than the model's positions, and two with what is not ASCII."""
    long = [" ".join(document[:4]) for document in english_documents[:6]]
    return [*(document[1] for document in english_documents[:24]), *long, "naïve café — 中文", "½ ﬁ I"]


def claim(folder: Path, kind: str) -> None:
    """Claim an output folder, like a command that is killed before its first output."""
    with Output(folder, kind, {"seed": 1}).open():
        pass


def reopen(folder: Path) -> None:
    """Mark a finished output as unfinished."""
    record = read_record(folder)
    Output(folder, record["kind"], record["identity"]).reopen()
