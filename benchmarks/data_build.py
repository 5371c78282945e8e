"""How fast text becomes a token dataset: jaxscale's build against datatrove's own tokenisation pipeline.

Both get the same JSONL files and the same `tokenizer.json`, and as many workers. Each turn is a process of its own,
timed from its start to its end, so that starting workers counts. Needs `pip install -e '.[build]' orjson`.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxscale.config.data import BuildConfig
from jaxscale.data.build.corpus import corpus_files, documents, tasks
from jaxscale.data.build.prepare import prepare_tokenizer
from jaxscale.data.build.tally import Tally
from jaxscale.data.store import TokenDataset

VOCABULARY = 32_768
FILES = 8
"""Files of the corpus; datatrove gives a task to each."""

DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer

if __name__ == "__main__":
    corpus, tokenizer, out, tasks, workers = sys.argv[1:]
    pipeline = [
        JsonlReader(corpus, glob_pattern="*.jsonl"),
        DocumentTokenizer(out, tokenizer_name_or_path=tokenizer, eos_token="<|end|>", shuffle_documents=False),
    ]
    LocalPipelineExecutor(pipeline, tasks=int(tasks), workers=int(workers), logging_dir=out + "/logs").run()
"""


def measure(megabytes: int = 100, repeats: int = 3, workers: int = 2) -> dict[str, float]:
    """Millions of bytes of text a second of both, the medians of turns taken one after the other, and their ratio.

    Raises SystemExit where the two do not make the same number of tokens.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text_bytes = _write_corpus(folder / "corpus", megabytes * 10**6)
        settings = BuildConfig(
            files=(f"{folder}/corpus/*.jsonl",), tokenizer=f"{folder}/t.json", train_vocabulary=VOCABULARY
        )
        prepare_tokenizer(settings)
        (folder / "peer.py").write_text(DATATROVE)
        (folder / "build.toml").write_text(
            f'[data]\ntrain = "{folder}/ours/train"\n[data.build]\nfiles = ["{folder}/corpus/*.jsonl"]\n'
            f'tokenizer = "{folder}/t.json"\nworkers = {workers}\ntask_bytes = {text_bytes // FILES}\n'
        )
        theirs = [f"{folder}/peer.py", f"{folder}/corpus", settings.tokenizer, f"{folder}/theirs", f"{FILES}"]
        commands = {
            "jaxscale": [sys.executable, "-m", "jaxscale", "data", "build", f"{folder}/build.toml"],
            "datatrove": [sys.executable, *theirs, f"{workers}"],
        }
        tokens: set[int] = set()
        seconds: dict[str, list[float]] = {contestant: [] for contestant in commands}
        for _ in range(repeats):
            for contestant, command in commands.items():
                for made in (folder / "ours", folder / "theirs"):
                    shutil.rmtree(made, ignore_errors=True)
                begun = time.perf_counter()
                done = subprocess.run(
                    command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
                )
                seconds[contestant].append(time.perf_counter() - begun)
                if done.returncode:
                    raise SystemExit(f"{contestant} failed:\n{done.stderr}")
                tokens.add(_tokens(folder / "ours") if contestant == "jaxscale" else _their_tokens(folder / "theirs"))
                if len(tokens) > 1:
                    raise SystemExit(f"{contestant} made another number of tokens: {tokens}")
    speeds = {contestant: text_bytes / 1e6 / statistics.median(turns) for contestant, turns in seconds.items()}
    return {**speeds, "ratio": speeds["jaxscale"] / speeds["datatrove"]}


def _write_corpus(folder: Path, size: int) -> int:
    """JSONL files of the standard library's source, over and over, each time a little different; returns its bytes."""
    folder.mkdir()
    settings = BuildConfig(corpus="python-stdlib")
    texts = [d.text for task in tasks(corpus_files(settings), settings) for d in documents(task, settings, Tally())]
    files = [open(folder / f"{number}.jsonl", "w") for number in range(FILES)]  # noqa: SIM115
    written = count = 0
    while written < size:
        text = f"{texts[count % len(texts)]}\n# {count}\n"
        files[count % FILES].write(json.dumps({"text": text}) + "\n")
        written, count = written + len(text.encode()), count + 1
    for file in files:
        file.close()
    return written


def _tokens(folder: Path) -> int:
    return TokenDataset.open(folder / "train").tokens


def _their_tokens(folder: Path) -> int:
    """Tokens of datatrove's `.ds` files, which are nothing but uint16 or uint32 ids."""
    width = 2 if VOCABULARY <= 2**16 else 4
    return sum(path.stat().st_size for path in folder.glob("*.ds")) // width


if __name__ == "__main__":
    print(json.dumps(measure(), indent=2))
